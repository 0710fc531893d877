"""Linear layers on few rows, whose weights are read once:  y_i = x W_i^T + b_i,  act(y_0) * y_1,  or residual + y_0

Shapes    x: (..., K), N rows in all   weights: (O_i, K), one to three   biases: (O_i,)   y_i, residual: (..., O_i)
Method    A program has all rows (up to 64) and a tile of columns of one product, or of gate and up. Where one product
          has too few tiles for the GPU, several programs share one by parts of K; the last of them that arrives adds
          the parts, in their order, so that a repeated product has the same bits.
Numerics  products and sums in fp32; the activation or the residual too, rounded once. Weights in fp32 under a 16-bit x
          are rounded as they are read, so that no copy of them is made.
Traffic   every weight once; x once for each tile of columns, out of L2
Source    parts of K added by the last program: Osama et al. 2023, arXiv:2301.03598
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes
from ._gated import ACTIVATIONS, activate, gated, gated_reference, runs_plain
from ._triton import Launch, kept_launch, tl, triton
from ._tuning import SHAPES

ROWS = SHAPES.THIN_ROWS  # more are left to torch's products
MOST_SHARED = 220 * 1024  # bytes of a multiprocessor's shared memory, for all stages
MOST_TILES = 4096  # of a product whose parts are added: numbers in `arrived`


class Tiling(NamedTuple):
    """Columns of a tile, numbers of K at a time, programs that share a tile, warps, stages."""

    columns: int
    block: int
    parts: int
    warps: int
    stages: int


def thin_linear_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, *,
    activation: str | None = None, residual: Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return in plain torch what the op must equal."""
    x, biases = x.to(dtype or x.dtype), biases or [None] * len(weights)
    y = [F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype)) for w, b in zip(weights, biases, strict=True)]
    if activation is not None:
        gate, up = y
        y = [gated_reference(gate, up, activation)]
    return (*y,) if residual is None else (residual + y[0],)


@triton.jit
def _kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, b0_ptr, b1_ptr, b2_ptr, y0_ptr, y1_ptr, y2_ptr, residual_ptr, parts_ptr,
    arrived_ptr, N, K, O0, O1, O2, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, part, slab = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    w_ptr, b_ptr, y_ptr, width = w0_ptr, b0_ptr, y0_ptr, O0
    if ACTIVATION is None:  # which of the products this tile is of
        if w1_ptr is not None:
            first = tl.cdiv(O0, COLUMNS)
            later = tile >= first
            tile = tl.where(later, tile - first, tile)
            w_ptr, y_ptr = tl.where(later, w1_ptr, w_ptr), tl.where(later, y1_ptr, y_ptr)
            width = tl.where(later, O1, width)
            if b_ptr is not None:
                b_ptr = tl.where(later, b1_ptr, b_ptr)
        if w2_ptr is not None:
            first = tl.cdiv(O1, COLUMNS)
            last = later & (tile >= first)
            tile = tl.where(last, tile - first, tile)
            w_ptr, y_ptr = tl.where(last, w2_ptr, w_ptr), tl.where(last, y2_ptr, y_ptr)
            width = tl.where(last, O2, width)
            if b_ptr is not None:
                b_ptr = tl.where(last, b2_ptr, b_ptr)
    row, column, k = slab * ROWS + tl.arange(0, ROWS), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    live, inside = row < N, column < width
    x_at = x_ptr + row[:, None] * K + k[None, :]
    w_at = tl.arange(0, COLUMNS)[None, :] * K + k[:, None]
    first_weight = tile.to(tl.int64) * COLUMNS * K  # int64: a head has more than 2^31 numbers
    w_ptr += first_weight
    if ACTIVATION is not None:
        w1_ptr += first_weight
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    share = tl.cdiv(tl.cdiv(K, BLOCK), PARTS) * BLOCK
    for start in tl.range(part * share, min((part + 1) * share, K), BLOCK, num_stages=STAGES):
        if EVEN:  # of K: no column of it is masked
            x = tl.load(x_at + start, mask=live[:, None], other=0.0)
            w = tl.load(w_ptr + w_at + start, mask=inside[None, :], other=0.0)
        else:
            x = tl.load(x_at + start, mask=live[:, None] & (k < K - start)[None, :], other=0.0)
            w = tl.load(w_ptr + w_at + start, mask=inside[None, :] & (k < K - start)[:, None], other=0.0)
        y = tl.dot(x, w.to(x.dtype), y, input_precision=PRECISION)
        if ACTIVATION is not None:
            if EVEN:
                w = tl.load(w1_ptr + w_at + start, mask=inside[None, :], other=0.0)
            else:
                w = tl.load(w1_ptr + w_at + start, mask=inside[None, :] & (k < K - start)[:, None], other=0.0)
            up = tl.dot(x, w.to(x.dtype), up, input_precision=PRECISION)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    stored = live[:, None] & inside[None, :]
    if PARTS > 1:
        tiles = tl.num_programs(0)
        ours = slab * tiles + tile  # one product: the tile is the program's
        place = (ours * PARTS).to(tl.int64) * ROWS * COLUMNS
        place += tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(parts_ptr + place + part * ROWS * COLUMNS, y)
        tl.debug_barrier()  # every thread has stored its share before one of them says so
        if tl.atomic_add(arrived_ptr + ours, 1, sem="acq_rel") == PARTS - 1:
            y = tl.zeros((ROWS, COLUMNS), tl.float32)
            for other in tl.static_range(PARTS):
                # ".cg": out of L2, where other programs' stores are; a multiprocessor's own cache does not see them
                y += tl.load(parts_ptr + place + other * ROWS * COLUMNS, cache_modifier=".cg")
            tl.store(arrived_ptr + ours, 0)  # for the next product
            _store(y, up, b_ptr, b1_ptr, y_ptr, residual_ptr, at, column, stored, inside, ACTIVATION)
    else:
        _store(y, up, b_ptr, b1_ptr, y_ptr, residual_ptr, at, column, stored, inside, ACTIVATION)


@triton.jit
def _store(y, up, b_ptr, b1_ptr, y_ptr, residual_ptr, at, column, stored, inside, ACTIVATION: tl.constexpr):
    if b_ptr is not None:
        y += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        if b1_ptr is not None:
            up += tl.load(b1_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = activate(y, ACTIVATION)[0] * up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=stored)


def thin_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, *,
    activation: str | None = None, residual: Tensor | None = None, dtype: torch.dtype | None = None,
    arrived: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute linear layers that read one x, without gradients.

    Args:
        x: (..., K), any floating dtype. Of more than ROWS rows, and in fp32, torch's products are taken.
        weights: (O_i, K), one to three, contiguous, in the products' dtype or a wider one.
        biases: (O_i,) or None each; None if no layer has one.
        activation: "silu", "gelu_tanh", "gelu" or "relu2": return act(y_0) * y_1, of two weights of one shape.
        residual: (..., O_0), added to the only product.
        dtype: of the products, by default x's.
        arrived: MOST_TILES zeros, int32, on the device, which it leaves zero: for products launched one after the other
            on one stream. Without it, each that needs it makes its own.

    Returns:
        (..., O_i) for each weight, in the products' dtype; one with activation or residual, the latter in the dtype
        that torch promotes both to.

    Raises:
        ValueError: shapes that do not fit.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    _check(x, weights, biases, activation, residual)
    x = x.to(dtype or x.dtype)
    N, K = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    served = all(w.is_contiguous() for w in weights) and len({b is None for b in biases}) == 1
    if runs_plain(x) or not 0 < N <= ROWS or not served or (x.dtype == torch.float32 and not x.is_cpu):
        return _by_torch(x, weights, biases, activation, residual)
    rows = max(16, min(64, triton.next_power_of_2(N)))
    tiling = tiling_of([len(w) for w in weights], K, activation is not None)
    bytes_of_stage = tiling.block * (
        rows * x.element_size() + tiling.columns * weights[0].element_size() * (2 if activation else 1)
    )
    stages = min(tiling.stages, MOST_SHARED // bytes_of_stage)
    y = [x.new_empty(*x.shape[:-1], len(w)) for w in weights[: 1 if activation else None]]
    if residual is not None:
        y = [torch.empty_like(y[0], dtype=torch.promote_types(x.dtype, residual.dtype))]
        residual = residual.contiguous()
    slabs = triton.cdiv(N, rows)
    tiles = sum(triton.cdiv(len(w), tiling.columns) for w in (weights[:1] if activation else weights))
    parts = None
    if tiling.parts > 1:
        parts = x.new_empty(slabs * tiles * tiling.parts * rows * tiling.columns, dtype=torch.float32)
        arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=x.device) if arrived is None else arrived
    sizes = [len(w) for w in weights] + [0] * (3 - len(weights))
    launch: Launch = kept_launch(
        _kernel, (tiles, tiling.parts, slabs), N, K, *sizes, ACTIVATION=activation, ROWS=rows, COLUMNS=tiling.columns,
        BLOCK=tiling.block, PARTS=tiling.parts, EVEN=K % tiling.block == 0, STAGES=stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tiling.warps,
    )  # fmt: skip
    launch(x.contiguous(), *_three(weights), *_three(biases), *_three(y), residual, parts, arrived)
    return tuple(y)


def tiling_of(sizes: Sequence[int], K: int, gated: bool) -> Tiling:
    """Return tiles so small that every multiprocessor has one, where K is long enough to be shared for that."""
    columns, block, warps, stages, of_many = SHAPES.THIN_TILE
    tiles = sum(-(-size // columns) for size in (sizes[:1] if gated else sizes))
    parts = 1
    if len(sizes) == 1:
        while parts * tiles < SHAPES.THIN_PROGRAMS and K // (2 * parts) >= 2 * block:
            parts *= 2
    elif tiles < SHAPES.THIN_PROGRAMS:
        columns //= 2
    return Tiling(columns, block, parts, warps, of_many if tiles > 2 * SHAPES.THIN_PROGRAMS else stages)


def _three(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*tensors, None, None, None][:3]


def _by_torch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None,
    residual: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if activation is None or runs_plain(x):
        return thin_linear_reference(x, weights, biases, activation=activation, residual=residual)
    gate, up = thin_linear_reference(x, weights, biases)
    return (gated("thin_linear", gate, up, activation),)


def _check(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str | None,
    residual: Tensor | None,
) -> None:  # fmt: skip
    check_dtypes(x=x)
    shapes = [tuple(w.shape) for w in weights]
    if not 1 <= len(weights) <= 3 or any(len(s) != 2 or s[1] != x.shape[-1] for s in shapes):
        raise ValueError(f"thin_linear takes one to three weights (O, {x.shape[-1]}), as x has columns: got {shapes}.")
    of_biases = [None if b is None else tuple(b.shape) for b in biases]
    if len(biases) != len(weights) or any(b not in (None, s[:1]) for b, s in zip(of_biases, shapes, strict=True)):
        raise ValueError(f"thin_linear takes a bias (O,) or None for each weight: {of_biases} for weights {shapes}.")
    if activation is not None and (activation not in ACTIVATIONS or len(set(shapes)) != 1 or len(shapes) != 2):
        raise ValueError(
            f"An activation, one of {', '.join(ACTIVATIONS)}, takes gate and up of one shape: got {activation!r} and "
            f"weights {shapes}."
        )
    y_shape = (*x.shape[:-1], shapes[0][0])
    if residual is not None and (len(shapes) != 1 or residual.shape != y_shape):
        raise ValueError(
            f"A residual is added to one product, of shape {y_shape}: it is {tuple(residual.shape)}, weights {shapes}."
        )
