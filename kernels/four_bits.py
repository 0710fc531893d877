"""Weights in 4 bits: blocks of numbers in memory order, each with one scale.

    x = table[code] scale

Formats   nf4     16 values of -1 to 1, denser near 0; 64 numbers a block; the scale is their largest magnitude, fp32
          mxfp4   0, 0.5, 1, 1.5, 2, 3, 4, 6 of both signs; 32 numbers a block; the scale is 2^(e - 127), e a byte
Nested    nf4's scales may be packed too (double quantisation): map[byte] largest + offset, 256 scales a block
Layout    byte i has number 2 i in its low four bits and number 2 i + 1 in its high ones, as MXFP4's checkpoints have
          it; bitsandbytes' nf4 has them the other way round
Method    A thread reads 4 bytes, whose 8 numbers have one scale, and writes these side by side.
Rounding  nf4: to the nearest value
Numerics  the product is fp32, rounded once. MXFP4 is exact in bf16. A nested scale is a product and a sum in fp32, each
          rounded, as bitsandbytes computes it
Traffic   1 read of half a byte and of a 64th (nf4) or 32nd of a scale, and 1 write, for each number
Source    Dettmers et al. 2023, arXiv:2305.14314 (nf4); OCP Microscaling Formats 1.0, 2023 (mxfp4)
"""

import functools
from typing import Any, NamedTuple

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
NESTED_BLOCK = 256  # scales
NUMBERS = 2048  # that a program unpacks, 8 in each of its 256 threads


class NestedScales(NamedTuple):
    """Scales of nf4 that are packed themselves: map[codes] * largest + offset."""

    codes: Tensor  # uint8, one for each block
    map: Tensor  # (256,) fp32
    largest: Tensor  # fp32, one for each 256 codes
    offset: Tensor  # (), fp32


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


def unpack_nf4_reference(codes: Tensor, scales: Tensor | NestedScales, numel: int, dtype: torch.dtype) -> Tensor:
    """Return in plain torch what `unpack_nf4_` writes. codes: (bytes,) uint8."""
    if isinstance(scales, NestedScales):
        largest = scales.largest.repeat_interleave(NESTED_BLOCK)[: len(scales.codes)]
        scales = scales.map[scales.codes.int()] * largest + scales.offset
    return unpack_reference(codes >> 4 | codes << 4, scales, numel, dtype)


@triton.jit
def _unpack_kernel(
    out_ptr, codes_ptr, scales_ptr, table_ptr, map_ptr, largest_ptr, offset_ptr, N,
    BLOCK: tl.constexpr, NESTED: tl.constexpr, HIGH_FIRST: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Codes are int32 here: eight numbers each."""
    word = tl.program_id(0).to(tl.int64) * (NUMBERS // 8) + tl.arange(0, NUMBERS // 8)
    mask = word * 8 < N
    codes = tl.load(codes_ptr + word, mask=mask, other=0)
    block = word * 8 // BLOCK
    scale = tl.load(scales_ptr + block, mask=mask, other=0)
    if map_ptr is not None:
        largest = tl.load(largest_ptr + block // NESTED, mask=mask, other=0)
        scale = tl.load(map_ptr + scale.to(tl.int32)) * largest + tl.load(offset_ptr)
    elif scales_ptr.dtype.element_ty == tl.uint8:
        exponent = scale.to(tl.int32)
        scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    place = tl.arange(0, 8)
    code = (codes[:, None] >> ((place ^ HIGH_FIRST) * 4)[None, :]) & 15
    at = word[:, None] * 8 + place[None, :]
    tl.store(out_ptr + at, tl.load(table_ptr + code) * scale[:, None], mask=at < N)


@remembered
def _unpack_launch(numel: int, block: int, high_first: int, numbers: int) -> Launch:
    # Without fusion, which would not round the product of a nested scale before the sum.
    return Launch(
        _unpack_kernel, (-(-numel // numbers),), numel, BLOCK=block, NESTED=NESTED_BLOCK, HIGH_FIRST=high_first,
        NUMBERS=numbers, num_warps=max(numbers // 8 // 32, 1), enable_fp_fusion=False,
    )  # fmt: skip


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
    _unpack_launch(numel, MXFP4_BLOCK if is_mxfp4 else NF4_BLOCK, 0, NUMBERS)(
        out, codes.view(torch.int32), scales, _tables_on(codes.device)[is_mxfp4], None, None, None
    )
    return out


def unpack_nf4_(out: Tensor, codes: Tensor, scales: Tensor | NestedScales) -> None:
    """Unpack bitsandbytes' nf4 into `out`.

    Args:
        out: contiguous, any shape and dtype of floating point; the number of its elements is a multiple of 8.
        codes: two numbers a byte, the first in the high bits; of any shape, and stored as any dtype.
        scales: fp32, or packed themselves; one for each block of 64.
    """
    codes = codes.flatten().view(torch.uint8)
    if not use_triton(out):
        out.copy_(unpack_nf4_reference(codes, scales, out.numel(), out.dtype).view_as(out))
        return
    nested: Any = scales if isinstance(scales, NestedScales) else (scales, None, None, None)
    _unpack_launch(out.numel(), NF4_BLOCK, 1, NUMBERS)(
        out, codes.view(torch.int32), nested[0], _tables_on(out.device)[0], *nested[1:]
    )
