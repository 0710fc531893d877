"""Moments of AdamW in 8 bits: blocks of 256 numbers in memory order, each with its largest magnitude in fp32.

    x = map[code] largest

Map       256 sorted values, not evenly spaced: 0, 1, and in decade i of seven 2^i values of each sign (mean of
          gradients) or 2^(i+1) positive ones (mean of squares): 10^(i-6) (0.1 + 0.9 (k + 0.5) / n), value k of n
Rounding  to the nearest value. `floor`: of a square that is not 0, never to 0. In a block whose gradients are of very
          different size small squares would be, and their weights' updates, mean / eps, huge
Numerics  NaN and infinity make their whole block NaN. A block below the normal numbers of fp32 is 0
Source    Dettmers et al. 2022, arXiv:2110.02861; maps and blocks are those of bitsandbytes and of torchao. Without 0 in
          the map of squares: Li et al. 2023, arXiv:2309.01507
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._triton import tl, triton

BLOCK = 256
_BLOCK = tl.constexpr(BLOCK)


@functools.lru_cache(8)
def maps_on(device: torch.device) -> Tensor:
    """Return both maps, (2, 256) fp32: of the mean of gradients, and of the mean of squares."""
    maps = []
    for signed in (True, False):
        values = [torch.tensor([0.0, 1.0])]
        for decade in range(7):
            edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1)
            positive = (edges[:-1] + edges[1:]) / 2 * 10 ** (decade - 6)
            values += [positive, -positive] if signed else [positive]
        maps.append(torch.cat(values).sort().values)
    return torch.stack(maps).to(device)


def blocks_of(x: Tensor) -> Tensor:
    """Return (blocks, 256), the last one filled with zeros."""
    return pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def decoded_reference(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """Return the numbers, fp32 in the shape of codes (any, uint8). largest: (blocks,) fp32."""
    values = maps_on(codes.device)[0 if signed else 1][blocks_of(codes).int()] * largest[:, None]
    return values.flatten()[: codes.numel()].view(codes.shape)


def encoded_reference(x: Tensor, signed: bool, floor: bool = True) -> tuple[Tensor, Tensor]:
    """Return codes in the shape of x, uint8, and the largest magnitudes of its blocks, (blocks,) fp32."""
    values = maps_on(x.device)[0 if signed else 1]
    blocks = blocks_of(x.float())
    largest = blocks.abs().amax(1)
    inverse = torch.where(largest >= torch.finfo(torch.float32).tiny, 1 / largest, 0.0)
    codes = torch.bucketize(blocks * inverse[:, None], (values[:-1] + values[1:]) / 2)
    if floor and not signed:
        codes = codes.clamp(min=(blocks > 0).long())
    return codes.to(torch.uint8).flatten()[: x.numel()].view(x.shape), largest


@triton.jit
def decoded(map_ptr, codes, largest):
    """Return the numbers (BLOCKS, 256) of codes of this shape. largest: (BLOCKS,)."""
    return tl.load(map_ptr + codes.to(tl.int32)) * largest[:, None]


@triton.jit
def encoded(x, SIGNED: tl.constexpr, FLOOR: tl.constexpr):
    """Return uint8 codes of x (BLOCKS, 256) fp32, and the largest magnitudes of its rows.

    Values are numbered by magnitude: n 2^i + k is number k of decade i, which has n 2^i of a sign; n - 1 is 0, and
    128 n is 1. In a decade they are in the middles of bins of one width, so that a line through its ends, rounded down,
    numbers them; from decade to decade the slope is a fifth, and so the line of a place is the least of all. Nearer
    than the first value of a decade is the last of the one below, though, up to a fifth of the first bin.
    """
    N: tl.constexpr = 1 if SIGNED else 2
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)  # as integers NaN is above infinity, and so is kept
    inverse = tl.where(largest >= 1.1754943508222875e-38, 1.0 / largest, 0.0)
    size = tl.abs(x) * inverse[:, None]
    # the lines, less a half: the first one such that what is nearer to 0 is in its lowest fifth
    zero: tl.constexpr = 0.5e-6 * (0.1 + 0.45 / N)
    end: tl.constexpr = 1e-7 * (1 + 9 / N)
    slope: tl.constexpr = 0.8 / (end - zero)
    line = size * slope + (N + 0.5 - slope * end)
    for decade in tl.static_range(1, 7):
        n = N * 2**decade
        line = tl.minimum(line, size * (n * 10.0 ** (7 - decade) / 9) + (n * 8 / 9 - 0.5))
    rounded = line + 8388608.0  # 2^23: the last bits are the number now
    number = rounded.to(tl.int32, bitcast=True) & 0x1FF
    first = ((number & (number - 1)) == 0) & (line - (rounded - 8388608.0) < -0.3)
    number = tl.where(first, number - 1, number)
    number = tl.where(size >= 1 - 0.225 / (64 * N), 128 * N, number)
    if SIGNED:
        code = tl.where(x < 0, 127 - tl.minimum(number, 127), 127 + number)  # there is no -1
    else:
        code = number - 1
        if FLOOR:
            code = tl.where((x > 0) & (code < 1), 1, code)
    return code.to(tl.uint8), largest
