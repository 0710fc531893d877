"""Deferred logits for a trainer that computes its loss from `outputs.logits` itself, without labels in the forward.

They outlive the forward, so they remember its autocast. Beside the operations of `DeferredLogits`, such a trainer asks
them for log-probabilities, cross-entropy and a mean, all of which the fused ops compute.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.linear_cross_entropy import linear_cross_entropy
from ..kernels.linear_log_probs import LogProbs, linear_log_probs
from .deferred_logits import DeferredLogits, Forward
from .deferring_head import deferred_logits


@dataclass(frozen=True, eq=False)
class ScoredLogits(DeferredLogits):
    """(..., V) logits that answer for losses on them. See the top of this file."""

    def log_probs(self, labels: Tensor, **options: Any) -> LogProbs:
        """Return the values of labels (...), in their shape. options: of `linear_log_probs`."""
        with self.autocasting():
            values = linear_log_probs(**self.operands(), labels=labels.reshape(-1), **options)
        return LogProbs(*(None if x is None else x.view(labels.shape) for x in values))  # pyright: ignore[reportArgumentType]

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Return F.cross_entropy of logits (N, V). What the fused op does not compute comes from real logits."""
        other = (weight, size_average, reduce) != (None, None, None) or target.is_floating_point()
        if other or reduction not in ("mean", "sum") or self.ndim != 2 or self.stored:
            logits = self.compute("a cross-entropy with class weights, probabilities or other shapes")
            return F.cross_entropy(
                logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        num_items = None if reduction == "mean" else 1
        with self.autocasting():
            return linear_cross_entropy(
                **self.operands(), labels=target, num_items=num_items, ignore_index=ignore_index,
                label_smoothing=label_smoothing,
            ).loss  # fmt: skip

    def detach(self) -> "ScoredLogits | Tensor":
        if self.stored:
            return self.compute().detach()
        head = self.head
        lora = tuple(x._replace(a=x.a.detach(), b=x.b.detach()) for x in head.lora)
        bias = None if head.bias is None else head.bias.detach()
        fixed = type(head)(head.weight.detach(), bias, lora)
        return self._with(hidden=self.hidden.detach(), head=fixed, project=_without_gradient(self.project))

    def mean(self, *args: Any, **options: Any) -> Tensor:
        """Return the mean of all logits. Others, such as those along a dimension, come from real logits."""
        if args or options or self.stored:
            return self.compute("a mean along a dimension").mean(*args, **options)
        if self.hidden.requires_grad or self.head.weight.requires_grad:
            return self.compute("a mean with a gradient").mean()
        if not self.capped:  # linear: the mean row has the mean logits
            row = self.hidden.flatten(0, -2).float().mean(0, keepdim=True).to(self.hidden.dtype)
            return self._with(hidden=row, forward=Forward("", running=False)).compute().mean()
        labels = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        means = self.log_probs(labels, ignore_index=None, mean_logits=True).mean_logit
        assert means is not None
        return means.mean()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.cross_entropy and args and isinstance(args[0], cls):
            return args[0].cross_entropy(*args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _without_gradient(project: Any) -> Any:
    def projected(hidden: Tensor) -> Tensor:
        return project(hidden).detach()

    return projected


@contextlib.contextmanager
def scored_logits(model: nn.Module) -> Iterator[Forward]:
    """Within the context, the output head of `model` returns `ScoredLogits`. Yields as `deferred_logits` does."""
    with deferred_logits(model, make=ScoredLogits.of) as forward:
        yield forward
