"""linear_divergence.py's rows in plain torch: the options of a call, and the twin of the row kernel, which takes the
same arguments and gives the same values.

Read it next to _divergence_kernels.py. `write_metrics`, `at_temperature`, `sums_of`, `value_of`, `gradient_of` and
`outcome_of` mirror the functions of the same name there, in nats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ._logits import LOWEST, LogitTransform, check_scalars, transform
from .divergence_kinds import BITS, ROW_KINDS, SECOND_PASS

FIELDS = (
    "loss", "divergence", "log_prob", "entropy", "is_top1", "forward_kl", "reverse_kl", "agrees",
    "teacher_log_prob", "teacher_entropy", *(f"{kind} of the loss" for kind in ROW_KINDS),
)  # fmt: skip
TERMS = len(FIELDS) - len(ROW_KINDS)  # the loss's divergences start here; those not asked for stay unwritten
(LOSS, DIVERGENCE, LOG_PROB, ENTROPY, IS_TOP1, FORWARD_KL, REVERSE_KL, AGREES, TEACHER_LOG_PROB, TEACHER_ENTROPY) = (
    range(TERMS)
)
# Bits of the kernel's FORM.
FORM_BIAS, FORM_SOFTCAP, FORM_TEACHER_BIAS, FORM_TEACHER_SOFTCAP, FORM_SHARE = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class DivergenceOptions:
    """Scalars of one call; `linear_divergence` explains them."""

    weights: Mapping[str, float]  # of ROW_KINDS; a kind of weight 0 is only measured
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

    @property
    def measured(self) -> int:
        """Return the kernel's MEASURED: bits of the kinds that take a second pass."""
        return sum([BITS[kind] for kind in self.weights if kind in SECOND_PASS])

    @property
    def graded(self) -> int:
        """Return the kernel's GRADED: bits of the kinds that have a gradient."""
        return sum([BITS[kind] for kind, weight in self.weights.items() if weight])

    @property
    def numbers(self) -> tuple[float | tuple[float, ...], ...]:
        """Return the kernel's scalars, from `scale` on."""
        return (*self.of_logits, *self.of_kinds, float(self.ce_weight), float(self.label_smoothing), float(self.z_loss))

    @property
    def of_logits(self) -> tuple[float, ...]:
        """Return the kernel's scalars that logits and their distributions depend on."""
        return (
            float(self.student.scale), float(self.student.softcap or 1.0), float(self.teacher.scale),
            float(self.teacher.softcap or 1.0), float(self.teacher_share), float(self.temperature),
        )  # fmt: skip

    @property
    def of_kinds(self) -> tuple[float | tuple[float, ...], ...]:
        """Return the kernel's scalars that the divergences depend on. The weights are one argument, a tuple."""
        weights = tuple(self.weight(kind) for kind in ROW_KINDS)
        return weights, float(self.beta), float(self.alpha), float(self.divergence_scale)

    @property
    def flags(self) -> dict[str, bool | int]:
        """Return the kernel's constants that depend on these options."""
        return {
            "OWN_SUMS": self.temperature != 1.0 or self.teacher_share != 1.0,
            "HAS_SMOOTHING": self.label_smoothing > 0, "HAS_CE": self.ce_weight != 0,
            "MEASURED": self.measured, "GRADED": self.graded,
        }  # fmt: skip


@dataclass(frozen=True)
class RowInputs:
    """A chunk of logits of both sides, with the labels and weights of its rows."""

    student: Tensor  # (n, V), raw
    teacher: Tensor  # (n, V), raw
    bias: Tensor | None  # (V,)
    teacher_bias: Tensor | None
    labels: Tensor | None  # (n,) int64
    token_weight: Tensor | None  # (n,) fp32


def form_of(x: RowInputs, o: DivergenceOptions) -> int:
    """Return the kernel's FORM: what the logits of a call are made of."""
    parts = {
        FORM_BIAS: x.bias is not None,
        FORM_SOFTCAP: o.student.softcap is not None,
        FORM_TEACHER_BIAS: x.teacher_bias is not None,
        FORM_TEACHER_SOFTCAP: o.teacher.softcap is not None,
        FORM_SHARE: o.teacher_share != 1.0,
    }
    return sum(bit for bit, there in parts.items() if there)


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
        slope = slope * x.token_weight[:, None]  # the row's weight is a factor of its gradient
    if grad is not None and dlogits is not None:
        grad.copy_(dlogits.mul_(slope))


def write_metrics(s: Tensor, t: Tensor, labels: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write the metrics, which are at temperature 1; return (log q, log p, q) (n, V), with LOWEST in place of -inf."""
    exact = s.log_softmax(-1), t.log_softmax(-1)  # with -inf where a token is ruled out
    log_q, log_p = (log_probs.clamp(min=LOWEST) for log_probs in exact)
    q, p = log_q.exp(), log_p.exp()
    out[ENTROPY], out[TEACHER_ENTROPY] = -torch.linalg.vecdot(q, log_q), -torch.linalg.vecdot(p, log_p)
    out[FORWARD_KL], out[REVERSE_KL] = kl(p, log_p, log_q), kl(q, log_q, log_p)
    out[AGREES] = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    out[LOG_PROB] = out[IS_TOP1] = out[TEACHER_LOG_PROB] = 0  # without labels they stay so
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
    """Both sides at the loss's temperature, each (n, V) with LOWEST for -inf."""

    log_q: Tensor
    log_p: Tensor
    q: Tensor
    p: Tensor


# What a kind computes of each entry, (n, V) each: `sums_of` and `gradient_of` use it.
Pieces = tuple[Tensor, Tensor]


def pieces_of(kind: str, x: Distributions, beta: float, alpha: float) -> Pieces:
    if kind == "jsd":
        q_ratio, p_ratio = log_ratios(x, beta)
        return p_ratio, q_ratio
    if kind == "skew_kl":
        q_ratio, p_ratio = log_ratios(x, alpha)
        return p_ratio, (x.p - x.q) * q_ratio.exp()  # the second: q (p/m - 1) / (1 - alpha)
    if kind == "skew_reverse_kl":
        ratio, _ = log_ratios(x, 1 - alpha)
        return ratio, ratio - alpha * torch.expm1(ratio)
    assert kind == "tvd"
    return (x.q - x.p).abs(), torch.sign(x.log_q - x.log_p)


def sums_of(kind: str, x: Distributions, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Return the two sums (n,) of a kind: `value_of` makes its value of both, `gradient_of` takes the second."""
    first, second = pieces
    dot = torch.linalg.vecdot
    if kind == "jsd":
        return dot(x.p, first), dot(x.q, second)
    if kind == "skew_kl":
        return dot(x.p, first), second.sum(-1)
    if kind == "skew_reverse_kl":
        return dot(x.q, first), dot(x.q, second)
    assert kind == "tvd"
    return first.sum(-1), dot(x.q, second)


def value_of(kind: str, first: Tensor, second: Tensor, beta: float) -> Tensor:
    """Return a divergence (n,) from its sums."""
    if kind == "jsd":
        return beta * first + (1 - beta) * second
    return 0.5 * first if kind == "tvd" else first


def gradient_of(kind: str, x: Distributions, pieces: Pieces, mean: Tensor, beta: float, alpha: float) -> Tensor:
    """Return the gradient (n, V) with respect to the student's logits / T. mean: the second sum (n,)."""
    piece, mean = pieces[1], mean[:, None]
    if kind == "jsd":
        return (1 - beta) * x.q * (piece - mean)
    if kind == "skew_kl":
        return (1 - alpha) ** 2 * (x.q * mean - piece)
    if kind == "skew_reverse_kl":
        return x.q * (piece - mean)
    assert kind == "tvd"
    return 0.5 * x.q * (piece - mean)


class Outcomes(NamedTuple):
    """q, p and d = log p/q of few outcomes, (n, K) each, all 0 for an outcome that is not there."""

    q: Tensor
    p: Tensor
    d: Tensor

    def over_mixture(self, share: float) -> tuple[Tensor, Tensor]:
        """Return (log q/m, log p/m), m = (1 - share) q + share p."""
        # relative to the larger of both, so that nothing overflows
        of_smaller = torch.where(self.d > 0, self.d.new_tensor(1 - share), self.d.new_tensor(share))  # numbers: fp32
        log_m = torch.log1p(of_smaller * torch.expm1(-self.d.abs()))
        return (-self.d).clamp(max=0) - log_m, self.d.clamp(max=0) - log_m


def outcome_of(kind: str, x: Outcomes, beta: float, alpha: float) -> tuple[Tensor, Tensor]:
    """Return (divergence (n,), gradient (n, K) in log q but for a constant) of few outcomes: see _sparse_rows.py."""
    if kind == "forward_kl":
        return (x.p * x.d).sum(-1), -x.p
    if kind == "reverse_kl":
        return -(x.q * x.d).sum(-1), x.q * -x.d
    if kind == "jsd":
        of_q, of_p = x.over_mixture(beta)
        return (beta * x.p * of_p + (1 - beta) * x.q * of_q).sum(-1), (1 - beta) * x.q * of_q
    if kind == "skew_kl":
        of_p = x.over_mixture(alpha)[1]
        return (x.p * of_p).sum(-1), (alpha - 1) * x.q * torch.expm1(of_p)
    if kind == "skew_reverse_kl":
        of_q = x.over_mixture(1 - alpha)[0]
        return (x.q * of_q).sum(-1), x.q * (of_q - alpha * torch.expm1(of_q))
    assert kind == "tvd"
    return (x.p - x.q).abs().sum(-1) / 2, x.q * torch.sign(-x.d) / 2


def kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) (n,), infinite where p has mass and q has none."""
    return inf_if_ruled_out(torch.linalg.vecdot(p, log_p - log_q))


def inf_if_ruled_out(value: Tensor) -> Tensor:
    """Return a KL as infinite where one side has mass and the other probability 0, whose logarithm is LOWEST here."""
    return value.masked_fill(value > 1e20, torch.inf)  # below any other KL


def log_ratios(x: Distributions, p_share: float) -> tuple[Tensor, Tensor]:
    """Return (log q/m, log p/m), m = p_share p + (1 - p_share) q. Exactly 0 where q is p; finite if one underflows."""
    d = x.log_p - x.log_q
    p_weight, q_weight = d.new_tensor(p_share), d.new_tensor(1 - p_share)
    larger, smaller = torch.where(d > 0, p_weight, q_weight), torch.where(d > 0, q_weight, p_weight)
    below = smaller * torch.expm1(-d.abs())  # m - 1 relative to the larger probability, unrounded by the 1
    m = larger + smaller * torch.exp(-d.abs())
    log_m = torch.where(m < 0.5, m.log(), below.log1p())  # each form where it keeps its digits
    return (-d).clamp(max=0) - log_m, d.clamp(max=0) - log_m


def _divergences(log_q: Tensor, log_p: Tensor, o: DivergenceOptions, terms: Tensor, write_grad: bool):
    """Return the weighted divergences (n,), and their gradient (n, V) with respect to the student's logits or None.

    Fill terms (len(ROW_KINDS), n) with each divergence that the options ask for.
    """
    x = Distributions(log_q, log_p, log_q.exp(), log_p.exp())
    forward, reverse = kl(x.p, log_p, log_q), kl(x.q, log_q, log_p)
    divergence = torch.zeros_like(log_q[:, 0])  # (n,)
    dlogits = torch.zeros_like(log_q) if write_grad else None
    for row, kind in enumerate(ROW_KINDS):
        if kind not in o.weights:
            continue
        pieces = mean = None
        if kind in SECOND_PASS:
            pieces = pieces_of(kind, x, o.beta, o.alpha)
            first, mean = sums_of(kind, x, pieces)
            value = value_of(kind, first, mean, o.beta)
        else:
            value = forward if kind == "forward_kl" else reverse
        terms[row] = value * o.divergence_scale
        if o.weight(kind):  # 0 * an infinite divergence would be NaN
            divergence += o.weight(kind) * terms[row]
        if dlogits is not None and o.weight(kind):
            add_gradient(dlogits, kind, x, pieces, reverse if mean is None else mean, o)
    return divergence, dlogits


def add_gradient(
    dlogits: Tensor, kind: str, x: Distributions, pieces: Pieces | None, mean: Tensor, o: DivergenceOptions
) -> None:
    """Add a kind's weighted gradient to dlogits (n, V). mean: see `gradient_of`; of the reverse KL its value."""
    if pieces is not None:
        gradient = gradient_of(kind, x, pieces, mean, o.beta, o.alpha)
    elif kind == "forward_kl":
        gradient = x.q - x.p
    else:
        gradient = x.q * (x.log_q - x.log_p - mean[:, None])
    dlogits += (o.weight(kind) * o.divergence_scale / o.temperature) * gradient


def _cross_entropy(s: Tensor, q: Tensor, labels, o: DivergenceOptions, dlogits: Tensor | None) -> Tensor:
    """Return the cross-entropy (n,) at temperature 1, and add ce_weight times its gradient to dlogits."""
    lse, s_label = s.logsumexp(-1), s.gather(1, labels[:, None]).squeeze(1)  # (n,) each
    if dlogits is not None:
        dlogits.addcmul_(q, (o.ce_weight * (1 + 2 * o.z_loss * lse))[:, None])  # d lse = q, d lse^2 = 2 lse q
        dlogits.scatter_add_(1, labels[:, None], torch.full_like(lse, o.ce_weight * (o.label_smoothing - 1))[:, None])
        dlogits -= o.ce_weight * o.label_smoothing / s.shape[1]
    ce = lse - s_label + o.z_loss * lse.square()
    return ce + o.label_smoothing * (s_label - s.mean(-1)) if o.label_smoothing else ce
