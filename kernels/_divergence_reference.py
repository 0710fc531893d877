"""linear_divergence.py in plain torch: its result type and the reference that it must equal."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import stats_dtype
from ._linear_head import Adapters, linear_reference, token_count
from ._logits import LOWEST, LogitTransform, entropy_of, transform
from .divergence_kinds import divergence_weights, named, parts


class LinearDivergence(NamedTuple):
    """The result of `linear_divergence`. Per-token values are fp32 (fp64 for fp64 inputs), in nats, 0 where ignored.

    `divergence` and `terms` use the loss's temperature; all other fields use distributions at temperature 1. Without
    labels, the fields that need them are 0.
    """

    loss: Tensor  # scalar, differentiable in hidden, weight and bias
    divergence: Tensor  # (N,) sum of the weighted divergences at the loss's temperature, times T^2 if the loss is
    log_prob: Tensor  # (N,) the student's log-probability of the label
    entropy: Tensor  # (N,) the student's entropy
    is_top1: Tensor  # (N,) bool, whether the student finds no token likelier than the label
    forward_kl: Tensor  # (N,) KL(teacher || student)
    reverse_kl: Tensor  # (N,) KL(student || teacher)
    agrees: Tensor  # (N,) bool, whether student and teacher have a likeliest token in common
    teacher_log_prob: Tensor  # (N,) the teacher's log-probability of the label
    teacher_entropy: Tensor  # (N,) the teacher's entropy
    # {name: (N,)} of each kind in `kind`, without its weight, at the loss's temperature, times T^2 if the loss is.
    terms: dict[str, Tensor]


def named_terms(kind: str | Mapping[str, float], beta: float, alpha: float, values: Mapping[str, Tensor]) -> dict:
    """Return `LinearDivergence.terms` from the values of the row kinds."""
    return {name: sum(share * values[part] for part, share in parts(name, beta, alpha).items()) for name in named(kind)}


def kl_values(x: Tensor, target: Tensor, log_target: bool) -> Tensor:
    """Return p (log p - x) of every entry, in plain torch, without NaN in value or gradient from 0 * inf."""
    none = (target.exp() if log_target else target) == 0
    x, target = x.masked_fill(none, 0.0), target.masked_fill(none, 1.0)
    log_p = target if log_target else target.log()
    p = log_p.exp() if log_target else target
    return (p * (log_p - x)).masked_fill(none, 0.0)


def divergence_of(kind: str, q: Tensor, p: Tensor, beta: float, alpha: float) -> Tensor:
    """Return one divergence (N,) from log-probabilities q, p (N, V) of student and teacher."""

    def kl(a, b):
        return kl_values(b, a, log_target=True).sum(-1)

    def mixture(a, b, share):
        a, b = a.clamp(min=LOWEST), b.clamp(min=LOWEST)
        return torch.logsumexp(torch.stack([a + math.log(share), b + math.log(1 - share)]), 0)

    match kind:
        case "forward_kl":
            return kl(p, q)
        case "reverse_kl":
            return kl(q, p)
        case "jsd":
            m = mixture(p, q, beta)
            return beta * kl(p, m) + (1 - beta) * kl(q, m)
        case "skew_kl":
            return kl(p, mixture(p, q, alpha))
        case "skew_reverse_kl":
            return kl(q, mixture(q, p, alpha))
    assert kind == "tvd"
    return (q.exp() - p.exp()).abs().sum(-1) / 2


def _divergences(
    student_logits: Tensor, teacher_logits: Tensor, kind, beta: float, temperature: float, alpha: float,
    teacher_share: float,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return (the weighted sum, {name: value} of the kinds in `kind`), each (N,)."""
    if teacher_share != 1:
        s, t = (x.clamp(min=LOWEST) for x in (student_logits.detach(), teacher_logits))
        teacher_logits = torch.lerp(s, t, teacher_share)
    q, p = ((x / temperature).log_softmax(-1) for x in (student_logits, teacher_logits))
    weights = divergence_weights(kind, beta, alpha)
    values = {part: divergence_of(part, q, p, beta, alpha) for part in weights}
    total = torch.zeros_like(q[:, 0])
    for part, weight in weights.items():
        if weight:  # 0 * an infinite divergence would be NaN
            total = total + weight * values[part]
    return total, named_terms(kind, beta, alpha, values)


def divergence_reference(
    student_logits: Tensor, teacher_logits: Tensor, *, kind: str | Mapping[str, float] = "forward_kl",
    beta: float = 0.5, temperature: float = 1.0, alpha: float = 0.1, teacher_share: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return weighted divergences (N,) of logits (N, V), in plain torch, without the factor T^2."""
    return _divergences(student_logits, teacher_logits, kind, beta, temperature, alpha, teacher_share)[0]


def distillation_reference(
    student_logits: Tensor, teacher_logits: Tensor, *, kind: str | Mapping[str, float] = "forward_kl",
    beta: float = 0.5, labels: Tensor | None = None, ce_weight: float = 0.0, temperature: float = 1.0,
    num_items: float | Tensor | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    scale_by_temperature_squared: bool = True, ignore_index: int = -100, token_weight: Tensor | None = None,
    reduction: str = "mean", alpha: float = 0.1, teacher_share: float = 1.0,
) -> LinearDivergence:  # fmt: skip
    """Return the loss from logits (N, V) of both sides, in plain torch."""
    dtype = stats_dtype(student_logits.dtype)
    s, t = student_logits.to(dtype), teacher_logits.detach().to(dtype)
    keep = torch.ones_like(s[:, 0], dtype=torch.bool) if labels is None else labels != ignore_index
    has_label = keep & (labels is not None)
    label = torch.zeros_like(keep, dtype=torch.int64) if labels is None else labels * keep
    q, p = s.log_softmax(-1), t.log_softmax(-1)
    log_prob, teacher_log_prob = (x.gather(1, label[:, None]).squeeze(1).where(has_label, 0) for x in (q, p))
    ce = -(1 - label_smoothing) * log_prob + z_loss * s.logsumexp(-1).square()
    if label_smoothing:
        ce = ce - label_smoothing * q.mean(-1)
    divergence, terms = _divergences(s, t, kind, beta, temperature, alpha, teacher_share)
    factor = temperature**2 if scale_by_temperature_squared else 1.0
    divergence = divergence * factor
    loss = (divergence + ce_weight * ce if ce_weight else divergence).where(keep, 0)
    if token_weight is not None:
        loss = loss * token_weight
    if reduction == "mean":
        loss = loss.sum() / token_count(keep, num_items, loss.dtype)
    agrees = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    fields = (
        divergence, log_prob, entropy_of(q), (log_prob >= q.amax(-1)) & has_label, kl_values(q, p, True).sum(-1),
        kl_values(p, q, True).sum(-1), agrees, teacher_log_prob, entropy_of(p),
    )  # fmt: skip
    terms = {name: (x * factor).where(keep, 0).detach() for name, x in terms.items()}
    return LinearDivergence(loss, *(x.where(keep, x.new_zeros(())).detach() for x in fields), terms=terms)


def linear_divergence_reference(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, scale: float = 1.0, teacher_scale: float = 1.0,
    softcap: float | None = None, teacher_softcap: float | None = None, vocab_size: int | None = None,
    lora: Adapters = None, teacher_lora: Adapters = None, **options,
) -> LinearDivergence:  # fmt: skip
    """Return in plain torch what `linear_divergence` must equal. Tests and benchmarks import this."""
    V = min(weight.shape[0], teacher_weight.shape[0], vocab_size or weight.shape[0])
    bias, teacher_bias = (None if b is None else b[:V] for b in (bias, teacher_bias))
    student = transform(linear_reference(hidden, weight, lora)[:, :V], bias, LogitTransform(scale, softcap))[0]
    with torch.no_grad():
        teacher_transform = LogitTransform(teacher_scale, teacher_softcap)
        logits = linear_reference(teacher_hidden, teacher_weight, teacher_lora)[:, :V]
        teacher = transform(logits, teacher_bias, teacher_transform)[0]
    return distillation_reference(student, teacher, **options)
