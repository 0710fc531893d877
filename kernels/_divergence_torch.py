"""The torch twin of linear_divergence.py's row kernel: it takes the same arguments and gives the same values.

Read it beside _divergence_kernels.py. `write_metrics` and `at_temperature` mirror the functions of the same name there;
the terms of the kinds mirror the sums of `second_pass`, and their gradients mirror `write_gradient`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._divergence_options import FIELDS, TERMS, DivergenceOptions, RowInputs
from ._logits import LOWEST, transform
from .divergence_kinds import ROW_KINDS

(
    LOSS, DIVERGENCE, LOG_PROB, ENTROPY, IS_TOP1, FORWARD_KL, REVERSE_KL, AGREES, TEACHER_LOG_PROB, TEACHER_ENTROPY,
) = range(len(FIELDS[:TERMS]))  # fmt: skip


def divergence_rows_torch(x: RowInputs, out: Tensor, grad: Tensor | None, o: DivergenceOptions) -> None:
    s, slope = transform(x.student, x.bias, o.student)
    t = transform(x.teacher, x.teacher_bias, o.teacher)[0].to(s.dtype)
    log_q1, log_p1, q1 = write_metrics(s, t, x.labels, out)
    log_q, log_p = at_temperature(s, t, log_q1, log_p1, o)
    divergence, dlogits = _divergences(log_q, log_p, o, out[TERMS:], grad is not None)
    out[LOSS] = out[DIVERGENCE] = divergence
    if o.ce_weight:
        out[LOSS] += o.ce_weight * _cross_entropy(s, q1, x.labels, o, dlogits)
    if x.token_weight is not None:
        out[LOSS] *= x.token_weight
        slope = slope * x.token_weight[:, None]
    if grad is not None and dlogits is not None:
        grad.copy_(dlogits.mul_(slope))


def write_metrics(s: Tensor, t: Tensor, labels: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write the metrics, which are at temperature 1; return (log q, log p, q) (n, V), with LOWEST in place of -inf."""
    exact = s.log_softmax(-1), t.log_softmax(-1)
    log_q, log_p = (log_probs.clamp(min=LOWEST) for log_probs in exact)
    q, p = log_q.exp(), log_p.exp()
    out[ENTROPY], out[TEACHER_ENTROPY] = -torch.linalg.vecdot(q, log_q), -torch.linalg.vecdot(p, log_p)
    out[FORWARD_KL], out[REVERSE_KL] = _kl(p, log_p, log_q), _kl(q, log_q, log_p)
    out[AGREES] = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    out[LOG_PROB] = out[IS_TOP1] = out[TEACHER_LOG_PROB] = 0
    if labels is not None:
        place = labels[:, None]
        out[LOG_PROB], out[TEACHER_LOG_PROB] = (log_probs.gather(1, place).squeeze(1) for log_probs in exact)
        out[IS_TOP1] = s.gather(1, place).squeeze(1) >= s.amax(-1)
    return log_q, log_p, q


def at_temperature(s: Tensor, t: Tensor, log_q: Tensor, log_p: Tensor, o: DivergenceOptions) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the loss's distributions. log_q, log_p: those at temperature 1."""
    if o.teacher_share != 1.0:
        t = torch.lerp(s.clamp(min=LOWEST), t.clamp(min=LOWEST), o.teacher_share)
    if o.temperature == 1.0 and o.teacher_share == 1.0:
        return log_q, log_p
    log_q, log_p = ((logits / o.temperature).log_softmax(-1).clamp(min=LOWEST) for logits in (s, t))
    return log_q, log_p


class Distributions(NamedTuple):
    """Both sides at the loss's temperature, each (n, V) with LOWEST for -inf, and whether to compute gradients."""

    log_q: Tensor
    log_p: Tensor
    q: Tensor
    p: Tensor
    write_grad: bool


# A kind's value (n,), and its gradient (n, V) with respect to the student's logits / T, or None if not needed.
Term = tuple[Tensor, Tensor | None]


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) (n,), infinite where p has mass and q has none."""
    value = torch.linalg.vecdot(p, log_p - log_q)
    return value.masked_fill(value > 1e20, torch.inf)


def _forward_kl(x: Distributions, _) -> Term:
    value = _kl(x.p, x.log_p, x.log_q)
    return value, x.q - x.p if x.write_grad else None


def _reverse_kl(x: Distributions, _) -> Term:
    value = _kl(x.q, x.log_q, x.log_p)
    return value, x.q * (x.log_q - x.log_p - value[:, None]) if x.write_grad else None


def log_ratios(x: Distributions, p_share: float) -> tuple[Tensor, Tensor]:
    """Return (log q/m, log p/m), m = p_share p + (1 - p_share) q. Exactly 0 where q is p; finite if one underflows."""
    d = x.log_p - x.log_q
    p_weight, q_weight = d.new_tensor(p_share), d.new_tensor(1 - p_share)
    larger, smaller = torch.where(d > 0, p_weight, q_weight), torch.where(d > 0, q_weight, p_weight)
    below = smaller * torch.expm1(-d.abs())
    m = larger + smaller * torch.exp(-d.abs())
    log_m = torch.where(m < 0.5, m.log(), below.log1p())  # each form where it keeps its digits
    return (-d).clamp(max=0) - log_m, d.clamp(max=0) - log_m


def _jsd(x: Distributions, o: DivergenceOptions) -> Term:
    q_ratio, p_ratio = log_ratios(x, o.beta)
    kl_qm = torch.linalg.vecdot(x.q, q_ratio)
    value = o.beta * torch.linalg.vecdot(x.p, p_ratio) + (1 - o.beta) * kl_qm
    return value, (1 - o.beta) * x.q * (q_ratio - kl_qm[:, None]) if x.write_grad else None


def _skew_kl(x: Distributions, o: DivergenceOptions) -> Term:
    q_ratio, p_ratio = log_ratios(x, o.alpha)
    value = torch.linalg.vecdot(x.p, p_ratio)
    rise = (x.p - x.q) * q_ratio.exp()  # q (p/m - 1) / (1 - alpha)
    gradient = (1 - o.alpha) ** 2 * (x.q * rise.sum(-1, True) - rise) if x.write_grad else None
    return value, gradient


def _skew_reverse_kl(x: Distributions, o: DivergenceOptions) -> Term:
    ratio, _ = log_ratios(x, 1 - o.alpha)
    value = torch.linalg.vecdot(x.q, ratio)
    rise = ratio - o.alpha * torch.expm1(ratio)
    return value, x.q * (rise - torch.linalg.vecdot(x.q, rise)[:, None]) if x.write_grad else None


def _tvd(x: Distributions, _) -> Term:
    value = 0.5 * (x.q - x.p).abs().sum(-1)
    sign = torch.sign(x.log_q - x.log_p)
    return value, 0.5 * x.q * (sign - torch.linalg.vecdot(x.q, sign)[:, None]) if x.write_grad else None


TERM_OF_KIND = {
    "forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd, "skew_kl": _skew_kl,
    "skew_reverse_kl": _skew_reverse_kl, "tvd": _tvd,
}  # fmt: skip


def _divergences(log_q: Tensor, log_p: Tensor, o: DivergenceOptions, terms: Tensor, write_grad: bool):
    """Return the weighted divergences (n,), and their gradient (n, V) with respect to the student's logits or None.

    Fill terms (len(ROW_KINDS), n) with each divergence that the options ask for.
    """
    q, p = log_q.exp(), log_p.exp()
    divergence = torch.zeros_like(log_q[:, 0])
    dlogits = torch.zeros_like(log_q) if write_grad else None
    for row, kind in enumerate(ROW_KINDS):
        if kind not in o.weights:
            continue
        sides = Distributions(log_q, log_p, q, p, write_grad and o.weight(kind) != 0)
        value, gradient = TERM_OF_KIND[kind](sides, o)
        terms[row] = value * o.divergence_scale
        if o.weight(kind):  # 0 * an infinite divergence would be NaN
            divergence += o.weight(kind) * terms[row]
        if gradient is not None:
            factor = o.weight(kind) * o.divergence_scale / o.temperature
            dlogits += factor * gradient
    return divergence, dlogits


def _cross_entropy(s: Tensor, q: Tensor, labels, o: DivergenceOptions, dlogits: Tensor | None) -> Tensor:
    """Return the cross-entropy (n,) at temperature 1, and add ce_weight times its gradient to dlogits."""
    lse, s_label = s.logsumexp(-1), s.gather(1, labels[:, None]).squeeze(1)
    if dlogits is not None:
        dlogits.addcmul_(q, (o.ce_weight * (1 + 2 * o.z_loss * lse))[:, None])
        dlogits.scatter_add_(1, labels[:, None], torch.full_like(lse, o.ce_weight * (o.label_smoothing - 1))[:, None])
        dlogits -= o.ce_weight * o.label_smoothing / s.shape[1]
    ce = lse - s_label + o.z_loss * lse.square()
    return ce + o.label_smoothing * (s_label - s.mean(-1)) if o.label_smoothing else ce
