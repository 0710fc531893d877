"""A frozen linear layer with LoRA adapters:  y = x W^T + b + sum_j s_j (x A_j^T) B_j^T.

Shapes    x: (..., K)  weight: (O, K)  bias: (O,)  A: (r, K)  B: (O, r)  y: (..., O)
Method    y is written by the base product, and each adapter's term is added by a second product in place: no tensor of
          y's size beside y, and no elementwise pass. Saved are x, which layers that read the same x share, and x A^T
          (N, r). The backward forms no gradient of W, and adds the adapters' part of dx in place too.
Numerics  see _low_rank.py
Traffic   beside the base products, per adapter: forward 1 read of x, 1 read and 1 write of y; backward 2 reads of dy,
          1 read of x, 1 read and 1 write of dx
Source    Hu et al. 2021, arXiv:2106.09685
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import first_order
from ._low_rank import (
    Adapter,
    Numerics,
    Projection,
    as_matrix,
    check_projection,
    down_gradients,
    input_gradient,
    project,
    rank_gradients,
)  # fmt: skip

Layout = tuple[tuple[tuple[float, ...], Callable[[Tensor], Tensor] | None], ...]


def lora_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, adapters: Sequence[Adapter] = (), *,
    unpack: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """What the op must equal, in plain torch: each adapter computes in its own dtype, the result has the base's."""
    base = y = F.linear(x, weight if unpack is None else unpack(weight).to(x.dtype), bias)
    for a, b, scale in adapters:
        y = y + F.linear(F.linear(x.to(a.dtype), a), b) * scale
    return y.to(base.dtype)


def tensors_of(projections: Sequence[Projection]) -> tuple[list[Tensor], list[Tensor]]:
    """(base weights, A and B of each adapter in turn)."""
    leaves = [leaf for p in projections for adapter in p.adapters for leaf in adapter[:2]]
    return [p.weight for p in projections], leaves


def layout_of(projections: Sequence[Projection]) -> Layout:
    """What `tensors_of` leaves out and a backward needs."""
    return tuple((tuple(adapter.scale for adapter in p.adapters), p.unpack) for p in projections)


def restore(layout: Layout, weights: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Projection]:
    """The projections of `tensors_of` and `layout_of`, without their biases."""
    remaining: Iterator[Tensor] = iter(leaves)
    return [
        Projection(w, None, tuple(Adapter(next(remaining), next(remaining), scale) for scale in scales), unpack)
        for w, (scales, unpack) in zip(weights, layout, strict=True)
    ]


def interleaved(das: Sequence[Tensor], dbs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients in the order of `tensors_of`'s leaves: A, B, A, B, ..., None where not needed."""
    gradients: list[Tensor | None] = []
    for i, db in enumerate(dbs):
        gradients += [das[i] if das and needs[2 * i] else None, db]
    return gradients


class LoraLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, projection, *leaves):
        numerics = Numerics.of(x, projection.adapters)
        (y,), values = project(as_matrix(x, numerics.compute), (projection,), numerics)
        ctx.layout, ctx.numerics = layout_of((projection,)), numerics
        ctx.save_for_backward(x, values, projection.weight, *leaves)  # x as it came: other layers hold that one too
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, values, weight, *leaves = ctx.saved_tensors
        need_x, _, *needs = ctx.needs_input_grad
        numerics, projections = ctx.numerics, restore(ctx.layout, [weight], leaves)
        dys = [as_matrix(dy, numerics.compute)]
        g, dbs = rank_gradients(dys, values, projections, needs[1::2], need_x or any(needs[::2]), numerics)
        dx = input_gradient(dys, g, projections, numerics).view(x.shape) if need_x else None
        das = ()
        if g is not None and any(needs[::2]):
            das = down_gradients(g, as_matrix(x, numerics.compute), projections, numerics)
        return dx, None, *interleaved(das, dbs, needs)


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, adapters: Sequence[Adapter] = (), *,
    unpack: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """linear(x, weight, bias) + sum of scale * linear(linear(x, a), b). Differentiable once in x and the adapters.

    Under autocast everything is in autocast's dtype, as F.linear would be. Otherwise y is in the dtype of x and weight,
    and adapters of a wider dtype keep the precision of their own products and gradients.

    Args:
        x: (..., K), any floating dtype and strides.
        weight: (O, K), frozen, in x's dtype; any under autocast. With `unpack`, what that takes.
        bias: (O,) or None, frozen, as weight.
        adapters: (a (r, K), b (O, r), scale) each; none: the linear layer alone. Ranks and dtypes may differ.
        unpack: makes the dense (O, K) weight, in any dtype, of a packed one. Called in forward and again in backward.

    Returns:
        (..., O), in x's dtype, or autocast's.

    Raises:
        ValueError: shapes that do not fit, or a weight or bias that requires a gradient.
    """
    projection = Projection(weight, bias, tuple(Adapter(*adapter) for adapter in adapters), unpack)
    check_projection("lora_linear", "weight", projection, x.shape[-1])
    if torch.compiler.is_compiling():
        return lora_linear_reference(x, weight, bias, adapters, unpack=unpack)
    return LoraLinearFunction.apply(x, projection, *tensors_of((projection,))[1])
