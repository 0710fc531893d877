"""A gated activation together with the projection behind it:  out = h W^T + b,  h = act(gate) * up.

Shapes    gate, up, h: (..., I), or packed [gate | up] (..., 2I)    weight: (H, I)  bias: (H,)  out: (..., H)
Method    The forward saves gate, up and weight, but not h. The kernel that turns dh = dout W into the gradients of gate
          and up has act(gate) in registers, so it writes h over dh, and dW = dout^T h reads h there. Compared with an
          activation and a separate linear layer, N I fewer elements are kept, for one more write.
Numerics  h in the product's dtype, from fp32, rounded once: the same in both passes
Traffic   besides the three products: forward 2 reads and 1 write of N I elements, backward 3 reads and 3 writes (2 for
          a frozen weight)
Source    Shazeer 2020, arXiv:2002.05202; recomputation: Chen et al. 2016, arXiv:1604.06174
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import first_order
from ._gated import ACTIVATIONS, check_gated, forward, gated_reference, halves, input_gradients, promoted, runs_plain
from .weight_gradients import taken_place, weight_gradient

__all__ = ["gated_linear", "gated_linear_reference", "gated_reference"]


def gated_linear_reference(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    return F.linear(gated_reference(gate, up, activation), weight, bias)


class GatedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight, bias, activation):
        ctx.save_for_backward(gate, up, weight)
        ctx.activation, ctx.bias_dtype = activation, None if bias is None else bias.dtype
        ctx.place = taken_place(weight)
        gate, up = halves(gate, up)
        dtype = promoted(gate, up)  # of the product
        if torch.is_autocast_enabled(gate.device.type):  # F.linear's own casts would be cached without a graph
            dtype = torch.get_autocast_dtype(gate.device.type)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        return F.linear(forward(gate, up, activation, dtype), weight, bias)

    @staticmethod
    @first_order
    def backward(ctx, dout):
        gate, up, weight = ctx.saved_tensors
        need_gate, need_up, need_weight, need_bias, _ = ctx.needs_input_grad
        dout = dout.reshape(-1, dout.shape[-1])
        needs = need_gate, need_up, need_weight
        gradients = gated_linear_gradients(dout, gate, up, weight, needs, ctx.activation, place=ctx.place)
        dbias = dout.sum(0, dtype=ctx.bias_dtype) if need_bias else None
        return *gradients, dbias, None


def gated_linear_gradients(
    dout: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor, needs: Sequence[bool], activation: str,
    *, overwrite: bool = False, place: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of gate, up and weight, where needed. dout: (N, H).

    `overwrite`: see `input_gradients`. `place`: see `weight_gradient`.
    """
    dgate = dup = dweight = h = None
    if needs[0] or needs[1]:
        dh = torch.mm(dout, weight.to(dout.dtype)).view(*gate.shape[:-1], weight.shape[1])
        if needs[2]:  # over dh, unless dtypes differ: then a thread could overwrite what another still reads
            h = dh if gate.dtype == dh.dtype == (gate if up is None else up).dtype else torch.empty_like(dh)
        dgate, dup = input_gradients(dh, gate, up, needs, activation, h, overwrite=overwrite)
    # Frozen inputs: no kernel of the backward passes over gate and up, so h is made by the forward's.
    elif needs[2]:
        h = forward(*halves(gate, up), activation, dout.dtype)
    if h is not None:
        dweight = weight_gradient(dout, h.view(-1, weight.shape[1]), place)  # autograd casts it to weight's dtype
    return dgate, dup, dweight


def gated_linear(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    """Compute linear(act(gate) * up, weight, bias), keeping only gate and up for the backward. Differentiable once.

    For silu it equals F.linear(swiglu(gate, up), weight, bias). Under autocast, act(gate) * up and the product are in
    autocast's dtype, as with F.linear.

    Args:
        gate: (..., I), fp32, fp16, bf16 or fp64, any strides. With up=None, packed [gate | up] (..., 2 I); then its
            gradient is packed too.
        up: like gate, or None.
        weight: (H, I), in the dtype that gate and up promote to; any under autocast. Frozen if it requires no
            gradient: its product is skipped.
        bias: (H,), like weight.
        activation: "silu", "gelu_tanh", "gelu" (erf) or "relu2" (squared ReLU).

    Returns:
        (..., H), in the product's dtype.

    Raises:
        ValueError: if shapes don't fit, or the activation is unknown.
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
