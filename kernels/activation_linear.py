"""An activation together with the linear layer behind it:  out = h W^T + b,  h = act(x).

Shapes    x, h: (..., I)    weight: (H, I)  bias: (H,)  out: (..., H)
Method    As gated_linear.py without up: the forward saves x and weight, but not h. The kernel that turns dh = dout W
          into dx has act(x) in registers, so it writes h over dh, and dW = dout^T h reads h there. Compared with an
          activation and a separate linear layer, N I fewer elements are kept, for one more write.
Numerics  h in the product's dtype, from fp32, rounded once: the same in both passes
Traffic   besides the three products: forward 1 read and 1 write of N I elements, backward 2 reads and 2 writes (1 for a
          frozen weight)
Source    Vaswani et al. 2017, arXiv:1706.03762; recomputation: Chen et al. 2016, arXiv:1604.06174
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes, empty, first_order
from ._gated import ACTIVATIONS, activation_reference, backward, forward, runs_plain
from .weight_gradients import taken_place, weight_gradient

__all__ = ["activation_linear", "activation_linear_reference", "activation_reference"]


def activation_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "gelu"
) -> Tensor:
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(activation_reference(x.to(wide), activation).to(x.dtype), weight, bias)


class ActivationLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, activation):
        ctx.save_for_backward(x, weight)
        ctx.activation, ctx.bias_dtype = activation, None if bias is None else bias.dtype
        ctx.place = taken_place(weight)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):  # F.linear's own casts would be cached without a graph
            dtype = torch.get_autocast_dtype(x.device.type)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        return F.linear(forward(x, None, activation, dtype), weight, bias)

    @staticmethod
    @first_order
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dout = dout.reshape(-1, dout.shape[-1])
        dx = dweight = h = None
        if need_x:
            dh = torch.mm(dout, weight.to(dout.dtype)).view(x.shape)
            if need_weight:  # over dh, unless dtypes differ: then a thread could overwrite what another still reads
                h = dh if x.dtype == dh.dtype else torch.empty_like(dh)
            dx = empty(x)
            backward(dh, x, None, dx, None, ctx.activation, h)
        elif need_weight:  # x is frozen: h is made by the forward's kernel
            h = forward(x, None, ctx.activation, dout.dtype)
        if h is not None:
            dweight = weight_gradient(
                dout, h.view(-1, weight.shape[1]), ctx.place
            )  # autograd casts it to weight's dtype
        dbias = dout.sum(0, dtype=ctx.bias_dtype) if need_bias else None
        return dx, dweight, dbias, None


def activation_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "gelu") -> Tensor:
    """Compute linear(act(x), weight, bias), keeping only x for the backward. Differentiable once.

    Under autocast, act(x) and the product are in autocast's dtype, as with F.linear.

    Args:
        x: (..., I), fp32, fp16, bf16 or fp64, any strides.
        weight: (H, I), in x's dtype; any under autocast. Frozen if it requires no gradient: its product is skipped.
        bias: (H,), like weight.
        activation: "gelu" (erf), "gelu_tanh", "silu" or "relu2" (squared ReLU).

    Returns:
        (..., H), in the product's dtype.

    Raises:
        ValueError: if shapes don't fit, or the activation is unknown.
    """
    _check(x, weight, bias, activation)
    if runs_plain(x):
        return activation_linear_reference(x, weight, bias, activation=activation)
    return ActivationLinearFunction.apply(x, weight, bias, activation)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    check_dtypes(x=x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight must be (H, I) with I the columns of x: weight is {tuple(weight.shape)}, x {tuple(x.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be one per row of weight: bias is {tuple(bias.shape)}, weight {tuple(weight.shape)}."
        )
