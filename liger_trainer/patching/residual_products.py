"""The last product of an MLP, added to the residual stream by the product itself: s += h @ down.weight.T.

Without gradients nobody needs the MLP's own output, or the sum in front of it once the norm has read that. So in eval
mode, which a teacher is always in, the MLP returns a `Product`, and the `ResidualSum` (residuals.py) that it is added
to takes it in, in place: two passes over the hidden states less, and one rounding. In training mode a forward without
gradients is one of checkpointing, which computes the same again with gradients and must find the same numbers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..modules.projections import gated, is_plain
from .deferred_tensor import DeferredTensor, is_watched
from .mlps import RULE, MLPRule, calls_other_children


@dataclass(eq=False)
class Product(DeferredTensor):
    """down(h), not computed yet. Whoever calls such an MLP by itself gets one, too."""

    h: Tensor
    down: nn.Linear

    def compute(self) -> Tensor:
        return self.down(self.h)

    def add_to(self, stream: Tensor) -> bool:
        """Add the product to a tensor in place. Return False, having done nothing, if it does not fit."""
        weight = self.down.weight
        shape, kinds = (*self.h.shape[:-1], weight.shape[0]), {self.h.dtype, weight.dtype, stream.dtype}
        alike = len(kinds) == 1 and stream.shape == shape and stream.is_contiguous() and stream.device == weight.device
        if not alike or torch.is_autocast_enabled(stream.device.type):
            return False
        stream.view(-1, shape[-1]).addmm_(self.h.reshape(-1, weight.shape[1]), weight.t())
        return True


def product_forward(inner: Callable) -> Callable:
    """Return a forward of an MLP that leaves its last product to the sum, in eval mode and without gradients."""

    @functools.wraps(inner)
    def forward(module, *inputs, **named):
        if module.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return inner(module, *inputs, **named)
        rule: MLPRule = vars(module)[RULE]
        down = getattr(module, rule.down)
        watched = is_watched(module) or calls_other_children(module, {*rule.first, rule.down})
        if watched or not is_plain(down) or down.bias is not None:
            return inner(module, *inputs, **named)
        (x,) = (*inputs, *named.values())
        gate, up = rule.gate_and_up(module, x)
        return Product(gated(gate, up, rule.activation), down)

    return forward
