"""The loss of a batch, by what a teacher answers: nothing, logits, or the answers of several teachers.

A few tokens of each position: sparse_answer.py. Formulas: kernels/linear_cross_entropy.py, linear_divergence.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.cross_entropy import cross_entropy, cross_entropy_reference
from ..kernels.linear_cross_entropy import linear_cross_entropy
from ..kernels.linear_divergence import distillation_reference, linear_divergence
from .deferred_logits import DeferredLogits, settled
from .spec import IGNORE_INDEX, BatchLoss, BatchTargets, Distillation, Logits, LossOptions, TeacherAnswer, check_lengths


def cross_entropy_loss(logits: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
    """Return the cross-entropy of logits (batch, length, V)."""
    common = {"label_smoothing": options.label_smoothing, "dft": options.dft, "ignore_index": IGNORE_INDEX}
    if isinstance(logits, DeferredLogits):
        operands = logits.operands(sharded=True)
        result = linear_cross_entropy(**operands, labels=targets.labels, **targets.for_ops(), **common)
    else:
        flat = logits.flatten(0, -2)
        common |= {"num_items": targets.num_items, "token_weight": targets.weights}
        result = cross_entropy_reference(flat, targets.labels, **common)
    return BatchLoss(*result)


def stored_logits_loss(
    logits: Tensor, labels: Tensor | None, vocab_size: int | None = None,
    num_items_in_batch: float | Tensor | None = None, ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None, **kwargs,
) -> Tensor:  # fmt: skip
    """Compute transformers' `ForCausalLMLoss` by the kernel of `cross_entropy`, without a copy of the logits in fp32.

    Args:
        logits: (batch, length, V).
        labels: (batch, length), shifted here. `shift_labels` are shifted already.
        num_items_in_batch: the divisor of the sum. Default: the number of labels that are not ignored.
        vocab_size, kwargs: what a model's forward passes on. Not used.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = shift_labels.reshape(-1).to(logits.device)
    return cross_entropy(logits.flatten(0, -2), flat, num_items=num_items_in_batch, ignore_index=ignore_index).loss


@dataclass(frozen=True)
class DenseAnswer(TeacherAnswer):
    """A teacher's logits (batch, length, Vt), of the student's tokens."""

    logits: Logits

    covers_all_tokens = True

    @property
    def shape(self) -> torch.Size:
        return self.logits.shape

    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return sum_k weights[k] D_k + ce_weight CE. Stored logits on either side take the plain torch reference."""
        how = options.for_teacher()
        one_pass = how.measure_jsd and _is_plain(how)
        common = {
            "kind": {"jsd": 0.0, **how.weights} if one_pass else how.weights or {"forward_kl": 0.0},
            "beta": 0.5 if one_pass else how.beta, "alpha": how.skew_alpha, "temperature": how.temperature,
            "scale_by_temperature_squared": how.scale_by_temperature_squared, "teacher_share": how.teacher_share,
            "labels": targets.labels, "ce_weight": how.ce_weight, "label_smoothing": options.label_smoothing,
            "ignore_index": IGNORE_INDEX,
        }  # fmt: skip
        if isinstance(student, DeferredLogits) and isinstance(self.logits, DeferredLogits):
            result = linear_divergence(
                **student.operands(sharded=True), **self.logits.operands("teacher_", sharded=True),
                vocab_size=how.vocab_size, **targets.for_ops(), **common,
            )  # fmt: skip
        else:
            vocab = min(student.shape[-1], self.shape[-1], how.vocab_size or student.shape[-1])
            s, t = (stored(logits).flatten(0, -2)[:, :vocab] for logits in (student, self.logits))
            common |= {"num_items": targets.num_items, "token_weight": targets.weights}
            result = distillation_reference(s, t, **common)
        jsd = result.terms["jsd"] if one_pass else None
        if how.measure_jsd and not one_pass:
            # A second pass, since the loss has other settings than this statistic. Only evaluations measure it.
            plain = Distillation({"jsd": 0.0}, vocab_size=how.vocab_size, measure_jsd=True)
            with torch.no_grad():
                jsd = self.loss(student, targets, LossOptions(distillation=plain)).jsd
        return BatchLoss(**result._asdict(), jsd=jsd)


@dataclass(frozen=True)
class RecordedAnswer(DenseAnswer):
    """Logits of which only those that predict a label of the caller's are there, as a cache has them."""

    covers_all_tokens = False


def _is_plain(how: Distillation) -> bool:
    """Whether a JSD computed with this loss is the one at temperature 1 and beta 0.5, against only the teacher."""
    return how.temperature == how.teacher_share == 1 and (how.beta == 0.5 or "jsd" not in how.weights)


def stored(logits: Logits) -> Tensor:
    """Return the logits themselves, for a loss in plain torch."""
    return logits.compute("a distillation loss") if isinstance(logits, DeferredLogits) else logits


def as_teacher_answer(teacher: Logits | TeacherAnswer) -> TeacherAnswer:
    """Return the answer that a teacher gave. Plain logits are a dense one."""
    return teacher if isinstance(teacher, TeacherAnswer) else DenseAnswer(settled(teacher))


# Several teachers: sum_k w_k D(p_k, q) over the tokens that teacher k teaches, and one CE.
# Each teacher's part is an ordinary loss of the batch that ignores the other teachers' tokens and is divided by the
# whole batch's num_items. So the parts add up to the loss, and their gradients to its gradient.


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
        results, how = [], options.for_teacher()
        for i, (part, part_targets) in enumerate(zip(self.parts, self.part_targets, strict=True)):
            answer, part_targets = as_teacher_answer(part.answer), part_targets.to(student.device)
            check_lengths(part_targets, answer)
            weights = {kind: part.weight * w for kind, w in how.weights.items()}
            ce_weight = how.ce_weight if self.routed or i == 0 else 0.0  # the cross-entropy of a token is added once
            own = replace(options, distillation=replace(how, weights=weights, ce_weight=ce_weight))
            results.append(answer.loss(student, part_targets, own))
        if self.routed:  # every token is of one part, and 0 in the others
            merged = {name: _sum([getattr(result, name) for result in results]) for name in BatchLoss._fields}
        else:
            merged = _weighted(results, [part.weight for part in self.parts])
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
