"""From (deferred) logits and labels to the loss of a batch: which rows count, and what they are compared with.

The same shift and the same rows serve cross-entropy and distillation. Real logits, where a model could not defer them,
take the plain torch reference of the same loss.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.cross_entropy import CrossEntropy, cross_entropy_reference
from ..kernels.linear_cross_entropy import linear_cross_entropy
from ..kernels.linear_divergence import LinearDivergence, distillation_reference, linear_divergence
from .deferred_logits import DeferredLogits
from .sparse import SparseDistillation, SparseTeacher, sparse_distillation
from .spec import IGNORE_INDEX, MEASURED_JSD, Distillation, Logits, LossOptions, Targets
from .uld import UldAnswer, UldDistillation, uld_distillation

TeacherAnswer = Logits | SparseTeacher | UldAnswer


def terms_of(result: Any, distillation: Distillation) -> dict[str, Tensor]:
    """The values of the loss's terms, (batch * length,), by type: without weight, and T^2 times if the loss is."""
    values = {"ce": -result.log_prob, **result.terms}
    return {name: values[name] for name in distillation.terms if name in values}


def batch_loss(
    logits: Logits, targets: Targets, options: LossOptions, teacher: TeacherAnswer | None = None
) -> CrossEntropy | LinearDivergence | SparseDistillation | UldDistillation:
    """The loss of one batch and its per-token values, each (batch * length,).

    Args:
        logits: (batch, length, V) of the student.
        teacher: (batch, length, Vt) for `options.distillation`, or (batch, length, K) out of a cache; cross-entropy
            alone without.

    Raises:
        ValueError: logits and labels of different lengths, or a teacher without `options.distillation`.
    """
    for side in (logits, teacher):
        if side is not None and side.shape[:-1] != targets.shape:
            raise ValueError(
                f"Logits are {tuple(side.shape)}, but labels are {tuple(targets.shape)}: lengths must agree."
            )
    if teacher is None:
        return _cross_entropy(logits, targets, options)
    if options.distillation is None:
        raise ValueError("Teacher logits were given to a model whose loss has no distillation part.")
    if isinstance(teacher, UldAnswer):
        return uld_distillation(logits, teacher, targets, options, options.distillation)
    if isinstance(teacher, SparseTeacher):
        return sparse_distillation(logits, teacher, targets, options.distillation)
    return _distillation(logits, teacher, targets, options, options.distillation)


def _cross_entropy(logits: Logits, targets: Targets, options: LossOptions) -> CrossEntropy:
    common = {"label_smoothing": options.label_smoothing, "dft": options.dft, "ignore_index": IGNORE_INDEX}
    if not isinstance(logits, DeferredLogits):
        return cross_entropy_reference(logits.flatten(0, -2), targets.labels, num_items=targets.num_items, **common)
    return linear_cross_entropy(
        logits.hidden.flatten(0, -2), logits.head.weight, targets.labels, bias=logits.head.bias,
        scale=logits.scale, softcap=logits.softcap, lora=logits.head.lora, **targets.for_ops(), **common,
    )  # fmt: skip


def _distillation(
    student: Logits, teacher: Logits, targets: Targets, options: LossOptions, distillation: Distillation
) -> LinearDivergence:
    def loss(how: Distillation) -> LinearDivergence:
        return _divergence(student, teacher, targets, options, how)

    if not distillation.measure_jsd:
        return loss(distillation)
    if distillation.temperature == distillation.teacher_share == 1 and (
        distillation.beta == 0.5 or "jsd" not in distillation.weights
    ):
        result = loss(replace(distillation, weights={"jsd": 0.0, **distillation.weights}, beta=0.5))
        measured = result
    else:
        result = loss(distillation)
        with torch.no_grad():
            measured = loss(Distillation({"jsd": 0.0}, vocab_size=distillation.vocab_size))
    return result._replace(terms={**result.terms, MEASURED_JSD: measured.terms["jsd"]})


def _divergence(
    student: Logits, teacher: Logits, targets: Targets, options: LossOptions, distillation: Distillation
) -> LinearDivergence:
    common = {
        "kind": distillation.weights or {"forward_kl": 0.0}, "beta": distillation.beta, "labels": targets.labels,
        "ce_weight": distillation.ce_weight, "temperature": distillation.temperature,
        "scale_by_temperature_squared": distillation.scale_by_temperature_squared,
        "label_smoothing": options.label_smoothing, "ignore_index": IGNORE_INDEX, "alpha": distillation.skew_alpha,
        "teacher_share": distillation.teacher_share,
    }  # fmt: skip
    if not (isinstance(student, DeferredLogits) and isinstance(teacher, DeferredLogits)):
        vocab = min(student.shape[-1], teacher.shape[-1], distillation.vocab_size or student.shape[-1])
        s, t = (x.compute("a distillation loss") if isinstance(x, DeferredLogits) else x for x in (student, teacher))
        s, t = s.flatten(0, -2)[:, :vocab], t.flatten(0, -2)[:, :vocab]
        return distillation_reference(s, t, num_items=targets.num_items, **common)
    return linear_divergence(
        student.hidden.flatten(0, -2), student.head.weight, teacher.hidden.flatten(0, -2), teacher.head.weight,
        bias=student.head.bias, teacher_bias=teacher.head.bias, scale=student.scale, teacher_scale=teacher.scale,
        softcap=student.softcap, teacher_softcap=teacher.softcap, vocab_size=distillation.vocab_size,
        lora=student.head.lora, teacher_lora=teacher.head.lora, **targets.for_ops(), **common,
    )  # fmt: skip
