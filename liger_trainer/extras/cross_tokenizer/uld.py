"""Universal logit distillation: the loss of a batch against a teacher with another tokenizer.

Formulas: kernels/linear_uld.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.linear_uld import linear_uld, stored_uld, uld_reference
from ...losses.answers import stored
from ...losses.deferred_logits import DeferredLogits
from ...losses.spec import IGNORE_INDEX, BatchLoss, BatchTargets, Distillation, Logits, LossOptions, TeacherAnswer


@dataclass(frozen=True)
class UldAnswer(TeacherAnswer):
    """A teacher's logits of the teacher's tokens, and which of them belong to the positions of the student's batch."""

    logits: Logits  # (rows, length, Vt)
    partners: Tensor  # (batch, length of the student) int64: index into rows * length, negative: none
    vocab_size: int  # of the teacher's tokenizer

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.partners.shape, self.vocab_size))

    @property
    def teacher_positions(self) -> Tensor:
        return self.partners

    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return uld_weight * ULD + ce_weight * CE. Tokens without a partner have only cross-entropy."""
        how, partners = options.for_teacher(), self.partners.flatten()
        common = {
            "labels": targets.labels, "uld_weight": how.uld_weight, "ce_weight": how.ce_weight,
            "label_smoothing": options.label_smoothing,
        }  # fmt: skip
        if isinstance(student, DeferredLogits) and isinstance(self.logits, DeferredLogits):
            result = linear_uld(
                **student.operands(), **self.logits.operands("teacher_"), partners=partners,
                vocab_size=how.vocab_size, teacher_vocab_size=self.vocab_size, temperature=how.temperature,
                scale_by_temperature_squared=how.scale_by_temperature_squared, **targets.for_ops(), **common,
            )  # fmt: skip
        else:
            s, t = (stored(logits).flatten(0, -2).float() for logits in (student, self.logits))
            # a head may be padded beyond its tokenizer
            s = s[:, : how.vocab_size]
            uld = _distances(s, t[:, : self.vocab_size], partners, targets, how)
            common |= {"num_items": targets.num_items, "token_weight": targets.weights}
            result = stored_uld(s, uld, **common)
        return BatchLoss.of_term("uld", how.uld_weight, result)


def _distances(s: Tensor, t: Tensor, partners: Tensor, targets: BatchTargets, how: Distillation) -> Tensor:
    """Return the (N,) distances of logits that are stored."""
    aligned = (partners >= 0) & (targets.labels != IGNORE_INDEX)
    distances = uld_reference(s[aligned], t[partners[aligned]], how.temperature)
    factor = how.temperature**2 if how.scale_by_temperature_squared else 1.0
    # the rows without a partner have distance 0
    return s.new_zeros(s.shape[0]).masked_scatter(aligned, factor * distances)
