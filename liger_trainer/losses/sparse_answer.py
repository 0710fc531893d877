"""The loss of a batch whose teacher answers with a few tokens of each position, as a cache and a server do.

Formula: kernels/linear_sparse_divergence.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.cross_entropy import cross_entropy_reference
from ..kernels.linear_sparse_divergence import (
    LinearSparseDivergence,
    linear_sparse_divergence,
    weighted_sparse_divergences,
)
from ..kernels.types import token_count
from .deferred_logits import DeferredLogits
from .spec import IGNORE_INDEX, BatchLoss, BatchTargets, Logits, LossOptions, TeacherAnswer


@dataclass(frozen=True)
class TokenTargets:
    """What a teacher predicts at tokens (...,). fp32, in nats."""

    ids: Tensor  # (..., K) int32, negative: no entry
    log_probs: Tensor  # (..., K) at the cache's temperature, -inf: no entry
    top_ids: Tensor  # (...,) int32, the likeliest token
    label_log_prob: Tensor | None  # (...,) at temperature 1; None: not known
    entropy: Tensor | None  # (...,) at temperature 1; None: not known
    unnamed: Tensor  # (...,) add this to the entries' divergence to estimate the KL; 0 for topk without draws


@dataclass(frozen=True)
class SparseAnswer(TeacherAnswer):
    """A teacher's predictions at the positions of a batch: `targets` are (batch, length, K) or (batch, length)."""

    targets: TokenTargets
    tail: str  # "bucket" or "none", see `linear_sparse_divergence`
    vocab_size: int  # its probabilities are over these tokens

    @property
    def shape(self) -> torch.Size:
        return self.targets.log_probs.shape

    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return sum_k weights[k] D_k + ce_weight CE, the divergences of the listed tokens and of the rest as one.

        Draws (tail "none") determine only the forward KL.
        """
        how, entries = options.for_teacher(), self.targets
        # One kernel computes the forward KL where it is the only divergence; its result is then weighted here. With 1
        # the op itself knows the weights.
        weight = how.weights["forward_kl"] or 1.0 if set(how.weights) == {"forward_kl"} else 1.0
        common = {
            "kind": "forward_kl" if weight != 1.0 else {"forward_kl": 0.0, **how.weights},
            "beta": how.beta, "alpha": how.skew_alpha,
            "ids": entries.ids.flatten(0, -2), "log_probs": entries.log_probs.flatten(0, -2),
            "tail": self.tail, "labels": targets.labels, "ce_weight": how.ce_weight / weight,
            "temperature": how.temperature, "top_ids": entries.top_ids.flatten(),
            "scale_by_temperature_squared": how.scale_by_temperature_squared,
        }  # fmt: skip
        if isinstance(student, DeferredLogits):
            result = linear_sparse_divergence(
                **student.operands(), vocab_size=self.vocab_size, **targets.for_ops(), **common
            )
        else:
            logits = student.flatten(0, -2)[:, : self.vocab_size]
            common |= {"num_items": targets.num_items, "token_weight": targets.weights}
            result = _loss_of_stored(logits, **common)
        keep = targets.labels != IGNORE_INDEX
        # the cache's probabilities are those at the loss's temperature, so only this one gives the KL at temperature 1
        at_one = how.temperature == 1.0
        return BatchLoss(
            loss=result.loss if weight == 1.0 else result.loss * weight,
            divergence=result.divergence * weight,
            log_prob=result.log_prob,
            entropy=result.entropy,
            is_top1=result.is_top1,
            agrees=result.agrees,
            forward_kl=result.terms["forward_kl"] + entries.unnamed.flatten() * keep if at_one else None,
            teacher_log_prob=_of_kept(entries.label_log_prob, keep),
            teacher_entropy=_of_kept(entries.entropy, keep),
            terms={name: result.terms[name] for name in how.weights},
        )


def _of_kept(values: Tensor | None, keep: Tensor) -> Tensor | None:
    return None if values is None else values.flatten() * keep


def _loss_of_stored(
    logits: Tensor, ids: Tensor, log_probs: Tensor, *, labels: Tensor, ce_weight: float, top_ids: Tensor,
    scale_by_temperature_squared: bool, num_items: float | Tensor | None, token_weight: Tensor | None, **how: Any,
) -> LinearSparseDivergence:  # fmt: skip
    """Compute the op in plain torch, from logits (N, V) that are stored."""
    ce = cross_entropy_reference(logits, labels, num_items=num_items, token_weight=token_weight)
    keep = labels != -100
    factor = how["temperature"] ** 2 if scale_by_temperature_squared else 1.0

    def of_all(kept: Tensor) -> Tensor:
        each = logits.new_zeros(keep.shape, dtype=torch.float32)
        each[keep] = factor * kept
        return each

    total, terms = weighted_sparse_divergences(logits[keep].float(), ids[keep], log_probs[keep], **how)
    divergence = of_all(total)
    weighted = divergence if token_weight is None else divergence * token_weight
    loss = weighted.sum() / token_count(keep, num_items, divergence.dtype) + ce_weight * ce.loss
    agrees = logits.gather(-1, top_ids[:, None].long()).squeeze(-1) >= logits.amax(-1)
    mass = log_probs.exp().sum(-1) * keep
    return LinearSparseDivergence(
        loss, divergence.detach(), ce.log_prob, ce.entropy, ce.is_top1, mass, (agrees & keep).detach(),
        terms={name: of_all(value).detach() for name, value in terms.items()},
    )  # fmt: skip
