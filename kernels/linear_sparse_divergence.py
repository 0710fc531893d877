"""Distillation of a linear head from a teacher that is known at K entries per token; no logits are stored.

    s = transform(hidden @ weight.T + bias + lora) / T,  q = softmax(s)   student; lora: see _linear_head.py
    p_k = exp(log_probs_k) for the token ids_k, k = 1..K                  teacher, from a cache
    P = sum p_k,  Q = sum q_k,  R = max(0, 1 - P)                         R: the mass that the cache leaves open

    bucket  sum p_k (log p_k - log q_k) + R (log R - log(1 - Q))   d/ds_j = (P + R) q_j - p_j        j among ids
                                                                          (P + R) q_j - R q_j/(1 - Q)  else
    none    sum p_k (log p_k - log q_k)                            d/ds_j = P q_j - p_j, p_j = 0 beyond ids
    loss = sum over rows of w [T^2 D + ce_weight CE] / num_items,  CE at T = 1, w token_weight
    other kinds, with the bucket: D(p, q) of the K + 1 outcomes, formulas in _sparse_rows.py

Tails     The right one depends on where the entries come from.
          bucket: the teacher's likeliest K, or any other choice made without chance. The rest of the vocabulary counts
          as one token: the student learns how much mass it has, not how that is spread. The loss is the KL divergence
          with the rest lumped together: never above the full one, equal to it at K = V, and 0 for a student that equals
          its teacher.
          none: ids DRAWN from the teacher, log_probs = log(count / n) after n draws (or the logs of importance
          weights). The expected gradient is then the full forward KL's, and the loss estimates its
          cross-entropy part without bias; it subtracts the sample's own entropy, a constant. For the likeliest K it is
          biased: the optimum gives all other tokens probability 0.
          The likeliest K divided by their sum have that same optimum, so they are not offered.
Kinds     With the bucket both sides are distributions over K + 1 outcomes, and any divergence of these is determined:
          a lower bound of the full one, as the forward KL is, and 0 for a student that equals its teacher. R is then at
          least 2^-24, since log-probabilities in fp32 tell no less, and a reverse KL would be infinite. Draws (tail
          none) determine only the forward KL.
Shapes    hidden: (N, H)  weight: (V, H)  ids, log_probs: (N, K)  labels, token_weight: (N,)  bias: (V,)
Method    as in linear_cross_entropy.py: three products, gradients in the forward. _sparse_rows.py computes the rows.
Numerics  logits in the products' dtype; softmax and sums in fp32. 1 - Q is a sum over only the rest, so log(1 - Q)
          is right even if Q is 1 to rounding. A cache's rounding may bring P above 1: then R is 0, and value and
          gradient still follow the formula. If ids cover the whole vocabulary there is no rest, and R is 0.
Traffic   per logit as in linear_cross_entropy.py; per row K ids and log-probabilities more
Source    draws and their lack of bias, bias of the likeliest K: Anshumann et al., ACL 2025 (RS-KD), arXiv:2503.16870;
          caches of the likeliest K and the question of the missing mass: Arcee's DistillKit; T^2: Hinton et al. 2015,
          arXiv:1503.02531; the bucket: KL between coarser distributions (data processing inequality)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._divergence_reference import divergence_of, named_terms
from ._linear_head import (
    Adapters,
    LinearHead,
    Lora,
    Rows,
    RowSelection,
    check_head,
    check_overwritten,
    gather_rows,
    labelled_weight,
    linear_reference,
    token_count,
    vocabulary,
)
from ._linear_loss import (
    Execution,
    FusedLoss,
    LinearLoss,
    LogitChunk,
    check_execution,
    check_labels,
)
from ._logits import LogitTransform, entropy_of, transform
from ._sparse_rows import FIELDS, LEAST_REST, TERMS, SparseOptions, SparseTargets, sparse_rows
from .divergence_kinds import ROW_KINDS, divergence_weights

__all__ = [
    "LinearSparseDivergence", "Lora", "linear_sparse_divergence", "linear_sparse_divergence_reference",
    "sparse_divergence_reference", "weighted_sparse_divergences",
]  # fmt: skip

MAX_ENTRIES = 1024  # per token: they lie in the registers of one program


class LinearSparseDivergence(NamedTuple):
    """The result of `linear_sparse_divergence`. Per-token values are fp32 (fp64 for fp64 inputs), 0 where ignored.

    Without labels or top_ids, the fields that need them are 0.
    """

    loss: Tensor  # scalar, differentiable in hidden, weight and bias
    divergence: Tensor  # (N,) nats, at the loss's temperature, times T^2 if the loss is
    log_prob: Tensor  # (N,) the student's log-probability of the label, at temperature 1
    entropy: Tensor  # (N,) the student's entropy, at temperature 1
    is_top1: Tensor  # (N,) bool, whether the student finds no token likelier than the label
    teacher_mass: Tensor  # (N,) P, the teacher's probability that the K entries cover
    agrees: Tensor  # (N,) bool, whether the student finds no token likelier than the one of top_ids
    # {name: (N,)} of each kind in `kind`, without its weight, at the loss's temperature, times T^2 if the loss is.
    terms: dict[str, Tensor]


def sparse_divergence_reference(
    student_logits: Tensor, ids: Tensor, log_probs: Tensor, *, tail: str = "bucket", temperature: float = 1.0,
    kind: str = "forward_kl", beta: float = 0.5, alpha: float = 0.1,
) -> Tensor:  # fmt: skip
    """Return divergences (N,) of one of ROW_KINDS of logits (N, V), in plain torch, without the factor T^2."""
    log_q = (student_logits / temperature).log_softmax(-1)
    present = (ids >= 0) & (log_probs != -torch.inf)
    log_p = log_probs.to(log_q.dtype)
    p, log_p = log_p.exp().where(present, 0), log_p.where(present, 0)
    index = ids.long().where(present, 0)
    log_q_k = log_q.gather(1, index)
    divergence = (p * (log_p - log_q_k.where(p > 0, 0))).sum(-1)
    if tail == "none":
        return divergence
    named = torch.zeros_like(log_q).scatter_add(1, index, present.to(log_q.dtype)) > 0
    covered = named.all(-1)
    rest = (1 - p.sum(-1)).clamp(min=0).where(~covered, 0)
    log_rest_q = log_q.masked_fill(named & ~covered[:, None], -torch.inf).logsumexp(-1)
    if kind == "forward_kl":
        return divergence + torch.special.xlogy(rest, rest) - rest * log_rest_q
    sides = (log_q_k, log_rest_q), (log_p, rest.clamp(min=LEAST_REST).log())
    here = torch.cat([present, ~covered[:, None]], -1)
    q, p = (torch.cat([a, b[:, None]], -1).where(here, -torch.inf) for a, b in sides)
    return divergence_of(kind, q, p, beta, alpha)


def weighted_sparse_divergences(
    student_logits: Tensor, ids: Tensor, log_probs: Tensor, *, kind: str | Mapping[str, float] = "forward_kl",
    beta: float = 0.5, alpha: float = 0.1, **how: Any,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the weighted sum (N,) of the kinds, and each without its weight by name; see the one above."""
    weights = divergence_weights(kind, beta, alpha)
    how |= {"beta": beta, "alpha": alpha}
    values = {part: sparse_divergence_reference(student_logits, ids, log_probs, kind=part, **how) for part in weights}
    total = torch.zeros_like(next(iter(values.values())))
    for part, weight in weights.items():
        if weight:  # 0 * an infinite divergence would be NaN
            total = total + weight * values[part]
    return total, named_terms(kind, beta, alpha, values)


def linear_sparse_divergence_reference(
    hidden: Tensor, weight: Tensor, ids: Tensor, log_probs: Tensor, *, tail: str = "bucket",
    kind: str | Mapping[str, float] = "forward_kl", labels: Tensor | None = None, ce_weight: float = 0.0,
    temperature: float = 1.0, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None,
    num_items: float | Tensor | None = None, ignore_index: int = -100, token_weight: Tensor | None = None,
    scale_by_temperature_squared: bool = True, vocab_size: int | None = None, reduction: str = "mean",
    top_ids: Tensor | None = None, lora: Adapters = None, beta: float = 0.5, alpha: float = 0.1,
) -> LinearSparseDivergence:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    V = min(weight.shape[0], vocab_size or weight.shape[0])
    logits, bias = linear_reference(hidden, weight, lora)[:, :V], None if bias is None else bias[:V]
    s = transform(logits, bias, LogitTransform(scale, softcap))[0]
    keep = torch.ones_like(s[:, 0], dtype=torch.bool) if labels is None else labels != ignore_index
    has_label = keep & (labels is not None)
    label = torch.zeros_like(keep, dtype=torch.int64) if labels is None else labels * keep
    log_q = s.log_softmax(-1)
    log_prob = log_q.gather(1, label[:, None]).squeeze(1).where(has_label, 0)
    factor = temperature**2 if scale_by_temperature_squared else 1.0
    divergence, terms = weighted_sparse_divergences(
        s, ids, log_probs, tail=tail, temperature=temperature, kind=kind, beta=beta, alpha=alpha
    )
    divergence = divergence * factor
    each = divergence - ce_weight * log_prob if ce_weight else divergence
    each = each * (1.0 if token_weight is None else token_weight)
    loss = each.where(keep, 0)
    if reduction == "mean":
        loss = loss.sum() / token_count(keep, num_items, loss.dtype)
    mass = log_probs.to(s.dtype).exp().where(ids >= 0, 0).sum(-1)
    is_top1 = (log_prob >= log_q.amax(-1)) & has_label
    agrees = torch.zeros_like(keep)
    if top_ids is not None:
        agrees = log_q.gather(1, top_ids[:, None].long()).squeeze(1) >= log_q.amax(-1)
    fields = divergence, log_prob, entropy_of(log_q), is_top1, mass, agrees

    def kept(x: Tensor) -> Tensor:
        return x.where(keep, x.new_zeros(())).detach()

    return LinearSparseDivergence(loss, *map(kept, fields), terms={name: kept(factor * x) for name, x in terms.items()})


@dataclass(frozen=True)
class LinearSparse(LinearLoss):
    """The loss of one call. targets: those of the rows that take part."""

    targets: SparseTargets
    options: SparseOptions

    fields = FIELDS

    def write_rows(self, chunk: LogitChunk) -> None:
        targets = self.targets.rows(chunk.rows)
        sparse_rows(chunk.logits, chunk.bias, targets, chunk.values, chunk.dlogits, self.options)

    def weighted(self, factor: Tensor) -> "LinearSparse":
        weight = self.targets.token_weight
        token_weight = factor if weight is None else factor * weight
        return replace(self, targets=replace(self.targets, token_weight=token_weight))


def _loss(
    rows: Rows, how: Execution, head: LinearHead, labels: Tensor | None, token_weight: Tensor | None, ids: Tensor,
    log_probs: Tensor, top_ids: Tensor | None, vocab: int, tail: str, scale: float, softcap: float | None,
    temperature: float, ce_weight: float, scale_by_temperature_squared: bool, kinds: str, weights: list[float],
    beta: float, alpha: float,
) -> LinearSparse:  # fmt: skip
    """Make the loss. kinds: separated by spaces, since custom ops can't take list[str]."""
    options = SparseOptions(
        tail, LogitTransform(scale, softcap), temperature, ce_weight, scale_by_temperature_squared,
        dict(zip(kinds.split(), weights, strict=True)), beta, alpha,
    )  # fmt: skip
    targets = SparseTargets(
        gather_rows(ids, rows).contiguous(), gather_rows(log_probs, rows).contiguous(),
        None if labels is None else gather_rows(labels, rows).contiguous(),
        labelled_weight(token_weight, rows, head.hidden.dtype),
        None if top_ids is None else gather_rows(top_ids, rows).contiguous(),
    )  # fmt: skip
    return LinearSparse(rows, vocab, how, targets, options)


_fused_loss = FusedLoss("linear_sparse_divergence", _loss)


def linear_sparse_divergence(
    hidden: Tensor, weight: Tensor, ids: Tensor, log_probs: Tensor, *, tail: str = "bucket",
    kind: str | Mapping[str, float] = "forward_kl", labels: Tensor | None = None, ce_weight: float = 0.0,
    temperature: float = 1.0, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None,
    num_items: float | Tensor | None = None, ignore_index: int = -100, token_weight: Tensor | None = None,
    reduction: str = "mean", scale_by_temperature_squared: bool = True, rows: RowSelection | None = None,
    vocab_size: int | None = None, recompute: bool = False, workspace_mb: float | None = None,
    accumulate_dtype: torch.dtype | None = None, overwrite_hidden: bool = False, top_ids: Tensor | None = None,
    lora: Adapters = None, beta: float = 0.5, alpha: float = 0.1,
) -> LinearSparseDivergence:  # fmt: skip
    """Distill a student's head from a teacher known at K tokens per row, mixed with cross-entropy in the same pass.

    The top of this file has the formulas, and says which tail is right for which cache. The teacher gets no gradient.

    Args:
        hidden: (N, H), fp32, fp16, bf16 (fp64: torch).
        weight: (V, H). Frozen if it requires no gradient: its product is skipped.
        ids: (N, K) int64 or int32, K from 1 to 1024. Those of a row must be distinct: repeated draws are one entry with
            their count. An id that comes twice in a row gives NaN. Negative ids are padding and ignored. Ids beyond the
            vocabulary give NaN on the GPU, an error on the CPU.
        log_probs: (N, K) float, the teacher's natural log-probabilities of ids, used as given: with a temperature, pass
            those at that temperature. -inf is padding and ignored.
        tail: "bucket" for the likeliest K, with the rest of the vocabulary as one more outcome; "none" for ids drawn
            from the teacher, with log_probs = log(count / draws). "none" is biased for the likeliest K.
        kind: one of KINDS, or several with weights, as for `linear_divergence`. With tail "none" the forward KL is the
            only one that a sparse teacher determines.
        beta, alpha: of the JSD and of the skewed KLs, as for `linear_divergence`.
        labels: (N,) int64. Rows with ignore_index take no part in either loss. Without labels, every row does.
        ce_weight: weight of the cross-entropy against labels, at temperature 1.
        temperature: divides the student's logits in the divergence.
        bias: (V,), added to the logits.
        scale, softcap: what the model does to its logits, see `linear_cross_entropy`.
        num_items: divisor of the sum over tokens; default: the number of rows that take part.
        token_weight, reduction, rows, accumulate_dtype, overwrite_hidden, lora: see `linear_cross_entropy`.
        scale_by_temperature_squared: multiply the divergence, value and gradient, by temperature^2.
        vocab_size: the real vocabulary, if the head is padded beyond it.
        recompute: compute the logits again in the backward: four products instead of three, and an upstream gradient
            for each token's loss. The workspace stays the same.
        workspace_mb: MiB for the chunk of logits, see `linear_cross_entropy`.
        top_ids: (N,) int64 or int32 within the vocabulary, the teacher's likeliest token of each row, for `agrees`.

    Returns:
        LinearSparseDivergence: loss and per-token values.

    Raises:
        ValueError: if shapes don't fit, an option is unknown or out of range, or ce_weight lacks labels.
    """
    check_head(hidden, weight, bias, lora)
    _check_targets(hidden, ids, log_probs, top_ids)
    weights = divergence_weights(kind, beta, alpha)
    check_labels(hidden, labels, ce_weight)
    check_execution(hidden, token_weight, reduction, num_items, recompute, overwrite_hidden)
    check_overwritten(overwrite_hidden, lora)
    vocab, head = vocabulary(weight, vocab_size), LinearHead.of(hidden, weight, bias, lora)
    arguments = (
        ids, log_probs.detach(), top_ids, vocab, tail, scale, softcap, temperature, ce_weight,
        scale_by_temperature_squared, " ".join(weights), [*weights.values()], beta, alpha,
    )  # fmt: skip
    value, per_token = _fused_loss(
        head, labels, token_weight, arguments, rows=rows, num_items=num_items, ignore_index=ignore_index,
        reduction=reduction, recompute=recompute, workspace_mb=workspace_mb, accumulate_dtype=accumulate_dtype,
        overwrite_hidden=overwrite_hidden,
    )  # fmt: skip
    return _named(value, per_token, kind, beta, alpha)


def _named(loss: Tensor, per_token: Tensor, kind, beta: float, alpha: float) -> LinearSparseDivergence:
    divergence, log_prob, entropy, is_top1, teacher_mass, agrees = per_token[1:TERMS].unbind(0)
    terms = dict(zip(ROW_KINDS, per_token[TERMS:].unbind(0), strict=True))
    if divergence_weights(kind, beta, alpha) == {"forward_kl": 1.0}:
        terms["forward_kl"] = divergence  # the one term, which the kernel does not write twice
    return LinearSparseDivergence(
        loss, divergence, log_prob, entropy, is_top1 > 0, teacher_mass, agrees > 0,
        terms=named_terms(kind, beta, alpha, terms),
    )  # fmt: skip


def _check_targets(hidden: Tensor, ids: Tensor, log_probs: Tensor, top_ids: Tensor | None) -> None:
    if ids.dim() != 2 or ids.shape != log_probs.shape or ids.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"ids and log_probs must be (N, K), a row for each of hidden: ids is {tuple(ids.shape)}, "
            f"log_probs {tuple(log_probs.shape)}, hidden {tuple(hidden.shape)}."
        )
    if not 1 <= ids.shape[1] <= MAX_ENTRIES:
        raise ValueError(f"K must lie in 1 to {MAX_ENTRIES}, ids and log_probs have K = {ids.shape[1]}.")
    if ids.dtype not in (torch.int64, torch.int32) or not log_probs.is_floating_point():
        raise ValueError(
            f"ids must be int64 or int32 and log_probs float: ids is {ids.dtype}, log_probs {log_probs.dtype}."
        )
    if top_ids is not None and (top_ids.shape != ids.shape[:1] or top_ids.dtype not in (torch.int64, torch.int32)):
        raise ValueError(
            f"top_ids must be int64 or int32, one per row of hidden: top_ids is {tuple(top_ids.shape)} of "
            f"{top_ids.dtype}, hidden {tuple(hidden.shape)}."
        )
