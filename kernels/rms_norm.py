"""RMSNorm over the last dimension:  y = xhat * (offset + w),  xhat = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps).

    g = dy * (offset + w),  dx = rstd * (g - xhat * mean(g * xhat)),  dw = sum over rows of dy * xhat

Shapes    x, y: (..., H), in the kernels (N, H)    w: (H,)    rstd: (N,) fp32
Method    the forward saves x and rstd. In the backward a few programs per multiprocessor each walk over many tiles of
          rows with their share of dw in registers; a second kernel adds the shares. A frozen weight costs nothing.
Numerics  fp32 inside, rounded once on the way out (Gemma, OLMo). cast_before_weight: xhat is rounded to x's dtype
          before it meets the weight (Llama); the gradients ignore that rounding.
Traffic   forward 2NH elements, backward 3NH, and 2PH fp32 numbers for dw, P programs
Source    Zhang & Sennrich 2019, arXiv:1910.07467
"""

import functools

import torch
from torch import Tensor

from ._autograd import Scaled, empty, first_order, note_recomputable, vector
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


def rms_norm_reference(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, cast_before_weight: bool = False
) -> Tensor:
    """Compute `rms_norm` in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    factor = weight.to(wide) + offset
    if cast_before_weight:
        return (factor * normed.to(x.dtype)).to(torch.promote_types(x.dtype, weight.dtype))
    return (factor * normed).to(x.dtype)


@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, stride_x, N, H, eps, offset,
    HAS_WEIGHT: tl.constexpr, CAST_FIRST: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: a row times its stride passes 2^31
    cols = tl.arange(0, BLOCK_H)
    mask = tile_mask(rows, cols, N, H, ROWS, BLOCK_H, EXACT)
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / H + eps)  # columns beyond H were read as 0: they add nothing
    tl.store(rstd_ptr + rows, rstd, mask=rows < N)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        if CAST_FIRST:  # the rounding of the models that have this form, and of their references
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        y = y * (w + offset)[None, :]
    tl.store(y_ptr + rows[:, None] * H + cols[None, :], y, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, add_ptr, dx_ptr, share_ptr, stride_dy, stride_x, stride_add, N, H, offset,
    HAS_WEIGHT: tl.constexpr, HAS_ADD: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DW: tl.constexpr,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)
    if HAS_WEIGHT:
        factor = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32) + offset
    # One sum per entry of the tile: rows are added up once, after the loop.
    dw = tl.zeros((ROWS, BLOCK_H), tl.float32)
    for start in tl.range(pid * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = tile_mask(rows, cols, N, H, ROWS, BLOCK_H, EXACT)
        x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < N, other=0.0)[:, None]
        xhat = x * rstd
        if NEEDS_DW:
            dw += dy * xhat
        if NEEDS_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * factor[None, :]
            dx = rstd * (g - xhat * (tl.sum(g * xhat, 1) / H)[:, None])
            if HAS_ADD:  # the gradient that reaches x past the norm: add_rms_norm's sum
                dx += tl.load(add_ptr + rows[:, None] * stride_add + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows[:, None] * H + cols[None, :], dx, mask=mask)
    if NEEDS_DW:
        tl.store(share_ptr + pid * H + cols, tl.sum(dw, 0), mask=cols < H)


def out_dtype(x: Tensor, weight: Tensor | None, cast_before_weight: bool) -> torch.dtype:
    if not cast_before_weight or weight is None or weight.dtype == x.dtype:
        return x.dtype
    # Llama multiplies the rounded x by a weight of another dtype, and does not round that product.
    return torch.promote_types(x.dtype, weight.dtype)


@remembered
def _forward_launch(
    N: int, H: int, stride: int, eps: float, offset: float, has_weight: bool, cast: bool, config: tuple
) -> Launch:
    block, tile, warps = config
    return Launch(
        _forward_kernel, (-(-N // tile),), stride, N, H, eps, offset, HAS_WEIGHT=has_weight, CAST_FIRST=cast,
        # EXACT: a mask may keep loads from being 16 bytes wide
        EXACT=block == H and N % tile == 0, ROWS=tile, BLOCK_H=block, num_warps=warps,
    )  # fmt: skip


def norm_forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_before_weight: bool):
    """Return (y, x's rows, rstd)."""
    H = x.shape[-1]
    N = x.numel() // H
    rows, stride = rows_of(x)  # saved as it is read: one stride leads over its rows
    y = empty(x, out_dtype(x, weight, cast_before_weight))
    rstd = vector(N, x)  # fp32, one a row: all that the backward needs besides x
    launch = _forward_launch(N, H, stride, eps, offset, weight is not None, cast_before_weight, forward_config(H))
    launch(rows, None if weight is None else weight.contiguous(), y, rstd)
    return y, rows, rstd


@remembered
def _backward_launch(
    N: int, H: int, strides: tuple, offset: float, has_weight: bool, has_add: bool, needs_dx: bool, needs_dw: bool,
    config: tuple, multiprocessors: int,
) -> Launch:  # fmt: skip
    block, tile, warps, per_multiprocessor, stages = config
    tiles = -(-N // tile)
    # With dw few programs walk over many tiles, so that few shares are left to sum.
    programs = programs_for(tiles, multiprocessors * per_multiprocessor) if needs_dw else tiles
    return Launch(
        _backward_kernel, (programs,), *strides, N, H, offset,
        HAS_WEIGHT=has_weight, HAS_ADD=has_add, NEEDS_DX=needs_dx, NEEDS_DW=needs_dw,
        # without dw a program has one tile, and nothing to prefetch
        EXACT=block == H and N % tile == 0, ROWS=tile, BLOCK_H=block, STAGES=stages if needs_dw else 1, num_warps=warps,
    )  # fmt: skip


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, needs_dx: bool, needs_dw: bool,
    add: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return (dx + add, dw), None where not needed. dx has dy's shape."""
    H, N = dy.shape[-1], rstd.shape[0]
    x, stride_x = rows_of(x)
    dy_rows, stride_dy = rows_of(dy)
    add_rows, stride_add = (None, 0) if add is None else rows_of(add)
    dx = empty(dy, x.dtype) if needs_dx else None
    launch = _backward_launch(
        N, H, (stride_dy, stride_x, stride_add), offset, weight is not None, add is not None, needs_dx, needs_dw,
        backward_config(H, x.element_size(), dy.device), multiprocessors(dy.device),
    )  # fmt: skip
    shares = vector(launch.grid[0] * H, dy) if needs_dw else None  # a program's part of dw each
    launch(dy_rows, x, None if weight is None else weight.contiguous(), rstd, add_rows, dx, shares)
    return dx, None if shares is None or weight is None else sum_programs(shares, H, weight.dtype)[0]


def recompute(
    eps: float, offset: float, cast_before_weight: bool, x: Tensor, weight: Tensor | None, rstd: Tensor | None = None
) -> Tensor:
    """Compute the norm once more, in a backward: what `note_recomputable` keeps instead of it."""
    return norm_forward(x, weight, eps, offset, cast_before_weight)[0]


def _scaled(offset: float, x: Tensor, weight: Tensor | None, rstd: Tensor) -> Scaled:
    factor = weight if weight is None or not offset else weight.float() + offset  # bf16 would round the sum
    return Scaled(x.view(-1, x.shape[-1]), rstd, factor)


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, cast_before_weight):
        y, rows, rstd = norm_forward(x, weight, eps, offset, cast_before_weight)
        ctx.save_for_backward(rows, weight, rstd)
        ctx.offset = offset
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)  # or there would be zeros for rstd
        return y, rstd

    @staticmethod
    @first_order
    def backward(ctx, dy, _):
        rows, weight, rstd = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        return *rms_norm_backward(dy, rows, weight, rstd, ctx.offset, needs_dx, needs_dw), None, None, None


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, cast_before_weight: bool = False
) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, differentiable in x and weight.

    Args:
        x: (..., H), fp32, fp16, bf16 (fp64: torch). Any strides; copied only if one stride cannot lead over its rows.
        weight: (H,), any float dtype. None: the normalized x itself. Frozen if it requires no gradient.
        eps: added to the mean square, before the root.
        offset: added to the weight, in fp32. 1 for Gemma, whose weights are stored as weight - 1.
        cast_before_weight: round the normalized x to x's dtype before it is multiplied by the weight (Llama).

    Returns:
        (..., H) in x's dtype; with cast_before_weight in the dtype that torch promotes x and weight to.

    Raises:
        ValueError: x has no column, or weight is not one number per column.
    """
    check_columns(x, weight)
    if torch.compiler.is_compiling() or not use_triton(x):
        return rms_norm_reference(x, weight, eps, offset=offset, cast_before_weight=cast_before_weight)
    y, rstd = RMSNormFunction.apply(x, weight, eps, offset, cast_before_weight)
    make, scaled = functools.partial(recompute, eps, offset, cast_before_weight), functools.partial(_scaled, offset)
    return note_recomputable(y, make, x, weight, rstd, scaled=scaled)
