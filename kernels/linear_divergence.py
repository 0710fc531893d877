"""Divergence between a student's and a teacher's next-token distributions, from hidden states; no logits are stored.

    s = transform(hidden @ weight.T + bias) / T,  q = softmax(s)          student
    t = the same of the teacher,                  p = softmax(t)          teacher

    forward_kl  KL(p || q) = sum p (t - s) - lse_t + lse_s                 d/ds = q - p
    reverse_kl  KL(q || p) = sum q (s - t) - lse_s + lse_t                 d/ds = q (log q - log p - KL(q || p))
    jsd         beta KL(p || m) + (1 - beta) KL(q || m), m = (1 - beta) q + beta p
                                                                           d/ds = (1 - beta) q (log q/m - KL(q || m))
    loss = sum over rows of [T^2 sum_k weight_k D_k + ce_weight CE] / num_items,  CE at T = 1 as in linear_cross_entropy.py

Shapes    hidden: (N, Hs)  weight: (Vs, Hs)  teacher_hidden: (N, Ht)  teacher_weight: (Vt, Ht)  labels: (N,)
Vocabulary  the first V = min(Vs, Vt, vocab_size) rows of either head. What lies beyond is padding and takes no part.
Method    as in linear_cross_entropy.py, with a second workspace for the teacher's logits: four products in all. The row
          kernel makes one pass for all statistics, one more for the JSD, and one that writes the student's gradient in place.
Numerics  log-ratios are formed from differences that vanish where both logits agree: a student equal to its teacher gives
          loss 0 and gradient 0 exactly. Softmax and sums in fp32.
Source    generalised JSD and its convention: Agarwal et al. 2023 (GKD), arXiv:2306.13649, as in TRL; T^2: Hinton et al. 2015,
          arXiv:1503.02531; gradients in the forward as in linear_cross_entropy.py
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._chunks import (
    WORKSPACE_MB,
    HeadGradients,
    Needs,
    Rows,
    RowSelection,
    all_rows,
    chunk_bounds,
    compute_dtype,
    project,
    put,
    rescale_,
    stats_dtype,
    take,
    workspace,
)
from ._rows import LogitTransform, fold, load_label_logit, load_logits, transform
from ._triton import tl, triton, use_triton
from .linear_cross_entropy import selected_rows

BLOCK, WARPS = 2048, 8
KINDS = ("forward_kl", "reverse_kl", "jsd")
FIELDS = (
    "loss", "divergence", "log_prob", "entropy", "is_top1", "forward_kl", "reverse_kl", "agrees",
    "teacher_log_prob", "teacher_entropy",
)  # fmt: skip


class LinearDivergence(NamedTuple):
    """What `linear_divergence` returns. Per-token values are fp32 (fp64 for fp64 inputs), nats, 0 where ignored.

    All but `divergence` are of the distributions at temperature 1. Without labels, the fields about them are 0.
    """

    loss: Tensor  # scalar, differentiable in hidden, weight and bias
    divergence: (
        Tensor  # (N,) sum of the weighted divergences at the loss's temperature, times T^2 if the loss is
    )
    log_prob: Tensor  # (N,) the student's log-probability of the label
    entropy: Tensor  # (N,) the student's entropy
    is_top1: Tensor  # (N,) bool, whether no token is likelier than the label for the student
    forward_kl: Tensor  # (N,) KL(teacher || student)
    reverse_kl: Tensor  # (N,) KL(student || teacher)
    agrees: Tensor  # (N,) bool, whether student and teacher have a likeliest token in common
    teacher_log_prob: Tensor  # (N,) the teacher's log-probability of the label
    teacher_entropy: Tensor  # (N,) the teacher's entropy


@dataclass(frozen=True)
class DivergenceOptions:
    """Scalars of one call. See `linear_divergence`."""

    forward_kl: float = 0.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    beta: float = 0.5
    ce_weight: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale_by_temperature_squared: bool = True
    student: LogitTransform = field(default_factory=LogitTransform)
    teacher: LogitTransform = field(default_factory=LogitTransform)
    logits_dtype: torch.dtype | None = None
    workspace_mb: float = WORKSPACE_MB

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}.")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must lie in [0, 1], got {self.beta}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}.")

    @property
    def divergence_scale(self) -> float:
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0


def divergence_weights(kind: str | Mapping[str, float], beta: float) -> dict[str, float]:
    """{kind: weight}, with the JSD at beta 0 and 1 replaced by the KL that it tends to (after division by beta)."""
    given = {kind: 1.0} if isinstance(kind, str) else dict(kind)
    if not given or set(given) - set(KINDS):
        raise ValueError(
            f"kind must be one of {', '.join(KINDS)}, or a mapping of these to weights; got {kind!r}."
        )
    weights = dict.fromkeys(KINDS, 0.0)
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


def linear_divergence_reference(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    kind: str | Mapping[str, float] = "forward_kl", beta: float = 0.5, labels: Tensor | None = None,
    ce_weight: float = 0.0, temperature: float = 1.0, num_items: float | None = None,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, scale: float = 1.0, teacher_scale: float = 1.0,
    softcap: float | None = None, teacher_softcap: float | None = None, label_smoothing: float = 0.0,
    z_loss: float = 0.0, scale_by_temperature_squared: bool = True, ignore_index: int = -100,
    vocab_size: int | None = None,
) -> LinearDivergence:  # fmt: skip
    """What the op must equal, in plain torch. Tests and benchmarks import this one."""
    V = min(weight.shape[0], teacher_weight.shape[0], vocab_size or weight.shape[0])
    dtype = stats_dtype(hidden.dtype)
    s = F.linear(hidden, weight[:V]).to(dtype)
    s = transform(s, None if bias is None else bias[:V], LogitTransform(scale, softcap))[0]
    with torch.no_grad():
        t = F.linear(teacher_hidden, teacher_weight[:V]).to(dtype)
        t = transform(
            t,
            None if teacher_bias is None else teacher_bias[:V],
            LogitTransform(teacher_scale, teacher_softcap),
        )[0]
    keep = torch.ones_like(s[:, 0], dtype=torch.bool) if labels is None else labels != ignore_index
    label = torch.zeros_like(s[:, 0], dtype=torch.int64) if labels is None else labels.clamp(min=0)
    has_label = keep if labels is not None else torch.zeros_like(keep)
    q, p = s.log_softmax(-1), t.log_softmax(-1)
    log_prob, teacher_log_prob = (x.gather(1, label[:, None]).squeeze(1) * has_label for x in (q, p))
    ce = -(1 - label_smoothing) * log_prob - label_smoothing * q.mean(-1) + z_loss * s.logsumexp(-1).square()
    divergence = divergence_reference(s, t, kind=kind, beta=beta, temperature=temperature)
    divergence = divergence * (temperature**2 if scale_by_temperature_squared else 1.0)
    loss = (divergence + ce_weight * ce)[keep].sum() / (
        keep.sum().clamp(min=1) if num_items is None else num_items
    )
    agrees = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    fields = (
        divergence, log_prob, -(q.exp() * q).sum(-1), (log_prob >= q.amax(-1)) & has_label,
        (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1), agrees, teacher_log_prob, -(p.exp() * p).sum(-1),
    )  # fmt: skip
    return LinearDivergence(loss, *((x * keep).detach() for x in fields))


@triton.jit
def _log_ratios(log_q, log_p, beta):
    """(log q/m, log p/m) with m = (1 - beta) q + beta p. Exactly 0 where log_q == log_p, finite where q or p underflows."""
    d = log_p - log_q
    e = tl.exp(-tl.abs(d))
    share = tl.where(d > 0, 1.0 - beta, beta)  # of the smaller of the two probabilities in m
    ratio = tl.where(d > 0, -d, 0.0) - tl.log(1.0 + share * (e - 1.0))
    return ratio, ratio + d


@triton.jit
def _divergence_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, grad_ptr, out_ptr,
    stride_student, stride_teacher, stride_grad, stride_out, V,
    scale, softcap, teacher_scale, teacher_softcap, temperature, forward_kl, reverse_kl, jsd, beta,
    divergence_scale, ce_weight, smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_CE: tl.constexpr, HAS_JSD: tl.constexpr, HAS_REVERSE: tl.constexpr,
    WRITE_GRAD: tl.constexpr, ALIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    grad_ptr += row * stride_grad
    inv_t = 1.0 / temperature
    label = tl.full((), -1, tl.int64)
    s_label = tl.full((), 0.0, tl.float32)
    t_label = tl.full((), 0.0, tl.float32)
    if HAS_LABELS:
        label = tl.load(labels_ptr + row)
        s_label = load_label_logit(student_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        t_label = load_label_logit(
            teacher_ptr,
            teacher_bias_ptr,
            label,
            V,
            teacher_scale,
            teacher_softcap,
            HAS_TEACHER_BIAS,
            HAS_TEACHER_SOFTCAP,
        )

    # One pass: maxima, log-partitions, entropies and both KLs at temperature 1, and the KLs' sums at T where T is not 1.
    lanes = tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.float32)
    s_top = zero - 1e30
    t_top = zero - 1e30
    t_at_s_top = zero - 1e30
    s_total, s_entropy, s_ratio, s_total_T, s_ratio_T = zero, zero, zero, zero, zero
    t_total, t_entropy, t_ratio, t_total_T, t_ratio_T = zero, zero, zero, zero, zero
    s_plain = zero
    for start in range(0, V, BLOCK):
        cols = start + lanes
        mask = cols < V
        s, _ = load_logits(student_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        t, _ = load_logits(
            teacher_ptr,
            teacher_bias_ptr,
            cols,
            mask,
            teacher_scale,
            teacher_softcap,
            HAS_TEACHER_BIAS,
            HAS_TEACHER_SOFTCAP,
        )
        if HAS_SMOOTHING:
            s_plain += tl.where(mask, s, 0.0)
        if HAS_TEMPERATURE:
            _, s_total_T, s_ratio_T = fold(s * inv_t, s_top * inv_t, s_total_T, s_ratio_T, (s - t) * inv_t)
            _, t_total_T, t_ratio_T = fold(t * inv_t, t_top * inv_t, t_total_T, t_ratio_T, (t - s) * inv_t)
        t_at_s_top = tl.where(s > s_top, t, tl.where(s == s_top, tl.maximum(t, t_at_s_top), t_at_s_top))
        _, _, s_entropy = fold(s, s_top, s_total, s_entropy, s)
        s_top, s_total, s_ratio = fold(s, s_top, s_total, s_ratio, s - t)
        _, _, t_entropy = fold(t, t_top, t_total, t_entropy, t)
        t_top, t_total, t_ratio = fold(t, t_top, t_total, t_ratio, t - s)

    s_max = tl.max(s_top, 0)
    t_max = tl.max(t_top, 0)
    s_share = tl.exp(s_top - s_max)
    t_share = tl.exp(t_top - t_max)
    s_sum = tl.sum(s_total * s_share, 0)
    t_sum = tl.sum(t_total * t_share, 0)
    s_lse = s_max + tl.log(s_sum)
    t_lse = t_max + tl.log(t_sum)
    out_forward = tl.sum(t_ratio * t_share, 0) / t_sum - (t_lse - s_lse)
    out_reverse = tl.sum(s_ratio * s_share, 0) / s_sum - (s_lse - t_lse)
    agrees = tl.max(tl.where(s_top == s_max, t_at_s_top, -1e30), 0) >= t_max
    log_prob, is_top1, teacher_log_prob = 0.0, 0.0, 0.0
    if HAS_LABELS:
        log_prob, is_top1, teacher_log_prob = (
            s_label - s_lse,
            (s_label >= s_max).to(tl.float32),
            t_label - t_lse,
        )
    tl.store(out_ptr + 2 * stride_out + row, log_prob)
    tl.store(out_ptr + 3 * stride_out + row, s_lse - tl.sum(s_entropy * s_share, 0) / s_sum)
    tl.store(out_ptr + 4 * stride_out + row, is_top1)
    tl.store(out_ptr + 5 * stride_out + row, out_forward)
    tl.store(out_ptr + 6 * stride_out + row, out_reverse)
    tl.store(out_ptr + 7 * stride_out + row, agrees.to(tl.float32))
    tl.store(out_ptr + 8 * stride_out + row, teacher_log_prob)
    tl.store(out_ptr + 9 * stride_out + row, t_lse - tl.sum(t_entropy * t_share, 0) / t_sum)

    # The loss's own KLs and log-partitions, at its temperature.
    s_lse_T, t_lse_T, forward_T, reverse_T = s_lse, t_lse, out_forward, out_reverse
    if HAS_TEMPERATURE:
        s_share = tl.exp((s_top - s_max) * inv_t)
        t_share = tl.exp((t_top - t_max) * inv_t)
        s_sum = tl.sum(s_total_T * s_share, 0)
        t_sum = tl.sum(t_total_T * t_share, 0)
        s_lse_T = s_max * inv_t + tl.log(s_sum)
        t_lse_T = t_max * inv_t + tl.log(t_sum)
        forward_T = tl.sum(t_ratio_T * t_share, 0) / t_sum - (t_lse_T - s_lse_T)
        reverse_T = tl.sum(s_ratio_T * s_share, 0) / s_sum - (s_lse_T - t_lse_T)
    divergence = forward_kl * forward_T + reverse_kl * reverse_T

    kl_qm = tl.full((), 0.0, tl.float32)
    if HAS_JSD:
        p_sum = zero
        q_sum = zero
        for start in range(0, V, BLOCK):
            cols = start + lanes
            mask = cols < V
            s, _ = load_logits(student_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            t, _ = load_logits(
                teacher_ptr,
                teacher_bias_ptr,
                cols,
                mask,
                teacher_scale,
                teacher_softcap,
                HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP,
            )
            log_q = s * inv_t - s_lse_T
            log_p = t * inv_t - t_lse_T
            q_ratio, p_ratio = _log_ratios(log_q, log_p, beta)
            q_sum += tl.where(mask, tl.exp(log_q) * q_ratio, 0.0)
            p_sum += tl.where(mask, tl.exp(log_p) * p_ratio, 0.0)
        kl_qm = tl.sum(q_sum, 0)
        divergence += jsd * (beta * tl.sum(p_sum, 0) + (1.0 - beta) * kl_qm)

    divergence = divergence * divergence_scale
    loss = divergence
    if HAS_CE:
        ce = s_lse - s_label + z_loss * s_lse * s_lse
        if HAS_SMOOTHING:
            ce += smoothing * (s_label - tl.sum(s_plain, 0) / V)
        loss += ce_weight * ce
    tl.store(out_ptr + row, loss)
    tl.store(out_ptr + stride_out + row, divergence)

    if WRITE_GRAD:
        coefficient = divergence_scale * inv_t
        softmax_weight = ce_weight * (1.0 + 2.0 * z_loss * s_lse)
        for start in range(0, V, BLOCK):
            cols = start + lanes
            mask = cols < V
            s, slope = load_logits(student_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            t, _ = load_logits(
                teacher_ptr,
                teacher_bias_ptr,
                cols,
                mask,
                teacher_scale,
                teacher_softcap,
                HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP,
            )
            if ALIASED:  # the gradient is narrower than the logits it overwrites: all must be read before any is written
                tl.debug_barrier()
            log_q = s * inv_t - s_lse_T
            log_p = t * inv_t - t_lse_T
            q = tl.exp(log_q)
            grad = forward_kl * (q - tl.exp(log_p))
            if HAS_REVERSE:
                grad += reverse_kl * q * (log_q - log_p - reverse_T)
            if HAS_JSD:
                q_ratio, _ = _log_ratios(log_q, log_p, beta)
                grad += jsd * (1.0 - beta) * q * (q_ratio - kl_qm)
            grad = grad * coefficient
            if HAS_CE:
                if HAS_TEMPERATURE:
                    q = tl.exp(s - s_lse)
                ce_grad = softmax_weight * q
                ce_grad = tl.where(cols == label, ce_grad - ce_weight * (1.0 - smoothing), ce_grad)
                if HAS_SMOOTHING:
                    ce_grad -= ce_weight * smoothing / V
                grad += ce_grad
            tl.store(grad_ptr + cols, (grad * slope).to(grad_ptr.dtype.element_ty), mask=mask)


def _rows_triton(
    student, teacher, bias, teacher_bias, labels, grad, out, options: DivergenceOptions, write_grad: bool
):
    o = options
    _divergence_kernel[(student.shape[0],)](
        student, teacher, student if bias is None else bias, teacher if teacher_bias is None else teacher_bias,
        student if labels is None else labels, grad, out,
        student.stride(0), teacher.stride(0), grad.stride(0), out.stride(0), student.shape[1],
        float(o.student.scale), float(o.student.softcap or 1.0), float(o.teacher.scale), float(o.teacher.softcap or 1.0),
        float(o.temperature), float(o.forward_kl), float(o.reverse_kl), float(o.jsd), float(o.beta),
        float(o.divergence_scale), float(o.ce_weight), float(o.label_smoothing), float(o.z_loss),
        HAS_BIAS=bias is not None, HAS_TEACHER_BIAS=teacher_bias is not None,
        HAS_SOFTCAP=o.student.softcap is not None, HAS_TEACHER_SOFTCAP=o.teacher.softcap is not None,
        HAS_LABELS=labels is not None, HAS_TEMPERATURE=o.temperature != 1.0, HAS_SMOOTHING=o.label_smoothing > 0,
        HAS_CE=o.ce_weight != 0, HAS_JSD=o.jsd != 0, HAS_REVERSE=o.reverse_kl != 0,
        WRITE_GRAD=write_grad, ALIASED=grad.dtype != student.dtype, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _log_ratios_torch(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    d = log_p - log_q
    share = beta + (1 - 2 * beta) * (d > 0)
    ratio = (-d).clamp(max=0) - torch.log1p(share * torch.expm1(-d.abs()))
    return ratio, ratio + d


def _rows_torch(
    student, teacher, bias, teacher_bias, labels, grad, out, options: DivergenceOptions, write_grad: bool
):
    o = options
    s, slope = transform(student, bias, o.student)
    t, _ = transform(teacher, teacher_bias, o.teacher)
    log_q1, log_p1 = s.log_softmax(-1), t.log_softmax(-1)
    q1, p1 = log_q1.exp(), log_p1.exp()
    log_ratio = log_p1 - log_q1
    agrees = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    out[3], out[9] = -torch.linalg.vecdot(q1, log_q1), -torch.linalg.vecdot(p1, log_p1)
    out[5], out[6], out[7] = torch.linalg.vecdot(p1, log_ratio), -torch.linalg.vecdot(q1, log_ratio), agrees
    out[2] = out[4] = out[8] = 0
    if labels is not None:
        out[2], out[8] = (x.gather(1, labels[:, None]).squeeze(1) for x in (log_q1, log_p1))
        out[4] = s.gather(1, labels[:, None]).squeeze(1) >= s.amax(-1)

    log_q, log_p, q, p = log_q1, log_p1, q1, p1
    if o.temperature != 1.0:
        log_q, log_p = ((x / o.temperature).log_softmax(-1) for x in (s, t))
        q, p, log_ratio = log_q.exp(), log_p.exp(), log_p - log_q
    reverse = -torch.linalg.vecdot(q, log_ratio)
    divergence = o.forward_kl * torch.linalg.vecdot(p, log_ratio) + o.reverse_kl * reverse
    dlogits = o.forward_kl * (q - p)
    if o.reverse_kl:
        dlogits -= o.reverse_kl * q * (log_ratio + reverse[:, None])
    if o.jsd:
        q_ratio, p_ratio = _log_ratios_torch(log_q, log_p, o.beta)
        kl_qm = torch.linalg.vecdot(q, q_ratio)
        divergence += o.jsd * (o.beta * torch.linalg.vecdot(p, p_ratio) + (1 - o.beta) * kl_qm)
        dlogits += o.jsd * (1 - o.beta) * q * (q_ratio - kl_qm[:, None])
    divergence *= o.divergence_scale
    dlogits *= o.divergence_scale / o.temperature
    out[0] = out[1] = divergence
    if o.ce_weight:
        out[0] += o.ce_weight * _add_cross_entropy(s, q1, labels, o, dlogits)
    if write_grad:
        grad.copy_(dlogits * slope)


def _add_cross_entropy(s: Tensor, q: Tensor, labels: Tensor, o: DivergenceOptions, dlogits: Tensor) -> Tensor:
    """(n,) cross-entropy at temperature 1; adds ce_weight times its gradient to dlogits."""
    lse, s_label = s.logsumexp(-1), s.gather(1, labels[:, None]).squeeze(1)
    dlogits.addcmul_(q, (o.ce_weight * (1 + 2 * o.z_loss * lse))[:, None])
    dlogits.scatter_add_(
        1, labels[:, None], torch.full_like(lse, o.ce_weight * (o.label_smoothing - 1))[:, None]
    )
    dlogits -= o.ce_weight * o.label_smoothing / s.shape[1]
    return lse - s_label + o.z_loss * lse.square() + o.label_smoothing * (s_label - s.mean(-1))


@dataclass(frozen=True)
class LinearHead:
    """The inputs of one side: hidden (N, H), weight (V, H), bias (V,) or None."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def labelled(self, rows: Rows, vocab: int, dtype: torch.dtype) -> "LinearHead":
        """The labelled rows and the shared vocabulary, in the products' dtype."""
        bias = None if self.bias is None else self.bias[:vocab]
        return LinearHead(take(self.hidden, rows).to(dtype), self.weight[:vocab].to(dtype), bias)


def _linear_divergence(
    student: LinearHead, teacher: LinearHead, labels, rows: Rows, needs: Needs, vocab: int, o
):
    """(loss, per-token (10, N), d hidden, d weight, d bias)."""
    dtype = compute_dtype(student.hidden, student.weight)
    teacher_dtype = compute_dtype(teacher.hidden, teacher.weight)
    logits_dtype, teacher_logits_dtype = (
        torch.promote_types(d, o.logits_dtype or d) for d in (dtype, teacher_dtype)
    )
    total, device = student.hidden.shape[0], student.hidden.device
    gradients = HeadGradients(student.hidden, student.weight, student.bias, needs, rows, vocab)
    student, teacher = student.labelled(rows, vocab, dtype), teacher.labelled(rows, vocab, teacher_dtype)
    label_rows = None if labels is None else take(labels, rows)
    out = torch.empty(len(FIELDS), rows.count, dtype=stats_dtype(dtype), device=device)
    bounds = list(
        chunk_bounds(
            rows.count, vocab * (logits_dtype.itemsize + teacher_logits_dtype.itemsize), o.workspace_mb
        )
    )
    ws, teacher_ws = (
        workspace(bounds, vocab, logits_dtype, device),
        workspace(bounds, vocab, teacher_logits_dtype, device),
    )
    grad_ws = ws.view(dtype)[:, :vocab]  # in place: in the front of each row where the logits are wider
    each_row = _rows_triton if use_triton(grad_ws) else _rows_torch
    for start, stop in bounds:
        n = stop - start
        x = student.hidden[start:stop]
        project(x, student.weight, ws[:n])
        project(teacher.hidden[start:stop], teacher.weight, teacher_ws[:n])
        chunk_labels = None if label_rows is None else label_rows[start:stop]
        each_row(
            ws[:n],
            teacher_ws[:n],
            student.bias,
            teacher.bias,
            chunk_labels,
            grad_ws[:n],
            out[:, start:stop],
            o,
            needs.any,
        )
        if needs.any:
            gradients.add(grad_ws[:n], x, student.weight, start, stop)
    loss = out[0].sum() / rows.num_items if rows.num_items else out.new_zeros(())
    return loss, put(out.t(), rows, total).t(), *gradients.finish(rows, total, student.bias)


class LinearDivergenceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher, labels, rows, needs, vocab, options):
        with torch.autocast(hidden.device.type, enabled=False):
            student = LinearHead(hidden, weight, bias)
            loss, per_token, *gradients = _linear_divergence(
                student, teacher, labels, rows, needs, vocab, options
            )
        if needs.any:
            ctx.save_for_backward(*gradients, torch.ones_like(loss))
        ctx.mark_non_differentiable(per_token)
        ctx.set_materialize_grads(False)
        return loss, per_token

    @staticmethod
    def backward(ctx, grad_loss, _):
        *gradients, applied = ctx.saved_tensors
        rescale_([g for g in gradients if g is not None], grad_loss, applied)
        return *gradients, None, None, None, None, None, None


def linear_divergence(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    kind: str | Mapping[str, float] = "forward_kl", beta: float = 0.5, labels: Tensor | None = None,
    ce_weight: float = 0.0, temperature: float = 1.0, num_items: float | Tensor | None = None,
    bias: Tensor | None = None, teacher_bias: Tensor | None = None, scale: float = 1.0, teacher_scale: float = 1.0,
    softcap: float | None = None, teacher_softcap: float | None = None, label_smoothing: float = 0.0,
    z_loss: float = 0.0, scale_by_temperature_squared: bool = True, ignore_index: int = -100,
    vocab_size: int | None = None, logits_dtype: torch.dtype | None = None, rows: RowSelection | None = None,
    workspace_mb: float = WORKSPACE_MB,
) -> LinearDivergence:  # fmt: skip
    """Distillation loss of a student's head against a teacher's, mixed with hard cross-entropy in the same pass.

    The formulas are at the top of this file. No gradient goes to the teacher.

    Args:
        hidden: (N, Hs), fp32, fp16, bf16 (fp64 on CPU).
        weight: (Vs, Hs). Frozen if it does not require a gradient: its product is skipped.
        teacher_hidden: (N, Ht), any float dtype; Ht may differ from Hs.
        teacher_weight: (Vt, Ht).
        kind: "forward_kl", "reverse_kl" or "jsd"; or several with weights, {"forward_kl": 0.5, "reverse_kl": 0.5}.
        beta: of the JSD: m = (1 - beta) student + beta teacher. At 0 it stands for the forward KL, at 1 for the reverse.
        labels: (N,) int64. Rows with ignore_index take no part in either loss. Without labels, every row does.
        ce_weight: weight of the cross-entropy against labels, at temperature 1.
        temperature: divides both sides' logits in the divergences.
        num_items: what the sum over tokens is divided by; default the number of rows that take part.
        bias, teacher_bias: (Vs,) and (Vt,), added to the logits.
        scale, teacher_scale, softcap, teacher_softcap: what either model does to its logits, see `linear_cross_entropy`.
        label_smoothing, z_loss: of the cross-entropy, see `linear_cross_entropy`.
        scale_by_temperature_squared: multiply the divergences, value and gradient, by temperature^2, so that their
            gradients keep their size when the temperature changes.
        vocab_size: the real vocabulary, where both heads are padded beyond it.
        logits_dtype: torch.float32 keeps both sides' logits in fp32 under bf16 products: about half the gradient's error,
            for about 10 % of time and twice the workspace. Default: the products' dtype, as the models themselves do.
        rows: see `linear_cross_entropy`.
        workspace_mb: MiB for both chunks of logits.

    Returns:
        LinearDivergence: loss and per-token values.

    Raises:
        ValueError: shapes that do not fit, an unknown kind, an option out of range, or ce_weight without labels.
    """
    _check(hidden, weight, teacher_hidden, teacher_weight, labels, ce_weight, logits_dtype)
    options = DivergenceOptions(
        **divergence_weights(kind, beta), beta=beta, ce_weight=ce_weight, temperature=temperature,
        label_smoothing=label_smoothing, z_loss=z_loss, scale_by_temperature_squared=scale_by_temperature_squared,
        student=LogitTransform(scale, softcap), teacher=LogitTransform(teacher_scale, teacher_softcap),
        logits_dtype=logits_dtype, workspace_mb=workspace_mb,
    )  # fmt: skip
    vocab = min(weight.shape[0], teacher_weight.shape[0], vocab_size or weight.shape[0])
    if labels is None:
        selected = all_rows(hidden, num_items)
    else:
        selected = selected_rows(labels, rows, num_items, ignore_index)
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    teacher = LinearHead(teacher_hidden.detach(), teacher_weight.detach(), teacher_bias)
    needs = Needs.of(hidden, weight, bias)
    loss, per_token = LinearDivergenceFunction.apply(
        hidden, weight, bias, teacher, labels, selected, needs, vocab, options
    )
    _, divergence, log_prob, entropy, is_top1, forward_kl, reverse_kl, agrees, *of_teacher = per_token.unbind(
        0
    )
    return LinearDivergence(
        loss, divergence, log_prob, entropy, is_top1 > 0, forward_kl, reverse_kl, agrees > 0, *of_teacher
    )


def _check(hidden, weight, teacher_hidden, teacher_weight, labels, ce_weight, logits_dtype) -> None:
    for side, x, w in (("", hidden, weight), ("teacher_", teacher_hidden, teacher_weight)):
        if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
            raise ValueError(
                f"{side}hidden (N, H) and {side}weight (V, H) must share H: "
                f"{side}hidden is {tuple(x.shape)}, {side}weight is {tuple(w.shape)}."
            )
    if hidden.shape[0] != teacher_hidden.shape[0]:
        raise ValueError(
            f"Student and teacher must see the same tokens: hidden has {hidden.shape[0]} rows, "
            f"teacher_hidden {teacher_hidden.shape[0]}."
        )
    if labels is not None and labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"labels must be one per row of hidden: labels is {tuple(labels.shape)}, hidden {tuple(hidden.shape)}."
        )
    if labels is None and ce_weight:
        raise ValueError(f"ce_weight is {ce_weight}, but cross-entropy needs labels and none were given.")
    if logits_dtype not in (None, torch.float32):
        raise ValueError(f"logits_dtype must be None or torch.float32, got {logits_dtype}.")
