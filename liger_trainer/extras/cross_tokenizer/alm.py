"""Approximate likelihood matching: the loss of a batch against a teacher with another tokenizer, by spans of text.

Formulas: kernels/linear_alm.py.
"""

from typing import Any

import torch
from torch import Tensor

from ...kernels.linear_alm import linear_alm, stored_alm
from ...kernels.linear_log_probs import linear_log_probs, stored_log_probs
from ...kernels.types import RowSelection
from ...losses.answers import stored
from ...losses.deferred_logits import DeferredLogits
from ...losses.spec import IGNORE_INDEX, BatchLoss, BatchTargets, Logits, LossOptions, TeacherAnswer


class AlmAnswer(TeacherAnswer):
    """A teacher's log-likelihoods of spans of the student's tokens.

    No dataclass: engines look into these, and FSDP2 would round the log-likelihoods to bf16.

    Args:
        spans: (batch, length) int64. For each position in a span, the first token's position, as an index into
            batch * length; negative: in no span. A position is in the span of the token that it predicts.
        log_prob: (batch, length) fp32, of each span, at the position of its first token.
        partners: (batch, length) int64, the teacher's position for the first of each span; negative: none.
    """

    def __init__(self, spans: Tensor, log_prob: Tensor, partners: Tensor):
        self.spans, self.log_prob, self.partners = spans, log_prob, partners

    @property
    def shape(self) -> torch.Size:
        return self.spans.shape

    @property
    def teacher_positions(self) -> Tensor:
        return self.partners

    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return alm_weight * ALM + ce_weight * CE. Tokens in no span have only cross-entropy."""
        how = options.for_teacher()
        spans, teacher = (x.flatten().to(targets.labels.device) for x in (self.spans, self.log_prob))
        common: dict[str, Any] = {"alm_weight": how.alm_weight, "ce_weight": how.ce_weight, "tau": how.alm_tau}
        if isinstance(student, DeferredLogits):
            result = linear_alm(
                **student.operands(), labels=targets.labels, spans=spans, teacher_log_prob=teacher,
                vocab_size=how.vocab_size, **targets.for_ops(), **common,
            )  # fmt: skip
        else:
            # somebody has read the logits: they are stored, and the loss is of them
            logits = student.flatten(0, -2)[:, : how.vocab_size].float()
            result = stored_alm(
                logits, targets.labels, spans, teacher, num_items=targets.num_items, token_weight=targets.weights,
                **common,
            )  # fmt: skip
        # metrics are averaged over all tokens, those outside of spans with 0
        inside = (spans >= 0).to(result.alm.dtype)
        parts = {"spans/share": inside, "spans/student_nll": -result.log_prob * inside, "spans/teacher_nll": -teacher}
        return BatchLoss.of_term("alm", how.alm_weight, result, parts)


def teacher_log_probs(logits: Logits, labels: Tensor, rows: RowSelection, vocab_size: int) -> Tensor:
    """Return the log-probability (documents * length,) fp32 of each label under a teacher's logits; 0 where ignored.

    Args:
        logits: (documents, length, V).
        labels: (documents, length) int64, the token that each position predicts, or IGNORE_INDEX.
        rows: the labelled positions.
        vocab_size: of the teacher's tokenizer, where its head is padded beyond.
    """
    flat = labels.flatten()
    with torch.no_grad():
        if isinstance(logits, DeferredLogits):
            operands = logits.operands()
            # without gradients: the teacher is not trained
            return linear_log_probs(**operands, labels=flat, rows=rows, vocab_size=vocab_size).log_prob
        return stored_log_probs(stored(logits).flatten(0, -2)[:, :vocab_size].float(), flat, IGNORE_INDEX).log_prob
