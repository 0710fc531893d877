"""Universal logit distillation: what a teacher of another tokenizer makes of a batch, and the loss against it.

Formulas: kernels/linear_uld.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.linear_uld import linear_uld, stored_uld, uld_reference
from .deferred_logits import DeferredLogits
from .spec import Distillation, Logits, LossOptions, Targets


@dataclass(frozen=True)
class UldAnswer:
    """A teacher's logits of its own tokens, and which of them belong to the positions of the student's batch."""

    logits: Logits  # (rows, length, Vt)
    partners: Tensor  # (batch, length of the student) int64: index into rows * length, negative: none
    vocab_size: int  # of the teacher's tokenizer

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.partners.shape, self.vocab_size))


class UldDistillation(NamedTuple):
    """The loss of a batch and its per-token values, (batch * length,), 0 where ignored and without gradient."""

    loss: Tensor
    divergence: Tensor  # weighted, at the loss's temperature
    log_prob: Tensor
    entropy: Tensor
    is_top1: Tensor
    terms: dict[str, Tensor]


def uld_distillation(
    student: Logits, teacher: UldAnswer, targets: Targets, options: LossOptions, distillation: Distillation
) -> UldDistillation:
    """uld_weight * ULD + ce_weight * CE. Tokens without a partner have cross-entropy alone."""
    of = teacher.logits
    partners = teacher.partners.flatten()
    common = {
        "labels": targets.labels, "uld_weight": distillation.uld_weight, "ce_weight": distillation.ce_weight,
        "label_smoothing": options.label_smoothing,
    }  # fmt: skip
    how = {
        "temperature": distillation.temperature,
        "scale_by_temperature_squared": distillation.scale_by_temperature_squared,
    }
    if isinstance(student, DeferredLogits) and isinstance(of, DeferredLogits):
        result = linear_uld(
            student.hidden.flatten(0, -2), student.head.weight, of.hidden.flatten(0, -2), of.head.weight,
            partners=partners, bias=student.head.bias, teacher_bias=of.head.bias, scale=student.scale,
            teacher_scale=of.scale, softcap=student.softcap, teacher_softcap=of.softcap, lora=student.head.lora,
            teacher_lora=of.head.lora, vocab_size=distillation.vocab_size, teacher_vocab_size=teacher.vocab_size,
            **targets.for_ops(), **common, **how,
        )  # fmt: skip
    else:
        s, t = (x.compute("a distillation loss") if isinstance(x, DeferredLogits) else x for x in (student, of))
        s = s.flatten(0, -2)[:, : distillation.vocab_size].float()
        uld = _of_logits(s, t.flatten(0, -2)[:, : teacher.vocab_size].float(), partners, targets, **how)
        result = stored_uld(s, uld, num_items=targets.num_items, **common)
    return UldDistillation(
        loss=result.loss,
        divergence=distillation.uld_weight * result.uld,
        log_prob=result.log_prob,
        entropy=result.entropy,
        is_top1=result.is_top1,
        terms={"uld": result.uld},
    )


def _of_logits(
    s: Tensor, t: Tensor, partners: Tensor, targets: Targets, temperature: float, scale_by_temperature_squared: bool
) -> Tensor:
    """(N,) distances of logits that are stored."""
    there = (partners >= 0) & (targets.labels != -100)
    distances = uld_reference(s[there], t[partners[there]], temperature)
    factor = temperature**2 if scale_by_temperature_squared else 1.0
    return s.new_zeros(s.shape[0]).masked_scatter(there, factor * distances)
