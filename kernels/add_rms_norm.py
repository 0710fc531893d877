"""Residual add and RMSNorm in one pass:  s = x + residual,  y = rms_norm(s).

    d x = d residual = ds + the gradient that reaches s through y

Shapes    x, residual, s, y: (..., H), in the kernel (N, H)    w: (H,)    rstd: (N,) fp32
Method    s, the sum of a decoder layer's residual stream, is normalized while it is in registers. The backward adds the
          stream's own gradient in the pass that computes the norm's (`rms_norm_backward`).
Numerics  s is rounded to x's dtype and y is the norm of the rounded sum, as in the models; otherwise as in rms_norm
Traffic   forward 4NH elements (as two ops: 5NH), backward 4NH (6NH), and the shares of dw
Source    fused residual norms: Dao's flash-attention layer norm, Liger-Kernel's fused_add_rms_norm
"""

import functools

import torch
from torch import Tensor

from ._autograd import empty, first_order, note_recomputable, vector
from ._norm import check_columns, forward_config, rows_of, tile_mask
from ._triton import Launch, remembered, tl, triton, use_triton
from .rms_norm import out_dtype, recompute, rms_norm_backward, rms_norm_reference


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0,
    cast_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `add_rms_norm` in plain torch."""
    summed = (x + residual).to(x.dtype)
    return rms_norm_reference(summed, weight, eps, offset=offset, cast_before_weight=cast_before_weight), summed


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, sum_ptr, rstd_ptr, stride_x, stride_residual, N, H, eps, offset,
    HAS_WEIGHT: tl.constexpr, CAST_FIRST: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_H)
    mask = tile_mask(rows, cols, N, H, ROWS, BLOCK_H, EXACT)
    out = rows[:, None] * H + cols[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + rows[:, None] * stride_residual + cols[None, :], mask=mask, other=0.0)
    summed = (x + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + out, summed, mask=mask)
    y = summed.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(y * y, 1) / H + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < N)
    y = y * rstd[:, None]
    if HAS_WEIGHT:
        if CAST_FIRST:
            y = y.to(sum_ptr.dtype.element_ty).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        y = y * (w + offset)[None, :]
    tl.store(y_ptr + out, y, mask=mask)


@remembered
def _forward_launch(
    N: int, H: int, strides: tuple, eps: float, offset: float, has_weight: bool, cast: bool, config: tuple
) -> Launch:
    block, tile, warps = config
    return Launch(
        _forward_kernel, (-(-N // tile),), *strides, N, H, eps, offset, HAS_WEIGHT=has_weight, CAST_FIRST=cast,
        EXACT=block == H and N % tile == 0, ROWS=tile, BLOCK_H=block, num_warps=warps,
    )  # fmt: skip


def _forward(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast_before_weight: bool):
    """Return (y, s, rstd)."""
    H = x.shape[-1]
    N = x.numel() // H
    rows, stride_x = rows_of(x)
    residual_rows, stride_residual = rows_of(residual)
    y, summed = empty(x, out_dtype(x, weight, cast_before_weight)), empty(x)
    rstd = vector(N, x)
    strides = stride_x, stride_residual
    launch = _forward_launch(N, H, strides, eps, offset, weight is not None, cast_before_weight, forward_config(H))
    launch(rows, residual_rows, None if weight is None else weight.contiguous(), y, summed, rstd)
    return y, summed, rstd


class AddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, cast_before_weight):
        y, summed, rstd = _forward(x, residual, weight, eps, offset, cast_before_weight)
        ctx.save_for_backward(summed, weight, rstd)
        ctx.offset, ctx.residual_dtype = offset, residual.dtype
        ctx.set_materialize_grads(False)  # otherwise an unused output would get a gradient of zeros
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(summed)
        return y, summed

    @staticmethod
    @first_order
    def backward(ctx, dy, dsummed):
        summed, weight, rstd = ctx.saved_tensors
        needs_x, needs_residual, needs_dw = ctx.needs_input_grad[:3]
        dx, dw = dsummed, None
        if dy is not None:
            dx, dw = rms_norm_backward(
                dy, summed, weight, rstd, ctx.offset, needs_x or needs_residual, needs_dw, add=dsummed
            )
        dresidual = dx.to(ctx.residual_dtype) if needs_residual and dx is not None else None
        return dx if needs_x else None, dresidual, dw, None, None, None


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0,
    cast_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (rms_norm(x + residual), x + residual), both differentiable in x, residual and weight.

    Args:
        x: (..., H), fp32, fp16, bf16 (fp64: torch). Any strides; copied only if one stride cannot lead over its rows.
        residual: (..., H), any float dtype.
        weight: (H,), any float dtype. None: the normalized sum itself. Frozen if it requires no gradient.
        eps: added to the mean square, before the root.
        offset: added to the weight, in fp32. 1 for Gemma, whose weights are stored as weight - 1.
        cast_before_weight: round the normalized sum to x's dtype before it is multiplied by the weight (Llama).

    Returns:
        The norm, (..., H) in x's dtype (with cast_before_weight in the dtype that torch promotes x and weight to), and
        the sum, (..., H) rounded to x's dtype. The norm is of the rounded sum.

    Raises:
        ValueError: x has no column, residual has another shape than x, or weight is not one number per column.
    """
    check_columns(x, weight)
    if residual.shape != x.shape:
        raise ValueError(
            f"x and residual must have one shape: x is {tuple(x.shape)}, residual is {tuple(residual.shape)}."
        )
    if torch.compiler.is_compiling() or not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps, offset=offset, cast_before_weight=cast_before_weight)
    y, summed = AddRMSNormFunction.apply(x, residual, weight, eps, offset, cast_before_weight)
    return note_recomputable(y, functools.partial(recompute, eps, offset, cast_before_weight), summed, weight), summed
