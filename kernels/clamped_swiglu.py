"""SwiGLU with limits, as gpt-oss, DeepSeek V4 and GLM 5 have it:

    h = g s(alpha g) (u + shift),  g = min(gate, limit),  u = clamp(up, -limit, limit),  s the sigmoid

Shapes    gate, up, h: (..., I), or packed in one tensor (..., 2I): its halves, or its even and odd columns
Method    the code of _packed_gate.py; the forward saves gate and up
Numerics  fp32 inside, rounded once on the way out. A gradient passes at the limit itself, as through torch.clamp.
Traffic   forward: 2 reads and 1 write of N I elements; backward: 3 reads and 2 writes
Source    OpenAI's gpt-oss model card, 2025, arXiv:2508.10925
"""

import torch
from torch import Tensor

from ._autograd import check_dtypes, empty, first_order
from ._gated import check_gated, runs_plain
from ._packed_gate import Gate, backward, forward, gate_reference


def clamped_swiglu_reference(
    gate: Tensor, up: Tensor | None = None, *, limit: float, alpha: float = 1.0, shift: float = 0.0,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `clamped_swiglu` in plain torch."""
    return gate_reference(gate, up, _form(limit, alpha, shift, interleaved))


def _form(limit: float, alpha: float, shift: float, interleaved: bool) -> Gate:
    return Gate("silu", "interleaved" if interleaved else "gate first", limit, alpha, shift)


class ClampedSwigluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, form):
        ctx.shapes = gate.shape, None if up is None else up.shape
        gate, up = _rows(gate), None if up is None else _rows(up)
        ctx.save_for_backward(gate, up)
        ctx.form = form
        h = forward(gate, up, form)
        return h.view(*ctx.shapes[0][:-1], h.shape[1])

    @staticmethod
    @first_order
    def backward(ctx, dh):
        gate, up = ctx.saved_tensors
        need_gate, need_up, _ = ctx.needs_input_grad
        dgate = empty(gate) if need_gate else None
        dup = empty(up) if need_up else None
        backward(_rows(dh), gate, up, ctx.form, dgate, dup)
        return (
            *(None if x is None else x.view(shape) for x, shape in zip((dgate, dup), ctx.shapes, strict=True)),
            None,
        )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def clamped_swiglu(
    gate: Tensor, up: Tensor | None = None, *, limit: float, alpha: float = 1.0, shift: float = 0.0,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Compute g * sigmoid(alpha * g) * (u + shift), g and u clamped gate and up. Differentiable once.

    Args:
        gate: (..., I), fp32, fp16, bf16 or fp64. With up=None, packed gate and up, (..., 2 I).
        up: like gate, or None.
        limit: clamps gate from above and up to [-limit, limit]; above 0.
        alpha: in the sigmoid; 1 is SiLU.
        shift: added to the clamped up.
        interleaved: packed gate is in the even columns, up in the odd ones; else the first half is gate.

    Returns:
        (..., I), in the dtype that gate and up promote to.

    Raises:
        ValueError: if shapes don't fit, or the limit is not above 0.
    """
    check_dtypes(gate=gate, up=up)
    check_gated("clamped_swiglu", gate, up)
    if not limit > 0:
        raise ValueError(f"limit must be above 0, got {limit}.")
    if interleaved and up is not None:
        raise ValueError("interleaved is for a packed gate: with up, leave it out.")
    if runs_plain(gate):
        return clamped_swiglu_reference(gate, up, limit=limit, alpha=alpha, shift=shift, interleaved=interleaved)
    return ClampedSwigluFunction.apply(gate, up, _form(limit, alpha, shift, interleaved))
