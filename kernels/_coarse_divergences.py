"""Divergences of distributions with few outcomes: a teacher's K entries and the rest of the vocabulary as one more.

    kind             value                                  r = d value / d q, up to a constant
    forward_kl       sum p d                                (its gradient is -p in log q)
    reverse_kl       -sum q d                               -d
    jsd              b sum p log p/m + (1 - b) sum q log q/m    (1 - b) log q/m       m = (1 - b) q + b p
    skew_kl          sum p log p/m                          -(1 - a) (p/m - 1)        m = a p + (1 - a) q
    skew_reverse_kl  sum q log q/m                          log q/m - a (q/m - 1)     m = a q + (1 - a) p
    tvd              sum |p - q| / 2                        sign(q - p) / 2

with d = log p/q. Ratios come from d by expm1 and log1p, so they are exactly 0 where q and p are equal. The pieces of
the Triton kernel and their torch twin.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ._divergence_pieces import log_ratios, probabilities, sign, skew, skew_reverse
from ._logits import LOWEST
from ._triton import tl, triton

# Bits of KINDS, in the order of divergence_kinds.ROW_KINDS.
REVERSE = tl.constexpr(2)
JSD = tl.constexpr(4)
SKEW = tl.constexpr(8)
SKEW_REVERSE = tl.constexpr(16)
TVD = tl.constexpr(32)


@triton.jit
def weighted(weight, value):
    """Return weight * value; 0 for a kind that is only measured, whose value may be infinite."""
    return tl.where(weight != 0.0, weight * value, 0.0)


@triton.jit
def coarse_pieces(log_q, log_p, here, weights, beta, alpha, KINDS: tl.constexpr):
    """Return what outcomes add to each kind in KINDS, and minus their part of the gradient in log q.

    log_q, log_p: in base 2, a block of outcomes or one. here: which there are. weights: of the kinds behind the forward
    KL, which is not among the pieces. The values are in nats.
    """
    w_reverse, w_jsd, w_skew, w_skew_reverse, w_tvd = weights
    q, p, d, e = probabilities(log_q, log_p)
    q = tl.where(here, q, 0.0)
    p = tl.where(here, p, 0.0)
    d = tl.where(here, d, 0.0)
    zero = tl.where(here, 0.0, 0.0 * q)
    reverse, jsd, skewed, skewed_reverse, tvd, down = zero, zero, zero, zero, zero, zero
    if REVERSE & KINDS:
        reverse = -q * d * 0.6931471805599453
        down -= w_reverse * reverse
    if JSD & KINDS:
        of_q, of_p = log_ratios(d, e, beta)
        mine = (1.0 - beta) * q * of_q * 0.6931471805599453
        jsd = beta * p * of_p * 0.6931471805599453 + mine
        down -= w_jsd * mine
    if SKEW & KINDS:
        ratio, gap = skew(q, p, d, e, alpha)
        skewed = p * ratio * 0.6931471805599453
        down += w_skew * (1.0 - alpha) * (1.0 - alpha) * gap
    if SKEW_REVERSE & KINDS:
        ratio, slope = skew_reverse(d, e, alpha)
        skewed_reverse = q * ratio * 0.6931471805599453
        down -= w_skew_reverse * q * slope
    if TVD & KINDS:
        tvd = 0.5 * tl.abs(p - q)
        down -= w_tvd * 0.5 * q * sign(d)
    return reverse, jsd, skewed, skewed_reverse, tvd, down


class Coarse(NamedTuple):
    """Values (n,) by kind, and the gradient (n, outcomes) of their weighted sum in the log-probabilities of q."""

    values: dict[str, Tensor]
    gradient: Tensor


def coarse_divergences(
    log_q: Tensor, log_p: Tensor, here: Tensor, weights: Mapping[str, float], beta: float, alpha: float
) -> Coarse:
    """Return the divergences of log-probabilities (n, outcomes).

    Args:
        here: (n, outcomes) bool, which outcomes there are; the others count for nothing.
        weights: of ROW_KINDS; a kind of weight 0 is only measured.
        beta, alpha: as for `linear_divergence`.
    """
    log_q, log_p = (x.clamp(min=LOWEST).where(here, 0) for x in (log_q, log_p))
    sides = _Sides(log_q.exp().where(here, 0), log_p.exp().where(here, 0), log_p - log_q)
    values, gradient = {}, torch.zeros_like(log_q)
    for kind, weight in weights.items():
        values[kind], each = _KINDS[kind](sides, beta, alpha)
        if weight:
            gradient += weight * each
    return Coarse({kind: value.masked_fill(value > 1e20, torch.inf) for kind, value in values.items()}, gradient)


class _Sides(NamedTuple):
    """q, p and d = log p/q, all 0 for an outcome that is not there."""

    q: Tensor
    p: Tensor
    d: Tensor

    def over_mixture(self, share: float) -> tuple[Tensor, Tensor]:
        """Return (log q/m, log p/m), m = (1 - share) q + share p."""
        # relative to the larger of both, so that nothing overflows
        of_smaller = torch.where(self.d > 0, self.d.new_tensor(1 - share), self.d.new_tensor(share))  # numbers: fp32
        log_m = torch.log1p(of_smaller * torch.expm1(-self.d.abs()))
        return (-self.d).clamp(max=0) - log_m, self.d.clamp(max=0) - log_m


def _forward_kl(s: _Sides, *_: float) -> tuple[Tensor, Tensor]:
    return (s.p * s.d).sum(-1), -s.p


def _reverse_kl(s: _Sides, *_: float) -> tuple[Tensor, Tensor]:
    return -(s.q * s.d).sum(-1), s.q * -s.d


def _jsd(s: _Sides, beta: float, alpha: float) -> tuple[Tensor, Tensor]:
    of_q, of_p = s.over_mixture(beta)
    return (beta * s.p * of_p + (1 - beta) * s.q * of_q).sum(-1), (1 - beta) * s.q * of_q


def _skew_kl(s: _Sides, beta: float, alpha: float) -> tuple[Tensor, Tensor]:
    of_p = s.over_mixture(alpha)[1]
    return (s.p * of_p).sum(-1), (alpha - 1) * s.q * torch.expm1(of_p)


def _skew_reverse_kl(s: _Sides, beta: float, alpha: float) -> tuple[Tensor, Tensor]:
    of_q = s.over_mixture(1 - alpha)[0]
    return (s.q * of_q).sum(-1), s.q * (of_q - alpha * torch.expm1(of_q))


def _tvd(s: _Sides, *_: float) -> tuple[Tensor, Tensor]:
    return (s.p - s.q).abs().sum(-1) / 2, s.q * torch.sign(-s.d) / 2


_KINDS = {
    "forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd, "skew_kl": _skew_kl,
    "skew_reverse_kl": _skew_reverse_kl, "tvd": _tvd,
}  # fmt: skip
