"""Row kernels of linear_divergence.py: two chunks of logits in, per-token values and the student's gradient out.

The Triton kernel (_divergence_kernels.py) and its torch twin take the same arguments. Formulas: linear_divergence.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ._divergence_kernels import divergence_kernel
from ._divergence_reference import likeliest_half
from ._logits import LOWEST, LogitTransform, check_scalars, transform
from ._triton import kept_launch, use_triton
from .divergence_kinds import ROW_KINDS

LANES, WARPS = 1024, 32  # half of either with a second pass, which computes more a number
HEAD_STEPS = 12  # at most, each of which quarters the interval that holds the threshold of the adaptive KL's head
VECTOR_BYTES = 16  # of a row that a thread reads at once
FIELDS = (
    "loss", "divergence", "log_prob", "entropy", "is_top1", "forward_kl", "reverse_kl", "agrees",
    "teacher_log_prob", "teacher_entropy", *(f"{kind} of the loss" for kind in ROW_KINDS),
)  # fmt: skip
SECOND_PASS = ("jsd", "skew_kl", "skew_reverse_kl", "tvd", "adaptive_kl")  # kinds that need the log-partitions first
PAIRED = ("jsd", "skew_kl", "skew_reverse_kl", "tvd")  # kinds whose gradients are made of both sides' ratio
TERMS = len(FIELDS) - len(ROW_KINDS)  # where the divergences of the loss begin; those not asked for stay unwritten


@dataclass(frozen=True)
class DivergenceOptions:
    """Scalars of one call. See `linear_divergence`."""

    weights: Mapping[str, float]  # of ROW_KINDS: with 0 a kind is measured alone
    beta: float = 0.5
    alpha: float = 0.1
    teacher_share: float = 1.0
    ce_weight: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale_by_temperature_squared: bool = True
    student: LogitTransform = field(default_factory=LogitTransform)
    teacher: LogitTransform = field(default_factory=LogitTransform)
    logits_dtype: torch.dtype | None = None

    def __post_init__(self):
        check_scalars(self.temperature, self.label_smoothing)
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must lie in [0, 1], got {self.beta}.")
        if not 0 <= self.alpha < 1:
            raise ValueError(
                f"alpha must lie in [0, 1), got {self.alpha}. It is a distribution's share in its own mixture with the "
                "other: at 1 nothing of the other is left, and the divergence is 0."
            )
        if not 0 <= self.teacher_share <= 1:
            raise ValueError(f"teacher_share must lie in [0, 1], got {self.teacher_share}.")

    @property
    def divergence_scale(self) -> float:
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0

    def weight(self, kind: str) -> float:
        return float(self.weights.get(kind, 0.0))


@dataclass(frozen=True)
class RowInputs:
    """A chunk of logits of both sides, and what its rows are held against."""

    student: Tensor  # (n, V), raw
    teacher: Tensor  # (n, V), raw
    bias: Tensor | None  # (V,)
    teacher_bias: Tensor | None
    labels: Tensor | None  # (n,) int64
    token_weight: Tensor | None  # (n,) fp32


def divergence_rows(x: RowInputs, out: Tensor, grad: Tensor | None, options: DivergenceOptions) -> None:
    """Fill out (len(FIELDS), n), and grad (n, V) unless it is None; grad may lie where the student's logits lie."""
    (_rows_triton if use_triton(out) else _rows_torch)(x, out, grad, options)


def _wanted(o: DivergenceOptions) -> dict[str, bool]:
    """The kernel's flags: what is measured, and what has a gradient."""
    return {
        "HAS_JSD": "jsd" in o.weights, "GRAD_JSD": o.weight("jsd") != 0,
        "HAS_SKEW": "skew_kl" in o.weights, "GRAD_SKEW": o.weight("skew_kl") != 0,
        "HAS_SKEW_REVERSE": "skew_reverse_kl" in o.weights, "GRAD_SKEW_REVERSE": o.weight("skew_reverse_kl") != 0,
        "HAS_TVD": "tvd" in o.weights, "GRAD_TVD": o.weight("tvd") != 0,
        "HAS_ADAPTIVE": "adaptive_kl" in o.weights,
        "HAS_GAPS": "tvd" in o.weights or "adaptive_kl" in o.weights,
        "GRAD_FORWARD": o.weight("forward_kl") != 0 or o.weight("adaptive_kl") != 0,
        "GRAD_REVERSE": o.weight("reverse_kl") != 0 or o.weight("adaptive_kl") != 0,
        "SECOND_PASS": any(kind in o.weights for kind in SECOND_PASS),
        "GRAD_PAIRED": any(o.weight(kind) != 0 for kind in PAIRED),
    }  # fmt: skip


def _rows_triton(x: RowInputs, out: Tensor, grad: Tensor | None, o: DivergenceOptions) -> None:
    student, teacher = x.student, x.teacher
    write_grad = grad is not None
    grad = student if grad is None else grad
    vocab = student.shape[1]
    padded = -(-vocab // 16) * 16
    if min(student.stride(0), teacher.stride(0), grad.stride(0)) < padded:  # rows that are no `workspace`'s
        padded = vocab
    flags = _wanted(o)
    second = flags["SECOND_PASS"]
    kept_launch(
        divergence_kernel, (student.shape[0],),
        student.stride(0), teacher.stride(0), grad.stride(0), out.stride(0), vocab, padded,
        float(o.student.scale), float(o.student.softcap or 1.0),
        float(o.teacher.scale), float(o.teacher.softcap or 1.0), float(o.teacher_share),
        float(o.temperature), *(o.weight(kind) for kind in ROW_KINDS), float(o.beta), float(o.alpha),
        float(o.divergence_scale), float(o.ce_weight), float(o.label_smoothing), float(o.z_loss),
        HAS_BIAS=x.bias is not None, HAS_TEACHER_BIAS=x.teacher_bias is not None,
        HAS_SOFTCAP=o.student.softcap is not None, HAS_TEACHER_SOFTCAP=o.teacher.softcap is not None,
        HAS_LABELS=x.labels is not None, HAS_TOKEN_WEIGHT=x.token_weight is not None,
        OWN_SUMS=o.temperature != 1.0 or o.teacher_share != 1.0, HAS_SHARE=o.teacher_share != 1.0,
        HAS_SMOOTHING=o.label_smoothing > 0, HAS_CE=o.ce_weight != 0,
        **flags, WRITE_GRAD=write_grad, ALIASED=grad.dtype != student.dtype, STEPS=HEAD_STEPS,
        LANES=LANES // 2 if second else LANES, VECTOR=max(1, VECTOR_BYTES // student.element_size()),
        num_warps=WARPS // 2 if second else WARPS,
    )(
        student, teacher, student if x.bias is None else x.bias, teacher if x.teacher_bias is None else x.teacher_bias,
        student if x.labels is None else x.labels, student if x.token_weight is None else x.token_weight, grad, out,
    )  # fmt: skip


class Distributions(NamedTuple):
    """Both sides at the loss's temperature, each (n, V), LOWEST in place of -inf, and whether a gradient is wanted."""

    log_q: Tensor
    log_p: Tensor
    q: Tensor
    p: Tensor
    write_grad: bool


# Of each kind: its value (n,), and if wanted its gradient (n, V) with respect to the student's logits / T.
Term = tuple[Tensor, Tensor | None]


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """(n,) KL(p || q), infinite where p has mass that q rules out."""
    value = torch.linalg.vecdot(p, log_p - log_q)
    return value.masked_fill(value > 1e20, torch.inf)


def _forward_kl(x: Distributions, _) -> Term:
    value = _kl(x.p, x.log_p, x.log_q)
    return value, x.q - x.p if x.write_grad else None


def _reverse_kl(x: Distributions, _) -> Term:
    value = _kl(x.q, x.log_q, x.log_p)
    return value, x.q * (x.log_q - x.log_p - value[:, None]) if x.write_grad else None


def _log_ratios(x: Distributions, p_share: float) -> tuple[Tensor, Tensor]:
    """(log q/m, log p/m), m = p_share p + (1 - p_share) q. Exactly 0 where q is p, finite where either underflows."""
    d = x.log_p - x.log_q
    of_p, of_q = d.new_tensor(p_share), d.new_tensor(1 - p_share)
    of_larger, of_smaller = torch.where(d > 0, of_p, of_q), torch.where(d > 0, of_q, of_p)
    below = of_smaller * torch.expm1(-d.abs())
    m = of_larger + of_smaller * torch.exp(-d.abs())
    log_m = torch.where(m < 0.5, m.log(), below.log1p())  # each where it keeps its digits
    return (-d).clamp(max=0) - log_m, d.clamp(max=0) - log_m


def _jsd(x: Distributions, o: DivergenceOptions) -> Term:
    q_ratio, p_ratio = _log_ratios(x, o.beta)
    kl_qm = torch.linalg.vecdot(x.q, q_ratio)
    value = o.beta * torch.linalg.vecdot(x.p, p_ratio) + (1 - o.beta) * kl_qm
    return value, (1 - o.beta) * x.q * (q_ratio - kl_qm[:, None]) if x.write_grad else None


def _skew_kl(x: Distributions, o: DivergenceOptions) -> Term:
    q_ratio, p_ratio = _log_ratios(x, o.alpha)
    value = torch.linalg.vecdot(x.p, p_ratio)
    rise = (x.p - x.q) * q_ratio.exp()  # q (p/m - 1) / (1 - alpha)
    gradient = (1 - o.alpha) ** 2 * (x.q * rise.sum(-1, True) - rise) if x.write_grad else None
    return value, gradient


def _skew_reverse_kl(x: Distributions, o: DivergenceOptions) -> Term:
    ratio, _ = _log_ratios(x, 1 - o.alpha)
    value = torch.linalg.vecdot(x.q, ratio)
    rise = ratio - o.alpha * torch.expm1(ratio)
    return value, x.q * (rise - torch.linalg.vecdot(x.q, rise)[:, None]) if x.write_grad else None


def _tvd(x: Distributions, _) -> Term:
    value = 0.5 * (x.q - x.p).abs().sum(-1)
    sign = torch.sign(x.log_q - x.log_p)
    return value, 0.5 * x.q * (sign - torch.linalg.vecdot(x.q, sign)[:, None]) if x.write_grad else None


def _adaptive_kl(x: Distributions, o: DivergenceOptions) -> Term:
    gaps = (x.p - x.q).abs()
    both = gaps.sum(-1)
    of_head = torch.where(both > 0, (gaps * likeliest_half(x.log_p)).sum(-1) / both, 0.5)
    forward, d_forward = _forward_kl(x, o)
    reverse, d_reverse = _reverse_kl(x, o)
    value = of_head * forward + (1 - of_head) * reverse
    if d_forward is None or d_reverse is None:
        return value, None
    return value, of_head[:, None] * d_forward + (1 - of_head)[:, None] * d_reverse


OF_KIND = {
    "forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd, "skew_kl": _skew_kl,
    "skew_reverse_kl": _skew_reverse_kl, "tvd": _tvd, "adaptive_kl": _adaptive_kl,
}  # fmt: skip


def _rows_torch(x: RowInputs, out: Tensor, grad: Tensor | None, o: DivergenceOptions) -> None:
    labels = x.labels
    s, slope = transform(x.student, x.bias, o.student)
    t = transform(x.teacher, x.teacher_bias, o.teacher)[0].to(s.dtype)
    label_log_probs = s.log_softmax(-1), t.log_softmax(-1)
    log_q1, log_p1 = (x.clamp(min=LOWEST) for x in label_log_probs)
    q1, p1 = log_q1.exp(), log_p1.exp()
    agrees = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    out[3], out[9] = -torch.linalg.vecdot(q1, log_q1), -torch.linalg.vecdot(p1, log_p1)
    out[5], out[6], out[7] = _kl(p1, log_p1, log_q1), _kl(q1, log_q1, log_p1), agrees
    out[2] = out[4] = out[8] = 0
    if labels is not None:
        out[2], out[8] = (log_probs.gather(1, labels[:, None]).squeeze(1) for log_probs in label_log_probs)
        out[4] = s.gather(1, labels[:, None]).squeeze(1) >= s.amax(-1)

    log_q, log_p = log_q1, log_p1
    if o.teacher_share != 1.0:
        t = torch.lerp(s.clamp(min=LOWEST), t.clamp(min=LOWEST), o.teacher_share)
    if o.temperature != 1.0 or o.teacher_share != 1.0:
        log_q, log_p = ((logits / o.temperature).log_softmax(-1).clamp(min=LOWEST) for logits in (s, t))
    divergence, dlogits = _divergence_torch(log_q, log_p, o, out[TERMS:], grad is not None)
    out[0] = out[1] = divergence
    if o.ce_weight:
        out[0] += o.ce_weight * _cross_entropy_torch(s, q1, labels, o, dlogits)
    if x.token_weight is not None:
        out[0] *= x.token_weight
        slope = slope * x.token_weight[:, None]
    if grad is not None and dlogits is not None:
        grad.copy_(dlogits.mul_(slope))


def _divergence_torch(log_q: Tensor, log_p: Tensor, o: DivergenceOptions, terms: Tensor, write_grad: bool):
    """(n,) weighted divergences, and their gradient (n, V) with respect to the student's logits if wanted.

    terms: (len(ROW_KINDS), n), filled with each divergence asked for.
    """
    q, p = log_q.exp(), log_p.exp()
    divergence = torch.zeros_like(log_q[:, 0])
    dlogits = torch.zeros_like(log_q) if write_grad else None
    for row, kind in enumerate(ROW_KINDS):
        if kind not in o.weights:
            continue
        sides = Distributions(log_q, log_p, q, p, write_grad and o.weight(kind) != 0)
        value, of_logits = OF_KIND[kind](sides, o)
        terms[row] = value * o.divergence_scale
        if o.weight(kind):  # where a divergence is infinite, 0 of it is no number
            divergence += o.weight(kind) * terms[row]
        if of_logits is not None:
            factor = o.weight(kind) * o.divergence_scale / o.temperature
            dlogits += factor * of_logits
    return divergence, dlogits


def _cross_entropy_torch(s: Tensor, q: Tensor, labels, o: DivergenceOptions, dlogits: Tensor | None) -> Tensor:
    """(n,) cross-entropy at temperature 1; adds ce_weight times its gradient to dlogits."""
    lse, s_label = s.logsumexp(-1), s.gather(1, labels[:, None]).squeeze(1)
    if dlogits is not None:
        dlogits.addcmul_(q, (o.ce_weight * (1 + 2 * o.z_loss * lse))[:, None])
        dlogits.scatter_add_(1, labels[:, None], torch.full_like(lse, o.ce_weight * (o.label_smoothing - 1))[:, None])
        dlogits -= o.ce_weight * o.label_smoothing / s.shape[1]
    ce = lse - s_label + o.z_loss * lse.square()
    return ce + o.label_smoothing * (s_label - s.mean(-1)) if o.label_smoothing else ce
