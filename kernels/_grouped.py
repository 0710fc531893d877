"""Products of rows that are sorted by expert with each expert's own matrix, and of low rank beside them.

    grouped   y_s = x_s M_e                    outer   G_e = sum over the rows s of e of x_s^T y_s
    add       y_s += t_s B_e^T + bias_e        combine   out_n = sum_k w_nk y_(place_nk)

Shapes    x: (S, K)  M: (E, K, N)  y: (S, N)  t: (S, R)  B: (E, N, R)  bias: (E, N)  ends: (E,) int32, where
          each expert's rows end: those of e are from ends[e - 1] to ends[e]
Method    bf16 products on a GPU are torch's grouped product, which reads `ends` on the device, so that the host never
          waits. Others run one after the other. The low-rank term is added in place, tile by tile: a program finds its
          tile's expert from `ends`. Nothing is scattered: combine gathers the rows of each token, always in one order.
Numerics  fp32 inside, rounded once when stored
Traffic   add: 1 read and 1 write of S N; combine: 1 read of S H and 1 write of N H
Source    Gale et al. 2022, arXiv:2211.15841 (rows sorted by expert, grouped products)
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ._triton import Launch, remembered, tl, triton, use_triton

ROWS, COLUMNS, WARPS = 64, 128, 4  # the tile of `add`
COMBINED = 1024  # columns of a program of `combine`


def multiple_of_8(n: int) -> int:
    return -(-n // 8) * 8


def _runs_grouped(x: Tensor, y: Tensor, *sizes: int) -> bool:
    """Whether torch's grouped product takes these: bf16 on a GPU since Ampere, sizes that 8 divides (16 bytes)."""
    if not x.is_cuda or torch.version.hip or not hasattr(F, "grouped_mm") or not len(x):
        return False
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    return x.dtype == y.dtype == torch.bfloat16 and not any(size % 8 for size in sizes)


def _spans(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with its rows. The host waits for `ends`."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return x_s M_e. matrices: (E, K, N), of any strides, in x's dtype."""
    if _runs_grouped(x, matrices, *matrices.shape[1:]):
        return F.grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(len(x), matrices.shape[2])
    for expert, rows in _spans(ends):
        torch.mm(x[rows], matrices[expert], out=out[rows])
    return out


def outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Return (E, K, N): x^T y over the rows of each expert, 0 for one without rows."""
    if _runs_grouped(x, y, x.shape[1], y.shape[1]):
        out = F.grouped_mm(x.t(), y, offs=ends)
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return out.masked_fill_(empty[:, None, None], 0)
    out = x.new_zeros(len(ends), x.shape[1], y.shape[1])
    for expert, rows in _spans(ends):
        torch.mm(x[rows].t(), y[rows], out=out[expert])
    return out


@triton.jit
def _add_kernel(
    y_ptr, t_ptr, b_ptr, bias_ptr, ends_ptr, N, R, E, stride_expert, stride_row, stride_rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, COLUMNS)
    tile, cols = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    experts = tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + experts, mask=experts < E, other=0)
    begin = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, 0)
    mine = (tile >= upto - tiles) & (tile < upto)  # at most one expert's
    expert = tl.sum(tl.where(mine, experts, 0), 0).to(tl.int64)
    stop = tl.sum(tl.where(mine, end, 0), 0)
    first = tl.sum(tl.where(mine, begin + (tile - (upto - tiles)) * ROWS, 0), 0)
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    mask = (rows[:, None] < stop) & (cols[None, :] < N)
    at = y_ptr + rows[:, None] * N + cols[None, :]
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if t_ptr is not None:
        ranks = tl.arange(0, RANK)
        t = tl.load(
            t_ptr + rows[:, None] * R + ranks[None, :], mask=(rows[:, None] < stop) & (ranks[None, :] < R), other=0.0
        )
        b = tl.load(
            b_ptr + expert * stride_expert + cols[None, :] * stride_row + ranks[:, None] * stride_rank,
            mask=(cols[None, :] < N) & (ranks[:, None] < R), other=0.0,
        )  # fmt: skip
        y += tl.dot(t, b, input_precision="ieee")
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * N + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(at, y, mask=mask)


@remembered
def _add_launch(rows: int, N: int, R: int, E: int, strides: tuple[int, int, int], tile: tuple[int, int, int]) -> Launch:
    height, width, warps = tile
    grid = ((-(-rows // height) + E) * -(-N // width),)  # each expert may leave one tile unfinished
    return Launch(
        _add_kernel, grid, N, R, E, *strides, ROWS=height, COLUMNS=width,
        RANK=max(16, triton.next_power_of_2(R)), EXPERTS=triton.next_power_of_2(E), num_warps=warps,
    )  # fmt: skip


def add(y: Tensor, t: Tensor | None, b: Tensor | None, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Add t_s B_e^T and bias_e to y in place, and return y.

    Args:
        y: (S, N), contiguous.
        t: (S, R), contiguous, in y's dtype, or None to add the bias alone.
        b: (E, N, R), of any strides, or None as t.
        bias: (E, N) or None.
    """
    if not len(y) or (t is None and bias is None):
        return y
    if use_triton(y):
        R, strides = (0, (0, 0, 0)) if t is None or b is None else (t.shape[1], b.stride())
        bias = None if bias is None else bias.contiguous()
        _add_launch(*y.shape, R, len(ends), strides, (ROWS, COLUMNS, WARPS))(y, t, b, bias, ends)
        return y
    for expert, rows in _spans(ends):
        if t is not None and b is not None:
            y[rows].addmm_(t[rows], b[expert].t())
        if bias is not None:
            y[rows] += bias[expert]
    return y


@triton.jit
def _combine_kernel(
    y_ptr, place_ptr, weight_ptr, ends_ptr, out_ptr, H, E, TOP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks, stop = tl.cdiv(H, BLOCK), tl.load(ends_ptr + E - 1)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP):
        row = tl.load(place_ptr + token * TOP + k).to(tl.int64)
        y = tl.load(y_ptr + row * H + cols, mask=cols < tl.where(row < stop, H, 0), other=0.0).to(tl.float32)
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + token * TOP + k).to(tl.float32)
        total += y
    tl.store(out_ptr + token * H + cols, total, mask=cols < H)


@remembered
def _combine_launch(tokens: int, H: int, E: int, top: int, width: int) -> Launch:
    block = min(width, triton.next_power_of_2(H))
    return Launch(_combine_kernel, (tokens * -(-H // block),), H, E, TOP=top, BLOCK=block, num_warps=4)


def combine(y: Tensor, place: Tensor, weights: Tensor | None, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (N, H): each token's sum over its rows of y, weighted if `weights` are given.

    Args:
        y: (S, H), contiguous; rows from ends[-1] on belong to no expert, and count as 0.
        place: (N, top) int64, where each token's rows are.
        weights: (N, top) or None.
    """
    tokens, top = place.shape
    if use_triton(y):
        out = y.new_empty(tokens, y.shape[1], dtype=dtype)
        if out.numel():
            weights = None if weights is None else weights.contiguous()
            _combine_launch(tokens, y.shape[1], len(ends), top, COMBINED)(y, place, weights, ends, out)
        return out
    wide = torch.promote_types(y.dtype, torch.float32)
    rows = y[place].to(wide).where((place < ends[-1]).unsqueeze(-1), 0)
    return (rows if weights is None else rows * weights.to(wide).unsqueeze(-1)).sum(1).to(dtype)
