"""Row kernels of linear_divergence.py: two chunks of logits in, per-token values and the student's gradient out.

Each row is read once for all statistics, once more for the JSD, and once to write the gradient over the student's
logits. The Triton kernel and its torch twin take the same arguments. Formulas: linear_divergence.py.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._rows import LogitTransform, transform
from ._triton import kept_launch, tl, triton, use_triton

LANES, WARPS = 1024, 32  # half of either with the JSD, which computes more a number
VECTOR_BYTES = 16  # of a row that a thread reads at once
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
def _base_two(z, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """(log2(e) * logit, d logit / d raw): powers of two are what the hardware has."""
    if HAS_SOFTCAP:
        tanh = 2.0 * tl.sigmoid(2.0 * (z * scale) / softcap) - 1.0
        x = tanh * (softcap * 1.4426950408889634)
        slope = (1.0 - tanh * tanh) * scale
    else:
        x = z * (scale * 1.4426950408889634)
        slope = tl.zeros_like(z) + scale
    return x, slope


@triton.jit
def _load(
    raw_ptr, bias_ptr, cols, V, padded, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """(logits in base 2, d logits / d raw). Beyond the vocabulary they are so low that they weigh nothing, yet finite.

    padded: columns that may be read. Where that is a multiple of 16, whatever V is, vectors are loaded at once.
    """
    mask = cols < V
    z = tl.load(raw_ptr + cols, mask=cols < padded, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x, slope = _base_two(z, scale, softcap, HAS_SOFTCAP)
    return tl.where(mask, x, -1e30), slope


@triton.jit
def _load_label(raw_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """The label's logit in base 2. NaN for a label outside [0, V), so that a wrong label shows."""
    inside = (label >= 0) & (label < V)
    z = tl.load(raw_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + label, mask=inside, other=0.0).to(tl.float32)
    x, _ = _base_two(z, scale, softcap, HAS_SOFTCAP)
    return x


@triton.jit
def _fold(x, other, top, total, own, ratio, inv_t):
    """Online sums of e = 2^(inv_t (x - top)), e (x - top) and e (x - other), over one thread's numbers at a time.

    x: (LANES, VECTOR). Rescaling to a new maximum costs once a vector, and nothing crosses threads until the row ends.
    """
    higher = tl.maximum(top, tl.max(x, 1))
    keep = tl.exp2((top - higher) * inv_t)
    below = x - higher[:, None]
    e = tl.exp2(below * inv_t)
    own = (own + (top - higher) * total) * keep + tl.sum(e * below, 1)
    total = total * keep + tl.sum(e, 1)
    ratio = ratio * keep + tl.sum(e * (x - other), 1)
    return higher, total, own, ratio


@triton.jit
def _entropy(below, total, own, share, whole):
    """In base 2, from `_fold`'s sums of each lane, whose maximum is `below` the row's."""
    return tl.log2(whole) - tl.sum((own + below * total) * share, 0) / whole


@triton.jit
def _log_ratios(log_q, log_p, beta):
    """(q, p, log q/m, log p/m) in base 2, m = (1 - beta) q + beta p.

    The ratios are exactly 0 where log_q == log_p, and finite where q or p underflows.
    """
    d = log_p - log_q
    e = tl.exp2(-tl.abs(d))
    share = tl.where(d > 0, 1.0 - beta, beta)  # of the smaller of the two probabilities in m
    log_m = tl.log2(1.0 + share * (e - 1.0))  # over the larger of the two
    larger = tl.exp2(tl.maximum(log_q, log_p))
    smaller = larger * e
    q = tl.where(d > 0, smaller, larger)
    p = tl.where(d > 0, larger, smaller)
    return q, p, tl.minimum(-d, 0.0) - log_m, tl.minimum(d, 0.0) - log_m


@triton.jit
def _divergence_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, token_weight_ptr, grad_ptr, out_ptr,
    stride_student, stride_teacher, stride_grad, stride_out, V, padded,
    scale, softcap, teacher_scale, teacher_softcap, temperature, forward_kl, reverse_kl, jsd, beta,
    divergence_scale, ce_weight, smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_CE: tl.constexpr, HAS_JSD: tl.constexpr, HAS_FORWARD: tl.constexpr,
    HAS_REVERSE: tl.constexpr,
    WRITE_GRAD: tl.constexpr, ALIASED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Logits, log-partitions and divergences are in base 2 until they are stored."""
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    grad_ptr += row * stride_grad
    inv_t = 1.0 / temperature
    if HAS_LABELS:
        label = tl.load(labels_ptr + row)
        s_label = _load_label(student_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        t_label = _load_label(
            teacher_ptr, teacher_bias_ptr, label, V, teacher_scale, teacher_softcap, HAS_TEACHER_BIAS,
            HAS_TEACHER_SOFTCAP,
        )  # fmt: skip

    # One pass: maxima, log-partitions, entropies and KLs at temperature 1, and the KLs' sums at T where T is not 1.
    lanes = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    zero = tl.zeros((LANES,), tl.float32)
    s_top = zero - 1e30
    t_top = zero - 1e30
    t_at_s_top = zero - 1e30
    s_total, s_own, s_ratio, s_total_T, s_ratio_T = zero, zero, zero, zero, zero
    t_total, t_own, t_ratio, t_total_T, t_ratio_T = zero, zero, zero, zero, zero
    s_plain = zero
    for start in range(0, V, LANES * VECTOR):
        cols = start + lanes
        s, _ = _load(student_ptr, bias_ptr, cols, V, padded, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "")
        t, _ = _load(
            teacher_ptr, teacher_bias_ptr, cols, V, padded, teacher_scale, teacher_softcap, HAS_TEACHER_BIAS,
            HAS_TEACHER_SOFTCAP, "",
        )  # fmt: skip
        if HAS_SMOOTHING:
            s_plain += tl.sum(tl.where(cols < V, s, 0.0), 1)
        if HAS_TEMPERATURE:
            _, s_total_T, _, s_ratio_T = _fold(s, t, s_top, s_total_T, zero, s_ratio_T, inv_t)
            _, t_total_T, _, t_ratio_T = _fold(t, s, t_top, t_total_T, zero, t_ratio_T, inv_t)
        s_high = tl.max(s, 1)
        at_high = tl.max(tl.where(s == s_high[:, None], t, -1e30), 1)
        t_at_s_top = tl.where(
            s_high > s_top, at_high, tl.where(s_high == s_top, tl.maximum(at_high, t_at_s_top), t_at_s_top)
        )
        s_top, s_total, s_own, s_ratio = _fold(s, t, s_top, s_total, s_own, s_ratio, 1.0)
        t_top, t_total, t_own, t_ratio = _fold(t, s, t_top, t_total, t_own, t_ratio, 1.0)

    s_max = tl.max(s_top, 0)
    t_max = tl.max(t_top, 0)
    s_share = tl.exp2(s_top - s_max)
    t_share = tl.exp2(t_top - t_max)
    s_sum = tl.sum(s_total * s_share, 0)
    t_sum = tl.sum(t_total * t_share, 0)
    s_lse = s_max + tl.log2(s_sum)
    t_lse = t_max + tl.log2(t_sum)
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
    tl.store(out_ptr + 2 * stride_out + row, log_prob * LN2)
    tl.store(out_ptr + 3 * stride_out + row, _entropy(s_top - s_max, s_total, s_own, s_share, s_sum) * LN2)
    tl.store(out_ptr + 4 * stride_out + row, is_top1)
    tl.store(out_ptr + 5 * stride_out + row, out_forward * LN2)
    tl.store(out_ptr + 6 * stride_out + row, out_reverse * LN2)
    tl.store(out_ptr + 7 * stride_out + row, agrees.to(tl.float32))
    tl.store(out_ptr + 8 * stride_out + row, teacher_log_prob * LN2)
    tl.store(out_ptr + 9 * stride_out + row, _entropy(t_top - t_max, t_total, t_own, t_share, t_sum) * LN2)

    # The loss's own KLs and log-partitions, at its temperature.
    s_lse_T, t_lse_T, forward_T, reverse_T = s_lse, t_lse, out_forward, out_reverse
    if HAS_TEMPERATURE:
        s_share = tl.exp2((s_top - s_max) * inv_t)
        t_share = tl.exp2((t_top - t_max) * inv_t)
        s_sum = tl.sum(s_total_T * s_share, 0)
        t_sum = tl.sum(t_total_T * t_share, 0)
        s_lse_T = s_max * inv_t + tl.log2(s_sum)
        t_lse_T = t_max * inv_t + tl.log2(t_sum)
        forward_T = inv_t * tl.sum(t_ratio_T * t_share, 0) / t_sum - (t_lse_T - s_lse_T)
        reverse_T = inv_t * tl.sum(s_ratio_T * s_share, 0) / s_sum - (s_lse_T - t_lse_T)
    divergence = forward_kl * forward_T + reverse_kl * reverse_T

    if HAS_JSD:
        p_sum = zero
        q_sum = zero
        for start in range(0, V, LANES * VECTOR):
            cols = start + lanes
            s, _ = _load(student_ptr, bias_ptr, cols, V, padded, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "")
            t, _ = _load(
                teacher_ptr, teacher_bias_ptr, cols, V, padded, teacher_scale, teacher_softcap, HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP, "",
            )  # fmt: skip
            q, p, q_ratio, p_ratio = _log_ratios(s * inv_t - s_lse_T, t * inv_t - t_lse_T, beta)
            q_sum += tl.sum(q * q_ratio, 1)
            p_sum += tl.sum(p * p_ratio, 1)
        kl_qm = tl.sum(q_sum, 0)
        divergence += jsd * (beta * tl.sum(p_sum, 0) + (1.0 - beta) * kl_qm)

    divergence = divergence * (divergence_scale * LN2)
    loss = divergence
    log_partition = s_lse * LN2
    if HAS_CE:
        ce = log_partition - s_label * LN2 + z_loss * log_partition * log_partition
        if HAS_SMOOTHING:
            ce += smoothing * LN2 * (s_label - tl.sum(s_plain, 0) / V)
        loss += ce_weight * ce
    token_weight = 1.0
    if HAS_TOKEN_WEIGHT:
        token_weight = tl.load(token_weight_ptr + row)
    tl.store(out_ptr + row, loss * token_weight)
    tl.store(out_ptr + stride_out + row, divergence)

    if WRITE_GRAD:
        coefficient = divergence_scale * inv_t
        of_forward = forward_kl * coefficient
        of_reverse = reverse_kl * LN2 * coefficient
        of_jsd = jsd * (1.0 - beta) * LN2 * coefficient
        softmax_weight = ce_weight * (1.0 + 2.0 * z_loss * log_partition)
        for start in range(0, V, LANES * VECTOR):
            cols = start + lanes
            s, slope = _load(
                student_ptr, bias_ptr, cols, V, padded, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_first"
            )
            t, _ = _load(
                teacher_ptr, teacher_bias_ptr, cols, V, padded, teacher_scale, teacher_softcap, HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP, "evict_first",
            )  # fmt: skip
            if ALIASED:
                # The gradient is narrower than the logits it overwrites: all must be read before any is written.
                tl.debug_barrier()
            log_q = s * inv_t - s_lse_T
            log_p = t * inv_t - t_lse_T
            grad = tl.zeros_like(s)
            if HAS_JSD:
                q, p, q_ratio, _ = _log_ratios(log_q, log_p, beta)
                grad += of_jsd * q * (q_ratio - kl_qm)
            else:
                q = tl.exp2(log_q)
            if HAS_FORWARD:
                if not HAS_JSD:
                    p = tl.exp2(log_p)
                grad += of_forward * (q - p)
            if HAS_REVERSE:
                grad += of_reverse * q * (log_q - log_p - reverse_T)
            if HAS_CE:
                if HAS_TEMPERATURE:
                    q = tl.exp2(s - s_lse)
                ce_grad = softmax_weight * q
                ce_grad = tl.where(cols == label, ce_grad - ce_weight * (1.0 - smoothing), ce_grad)
                if HAS_SMOOTHING:
                    ce_grad -= ce_weight * smoothing / V
                grad += ce_grad
            grad = (grad * slope * token_weight).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + cols, grad, mask=cols < padded, eviction_policy="evict_first")


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
    vocab = student.shape[1]
    padded = -(-vocab // 16) * 16
    if min(student.stride(0), teacher.stride(0), grad.stride(0)) < padded:  # rows that are no `workspace`'s
        padded = vocab
    kept_launch(
        _divergence_kernel, (student.shape[0],),
        student.stride(0), teacher.stride(0), grad.stride(0), out.stride(0), vocab, padded,
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
        LANES=LANES // 2 if o.jsd else LANES, VECTOR=max(1, VECTOR_BYTES // student.element_size()),
        num_warps=WARPS // 2 if o.jsd else WARPS,
    )(
        student, teacher, student if x.bias is None else x.bias, teacher if x.teacher_bias is None else x.teacher_bias,
        student if x.labels is None else x.labels, student if x.token_weight is None else x.token_weight, grad, out,
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
