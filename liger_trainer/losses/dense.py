"""A teacher known at the whole vocabulary: the loss of a batch against its logits.

Formulas: kernels/linear_divergence.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.linear_divergence import distillation_reference, linear_divergence
from .deferred_logits import DeferredLogits, settled
from .spec import IGNORE_INDEX, BatchTargets, Distillation, Logits, LossOptions
from .teacher_answer import BatchLoss, TeacherAnswer


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
        jsd = None
        if how.measure_jsd:
            jsd = result.terms["jsd"] if one_pass else self._measured_jsd(student, targets, how)
        return BatchLoss(**result._asdict(), jsd=jsd)

    def _measured_jsd(self, student: Logits, targets: BatchTargets, how: Distillation) -> Tensor | None:
        """Take a second pass, which evaluations alone do: the loss has other settings than this statistic."""
        plain = Distillation({"jsd": 0.0}, vocab_size=how.vocab_size, measure_jsd=True)
        with torch.no_grad():
            return self.loss(student, targets, LossOptions(distillation=plain)).jsd


@dataclass(frozen=True)
class RecordedAnswer(DenseAnswer):
    """Logits of which only those that predict a label of the caller's are there, as a cache has them."""

    covers_all_tokens = False


def _is_plain(how: Distillation) -> bool:
    """Whether a JSD computed beside this loss is that at temperature 1 and beta 0.5, against the teacher alone."""
    return how.temperature == how.teacher_share == 1 and (how.beta == 0.5 or "jsd" not in how.weights)


def stored(logits: Logits) -> Tensor:
    """Return the logits themselves, for a loss in plain torch."""
    return logits.compute("a distillation loss") if isinstance(logits, DeferredLogits) else logits


def answer_of(teacher: Logits | TeacherAnswer) -> TeacherAnswer:
    """Return the answer that a teacher gave. Plain logits are a dense one."""
    return teacher if isinstance(teacher, TeacherAnswer) else DenseAnswer(settled(teacher))
