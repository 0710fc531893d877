"""The loss of a batch with several teachers: sum_k w_k D(p_k, q) over the tokens that teacher k teaches, and one CE.

Each teacher's part is an ordinary loss of the batch that ignores the other teachers' tokens and is divided by the whole
batch's num_items. So the parts add up to the loss, and their gradients to its gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .dense import answer_of
from .spec import IGNORE_INDEX, BatchTargets, Logits, LossOptions, check_lengths
from .teacher_answer import BatchLoss, TeacherAnswer

OF_STUDENT = ("log_prob", "entropy", "is_top1")
SUMMED = ("loss", "divergence")  # weighted in the parts already


@dataclass(frozen=True)
class WeightedAnswer:
    """One teacher's answer among several.

    Attributes:
        taught: (batch, length) bool, the positions at which it teaches, which predict a token; None for all.
    """

    name: str
    answer: Logits | TeacherAnswer
    weight: float
    taught: Tensor | None = None


@dataclass(frozen=True)
class SeveralAnswers(TeacherAnswer):
    """The answers of the teachers that teach in a batch, at least one.

    Routed answers are about different tokens; others are about all tokens, each.

    Attributes:
        names: those of all teachers.
        part_targets: one for each part, made by `for_targets`.
    """

    parts: Sequence[WeightedAnswer]
    names: tuple[str, ...]
    routed: bool
    part_targets: tuple[BatchTargets, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return self.parts[0].answer.shape

    def for_targets(self, targets: BatchTargets) -> "SeveralAnswers":
        each = (targets if part.taught is None else targets.only(part.taught) for part in self.parts)
        return replace(self, part_targets=tuple(each))

    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return the parts put together.

        Values about a teacher are those of each token's teacher, or else the mean over teachers by weight.
        """
        results = []
        for i, (part, part_targets) in enumerate(zip(self.parts, self.part_targets, strict=True)):
            answer, part_targets = answer_of(part.answer), part_targets.to(student.device)
            check_lengths(part_targets, answer)
            counts_ce = self.routed or i == 0  # the cross-entropy of a token is added once
            results.append(answer.loss(student, part_targets, _part_options(options, part.weight, counts_ce)))
        merged = _routed(results) if self.routed else _weighted(results, [part.weight for part in self.parts])
        return BatchLoss(**{**merged, "parts": self._by_teacher(results)})

    def _by_teacher(self, results: Sequence[BatchLoss]) -> dict[str, Tensor]:
        """Return zeros for teachers that had nothing to teach, since each process must log the same names."""
        index = {part.name: i for i, part in enumerate(self.parts)}
        values: dict[str, Tensor] = {}
        for name in self.names:
            i = index.get(name)
            kl: Any = torch.zeros_like(results[0].log_prob) if i is None else results[i].forward_kl
            values[f"{name}/forward_kl"] = kl
            if self.routed:
                taught = torch.zeros_like(kl) if i is None else self.part_targets[i].labels != IGNORE_INDEX
                values[f"{name}/share"] = taught.to(kl)
        return values


def _part_options(options: LossOptions, weight: float, counts_ce: bool) -> LossOptions:
    how = options.for_teacher()
    weights = {kind: weight * w for kind, w in how.weights.items()}
    return replace(options, distillation=replace(how, weights=weights, ce_weight=how.ce_weight if counts_ce else 0.0))


def _routed(results: Sequence[BatchLoss]) -> dict[str, Any]:
    """Add the parts: every token is of one part, and 0 in the others."""
    return {name: _sum([getattr(result, name) for result in results]) for name in BatchLoss._fields}


def _weighted(results: Sequence[BatchLoss], weights: Sequence[float]) -> dict[str, Any]:
    merged = {}
    for name in BatchLoss._fields:
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
