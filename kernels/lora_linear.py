"""A frozen linear layer with LoRA adapters:  y = x W^T + b + sum_j s_j (x A_j^T) B_j^T.

Shapes    x: (..., K)  weight: (O, K)  bias: (O,)  A: (r, K)  B: (O, r)  y: (..., O)
Method    The base product writes y, and a second product for each adapter adds its term in place: no other tensor of
          y's size, and no elementwise pass. The forward saves x, which layers that read the same x share, and x A^T
          (N, r). The backward computes no gradient of W, and adds the adapters' part of dx in place too.
Numerics  see _low_rank.py
Traffic   besides the base products, per adapter: forward 1 read of x, 1 read and 1 write of y; backward 2 reads of dy,
          1 read of x, 1 read and 1 write of dx
Source    Hu et al. 2021, arXiv:2106.09685
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes, first_order, saved_or_recomputed
from ._low_rank import (
    Adapter,
    Masks,
    Numerics,
    Projection,
    adapters_of,
    as_matrix,
    check_projection,
    input_and_a_gradients,
    input_of_a,
    layout_of,
    leaves_of,
    project,
    rank_gradients,
    restored,
    stacked,
    tensors_of,
    values_of,
)


def lora_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, adapters: Sequence[Adapter] = (), *,
    unpack: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return in plain torch what the op must equal: adapters compute in their own dtype, the result has the base's.

    Its dropout is torch's, with other masks than the op's.
    """
    # The base's dtype is the result's, however wide the adapters are.
    base = y = F.linear(x, weight if unpack is None else unpack(weight).to(x.dtype), bias)
    for a, b, scale, dropout in adapters:
        y = y + F.linear(F.linear(F.dropout(x.to(a.dtype), dropout), a), b) * scale
    return y.to(base.dtype)


def interleaved(das: Sequence[Tensor], dbs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Return gradients in the order of `leaves_of`: A, B, A, B, ..., None where not needed."""
    gradients: list[Tensor | None] = []
    for i, db in enumerate(dbs):
        gradients += [das[i] if das and needs[2 * i] else None, db]
    return gradients


class LoraLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, projections, *leaves):
        """Return y of each projection. leaves: see `leaves_of`."""
        numerics, masks = Numerics.of(x, adapters_of(projections)), Masks.of(x, projections)
        (stack,) = stacked([projections], numerics)
        flat = as_matrix(x, numerics.compute)
        values = values_of(flat, stack, masks, numerics)
        outputs = project(flat, stack, values, numerics)
        ctx.layout, ctx.numerics, ctx.shape = layout_of(projections), numerics, x.shape
        source = saved_or_recomputed(x, x)  # not a copy in another dtype: other layers save the same one
        ctx.source, ctx.sources = source.without_tensors(), len(source.tensors)
        ctx.save_for_backward(*source.tensors, values, masks.seed, *tensors_of(projections))
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)

    @staticmethod
    @first_order
    def backward(ctx, *gradients):
        saved = ctx.saved_tensors
        sources, (values, seed, *tensors) = saved[: ctx.sources], saved[ctx.sources :]
        need_x, _, *needs = ctx.needs_input_grad
        numerics = ctx.numerics
        (stack,) = stacked([restored(ctx.layout, tensors)], numerics)
        dys = [as_matrix(dy, numerics.compute) for dy in gradients]
        # g = s dy B: needed for dA and for the adapters' part of dx
        g, dbs = rank_gradients(dys, values, stack, needs[1::2], need_x or any(needs[::2]), numerics)
        flat = input_of_a(ctx.source, sources, numerics, seed) if any(needs[::2]) else None
        dx, das = input_and_a_gradients(dys, g, flat, stack, Masks(seed), numerics, need_x)
        return None if dx is None else dx.view(ctx.shape), None, *interleaved(das, dbs, needs)


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, adapters: Sequence[Adapter] = (), *,
    unpack: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Compute linear(x, weight, bias) + sum of scale * linear(linear(dropout(x), a), b).

    Differentiable once, in x and adapters.

    Under autocast everything is in autocast's dtype, as with F.linear. Otherwise y is in the dtype of x and weight, and
    adapters of a wider dtype keep the precision of their own products and gradients.

    Args:
        x: (..., K), any floating dtype and strides.
        weight: (O, K), frozen, in x's dtype; any under autocast. With `unpack`, the packed weight that it takes.
        bias: (O,) or None, frozen, like weight.
        adapters: (a (r, K), b (O, r), scale, dropout) each; none: only the linear layer. Ranks and dtypes may differ.
            dropout is the probability with which the adapter does not see an element of x, and sees the others divided
            by 1 - dropout. The masks come from a seed that is drawn on x's device from torch's generator.
        unpack: turns a packed weight into the dense (O, K) one, in any dtype. Called in forward and again in backward.

    Returns:
        (..., O), in x's dtype, or autocast's.

    Raises:
        ValueError: if shapes don't fit, a weight or bias requires a gradient, or dropout isn't from 0 to below 1.
    """
    check_dtypes(x=x)
    projection = Projection(weight, bias, tuple(Adapter(*adapter) for adapter in adapters), unpack)
    check_projection("lora_linear", "weight", projection, x.shape[-1])
    if torch.compiler.is_compiling():
        return lora_linear_reference(x, weight, bias, adapters, unpack=unpack)
    return LoraLinearFunction.apply(x, (projection,), *leaves_of((projection,)))[0]
