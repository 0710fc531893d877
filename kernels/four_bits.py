"""Weights in 4 bits: blocks of numbers in memory order, each with one scale.

    x = table[code] scale

Formats   nf4     16 values of -1 to 1, denser near 0; 64 numbers a block; the scale is their largest magnitude, fp32
          mxfp4   0, 0.5, 1, 1.5, 2, 3, 4, 6 of both signs; 32 numbers a block; the scale is 2^(e - 127), e a byte
Layout    byte i has number 2 i in its low four bits and number 2 i + 1 in its high ones, as MXFP4's checkpoints have it
Rounding  nf4: to the nearest value
Numerics  the product is fp32, rounded once. MXFP4 is exact in bf16
Traffic   1 read of half a byte and of a 64th (nf4) or 32nd of a scale, and 1 write, for each number
Source    Dettmers et al. 2023, arXiv:2305.14314 (nf4); OCP Microscaling Formats 1.0, 2023 (mxfp4)
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._triton import Launch, remembered, tl, triton, use_triton

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4_BLOCK, MXFP4_BLOCK = 64, 32
NUMBERS = 4096  # that a program unpacks; blocks divide it


@functools.lru_cache(8)
def _tables_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values of nf4 and of mxfp4, (16,) fp32 each."""
    nf4, mxfp4 = (torch.tensor(values, dtype=torch.float32, device=device) for values in (NF4_VALUES, MXFP4_VALUES))
    return nf4, mxfp4


def nf4_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nf4 codes of x (any shape), two a byte, and the scales of its blocks, (blocks,) fp32."""
    values = _tables_on(x.device)[0]
    blocks = pad(x.flatten().float(), (0, -x.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    largest = blocks.abs().amax(1)
    inverse = torch.where(largest > 0, 1 / largest, 0.0)
    codes = torch.bucketize(blocks * inverse[:, None], (values[:-1] + values[1:]) / 2, out_int32=True)
    codes = codes.to(torch.uint8).view(-1, 2)
    return codes[:, 0] | codes[:, 1] << 4, largest


def unpack_reference(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Compute `unpack` in plain torch."""
    nf4, mxfp4 = _tables_on(codes.device)
    numbers = torch.stack((codes & 15, codes >> 4), 1).int()
    if scales.dtype == torch.uint8:
        # The exponent's bits of an fp32 number. 2^-127 is below its normal numbers.
        scales = scales.int()
        scales = torch.where(scales > 0, scales << 23, 1 << 22).view(torch.float32)
        values, block = mxfp4, MXFP4_BLOCK
    else:
        values, block = nf4, NF4_BLOCK
    return (values[numbers].view(-1, block) * scales[:, None]).flatten()[:numel].to(dtype)


@triton.jit
def _unpack_kernel(out_ptr, codes_ptr, scales_ptr, table_ptr, N, BLOCK: tl.constexpr, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    mask = at < N
    # Two neighbours read one byte, and a block's numbers one scale: from the cache, all but the first.
    byte = tl.load(codes_ptr + at // 2, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + at // BLOCK, mask=mask, other=0)
    if scales_ptr.dtype.element_ty == tl.uint8:
        exponent = scale.to(tl.int32)
        scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    value = tl.load(table_ptr + ((byte >> ((at % 2) * 4).to(tl.int32)) & 15))
    tl.store(out_ptr + at, value * scale, mask=mask)


@remembered
def _unpack_launch(numel: int, block: int, numbers: int) -> Launch:
    return Launch(_unpack_kernel, (-(-numel // numbers),), numel, BLOCK=block, NUMBERS=numbers, num_warps=8)


def unpack(codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers, (numel,), in a dtype of floating point.

    Args:
        codes: uint8, two numbers a byte.
        scales: fp32 of nf4, uint8 of mxfp4, one for each block.
        numel: how many numbers there are; the last block may have more codes.
    """
    is_mxfp4 = scales.dtype == torch.uint8
    out = torch.empty(numel, dtype=dtype, device=codes.device)
    if not numel:
        return out
    if not use_triton(out):
        return unpack_reference(codes, scales, numel, dtype)
    _unpack_launch(numel, MXFP4_BLOCK if is_mxfp4 else NF4_BLOCK, NUMBERS)(
        out, codes, scales, _tables_on(codes.device)[is_mxfp4]
    )
    return out
