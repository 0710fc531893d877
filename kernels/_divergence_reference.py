"""linear_divergence.py in plain torch: what it returns, which kinds there are, and what it must equal."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ._chunks import stats_dtype
from ._head import Adapters, linear_reference
from ._rows import LogitTransform, transform

KINDS = ("forward_kl", "reverse_kl", "jsd")


class LinearDivergence(NamedTuple):
    """What `linear_divergence` returns. Per-token values are fp32 (fp64 for fp64 inputs), nats, 0 where ignored.

    All but `divergence` are of the distributions at temperature 1. Without labels, the fields about them are 0.
    """

    loss: Tensor  # scalar, differentiable in hidden, weight and bias
    divergence: Tensor  # (N,) sum of the weighted divergences at the loss's temperature, times T^2 if the loss is
    log_prob: Tensor  # (N,) the student's log-probability of the label
    entropy: Tensor  # (N,) the student's entropy
    is_top1: Tensor  # (N,) bool, whether no token is likelier than the label for the student
    forward_kl: Tensor  # (N,) KL(teacher || student)
    reverse_kl: Tensor  # (N,) KL(student || teacher)
    agrees: Tensor  # (N,) bool, whether student and teacher have a likeliest token in common
    teacher_log_prob: Tensor  # (N,) the teacher's log-probability of the label
    teacher_entropy: Tensor  # (N,) the teacher's entropy


def divergence_weights(kind: str | Mapping[str, float], beta: float) -> dict[str, float]:
    """{kind: weight}, with the JSD at beta 0 and 1 replaced by the KL that it tends to (after division by beta)."""
    given = {kind: 1.0} if isinstance(kind, str) else dict(kind)
    if not given or set(given) - set(KINDS):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, or a mapping of these to weights; got {kind!r}.")
    weights: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for name, weight in given.items():
        limit = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta)) if name == "jsd" else None
        weights[limit or name] += float(weight)
    return weights


def divergence_reference(
    student_logits: Tensor, teacher_logits: Tensor, *, kind: str | Mapping[str, float] = "forward_kl",
    beta: float = 0.5, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """(N,) weighted divergences of logits (N, V), in plain torch. Not multiplied by T^2."""
    q, p = ((x / temperature).log_softmax(-1) for x in (student_logits, teacher_logits))
    m = torch.logsumexp(torch.stack([q + _log(1 - beta), p + _log(beta)]), 0)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    weights = divergence_weights(kind, beta)
    total = weights["forward_kl"] * kl(p, q) + weights["reverse_kl"] * kl(q, p)
    if weights["jsd"]:
        total = total + weights["jsd"] * (beta * kl(p, m) + (1 - beta) * kl(q, m))
    return total


def _log(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log())


def distillation_reference(
    student_logits: Tensor, teacher_logits: Tensor, *, kind: str | Mapping[str, float] = "forward_kl",
    beta: float = 0.5, labels: Tensor | None = None, ce_weight: float = 0.0, temperature: float = 1.0,
    num_items: float | Tensor | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    scale_by_temperature_squared: bool = True, ignore_index: int = -100, token_weight: Tensor | None = None,
    reduction: str = "mean",
) -> LinearDivergence:  # fmt: skip
    """The loss in plain torch, from logits (N, V) of both sides."""
    dtype = stats_dtype(student_logits.dtype)
    s, t = student_logits.to(dtype), teacher_logits.detach().to(dtype)
    keep = torch.ones_like(s[:, 0], dtype=torch.bool) if labels is None else labels != ignore_index
    has_label = keep & (labels is not None)
    label = torch.zeros_like(keep, dtype=torch.int64) if labels is None else labels * keep
    q, p = s.log_softmax(-1), t.log_softmax(-1)
    log_prob, teacher_log_prob = (x.gather(1, label[:, None]).squeeze(1) * has_label for x in (q, p))
    ce = -(1 - label_smoothing) * log_prob - label_smoothing * q.mean(-1) + z_loss * s.logsumexp(-1).square()
    divergence = divergence_reference(s, t, kind=kind, beta=beta, temperature=temperature)
    divergence = divergence * (temperature**2 if scale_by_temperature_squared else 1.0)
    loss = (divergence + ce_weight * ce).where(keep, 0)
    if token_weight is not None:
        loss = loss * token_weight
    if reduction == "mean":
        loss = loss.sum() / (keep.sum().clamp(min=1) if num_items is None else num_items)
    agrees = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    fields = (
        divergence, log_prob, -(q.exp() * q).sum(-1), (log_prob >= q.amax(-1)) & has_label,
        (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1), agrees, teacher_log_prob, -(p.exp() * p).sum(-1),
    )  # fmt: skip
    return LinearDivergence(loss, *((x * keep).detach() for x in fields))


def linear_divergence_reference(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, scale: float = 1.0, teacher_scale: float = 1.0,
    softcap: float | None = None, teacher_softcap: float | None = None, vocab_size: int | None = None,
    lora: Adapters = None, teacher_lora: Adapters = None, **options,
) -> LinearDivergence:  # fmt: skip
    """What the op must equal, in plain torch. Tests and benchmarks import this one."""
    V = min(weight.shape[0], teacher_weight.shape[0], vocab_size or weight.shape[0])
    bias, teacher_bias = (None if b is None else b[:V] for b in (bias, teacher_bias))
    student = transform(linear_reference(hidden, weight, lora)[:, :V], bias, LogitTransform(scale, softcap))[0]
    with torch.no_grad():
        how = LogitTransform(teacher_scale, teacher_softcap)
        logits = linear_reference(teacher_hidden, teacher_weight, teacher_lora)[:, :V]
        teacher = transform(logits, teacher_bias, how)[0]
    return distillation_reference(student, teacher, **options)
