"""A gated MLP that keeps neither gate(x) nor up(x):  y = down(act(gate(x)) * up(x)).

Shapes    x: (..., K)  gate, up: (I, K), or packed [gate | up] (2I, K)  down: (H, I)  biases: one per row  y: (..., H)
Method    The products of linears.py, then gated_linear.py. The forward saves the weights, the biases and x, or what a
          norm makes x of (_autograd.py). The backward computes gate(x) and up(x) again, then what those two ops
          compute: h is written over dh; the gradients of gate(x) and up(x) overwrite these, which nobody else sees.
Numerics  as linears and gated_linear, bit for bit
Traffic   as these two, and two products more in the backward, for 2 N I elements less between the passes
Source    Shazeer 2020, arXiv:2002.05202; recomputation: Chen et al. 2016, arXiv:1604.06174
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._autograd import check_dtypes, first_order, saved_or_recomputed
from ._gated import ACTIVATIONS, forward, gated_reference, halves, runs_plain
from .gated_linear import gated_linear_gradients
from .linears import as_computed, bias_gradients, input_gradient, linears_reference, products, weight_gradients
from .weight_gradients import taken_place


def gated_mlp_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, *, activation: str = "silu"
) -> Tensor:
    """Return in plain torch what the op must equal."""
    biases = biases or [None] * len(weights)
    gate, *up = linears_reference(x, weights[:-1], biases[:-1])
    return linears_reference(gated_reference(gate, up[0] if up else None, activation), weights[-1:], biases[-1:])[0]


class GatedMLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, activation, count, *tensors):
        """Run the forward. tensors: the weights, `count` of them, and as many biases, or None."""
        weights, biases = tensors[:count], tensors[count:]
        ctx.shape, ctx.activation = x.shape, activation
        uncast, x = x, as_computed(x)  # the note of a norm is on the tensor as it came
        source = saved_or_recomputed(uncast, x)
        ctx.make, ctx.count = source.make, count
        ctx.places = [taken_place(w) for w in weights]
        ctx.save_for_backward(*weights, *biases, *source.tensors)
        h = forward(*halves(*_gate_and_up(x, weights, biases)), activation, x.dtype)
        return products(h, weights[-1:], biases[-1:])[0]

    @staticmethod
    @first_order
    def backward(ctx, dy):
        saved, count, (need_x, _, _, *needs) = ctx.saved_tensors, ctx.count, ctx.needs_input_grad
        weights, biases, sources = saved[:count], saved[count : 2 * count], saved[2 * count :]
        *first_weights, need_down = needs[:count]
        *first_biases, _ = needs[count:]
        dy = dy.reshape(-1, dy.shape[-1])
        # gradients of gate(x), up(x)
        wanted = [need_x or any(pair) for pair in zip(first_weights, first_biases, strict=True)]
        rows, ddown, x = [None] * len(wanted), None, None
        if need_down or any(wanted):  # else x is not computed again
            x = ctx.make(*sources).view(ctx.shape)
            # wanted[0] and [-1]: of packed gate and up they are the same one
            *gradients, ddown = gated_linear_gradients(
                dy, *_gate_and_up(x, weights, biases), weights[-1], (wanted[0], wanted[-1], need_down),
                ctx.activation, overwrite=True, place=ctx.places[-1],
            )  # fmt: skip
            x = x.reshape(-1, x.shape[-1])
            rows = [None if y is None else y.view(-1, y.shape[-1]) for y in gradients[: len(wanted)]]
        dx = input_gradient(rows, weights[:-1]) if need_x else None
        dweights = weight_gradients(rows, x, first_weights, ctx.places[:-1])
        dbiases = bias_gradients([*rows, dy], [None if b is None else b.dtype for b in biases], needs[count:])
        return None if dx is None else dx.view(ctx.shape), None, None, *dweights, ddown, *dbiases


def _gate_and_up(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return gate(x) and up(x), or both packed and None."""
    gate, *up = products(x, weights[:-1], biases[:-1])
    return gate, up[0] if up else None


def gated_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, *, activation: str = "silu"
) -> Tensor:
    """Compute down(act(gate(x)) * up(x)), keeping neither gate(x) nor up(x) for the backward. Differentiable once.

    Frozen tensors have no products. fp64, and a CPU, are computed in plain torch, which keeps them.

    Args:
        x: (..., K), fp32, fp16, bf16 or fp64, any strides.
        weights: gate (I, K), up (I, K) and down (H, I); or packed [gate | up] (2I, K) and down. In x's dtype; any under
            autocast.
        biases: one per row of each weight, or None; None if no layer has one.
        activation: "silu", "gelu_tanh", "gelu" (erf) or "relu2" (squared ReLU).

    Returns:
        (..., H), in x's dtype, or autocast's.

    Raises:
        ValueError: if shapes don't fit, or the activation is unknown.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    _check(x, weights, biases, activation)
    if runs_plain(x):
        return gated_mlp_reference(x, weights, biases, activation=activation)
    return GatedMLPFunction.apply(x, activation, len(weights), *weights, *biases)


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str) -> None:
    check_dtypes(x=x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if len(biases) != len(weights):
        raise ValueError(
            f"gated_mlp needs one bias or None for each weight: {len(weights)} weights, {len(biases)} biases."
        )
    shapes, columns = [tuple(w.shape) for w in weights], x.shape[-1]
    inner = shapes[-1][-1] if shapes and len(shapes[-1]) == 2 else None
    if inner is None or shapes[:-1] not in ([(inner, columns)] * 2, [(2 * inner, columns)]):
        raise ValueError(
            "gated_mlp needs the weights of gate (I, K), up (I, K) and down (H, I), or of both packed (2I, K) and "
            f"down, with K = {columns}, x's columns: they are {', '.join(map(str, shapes)) or 'none'}."
        )
    for shape, bias in zip(shapes, biases, strict=True):
        if bias is not None and bias.shape != shape[:1]:
            raise ValueError(f"A bias must be one per row of its weight {shape}: it is {tuple(bias.shape)}.")
