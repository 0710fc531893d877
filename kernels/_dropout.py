"""Dropout on the way into low-rank adapters, with masks that are made from a seed wherever they are read.

    values_j = s_j (m_j * x) A_j^T        dx += sum_j m_j * (g_j A_j)        dA_j = g_j^T (m_j * x)

Shapes    x, dx: (N, K)  A: (S R, K)  values, g: (N, S R), where R is the sum of the ranks and S the number of matrices
          that a factor is the sum of (see _low_rank.py)
Method    m_j is 0 or 1, and the adapter's scale holds 1 / (1 - p). An element is kept if 16 bits of a counter-based
          generator are not below 2^16 p: a call of Philox 4x32 makes the bits of eight neighbours in a row from (row,
          column / 8, number of the adapter) and the seed. So neither a mask nor a dropped x is ever in memory, and no
          adapter's mask says anything about another's. One kernel computes dx and dA, from one mask.
Numerics  sums in fp32. p is rounded to a multiple of 2^-16, and so is the p of 1 / (1 - p).
Traffic   as the products without dropout. On a GPU's integer units an element takes about eight operations a pass.
Source    Srivastava et al. 2014, JMLR 15; Philox, with the seven rounds that pass BigCrush: Salmon et al. 2011
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._triton import Launch, remembered, tl, triton
from ._tuning import SHAPES, architecture_of

LEVELS = 1 << 16
WORD = 0xFFFFFFFF
MULTIPLIERS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # Philox 4x32
ROUNDS = tl.constexpr(7)

WIDEST = 128  # numbers of a row of values that a program computes
FORWARD_ROWS, FORWARD_COLUMNS, FORWARD_TILE, FORWARD_WARPS = SHAPES.DROPOUT_FORWARD


class Tiling(NamedTuple):
    """How a program of the backward kernel is cut, and how many run at a time on an H100, by their registers."""

    rows: int
    columns: int
    warps: int
    programs: int


NARROW, MIDDLE, WIDE = (Tiling(*shape) for shape in SHAPES.DROPOUT_BACKWARD)
THREE_STAGES = 168 * 1024  # bytes of shared memory that the backward's three stages take at most in fp32; two take 88


class Run(NamedTuple):
    """Adapters of one rank, rate and scale, whose columns of values follow each other."""

    start: int  # their first column, of R
    rank: int
    count: int
    stream: int  # number of the first adapter within the op
    threshold: int
    factor: float  # s


def threshold_of(p: float) -> int:
    """Return how many of `LEVELS` values drop an element."""
    return min(round(p * LEVELS), LEVELS - 1)  # p just below 1 must not drop everything: 1 / (1 - p) would be infinite


def draw_seed(x: Tensor) -> Tensor:
    """Draw a seed (1,) on x's device, from torch's own generator. CUDA graphs draw again at each replay."""
    return torch.randint(2**63 - 1, (1,), device=x.device)


def kept(seed: Tensor, stream: int, shape: Sequence[int], threshold: int) -> Tensor:
    """Return the mask m (N, K) of an adapter, in plain torch."""
    rows, columns = shape
    groups = -(-columns // 8)  # one call of the generator makes the bits of eight columns
    counter = [
        torch.arange(rows, device=seed.device).view(-1, 1).expand(rows, groups),
        torch.arange(groups, device=seed.device).expand(rows, groups),
        seed.new_full((rows, groups), stream),
        seed.new_zeros(rows, groups),
    ]
    words = torch.stack(philox(seed, counter), -1)  # (N, groups, 4) of 32 bits
    bits = torch.stack((words & 0xFFFF, words >> 16), -1)  # two numbers of 16 bits a word
    return bits.flatten(1)[:, :columns] >= threshold


def philox(seed: Tensor, counter: Sequence[Tensor]) -> list[Tensor]:
    """Return four 32-bit numbers for each counter of four, all of them in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, seed >> 32 & WORD  # the key: both halves of the seed
    for _ in range(7):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # may wrap, which leaves all 64 bits right
        c0, c2 = (second >> 32 & WORD) ^ c1 ^ k0, (first >> 32 & WORD) ^ c3 ^ k1
        c1, c3 = second & WORD, first & WORD
        k0, k1 = k0 + STEPS[0] & WORD, k1 + STEPS[1] & WORD  # + binds before &
    return [c0, c1, c2, c3]


@triton.jit
def _multiplied(c, MULTIPLIER: tl.constexpr):
    """Return the high and the low half of a 64-bit product."""
    product = c.to(tl.uint64) * MULTIPLIER
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _keep(seed, row, group, stream, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the mask of `kept` for some rows and groups of eight columns, (ROWS, COLUMNS)."""
    # a column, a row and a scalar, and no tile yet: the first two rounds have little to do
    c0, c1 = row.to(tl.uint32)[:, None], group.to(tl.uint32)[None, :]
    c2 = tl.full((1, 1), stream, tl.uint32)
    c3 = tl.zeros((1, 1), tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high0, low0 = _multiplied(c0, 0xD2511F53)
        high1, low1 = _multiplied(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # in the order that reshaping turns into c0 c1 c2 c3
    least = tl.full((1, 1), threshold, tl.uint32)
    least = tl.expand_dims(tl.expand_dims(least, 2), 3) << 16
    # The low 16 bits, shifted up, and the high ones, whose lower bits cannot change the comparison with a multiple of
    # 2^16.
    keep = tl.join((words << 16) >= least, words >= least)
    return tl.reshape(keep, (ROWS, COLUMNS))


@triton.jit
def _value_columns(total, start, rank, WIDTH: tl.constexpr):
    """Return the columns of S R that belong to an adapter, slot by slot, padded to WIDTH."""
    lanes = tl.arange(0, WIDTH)
    return lanes // rank * total + start + lanes % rank


@triton.jit
def _values_kernel(
    x_ptr, a_ptr, seed_ptr, values_ptr, n, columns, stride_x, total, start, rank, stream, threshold, factor,
    SLOTS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute values of one adapter and ROWS rows. Programs that read the same rows follow each other."""
    adapter = tl.program_id(0) % COUNT
    row = tl.program_id(0) // COUNT * ROWS + tl.arange(0, ROWS)
    value = _value_columns(total, start + adapter * rank, rank, WIDTH)
    in_rows, in_width = row < n, tl.arange(0, WIDTH) < SLOTS * rank
    x_rows = x_ptr + row.to(tl.int64)[:, None] * stride_x
    a_rows = a_ptr + value.to(tl.int64)[:, None] * columns
    seed = tl.load(seed_ptr)
    values = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < columns
        x = tl.load(x_rows + column[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_rows + column[None, :], mask=in_width[:, None] & inside[None, :], other=0.0)
        group = first // 8 + tl.arange(0, COLUMNS // 8)
        keep = _keep(seed, row, group, stream + adapter, threshold, ROWS, COLUMNS)
        x = tl.where(keep, x, 0.0).to(a.dtype)  # the factor 1 / (1 - p) is in `factor`
        values = tl.dot(x, tl.trans(a), values, input_precision="ieee")
    at = row.to(tl.int64)[:, None] * (SLOTS * total) + value[None, :]
    tl.store(values_ptr + at, values * factor, mask=in_rows[:, None] & in_width[None, :])


@triton.jit
def _through_adapter(
    adapter, x, dx, da, g_ptr, a_ptr, seed, row, in_rows, first, columns, total, start, rank, stream, threshold,
    NEED_X: tl.constexpr, NEED_A: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return dx and dA with what an adapter adds to them in ROWS rows and COLUMNS columns."""
    value = _value_columns(total, start + adapter * rank, rank, WIDTH)
    in_width = tl.arange(0, WIDTH) < SLOTS * rank
    g_at = row.to(tl.int64)[:, None] * (SLOTS * total) + value[None, :]
    g = tl.load(g_ptr + g_at, mask=in_rows[:, None] & in_width[None, :], other=0.0)
    group = first // 8 + tl.arange(0, COLUMNS // 8)
    keep = _keep(seed, row, group, stream + adapter, threshold, ROWS, COLUMNS)
    if NEED_X:
        column = first + tl.arange(0, COLUMNS)
        a_at = value.to(tl.int64)[:, None] * columns + column[None, :]
        a = tl.load(a_ptr + a_at, mask=in_width[:, None] & (column < columns)[None, :], other=0.0)
        dx += tl.where(keep, tl.dot(g, a, input_precision="ieee"), 0.0)
    if NEED_A:
        da = tl.dot(tl.trans(g), tl.where(keep, x, 0.0).to(g.dtype), da, input_precision="ieee")
    return dx, da


@triton.jit
def _store_part(parts_ptr, da, adapter, split, first, columns, total, start, rank,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    value = _value_columns(total, start + adapter * rank, rank, WIDTH)
    in_width = tl.arange(0, WIDTH) < SLOTS * rank
    column = first + tl.arange(0, COLUMNS)
    at = (split.to(tl.int64) * (SLOTS * total) + value.to(tl.int64))[:, None] * columns + column[None, :]
    tl.store(parts_ptr + at, da, mask=in_width[:, None] & (column < columns)[None, :])


@triton.jit
def _gradients_kernel(
    g_ptr, a_ptr, seed_ptr, x_ptr, dx_ptr, parts_ptr,
    n, columns, span, stride_x, stride_dx, total, start, rank, stream, threshold,
    SLOTS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add to dx, and sum up a part of dA, for `span` rows and COLUMNS columns. COUNT is 1 to 3."""
    NEED_X: tl.constexpr = dx_ptr is not None
    NEED_A: tl.constexpr = parts_ptr is not None
    blocks = tl.cdiv(columns, COLUMNS)
    first, split = tl.program_id(0) % blocks * COLUMNS, tl.program_id(0) // blocks
    column = first + tl.arange(0, COLUMNS)
    inside = column < columns
    seed = tl.load(seed_ptr)
    x = tl.zeros((ROWS, COLUMNS), dtype=g_ptr.dtype.element_ty)
    dx = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    da0 = tl.zeros((WIDTH, COLUMNS), dtype=tl.float32)
    da1, da2 = da0, da0  # COUNT is 3 at most, so three sums are written out
    for top in range(split * span, min(split * span + span, n), ROWS):
        row = top + tl.arange(0, ROWS)
        in_rows = row < n
        mask = in_rows[:, None] & inside[None, :]
        if NEED_A:
            x_at = row.to(tl.int64)[:, None] * stride_x + column[None, :]
            x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(g_ptr.dtype.element_ty)
        if NEED_X:
            dx_at = row.to(tl.int64)[:, None] * stride_dx + column[None, :]
            dx = tl.load(dx_ptr + dx_at, mask=mask, other=0.0).to(tl.float32)
        dx, da0 = _through_adapter(
            0, x, dx, da0, g_ptr, a_ptr, seed, row, in_rows, first, columns, total, start, rank, stream, threshold,
            NEED_X, NEED_A, SLOTS, WIDTH, ROWS, COLUMNS,
        )  # fmt: skip
        if COUNT > 1:
            dx, da1 = _through_adapter(
                1, x, dx, da1, g_ptr, a_ptr, seed, row, in_rows, first, columns, total, start, rank, stream, threshold,
                NEED_X, NEED_A, SLOTS, WIDTH, ROWS, COLUMNS,
            )  # fmt: skip
        if COUNT > 2:
            dx, da2 = _through_adapter(
                2, x, dx, da2, g_ptr, a_ptr, seed, row, in_rows, first, columns, total, start, rank, stream, threshold,
                NEED_X, NEED_A, SLOTS, WIDTH, ROWS, COLUMNS,
            )  # fmt: skip
        if NEED_X:
            tl.store(dx_ptr + dx_at, dx, mask=mask)
    if NEED_A:
        _store_part(parts_ptr, da0, 0, split, first, columns, total, start, rank, SLOTS, WIDTH, COLUMNS)
        if COUNT > 1:
            _store_part(parts_ptr, da1, 1, split, first, columns, total, start, rank, SLOTS, WIDTH, COLUMNS)
        if COUNT > 2:
            _store_part(parts_ptr, da2, 2, split, first, columns, total, start, rank, SLOTS, WIDTH, COLUMNS)


@remembered
def runs_of(adapters: tuple[tuple[int, int, float], ...], stream: int, slots: int) -> tuple[Run, ...]:
    """Return what a launch each computes.

    Args:
        adapters: (rank, threshold, factor) each, in the order of their columns.
        stream: number of the first.
        slots: matrices that each factor is the sum of.
    """
    runs, start = [], 0
    for i, (rank, threshold, factor) in enumerate(adapters):
        last = runs[-1] if runs else None
        narrow = 2 * slots * rank <= WIDEST  # two or more adapters of such a rank fit into one launch
        if narrow and last and last.count < 3 and (last.rank, *last[4:]) == (rank, threshold, factor):
            runs[-1] = last._replace(count=last.count + 1)
        else:  # a part of a high rank has the same mask as the others
            step = rank if narrow else WIDEST // slots
            for at in range(0, rank, step):
                runs.append(Run(start + at, min(step, rank - at), 1, stream + i, threshold, factor))
        start += rank
    return tuple(runs)


def values_of_kept(x: Tensor, a: Tensor, seed: Tensor, runs: Sequence[Run], slots: int, values: Tensor) -> None:
    """Compute values_j = s_j (m_j * x) A_j^T on a GPU.

    Args:
        x: (N, K), any row stride.
        a: (S R, K), contiguous.
        values: (N, S R), contiguous.
    """
    if values.numel() == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    for run in runs:
        _values_launch(tuple(x.shape), x.stride(0), a.shape[0] // slots, slots, run)(x, a, seed, values)


def add_gradients(
    g: Tensor, a: Tensor, seed: Tensor, runs: Sequence[Run], slots: int, x: Tensor | None, dx: Tensor | None
) -> Tensor | None:
    """Add sum_j m_j * (g_j A_j) to dx, and return parts (P, S R, K) of dA in fp32, whose sum over P it is.

    Args:
        g: (N, S R), contiguous.
        a: (S R, K), contiguous.
        x: (N, K), or None if dA is not needed.
        dx: (N, K), contiguous, or None if it is not needed.
    """
    rows, columns = g.shape[0], a.shape[1]
    span, splits = _spans(rows, columns, [_tiling(slots, run) for run in runs])
    x = x if x is None or x.stride(1) == 1 else x.contiguous()
    # Each program's share of dA; they are added afterwards, in one order and not by atomics.
    parts = None if x is None else g.new_empty(splits, *a.shape, dtype=torch.float32)
    if rows * columns == 0:
        return None if parts is None else parts.zero_()
    strides = 0 if x is None else x.stride(0), 0 if dx is None else dx.stride(0)
    few = g.dtype == torch.float32 and architecture_of(g.device).shared < THREE_STAGES
    for run in runs:
        launch = _gradients_launch((rows, columns), strides, span, a.shape[0] // slots, slots, run, few)
        launch(g, a, seed, x, dx, parts)
    return parts


def _spans(rows: int, columns: int, tilings: Sequence[Tiling]) -> tuple[int, int]:
    """Return (rows of a program, programs for each block of columns)."""
    wanted = max([1, *(t.programs // -(-columns // t.columns) for t in tilings)])
    step = max([16, *(t.rows for t in tilings)])  # all tiles of rows divide a span
    span = max(1, -(-rows // (wanted * step))) * step  # rows a program, so that about `wanted` programs run
    return span, max(1, -(-rows // span))


def _tiling(slots: int, run: Run) -> Tiling:
    """Choose by the numbers that a program keeps for each column, of which those for rank 16 times 3 are 48."""
    kept_numbers = run.count * _width(slots, run)
    return NARROW if kept_numbers <= 16 else MIDDLE if kept_numbers <= 48 else WIDE


def _width(slots: int, run: Run) -> int:
    return max(16, triton.next_power_of_2(slots * run.rank))  # 16: the least that tensor cores take


@remembered
def _values_launch(shape: tuple[int, int], stride: int, total: int, slots: int, run: Run) -> Launch:
    start, rank, count, stream, threshold, factor = run
    width, (rows, columns) = _width(slots, run), shape
    tile = max(16, min(FORWARD_COLUMNS, FORWARD_TILE // width, triton.next_power_of_2(columns)))
    grid = (-(-rows // FORWARD_ROWS) * count,)
    return Launch(
        _values_kernel, grid, rows, columns, stride, total, start, rank, stream, threshold, factor,
        SLOTS=slots, COUNT=count, WIDTH=width, ROWS=FORWARD_ROWS, COLUMNS=tile, num_warps=FORWARD_WARPS,
    )  # fmt: skip


@remembered
def _gradients_launch(
    shape: tuple[int, int], strides: tuple[int, int], span: int, total: int, slots: int, run: Run, few_stages: bool
) -> Launch:
    start, rank, count, stream, threshold, _ = run
    stages = {"num_stages": 2} if few_stages else {}  # else Triton's own number
    width, (rows, columns), tiling = _width(slots, run), shape, _tiling(slots, run)
    tile = max(16, min(tiling.columns, 64 * tiling.columns // width, triton.next_power_of_2(columns)))
    return Launch(
        _gradients_kernel, (-(-columns // tile) * -(-rows // span),),
        rows, columns, span, *strides, total, start, rank, stream, threshold,
        SLOTS=slots, COUNT=count, WIDTH=width, ROWS=tiling.rows, COLUMNS=tile,
        num_warps=tiling.warps, **stages,
    )  # fmt: skip
