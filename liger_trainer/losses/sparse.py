"""A teacher known at a few tokens a position, and the loss of a batch against it.

Formulas: kernels/linear_sparse_divergence.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.cross_entropy import cross_entropy_reference
from ..kernels.linear_sparse_divergence import (
    LinearSparseDivergence,
    linear_sparse_divergence,
    sparse_divergence_reference,
)
from ..kernels.types import token_count
from .deferred_logits import DeferredLogits
from .spec import Distillation, Logits, Targets


@dataclass(frozen=True)
class TokenTargets:
    """Of tokens (...,): what a teacher makes of them. fp32, in nats."""

    ids: Tensor  # (..., K) int32, negative: no entry
    log_probs: Tensor  # (..., K) at the cache's temperature, -inf: no entry
    top_ids: Tensor  # (...,) int32, the likeliest token
    label_log_prob: Tensor  # (...,) at temperature 1
    entropy: Tensor | None  # (...,) at temperature 1; None: not known
    unnamed: Tensor  # (...,) what the entries' divergence lacks to an estimate of the KL; 0 for topk without draws


@dataclass(frozen=True)
class SparseTeacher:
    """What is known of a teacher at the positions of a batch: `targets` are (batch, length, K) or (batch, length)."""

    targets: TokenTargets
    tail: str  # "bucket" or "none", see `linear_sparse_divergence`
    vocab_size: int  # that its probabilities are over

    @property
    def shape(self) -> torch.Size:
        return self.targets.log_probs.shape


class SparseDistillation(NamedTuple):
    """The loss of a batch and its per-token values, (batch * length,), 0 where ignored and without gradient."""

    loss: Tensor
    divergence: Tensor  # weighted, at the loss's temperature
    log_prob: Tensor
    entropy: Tensor
    is_top1: Tensor
    agrees: Tensor
    forward_kl: Tensor | None  # at temperature 1; None where the cache is of another
    teacher_log_prob: Tensor
    teacher_entropy: Tensor | None  # None where it is not known
    terms: dict[str, Tensor]  # the divergence, by name and without its weight


def sparse_distillation(
    student: Logits, teacher: SparseTeacher, targets: Targets, distillation: Distillation
) -> SparseDistillation:
    """weight * forward KL + ce_weight * CE, where `distillation.weights` has a weight for the forward KL alone."""
    weight = distillation.weights["forward_kl"]
    of = teacher.targets
    common = {
        "tail": teacher.tail, "labels": targets.labels, "ce_weight": distillation.ce_weight / weight,
        "temperature": distillation.temperature, "top_ids": of.top_ids.flatten(),
        "scale_by_temperature_squared": distillation.scale_by_temperature_squared,
    }  # fmt: skip
    ids, log_probs = of.ids.flatten(0, -2), of.log_probs.flatten(0, -2)
    if isinstance(student, DeferredLogits):
        result = linear_sparse_divergence(
            student.hidden.flatten(0, -2), student.head.weight, ids, log_probs, bias=student.head.bias,
            scale=student.scale, softcap=student.softcap, vocab_size=teacher.vocab_size,
            lora=student.head.lora, **targets.for_ops(), **common,
        )  # fmt: skip
    else:
        logits = student.flatten(0, -2)[:, : teacher.vocab_size]
        result = _of_logits(logits, ids, log_probs, num_items=targets.num_items, **common)
    keep = targets.labels != -100
    forward_kl = None
    if distillation.temperature == 1.0:
        forward_kl = result.divergence + of.unnamed.flatten() * keep
    return SparseDistillation(
        loss=result.loss if weight == 1.0 else result.loss * weight,
        divergence=result.divergence * weight,
        log_prob=result.log_prob,
        entropy=result.entropy,
        is_top1=result.is_top1,
        agrees=result.agrees,
        forward_kl=forward_kl,
        teacher_log_prob=of.label_log_prob.flatten() * keep,
        teacher_entropy=None if of.entropy is None else of.entropy.flatten() * keep,
        terms={"forward_kl": result.divergence},
    )


def _of_logits(
    logits: Tensor, ids: Tensor, log_probs: Tensor, *, tail: str, labels: Tensor, ce_weight: float, temperature: float,
    top_ids: Tensor, scale_by_temperature_squared: bool, num_items: float | Tensor | None,
) -> LinearSparseDivergence:  # fmt: skip
    """The op on logits (N, V) that are stored, in plain torch."""
    ce, keep = cross_entropy_reference(logits, labels, num_items=num_items), labels != -100
    factor = temperature**2 if scale_by_temperature_squared else 1.0
    divergence = logits.new_zeros(keep.shape, dtype=torch.float32)
    divergence[keep] = factor * sparse_divergence_reference(
        logits[keep].float(), ids[keep], log_probs[keep], tail=tail, temperature=temperature
    )
    loss = divergence.sum() / token_count(keep, num_items, divergence.dtype) + ce_weight * ce.loss
    agrees = logits.gather(-1, top_ids[:, None].long()).squeeze(-1) >= logits.amax(-1)
    mass = log_probs.exp().sum(-1) * keep
    return LinearSparseDivergence(
        loss, divergence.detach(), ce.log_prob, ce.entropy, ce.is_top1, mass, (agrees & keep).detach()
    )
