"""Linear layers that read one x, such as queries, keys and values, or gate and up:  y_i = x W_i^T + b_i

Shapes    x: (..., K)  weight: (O_i, K)  bias: (O_i,)  y_i: (..., O_i)
Method    dx = sum_i dy_i W_i is one tensor, to which each product adds its part (addmm_): autograd would make one for
          each layer, and add them afterwards. W_i is saved as it is; under autocast it is cast again in the backward.
          An x that a norm has made is made again there (_autograd.py).
Numerics  a product adds to dx in fp32, so each part but the first is rounded once, where autograd rounds it twice
Traffic   besides the products: one read of dx for each layer but the first, where autograd's sum takes 3 reads and
          2 writes
Source    accumulation by beta of GEMM: Dongarra et al. 1990, ACM TOMS 16; sharing an input: lora_linears.py
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes, first_order, saved_or_recomputed
from .weight_gradients import taken_place, weight_gradient


def linears_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Return in plain torch what the op must equal."""
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True))


class LinearsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count, *tensors):
        ctx.shape = x.shape
        weights, biases = tensors[:count], tensors[count:]
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        ctx.places = [taken_place(w) for w in weights]
        uncast, x = x, as_computed(x)  # the note of a norm is on the tensor as it came
        source = saved_or_recomputed(uncast, x)
        ctx.make = source.make
        ctx.save_for_backward(*weights, *source.tensors)
        ctx.set_materialize_grads(False)  # an output without a gradient stays None, and has no product
        outputs = products(x, weights, biases)
        need_x, _, *needs = ctx.needs_input_grad
        if not need_x:
            # Nothing that an output depends on is trained: autograd shall ask for no gradient of it.
            frozen = [not (needs[i] or needs[count + i]) for i in range(count)]  # its weight and its bias
            ctx.mark_non_differentiable(*(y for y, is_frozen in zip(outputs, frozen, strict=True) if is_frozen))
        return outputs

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        saved, need_x, needs = ctx.saved_tensors, ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        weights, sources = saved[: len(gradients)], saved[len(gradients) :]
        rows = [None if dy is None else dy.reshape(-1, dy.shape[-1]) for dy in gradients]
        dx = input_gradient(rows, weights) if need_x else None
        x_rows = ctx.make(*sources).reshape(-1, ctx.shape[-1]) if any(needs[: len(weights)]) else None
        dweights = weight_gradients(rows, x_rows, needs[: len(weights)], ctx.places)
        dbiases = bias_gradients(rows, ctx.bias_dtypes, needs[len(weights) :])
        return None if dx is None else dx.view(ctx.shape), None, *dweights, *dbiases


def as_computed(x: Tensor) -> Tensor:
    """Return x in the dtype of its products: autocast's. (F.linear's own casts would be cached without a graph.)"""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return F.linear of x for each weight and bias, in x's dtype."""
    return tuple(
        F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype)) for w, b in zip(weights, biases, strict=True)
    )


def input_gradient(rows: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    """Return dx (N, K) of dy_i (N, O_i), where there is one."""
    dx = None
    for dy, weight in zip(rows, weights, strict=True):
        if dy is not None:
            weight = weight.to(dy.dtype)
            dx = dy @ weight if dx is None else dx.addmm_(dy, weight)  # in place: no tensor for each layer
    return dx


def weight_gradients(
    rows: Sequence[Tensor | None], x: Tensor | None, needs: Sequence[bool], places: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return dW_i of dy_i (N, O_i) and x (N, K), where needed. Autograd casts it to the weight's dtype."""
    return [
        None if dy is None or x is None or not need else weight_gradient(dy, x, place)
        for dy, need, place in zip(rows, needs, places, strict=True)
    ]


def bias_gradients(
    rows: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return db_i of dy_i (N, O_i), where needed, in these dtypes."""
    return [
        None if dy is None or not need else dy.sum(0, dtype=dtype)
        for dy, dtype, need in zip(rows, dtypes, needs, strict=True)
    ]


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """Compute F.linear of one x for several weights. Differentiable once; frozen tensors have no products.

    Args:
        x: (..., K), any floating dtype and strides.
        weights: (O_i, K) each, at least one, in x's dtype; any under autocast.
        biases: (O_i,) or None each; None if no layer has one.

    Returns:
        (..., O_i) for each, in x's dtype, or autocast's.

    Raises:
        ValueError: if there is no weight, shapes don't fit, or there isn't one bias or None for each weight.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    _check(x, weights, biases)
    if torch.compiler.is_compiling():
        return linears_reference(x, weights, biases)
    return LinearsFunction.apply(x, len(weights), *weights, *biases)


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    check_dtypes(x=x)
    if not weights or len(weights) != len(biases):
        raise ValueError(
            f"linears needs one bias or None for each weight: {len(weights)} weights, {len(biases)} biases."
        )
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"weight {i} must be (O, K) with K = {x.shape[-1]}, x's columns: it is {tuple(weight.shape)}."
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {i} must be one per row of weight {i}, {len(weight)}: it is {tuple(bias.shape)}.")
