"""LayerNorm over the last dimension:  y = xhat * w + b,  xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps).

    g = dy * w,  dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dw = sum over rows of dy * xhat,  db = sum over rows of dy

Shapes    x, y: (..., H), in the kernels (N, H)    w, b: (H,)    mean, rstd: (N,) fp32
Method    as in rms_norm. The variance is computed from the centred row, which is in registers: no cancellation. Small
          inputs go to torch's own kernels, launched by one call: there the host takes longer than the device.
Numerics  fp32 inside, rounded once on the way out
Traffic   forward 2NH elements, backward 3NH, and 2PH fp32 numbers each for dw and db, P programs
Source    Ba, Kiros & Hinton 2016, arXiv:1607.06450
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import empty, first_order, note_recomputable, vector
from ._norm import (
    backward_config,
    check_columns,
    forward_config,
    multiprocessors,
    programs_for,
    rows_of,
    sum_programs,
    tile_mask,
)
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES

TORCH_NUMBERS = SHAPES.LAYER_NORM_BY_TORCH  # of x, up to which torch is called


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Compute `layer_norm` in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, stride_x, N, H, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_H)
    mask = tile_mask(rows, cols, N, H, ROWS, BLOCK_H, EXACT)
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / H  # masked columns are 0
    # Centred before it is squared: the mean square minus the squared mean would cancel. Columns beyond the row must
    # be 0 again.
    y = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(y * y, 1) / H + eps)
    tl.store(stats_ptr + rows, mean, mask=rows < N)
    tl.store(stats_ptr + N + rows, rstd, mask=rows < N)
    y = y * rstd[:, None]
    if HAS_WEIGHT:
        y = y * tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(b_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * H + cols[None, :], y, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, share_ptr, stride_dy, stride_x, N, H,
    HAS_WEIGHT: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DW: tl.constexpr, NEEDS_DB: tl.constexpr,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    # One sum per entry of the tile: rows are added up once, after the loop.
    dw = tl.zeros((ROWS, BLOCK_H), tl.float32)
    db = tl.zeros((ROWS, BLOCK_H), tl.float32)
    for start in tl.range(pid * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = tile_mask(rows, cols, N, H, ROWS, BLOCK_H, EXACT)
        x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(stats_ptr + rows, mask=rows < N, other=0.0)[:, None]
        rstd = tl.load(stats_ptr + N + rows, mask=rows < N, other=0.0)[:, None]
        xhat = (x - mean) * rstd  # nonzero beyond the row's end, but dy is 0 there
        if NEEDS_DW:
            dw += dy * xhat
        if NEEDS_DB:
            db += dy
        if NEEDS_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * w[None, :]
            g_mean = (tl.sum(g, 1) / H)[:, None]  # the gradient of the mean that was subtracted
            dx = rstd * (g - g_mean - xhat * (tl.sum(g * xhat, 1) / H)[:, None])
            tl.store(dx_ptr + rows[:, None] * H + cols[None, :], dx, mask=mask)
    share_ptr += pid * H + cols
    if NEEDS_DW:
        tl.store(share_ptr, tl.sum(dw, 0), mask=cols < H)
        share_ptr += tl.num_programs(0) * H  # all programs' shares of dw lie before those of db
    if NEEDS_DB:
        tl.store(share_ptr, tl.sum(db, 0), mask=cols < H)


@remembered
def _forward_launch(N: int, H: int, stride: int, eps: float, has_weight: bool, has_bias: bool, config: tuple) -> Launch:
    block, tile, warps = config
    return Launch(
        _forward_kernel, (-(-N // tile),), stride, N, H, eps, HAS_WEIGHT=has_weight, HAS_BIAS=has_bias,
        EXACT=block == H and N % tile == 0, ROWS=tile, BLOCK_H=block, num_warps=warps,
    )  # fmt: skip


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, x's rows, their means, then their rstd)."""
    H = x.shape[-1]
    N = x.numel() // H
    rows, stride = rows_of(x)
    y, stats = empty(x), vector(2 * N, x)  # one tensor for both: each costs the host an allocation
    launch = _forward_launch(N, H, stride, eps, weight is not None, bias is not None, forward_config(H))
    launch(rows, *(None if p is None else p.contiguous() for p in (weight, bias)), y, stats)
    return y, rows, stats


@remembered
def _backward_launch(
    N: int, H: int, strides: tuple, has_weight: bool, needs_dx: bool, needs_dw: bool, needs_db: bool, config: tuple,
    multiprocessors: int,
) -> Launch:  # fmt: skip
    block, tile, warps, per_multiprocessor, stages = config
    tiles, sums = -(-N // tile), needs_dw or needs_db
    programs = programs_for(tiles, multiprocessors * per_multiprocessor) if sums else tiles
    return Launch(
        _backward_kernel, (programs,), *strides, N, H,
        HAS_WEIGHT=has_weight, NEEDS_DX=needs_dx, NEEDS_DW=needs_dw, NEEDS_DB=needs_db,
        EXACT=block == H and N % tile == 0, ROWS=tile, BLOCK_H=block, STAGES=stages if sums else 1, num_warps=warps,
    )  # fmt: skip


def _backward(dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, needs_dx: bool, sums: tuple):
    """Return (dx, dw, db), None where not needed. sums: the dtypes of dw and db, None where not needed."""
    H, N = dy.shape[-1], stats.shape[0] // 2
    x, stride_x = rows_of(x)
    dy_rows, stride_dy = rows_of(dy)
    dx = empty(dy, x.dtype) if needs_dx else None
    dtypes = [dtype for dtype in sums if dtype is not None]
    dw_dtype, db_dtype = sums
    launch = _backward_launch(
        N, H, (stride_dy, stride_x), weight is not None, needs_dx, dw_dtype is not None, db_dtype is not None,
        backward_config(H, x.element_size(), dy.device), multiprocessors(dy.device),
    )  # fmt: skip
    shares = vector(len(dtypes) * launch.grid[0] * H, dy) if dtypes else stats  # else a pointer that is not read
    launch(dy_rows, x, None if weight is None else weight.contiguous(), stats, dx, shares)
    totals = iter(sum_programs(shares, H, *dtypes) if dtypes else ())
    return dx, *(None if dtype is None else next(totals) for dtype in sums)


def _suits_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether torch's own kernels give the same (fp32 inside, rounded once) sooner, as the host is the slower.

    Return False for wrong shapes: the checks that follow say what is wrong.
    """
    if weight is None or not 0 < x.numel() <= TORCH_NUMBERS:
        return False
    columns, dtype = x.shape[-1:], x.dtype
    if weight.dtype != dtype or weight.shape != columns:
        return False
    if bias is not None and (bias.dtype != dtype or bias.shape != columns):
        return False
    # Under autocast torch would return fp32; the op returns x's dtype.
    return x.is_contiguous() and not torch.is_autocast_enabled(x.device.type)


def _recompute(eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _forward(x, weight, bias, eps)[0]


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, rows, stats = _forward(x, weight, bias, eps)
        ctx.save_for_backward(rows, weight, stats)
        needs_dw, needs_db = ctx.needs_input_grad[1:3]
        # dtypes, not the tensors: the backward reads no bias
        ctx.sums = (weight.dtype if needs_dw else None, bias.dtype if needs_db else None)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        rows, weight, stats = ctx.saved_tensors
        return *_backward(dy, rows, weight, stats, ctx.needs_input_grad[0], ctx.sums), None


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Compute (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, differentiable in all three.

    Args:
        x: (..., H), fp32, fp16, bf16 (fp64: torch). Any strides; copied only if one stride cannot lead over its rows.
        weight: (H,), any float dtype. None: 1. Frozen if it requires no gradient.
        bias: (H,), any float dtype, also without a weight. None: 0. Frozen if it requires no gradient.
        eps: added to the variance (the mean square of the centred row), before the root.

    Returns:
        (..., H) in x's dtype, under autocast too.

    Raises:
        ValueError: x has no column, or weight or bias is not one number per column.
    """
    if x.is_cuda and not torch.compiler.is_compiling() and _suits_torch(x, weight, bias):
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
    check_columns(x, weight)
    check_columns(x, bias, "bias")
    if torch.compiler.is_compiling() or not use_triton(x):
        return layer_norm_reference(x, weight, bias, eps)
    y = LayerNormFunction.apply(x, weight, bias, eps)
    return note_recomputable(y, functools.partial(_recompute, eps), x, weight, bias)
