"""Approximate likelihood matching: a linear head learns the likelihoods that a teacher of other tokens gives to text.

Student and teacher have cut the same text into tokens of their own, and rows are grouped into spans: the shortest
stretches of text that are whole tokens to both. By the chain rule the log-likelihood of a span, given all text before
it, is the sum over its tokens.

    log_prob_i = log softmax(transform(hidden @ weight.T + bias + lora))_i,label
    b = eps - sum over the span of log_prob                                  the student's surprisal, in nats
    a = eps - teacher_log_prob                                               the teacher's
    u = e^(-a / tau),  v = e^(-b / tau)                                      likelihoods, softened
    alm = tau [u log(u / v) + (1 - u) log((1 - u) / (1 - v))]                d alm / db = (u - v) / (1 - v)
    loss = sum over spans of w alm_weight alm + sum over rows of w ce_weight (-log_prob), divided by num_items

Meaning   the KL of two coins, "this text comes next" against "any other does": text has too many continuations to
          compare all of them. tau makes the coins comparable where spans are unlikely. The factor tau keeps the value
          nearly the same for every large tau: for tau to infinity it is b - a + a log(a / b).
Shapes    hidden: (N, H)  weight: (V, H)  labels, spans, token_weight: (N,)  teacher_log_prob: (N,)
Method    linear_log_probs.py for the log-probabilities and the gradients of the head: no logits are stored. What
          is left are a few passes over N numbers.
Numerics  fp32, with expm1 where 1 - u would cancel; a span's log-probabilities are summed in fp64, so that the order
          of their sum does not show. eps keeps the gradient bounded where the student is certain. A student that gives
          a span the teacher's likelihood gets value 0 and gradient 0, exactly.
Source    Minixhofer, Vulic, Ponti 2025, arXiv:2503.20083, without the debiasing of outcome chunks and without the
          factor tau; eps as in the authors' tokenkit at tau = 100; the limit for large tau is tokenkit's, too
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._autograd import first_order
from ._linear_head import Adapters, Lora, RowSelection, token_count
from .linear_log_probs import LogProbs, linear_log_probs, linear_log_probs_reference, stored_log_probs

__all__ = ["LinearAlm", "Lora", "alm_reference", "linear_alm", "linear_alm_reference", "stored_alm", "sum_of_spans"]

FLOOR = 1e-4  # eps, in nats


class LinearAlm(NamedTuple):
    """The result of `linear_alm`. Per-token values are fp32 (fp64 for fp64 inputs), 0 where ignored."""

    loss: Tensor  # scalar, differentiable in hidden, weight and bias
    alm: Tensor  # (N,) nats; the whole span's value at its first row, 0 at the others
    log_prob: Tensor  # (N,) the student's log-probability of the label
    entropy: Tensor  # (N,) the student's entropy
    is_top1: Tensor  # (N,) bool, whether the student finds no token likelier than the label


def alm_reference(log_prob: Tensor, teacher_log_prob: Tensor, tau: float) -> Tensor:
    """Return the values of spans, in plain torch, from log-likelihoods of any shape."""
    a, b = FLOOR - teacher_log_prob, FLOOR - log_prob
    u, v = (-a / tau).exp(), (-b / tau).exp()
    return tau * (u * (b - a) / tau + (1 - u) * ((1 - u) / (1 - v)).log())


def sum_of_spans(values: Tensor, spans: Tensor, rows: int) -> Tensor:
    """Return (rows,) with the sum of each span's values at the row that spans names, 0 elsewhere; in values' dtype.

    Args:
        values: (N,).
        spans: (N,) int64, an index into the rows returned; negative: in no span.
    """
    inside = values.where(spans >= 0, values.new_zeros(())).double()
    total = inside.new_zeros(rows).index_add(0, spans.clamp(min=0), inside)
    return total.to(values.dtype)


class SpanDivergence(torch.autograd.Function):
    """`alm_reference` without its cancellations."""

    @staticmethod
    def forward(ctx, log_prob: Tensor, teacher_log_prob: Tensor, tau: float) -> Tensor:
        b, a = (FLOOR - x.clamp(max=0) for x in (log_prob, teacher_log_prob))
        u, not_u, not_v = (-a / tau).exp(), -torch.expm1(-a / tau), -torch.expm1(-b / tau)
        gap = (a - b).where(a != b, 0)
        likelier = torch.maximum(u, 1 - not_v)
        ctx.save_for_backward(gap.sign() * likelier * -torch.expm1(-gap.abs() / tau) / not_v)
        return -(u * gap).where(u > 0, 0) + tau * not_u * (not_u / not_v).log()

    @staticmethod
    @first_order
    def backward(ctx, upstream):
        (slope,) = ctx.saved_tensors
        return upstream * slope, None, None


def linear_alm_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, spans: Tensor, teacher_log_prob: Tensor, *, alm_weight: float = 1.0,
    ce_weight: float = 0.0, tau: float = 100.0, num_items: float | Tensor | None = None, ignore_index: int = -100,
    token_weight: Tensor | None = None, **head: Any,
) -> LinearAlm:  # fmt: skip
    """Return in plain torch what the op must equal. Tests import this. head: of `linear_log_probs_reference`."""
    values = linear_log_probs_reference(hidden, weight, labels, ignore_index=ignore_index, **head)
    count = (labels != ignore_index).sum().clamp(min=1) if num_items is None else num_items
    first = spans == torch.arange(len(spans), device=spans.device)
    of_student = torch.stack([(values.log_prob * (spans == i)).sum() for i in range(len(spans))])
    alm = alm_reference(of_student, teacher_log_prob.to(of_student.dtype), tau).where(first, 0)
    total = alm_weight * alm - ce_weight * values.log_prob
    loss = (total if token_weight is None else total * token_weight).sum() / count
    return LinearAlm(loss, alm.detach(), values.log_prob.detach(), values.entropy.detach(), values.is_top1)


def linear_alm(
    hidden: Tensor, weight: Tensor, labels: Tensor, spans: Tensor, teacher_log_prob: Tensor, *, alm_weight: float = 1.0,
    ce_weight: float = 0.0, tau: float = 100.0, num_items: float | Tensor | None = None, bias: Tensor | None = None,
    scale: float = 1.0, softcap: float | None = None, ignore_index: int = -100, token_weight: Tensor | None = None,
    vocab_size: int | None = None, rows: RowSelection | None = None, workspace_mb: float | None = None,
    accumulate_dtype: torch.dtype | None = None, lora: Adapters = None,
) -> LinearAlm:  # fmt: skip
    """Have a student give spans of text the likelihoods that a teacher of another tokenizer gives them. Cross-entropy
    is mixed in in the same pass.

    The formulas are at the top of this file. The teacher gets no gradient.

    Args:
        hidden: (N, H), fp32, fp16, bf16 (fp64: torch).
        weight: (V, H). Frozen if it requires no gradient: its product is skipped.
        labels: (N,) int64. Rows with ignore_index take no part.
        spans: (N,) int64. For each row in a span, the index of the span's first row, whose own entry is its own index.
            Negative: in no span. Rows of a span must have labels.
        teacher_log_prob: (N,), the teacher's log-likelihood of each span, in nats, at the span's first row; not read
            elsewhere.
        alm_weight, ce_weight: weights of the spans' values, and of the cross-entropy against labels.
        tau: positive; divides log-likelihoods. 100 in the paper.
        num_items: divisor of both sums; default: the number of rows with a label.
        token_weight: (N,), multiplies each row's terms, not the divisor; a span has its first row's.
        vocab_size: the real vocabulary, if the head is padded beyond its own.
        rows: the labelled rows, if their selection started earlier (see `RowSelection`); its num_items holds.
        bias, scale, softcap, workspace_mb, accumulate_dtype, lora: see `linear_log_probs`.

    Returns:
        LinearAlm: loss and per-token values.

    Raises:
        ValueError: if shapes don't fit or an option is out of range.
    """
    values = linear_log_probs(
        hidden, weight, labels, bias=bias, scale=scale, softcap=softcap, ignore_index=ignore_index, rows=rows,
        vocab_size=vocab_size, workspace_mb=workspace_mb, accumulate_dtype=accumulate_dtype, lora=lora,
    )  # fmt: skip
    if rows is not None:
        num_items = rows.wait().num_items
    divisor = token_count(labels != ignore_index, num_items, values.log_prob.dtype)
    return alm_of(
        values, spans, teacher_log_prob, alm_weight=alm_weight, ce_weight=ce_weight, tau=tau, divisor=divisor,
        token_weight=token_weight,
    )  # fmt: skip


def stored_alm(
    logits: Tensor, labels: Tensor, spans: Tensor, teacher_log_prob: Tensor, *, num_items: float | Tensor | None = None,
    ignore_index: int = -100, **options: Any,
) -> LinearAlm:  # fmt: skip
    """Return the same for logits (N, V) that are stored. options: as for `alm_of`."""
    values = stored_log_probs(logits, labels, ignore_index)
    divisor = token_count(labels != ignore_index, num_items, values.log_prob.dtype)
    return alm_of(values, spans, teacher_log_prob, divisor=divisor, **options)


def alm_of(
    values: LogProbs, spans: Tensor, teacher_log_prob: Tensor, *, divisor: Tensor, alm_weight: float = 1.0,
    ce_weight: float = 0.0, tau: float = 100.0, token_weight: Tensor | None = None,
) -> LinearAlm:  # fmt: skip
    """Return the loss of log-probabilities (N,) with gradient. See `linear_alm`."""
    log_prob, size = values.log_prob, values.log_prob.shape
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}.")
    for name, x in (("spans", spans), ("teacher_log_prob", teacher_log_prob)):
        if x.shape != size:
            raise ValueError(
                f"{name} must be one number per row of hidden: expected {tuple(size)}, got {tuple(x.shape)}."
            )
    first = spans == torch.arange(size[0], device=spans.device)
    teacher = teacher_log_prob.to(log_prob.dtype).where(first, 0)
    of_student = sum_of_spans(log_prob, spans, size[0])
    alm = SpanDivergence.apply(of_student, teacher, tau).where(first, 0)
    total = alm_weight * alm - ce_weight * log_prob
    loss = (total if token_weight is None else total * token_weight).sum() / divisor
    return LinearAlm(loss, alm.detach(), log_prob.detach(), values.entropy.detach(), values.is_top1)
