"""What the normalizations share: tiles of whole rows, and gradients that are sums over rows.

A program holds a tile of ROWS whole rows, (ROWS, BLOCK_H). In a backward pass, each program walks over many tiles and
sums its share of the weight's gradient in registers. A second kernel adds the shares of all programs, always in the
same order, and rounds once.
"""

import functools

import torch
from torch import Tensor

from ._autograd import check_dtypes, vector
from ._triton import Launch, remembered, tl, triton
from ._tuning import SHAPES, architecture_of

SUM_ROWS, SUM_COLUMNS, SUM_WARPS = SHAPES.NORM_SUM  # the tile of the kernel that adds the programs' shares
MOST_COLUMNS = 2**20  # numbers in a block of Triton's, which holds a whole row
CPU_MULTIPROCESSORS = 4  # as many as the interpreter pretends to have


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_MULTIPROCESSORS
    properties = torch.get_device_module(device).get_device_properties(device)
    return getattr(properties, "multi_processor_count", None) or properties.gpu_subslice_count  # CUDA and ROCm; XPU


def programs_for(tiles: int, limit: int) -> int:
    """Return the fewest programs, at most `limit`, that finish as soon as `limit` programs would."""
    # as many rounds as `limit` programs take, with none idle in the last
    return max(1, -(-tiles // max(1, -(-tiles // limit))))


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """Return (x as rows without gaps inside, elements from row to row). Copy only if no stride leads over the rows."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    if x.stride(1) != 1:
        x = x.contiguous()
    return x, x.stride(0)


def check_columns(x: Tensor, weight: Tensor | None, name: str = "weight") -> None:
    check_dtypes(x=x, **{name: weight})
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x must be (..., H) with at least one column, got {tuple(x.shape)}.")
    if x.shape[-1] > MOST_COLUMNS:
        raise ValueError(f"x must be (..., H) with at most {MOST_COLUMNS:,} columns, got {tuple(x.shape)}.")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} must hold one number per column of x: x is {tuple(x.shape)}, {name} is {tuple(weight.shape)}."
        )


@functools.cache
def forward_config(H: int) -> tuple[int, int, int]:
    """Return (BLOCK_H, ROWS, warps) of a forward's tile."""
    block = triton.next_power_of_2(H)
    return block, max(1, SHAPES.NORM_FORWARD // block), min(32, max(8, block // SHAPES.NORM_COLUMNS_A_WARP))


@functools.cache
def backward_config(H: int, itemsize: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_H, ROWS, warps, programs per multiprocessor, stages of prefetch) of a backward."""
    block = triton.next_power_of_2(H)
    if block <= SHAPES.NORM_BACKWARD:
        rows = SHAPES.NORM_BACKWARD // block
        narrow, wide = architecture_of(device).norm_stages  # tiles take shared memory
        return block, rows, SHAPES.NORM_BACKWARD_WARPS, 1, narrow if itemsize == 2 else wide
    return block, 1, 32, 1, 1  # a row fills the registers of a multiprocessor: nothing is prefetched


@triton.jit
def tile_mask(rows, cols, N, H, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, EXACT: tl.constexpr):
    """Return which entries of a tile exist. EXACT: all of them, known at compile time, so no load needs a mask."""
    if EXACT:
        mask = tl.full((ROWS, BLOCK_H), 1, tl.int1)  # known at compile time, so loads have none
    else:
        mask = (rows[:, None] < N) & (cols[None, :] < H)
    return mask


@triton.jit
def _sum_programs_kernel(share_ptr, first_ptr, second_ptr, P, H, SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr):
    cols = tl.program_id(0) * SUM_COLUMNS + tl.arange(0, SUM_COLUMNS)
    share_ptr += tl.program_id(1).to(tl.int64) * P * H
    total = tl.zeros((SUM_ROWS, SUM_COLUMNS), tl.float32)
    for start in range(0, P, SUM_ROWS):
        rows = start + tl.arange(0, SUM_ROWS)
        mask = (rows[:, None] < P) & (cols[None, :] < H)
        total += tl.load(share_ptr + rows[:, None] * H + cols[None, :], mask=mask, other=0.0)  # always in one order
    total = tl.sum(total, 0)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + cols, total, mask=cols < H)
    else:
        tl.store(second_ptr + cols, total, mask=cols < H)


@remembered
def _sum_launch(K: int, P: int, H: int, rows: int, columns: int, warps: int) -> Launch:
    grid = -(-H // columns), K
    return Launch(_sum_programs_kernel, grid, P, H, SUM_ROWS=rows, SUM_COLUMNS=columns, num_warps=warps)


def sum_programs(shares: Tensor, H: int, *dtypes: torch.dtype) -> list[Tensor]:
    """Return sums (H,) over programs, one for each dtype. shares: (one or two sums, programs, H) numbers in fp32."""
    K = len(dtypes)
    sums = [vector(H, shares, dtype) for dtype in dtypes]
    launch = _sum_launch(K, shares.numel() // (K * H), H, SUM_ROWS, SUM_COLUMNS, SUM_WARPS)
    launch(shares, sums[0], sums[-1])
    return sums
