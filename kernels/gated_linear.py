"""A gated activation together with the projection behind it:  out = h W^T + b,  h = act(gate) * up.

Shapes    gate, up, h: (..., I), or packed [gate | up] (..., 2I)    weight: (H, I)  bias: (H,)  out: (..., H)
Method    gate, up and weight are saved, h is not: the kernel that turns dh = dout W into the gradients of gate and up
          has act(gate) in registers and writes h over dh, from where dW = dout^T h reads it. Against an activation and
          a linear layer apart, N I elements less are kept between forward and backward, for one write more.
Numerics  h in the product's dtype, from fp32, rounded once: the same in both passes
Traffic   beside the three products: forward 2 reads and 1 write of N I elements, backward 3 reads and 3 writes, 2 for
          a frozen weight
Source    Shazeer 2020, arXiv:2002.05202; recomputation: Chen et al. 2016, arXiv:1604.06174
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import first_order
from ._gated import ACTIVATIONS, check_gated, forward, gated_reference, halves, input_gradients, promoted, runs_plain

__all__ = ["gated_linear", "gated_linear_reference", "gated_reference"]


def gated_linear_reference(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    """What the op must equal, in plain torch. Tests and benchmarks import this one."""
    return F.linear(gated_reference(gate, up, activation), weight, bias)


class GatedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight, bias, activation):
        ctx.save_for_backward(gate, up, weight)
        ctx.activation, ctx.bias_dtype = activation, None if bias is None else bias.dtype
        gate, up = halves(gate, up)
        dtype = promoted(gate, up)
        if torch.is_autocast_enabled(gate.device.type):  # left to F.linear, the casts would be cached without a graph
            dtype = torch.get_autocast_dtype(gate.device.type)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        return F.linear(forward(gate, up, activation, dtype), weight, bias)

    @staticmethod
    @first_order
    def backward(ctx, dout):
        gate, up, weight = ctx.saved_tensors
        need_gate, need_up, need_weight, need_bias, _ = ctx.needs_input_grad
        dout = dout.reshape(-1, dout.shape[-1])
        dgate = dup = dweight = h = None
        if need_gate or need_up:
            dh = torch.mm(dout, weight.to(dout.dtype)).view(*gate.shape[:-1], weight.shape[1])
            if need_weight:  # over dh, unless layouts of several dtypes let one thread overwrite what another reads
                h = dh if gate.dtype == dh.dtype == (gate if up is None else up).dtype else torch.empty_like(dh)
            dgate, dup = input_gradients(dh, gate, up, (need_gate, need_up), ctx.activation, h)
        elif need_weight:
            h = forward(*halves(gate, up), ctx.activation, dout.dtype)
        if h is not None:
            dweight = torch.mm(dout.t(), h.view(-1, weight.shape[1]))  # autograd casts it to weight's dtype
        dbias = dout.sum(0, dtype=ctx.bias_dtype) if need_bias else None
        return dgate, dup, dweight, dbias, None


def gated_linear(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    """linear(act(gate) * up, weight, bias), keeping gate and up alone for the backward. Differentiable once in all.

    Equals F.linear(swiglu(gate, up), weight, bias), for silu. Under autocast the product, and act(gate) * up, are in
    autocast's dtype, as F.linear's would be.

    Args:
        gate: (..., I), fp32, fp16, bf16 or fp64, any strides; with up=None packed [gate | up], (..., 2 I), whose
            gradient is packed too.
        up: as gate, or None.
        weight: (H, I), in the dtype that gate and up promote to; any under autocast. Frozen if it does not require a
            gradient: its product is skipped.
        bias: (H,), as weight.
        activation: "silu", "gelu_tanh", "gelu" (erf) or "relu2" (squared ReLU).

    Returns:
        (..., H), in the product's dtype.

    Raises:
        ValueError: shapes that do not fit, or an unknown activation.
    """
    _check(gate, up, weight, bias, activation)
    if runs_plain(gate):
        return gated_linear_reference(gate, up, weight, bias, activation=activation)
    return GatedLinearFunction.apply(gate, up, weight, bias, activation)


def _check(gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    check_gated("gated_linear", gate, up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    width = gate.shape[-1] // 2 if up is None else gate.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"weight must be (H, I) with I = {width}, the columns of act(gate) * up: weight is {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be one per row of weight: bias is {tuple(bias.shape)}, weight {tuple(weight.shape)}."
        )
