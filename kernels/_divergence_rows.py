"""Row kernels of linear_divergence.py: two chunks of logits in, per-token values and the student's gradient out.

Each row is read once for all statistics, once more for the JSD, and once to write the gradient over the student's
logits. The Triton kernel and its torch twin take the same arguments. Formulas: linear_divergence.py.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._rows import LogitTransform, fold, load_label_logit, load_logits, transform
from ._triton import tl, triton, use_triton

BLOCK, WARPS = 4096, 32  # half of either with the JSD, which computes more a number
FIELDS = (
    "loss", "divergence", "log_prob", "entropy", "is_top1", "forward_kl", "reverse_kl", "agrees",
    "teacher_log_prob", "teacher_entropy",
)  # fmt: skip


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


@triton.jit
def _log_ratios(log_q, log_p, beta):
    """(q, p, log q/m, log p/m), m = (1 - beta) q + beta p.

    The ratios are exactly 0 where log_q == log_p, and finite where q or p underflows.
    """
    d = log_p - log_q
    e = tl.exp(-tl.abs(d))
    share = tl.where(d > 0, 1.0 - beta, beta)  # of the smaller of the two probabilities in m
    log_m = tl.log(1.0 + share * (e - 1.0))  # over the larger of the two
    larger = tl.exp(tl.maximum(log_q, log_p))
    q = tl.where(d > 0, larger * e, larger)
    p = tl.where(d > 0, larger, larger * e)
    return q, p, tl.minimum(-d, 0.0) - log_m, tl.minimum(d, 0.0) - log_m


@triton.jit
def _divergence_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, token_weight_ptr, grad_ptr, out_ptr,
    stride_student, stride_teacher, stride_grad, stride_out, V,
    scale, softcap, teacher_scale, teacher_softcap, temperature, forward_kl, reverse_kl, jsd, beta,
    divergence_scale, ce_weight, smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_CE: tl.constexpr, HAS_JSD: tl.constexpr, HAS_FORWARD: tl.constexpr,
    HAS_REVERSE: tl.constexpr,
    WRITE_GRAD: tl.constexpr, ALIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    grad_ptr += row * stride_grad
    inv_t = 1.0 / temperature
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

    # One pass: maxima, log-partitions, entropies and KLs at temperature 1, and the KLs' sums at T where T is not 1.
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
        s, _ = load_logits(student_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_last")
        t, _ = load_logits(
            teacher_ptr,
            teacher_bias_ptr,
            cols,
            mask,
            teacher_scale,
            teacher_softcap,
            HAS_TEACHER_BIAS,
            HAS_TEACHER_SOFTCAP,
            "evict_last",
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

    if HAS_JSD:
        p_sum = zero
        q_sum = zero
        for start in range(0, V, BLOCK):
            cols = start + lanes
            mask = cols < V
            s, _ = load_logits(student_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_last")
            t, _ = load_logits(
                teacher_ptr,
                teacher_bias_ptr,
                cols,
                mask,
                teacher_scale,
                teacher_softcap,
                HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP,
                "evict_last",
            )
            log_q = s * inv_t - s_lse_T
            log_p = t * inv_t - t_lse_T
            q, p, q_ratio, p_ratio = _log_ratios(log_q, log_p, beta)
            q_sum += tl.where(mask, q * q_ratio, 0.0)
            p_sum += tl.where(mask, p * p_ratio, 0.0)
        kl_qm = tl.sum(q_sum, 0)
        divergence += jsd * (beta * tl.sum(p_sum, 0) + (1.0 - beta) * kl_qm)

    divergence = divergence * divergence_scale
    loss = divergence
    if HAS_CE:
        ce = s_lse - s_label + z_loss * s_lse * s_lse
        if HAS_SMOOTHING:
            ce += smoothing * (s_label - tl.sum(s_plain, 0) / V)
        loss += ce_weight * ce
    token_weight = 1.0
    if HAS_TOKEN_WEIGHT:
        token_weight = tl.load(token_weight_ptr + row)
    tl.store(out_ptr + row, loss * token_weight)
    tl.store(out_ptr + stride_out + row, divergence)

    if WRITE_GRAD:
        coefficient = divergence_scale * inv_t
        softmax_weight = ce_weight * (1.0 + 2.0 * z_loss * s_lse)
        for start in range(0, V, BLOCK):
            cols = start + lanes
            mask = cols < V
            s, slope = load_logits(
                student_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_first"
            )
            t, _ = load_logits(
                teacher_ptr,
                teacher_bias_ptr,
                cols,
                mask,
                teacher_scale,
                teacher_softcap,
                HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP,
                "evict_first",
            )
            if (
                ALIASED
            ):  # the gradient is narrower than the logits it overwrites: all must be read before any is written
                tl.debug_barrier()
            log_q = s * inv_t - s_lse_T
            log_p = t * inv_t - t_lse_T
            grad = tl.zeros_like(s)
            if HAS_JSD:
                q, p, q_ratio, _ = _log_ratios(log_q, log_p, beta)
                grad += jsd * (1.0 - beta) * q * (q_ratio - kl_qm)
            else:
                q = tl.exp(log_q)
            if HAS_FORWARD:
                if not HAS_JSD:
                    p = tl.exp(log_p)
                grad += forward_kl * (q - p)
            if HAS_REVERSE:
                grad += reverse_kl * q * (log_q - log_p - reverse_T)
            grad = grad * coefficient
            if HAS_CE:
                if HAS_TEMPERATURE:
                    q = tl.exp(s - s_lse)
                ce_grad = softmax_weight * q
                ce_grad = tl.where(cols == label, ce_grad - ce_weight * (1.0 - smoothing), ce_grad)
                if HAS_SMOOTHING:
                    ce_grad -= ce_weight * smoothing / V
                grad += ce_grad
            grad = grad * slope * token_weight
            grad = grad.to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + cols, grad, mask=mask, eviction_policy="evict_first")


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


def _rows_triton(x: RowInputs, out: Tensor, grad: Tensor | None, o: DivergenceOptions) -> None:
    student, teacher = x.student, x.teacher
    write_grad = grad is not None
    grad = student if grad is None else grad
    _divergence_kernel[(student.shape[0],)](
        student, teacher, student if x.bias is None else x.bias, teacher if x.teacher_bias is None else x.teacher_bias,
        student if x.labels is None else x.labels, student if x.token_weight is None else x.token_weight, grad, out,
        student.stride(0), teacher.stride(0), grad.stride(0), out.stride(0), student.shape[1],
        float(o.student.scale), float(o.student.softcap or 1.0),
        float(o.teacher.scale), float(o.teacher.softcap or 1.0),
        float(o.temperature), float(o.forward_kl), float(o.reverse_kl), float(o.jsd), float(o.beta),
        float(o.divergence_scale), float(o.ce_weight), float(o.label_smoothing), float(o.z_loss),
        HAS_BIAS=x.bias is not None, HAS_TEACHER_BIAS=x.teacher_bias is not None,
        HAS_SOFTCAP=o.student.softcap is not None, HAS_TEACHER_SOFTCAP=o.teacher.softcap is not None,
        HAS_LABELS=x.labels is not None, HAS_TOKEN_WEIGHT=x.token_weight is not None,
        HAS_TEMPERATURE=o.temperature != 1.0, HAS_SMOOTHING=o.label_smoothing > 0,
        HAS_CE=o.ce_weight != 0, HAS_JSD=o.jsd != 0, HAS_FORWARD=o.forward_kl != 0, HAS_REVERSE=o.reverse_kl != 0,
        WRITE_GRAD=write_grad, ALIASED=grad.dtype != student.dtype,
        BLOCK=BLOCK // 2 if o.jsd else BLOCK, num_warps=WARPS // 2 if o.jsd else WARPS,
    )  # fmt: skip


def _log_ratios_torch(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    d = log_p - log_q
    share = beta + (1 - 2 * beta) * (d > 0).to(d.dtype)
    log_m = torch.log1p(share * torch.expm1(-d.abs()))
    return (-d).clamp(max=0) - log_m, d.clamp(max=0) - log_m


def _rows_torch(x: RowInputs, out: Tensor, grad: Tensor | None, o: DivergenceOptions) -> None:
    labels = x.labels
    s, slope = transform(x.student, x.bias, o.student)
    t = transform(x.teacher, x.teacher_bias, o.teacher)[0].to(s.dtype)
    log_q1, log_p1 = s.log_softmax(-1), t.log_softmax(-1)
    q1, p1 = log_q1.exp(), log_p1.exp()
    log_ratio = log_p1 - log_q1
    agrees = ((s == s.amax(-1, True)) & (t == t.amax(-1, True))).any(-1)
    out[3], out[9] = -torch.linalg.vecdot(q1, log_q1), -torch.linalg.vecdot(p1, log_p1)
    out[5], out[6], out[7] = torch.linalg.vecdot(p1, log_ratio), -torch.linalg.vecdot(q1, log_ratio), agrees
    out[2] = out[4] = out[8] = 0
    if labels is not None:
        out[2], out[8] = (log_probs.gather(1, labels[:, None]).squeeze(1) for log_probs in (log_q1, log_p1))
        out[4] = s.gather(1, labels[:, None]).squeeze(1) >= s.amax(-1)

    log_q, log_p = log_q1, log_p1
    if o.temperature != 1.0:
        log_q, log_p = ((logits / o.temperature).log_softmax(-1) for logits in (s, t))
    divergence, dlogits = _divergence_torch(log_q, log_p, o, grad is not None)
    out[0] = out[1] = divergence
    if o.ce_weight:
        out[0] += o.ce_weight * _cross_entropy_torch(s, q1, labels, o, dlogits)
    if x.token_weight is not None:
        out[0] *= x.token_weight
        slope = slope * x.token_weight[:, None]
    if grad is not None and dlogits is not None:
        grad.copy_(dlogits.mul_(slope))


def _divergence_torch(log_q: Tensor, log_p: Tensor, o: DivergenceOptions, write_grad: bool):
    """(n,) weighted divergences, and their gradient (n, V) with respect to the student's logits if wanted."""
    q, p, log_ratio = log_q.exp(), log_p.exp(), log_p - log_q
    reverse = -torch.linalg.vecdot(q, log_ratio)
    divergence = o.forward_kl * torch.linalg.vecdot(p, log_ratio) + o.reverse_kl * reverse
    dlogits = o.forward_kl * (q - p) if write_grad else None
    if dlogits is not None and o.reverse_kl:
        dlogits -= o.reverse_kl * q * (log_ratio + reverse[:, None])
    if o.jsd:
        q_ratio, p_ratio = _log_ratios_torch(log_q, log_p, o.beta)
        kl_qm = torch.linalg.vecdot(q, q_ratio)
        divergence += o.jsd * (o.beta * torch.linalg.vecdot(p, p_ratio) + (1 - o.beta) * kl_qm)
        if dlogits is not None:
            dlogits += o.jsd * (1 - o.beta) * q * (q_ratio - kl_qm[:, None])
    if dlogits is not None:
        dlogits *= o.divergence_scale / o.temperature
    return divergence * o.divergence_scale, dlogits


def _cross_entropy_torch(s: Tensor, q: Tensor, labels, o: DivergenceOptions, dlogits: Tensor | None) -> Tensor:
    """(n,) cross-entropy at temperature 1; adds ce_weight times its gradient to dlogits."""
    lse, s_label = s.logsumexp(-1), s.gather(1, labels[:, None]).squeeze(1)
    if dlogits is not None:
        dlogits.addcmul_(q, (o.ce_weight * (1 + 2 * o.z_loss * lse))[:, None])
        dlogits.scatter_add_(1, labels[:, None], torch.full_like(lse, o.ce_weight * (o.label_smoothing - 1))[:, None])
        dlogits -= o.ce_weight * o.label_smoothing / s.shape[1]
    return lse - s_label + o.z_loss * lse.square() + o.label_smoothing * (s_label - s.mean(-1))
