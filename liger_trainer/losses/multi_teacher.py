"""The loss of a batch with several teachers: sum_k w_k D(p_k, q) over the tokens that teacher k teaches, and one CE.

Each teacher's part is an ordinary loss of the batch in which the other teachers' tokens are ignored, divided by the
items of the whole batch; so the parts add up to the loss, and their gradients to its gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .batch_loss import batch_loss
from .deferred_logits import DeferredLogits
from .sparse import SparseTeacher
from .spec import IGNORE_INDEX, Logits, LossOptions, Targets

OF_STUDENT = ("log_prob", "entropy", "is_top1")
SUMMED = ("loss", "divergence")  # weighted in the parts already


@dataclass(frozen=True)
class TeacherShare:
    """One teacher's knowledge of a batch.

    Attributes:
        taught: (batch, length) bool, the positions at which it teaches, which predict a token; None for all.
    """

    name: str
    logits: Logits | SparseTeacher
    weight: float
    taught: Tensor | None = None


@dataclass(frozen=True)
class TeacherShares:
    """What several teachers know of a batch: of those that teach in it, at least one. `names` are all there are.

    Routed shares teach different tokens; others teach all tokens, each.
    """

    shares: Sequence[TeacherShare]
    names: tuple[str, ...]
    routed: bool


@dataclass(frozen=True)
class SharedLoss:
    """The parts put together: fields of one loss's result, and {"name/forward_kl", "name/share": per-token values}.

    Values about a teacher are those of each token's teacher, or else the mean over teachers by weight.
    """

    result: Any
    by_teacher: Mapping[str, Tensor]


class SeveralTargets:
    """The targets of each share. Made before the backbone runs, as `Targets` are."""

    def __init__(self, targets: Targets, given: TeacherShares):
        self.given = given
        self._of_share = [targets if s.taught is None else targets.only(s.taught) for s in given.shares]

    def loss(self, student: Logits, options: LossOptions) -> SharedLoss:
        """Of the student's logits (batch, length, V)."""
        results = []
        for i, (share, targets) in enumerate(zip(self.given.shares, self._of_share, strict=True)):
            counts_ce = self.given.routed or i == 0
            own = _options(options, share.weight, counts_ce)
            results.append(batch_loss(student, targets.to(_device(student)), own, share.logits))
        merged = _routed(results) if self.given.routed else _weighted(results, [s.weight for s in self.given.shares])
        return SharedLoss(results[0]._replace(**merged), self._by_teacher(results))

    def _by_teacher(self, results: Sequence[Any]) -> dict[str, Tensor]:
        """Zeros of the teachers that had nothing to teach: each process has the same names."""
        values: dict[str, Tensor] = {}
        for name in self.given.names:
            i = next((i for i, share in enumerate(self.given.shares) if share.name == name), None)
            kl = torch.zeros_like(results[0].forward_kl) if i is None else results[i].forward_kl
            values[f"{name}/forward_kl"] = kl
            if self.given.routed:
                taught = torch.zeros_like(kl) if i is None else self._of_share[i].labels != IGNORE_INDEX
                values[f"{name}/share"] = taught.to(kl)
        return values


def _options(options: LossOptions, weight: float, counts_ce: bool) -> LossOptions:
    how = options.distillation
    assert how is not None
    weights = {kind: weight * w for kind, w in how.weights.items()}
    return replace(options, distillation=replace(how, weights=weights, ce_weight=how.ce_weight if counts_ce else 0.0))


def _routed(results: Sequence[Any]) -> dict[str, Any]:
    """Every token is of one part, and 0 in the others."""
    return {name: _sum([getattr(result, name) for result in results]) for name in results[0]._fields}


def _weighted(results: Sequence[Any], weights: Sequence[float]) -> dict[str, Any]:
    merged = {}
    for name in results[0]._fields:
        values = [getattr(result, name) for result in results]
        if name in OF_STUDENT:
            merged[name] = values[0]
        elif name in SUMMED:
            merged[name] = _sum(values)
        else:
            merged[name] = _sum([_times(x, w / sum(weights)) for x, w in zip(values, weights, strict=True)])
    return merged


def _sum(values: Sequence[Any]) -> Any:
    first = values[0]
    if first is None or any(value is None for value in values):
        return None
    if isinstance(first, Mapping):
        return {name: _sum([value[name] for value in values]) for name in first}
    return torch.stack(list(values)).any(0) if first.dtype == torch.bool else torch.stack(list(values)).sum(0)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, Mapping):
        return {name: _times(x, factor) for name, x in value.items()}
    return None if value is None else value.to(torch.promote_types(value.dtype, torch.float32)) * factor


def _device(logits: Logits) -> torch.device:
    return logits.hidden.device if isinstance(logits, DeferredLogits) else logits.device
