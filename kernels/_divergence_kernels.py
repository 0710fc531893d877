"""The Triton kernel for the rows of linear_divergence.py, which has the formulas. Read _divergence_torch.py, its torch
twin, beside it.

The kernel reads a row once for all statistics (`first_pass`). It reads it again for divergences that need the
log-partitions first (`second_pass`: JSD, skewed KLs, total variation), and once to write the gradient over the
student's logits (`write_gradient`). A kernel is compiled for each set of options, and contains only what these ask for.

In every piece, `sides` and FORM say where logits come from: see `load_sides`.
"""

from ._divergence_pieces import (
    SHARE,
    entropy,
    fold,
    lanes_of,
    load_both,
    load_labels,
    load_sides,
    log_ratios,
    probabilities,
    sign,
    skew,
    skew_reverse,
    unbounded,
)
from ._triton import tl, triton

LN2 = tl.constexpr(0.6931471805599453)

# Rows of the output. From FORWARD_TERM on they follow the order of divergence_kinds.ROW_KINDS.
LOSS = tl.constexpr(0)
DIVERGENCE = tl.constexpr(1)
LOG_PROB = tl.constexpr(2)
ENTROPY = tl.constexpr(3)
IS_TOP1 = tl.constexpr(4)
FORWARD_KL = tl.constexpr(5)
REVERSE_KL = tl.constexpr(6)
AGREES = tl.constexpr(7)
TEACHER_LOG_PROB = tl.constexpr(8)
TEACHER_ENTROPY = tl.constexpr(9)
FORWARD_TERM = tl.constexpr(10)
REVERSE_TERM = tl.constexpr(11)
JSD_TERM = tl.constexpr(12)
SKEW_TERM = tl.constexpr(13)
SKEW_REVERSE_TERM = tl.constexpr(14)
TVD_TERM = tl.constexpr(15)

# Bits of MEASURED and GRADED.
FORWARD = tl.constexpr(1)
REVERSE = tl.constexpr(2)
JSD = tl.constexpr(4)
SKEW = tl.constexpr(8)
SKEW_REVERSE = tl.constexpr(16)
TVD = tl.constexpr(32)
PAIRED = tl.constexpr(4 + 8 + 16 + 32)  # kinds whose gradients need the ratio of both sides


@triton.jit
def divergence_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, token_weight_ptr, grad_ptr, out_ptr,
    stride_student, stride_teacher, stride_grad, stride_out, V, padded,
    scale, softcap, teacher_scale, teacher_softcap, teacher_share, temperature, forward_kl, reverse_kl, jsd, skew_kl,
    skew_reverse_kl, tvd, beta, alpha, divergence_scale, ce_weight, smoothing, z_loss,
    FORM: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr, OWN_SUMS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_CE: tl.constexpr, MEASURED: tl.constexpr, GRADED: tl.constexpr,
    WRITE_GRAD: tl.constexpr, ALIASED: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute a row. Logits, log-partitions and divergences are in base 2 until they are stored.

    OWN_SUMS: the divergences need sums of their own, as their distributions aren't those of the metrics, which are at
    temperature 1. MEASURED: kinds that the second pass computes. GRADED: kinds that have a gradient.
    forward_kl ... tvd: weights.
    """
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    grad_ptr += row * stride_grad
    inv_t = 1.0 / temperature
    sides = (
        student_ptr, bias_ptr, scale, softcap, teacher_ptr, teacher_bias_ptr, teacher_scale, teacher_softcap,
        teacher_share, V, padded,
    )  # fmt: skip
    label, s_label, t_label = 0, 0.0, 0.0
    if HAS_LABELS:
        label = tl.load(labels_ptr + row)
        s_label, t_label = load_labels(sides, label, FORM)

    s_sums, t_sums, tops, s_plain = first_pass(sides, inv_t, FORM, OWN_SUMS, HAS_SMOOTHING, LANES, VECTOR)
    at_one = write_metrics(out_ptr, stride_out, row, s_sums, t_sums, tops, s_label, t_label, HAS_LABELS)
    s_lse = at_one[2]
    at_T = at_temperature(s_sums, t_sums, tops, at_one, inv_t, FORM, OWN_SUMS)
    s_lse_T, t_lse_T, forward_T, reverse_T = at_T

    divergence = tl.where(forward_kl != 0, forward_kl * forward_T, 0.0)  # 0 * an infinite KL would be NaN
    divergence += tl.where(reverse_kl != 0, reverse_kl * reverse_T, 0.0)
    unit = divergence_scale * LN2
    tl.store(out_ptr + FORWARD_TERM * stride_out + row, forward_T * unit)
    tl.store(out_ptr + REVERSE_TERM * stride_out + row, reverse_T * unit)
    kl_qm, mean_rise, mean_reverse_rise, mean_sign = 0.0, 0.0, 0.0, 0.0
    if MEASURED:
        p_sum, q_sum, skew_sum, skew_rise, reverse_sum, reverse_rise, gap_sum, sign_sum = second_pass(
            sides, s_lse_T, t_lse_T, inv_t, beta, alpha, FORM, MEASURED, LANES, VECTOR
        )
        gaps = tl.sum(gap_sum, 0)  # twice the total variation
        if JSD & MEASURED:
            kl_qm = tl.sum(q_sum, 0)
            value = beta * tl.sum(p_sum, 0) + (1.0 - beta) * kl_qm
            divergence += jsd * value
            tl.store(out_ptr + JSD_TERM * stride_out + row, value * unit)
        if SKEW & MEASURED:
            value = tl.sum(skew_sum, 0)
            mean_rise = tl.sum(skew_rise, 0)
            divergence += skew_kl * value
            tl.store(out_ptr + SKEW_TERM * stride_out + row, value * unit)
        if SKEW_REVERSE & MEASURED:
            value = tl.sum(reverse_sum, 0)
            mean_reverse_rise = tl.sum(reverse_rise, 0)
            divergence += skew_reverse_kl * value
            tl.store(out_ptr + SKEW_REVERSE_TERM * stride_out + row, value * unit)
        if TVD & MEASURED:
            mean_sign = tl.sum(sign_sum, 0)
            divergence += tvd * gaps * (0.5 / LN2)
            tl.store(out_ptr + TVD_TERM * stride_out + row, gaps * (0.5 * divergence_scale))

    divergence = divergence * unit
    loss = divergence
    log_partition = s_lse * LN2
    if HAS_CE:
        ce = log_partition - s_label * LN2 + z_loss * log_partition * log_partition
        if HAS_SMOOTHING:
            plain = tl.sum(s_plain, 0)
            ce += smoothing * LN2 * (s_label - tl.where(plain < -1e25, float("-inf"), plain) / V)
        loss += ce_weight * ce
    token_weight = 1.0
    if HAS_TOKEN_WEIGHT:
        token_weight = tl.load(token_weight_ptr + row)
    tl.store(out_ptr + LOSS * stride_out + row, loss * token_weight)
    tl.store(out_ptr + DIVERGENCE * stride_out + row, divergence)

    if WRITE_GRAD:
        coefficient = divergence_scale * inv_t
        term_weights = (
            forward_kl * coefficient, reverse_kl * LN2 * coefficient, jsd * (1.0 - beta) * LN2 * coefficient,
            skew_kl * (1.0 - alpha) * (1.0 - alpha) * coefficient, skew_reverse_kl * coefficient,
            tvd * 0.5 * coefficient,
        )  # fmt: skip
        means = reverse_T, kl_qm, mean_rise, mean_reverse_rise, mean_sign
        softmax_weight = ce_weight * (1.0 + 2.0 * z_loss * log_partition)
        write_gradient(
            grad_ptr, sides, term_weights, means, s_lse_T, t_lse_T, inv_t, beta, alpha, s_lse, label, softmax_weight,
            ce_weight * (1.0 - smoothing), ce_weight * smoothing / V, token_weight, FORM, GRADED, OWN_SUMS, HAS_CE,
            HAS_SMOOTHING, ALIASED, LANES, VECTOR,
        )  # fmt: skip


@triton.jit
def first_pass(
    sides, inv_t, FORM: tl.constexpr, OWN_SUMS: tl.constexpr, HAS_SMOOTHING: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Read the row once: find maxima, and `fold`'s sums at temperature 1 and for the KLs' own distributions.

    Return (the student's sums, the teacher's sums, (maxima of the student, of the teacher, and of the logits that the
    student is compared with, the teacher's logit at the student's maximum), the student's plain sum), one value a lane.
    """
    teacher_share, V = sides[8], sides[9]
    lanes = lanes_of(LANES, VECTOR)
    zero = tl.zeros((LANES,), tl.float32)
    s_top = zero - 1e30
    t_top = zero - 1e30
    u_top = zero - 1e30
    t_at_s_top = zero - 1e30
    s_total, s_moment, s_ratio, s_total_T, s_ratio_T = zero, zero, zero, zero, zero
    t_total, t_moment, t_ratio, t_total_T, t_ratio_T = zero, zero, zero, zero, zero
    s_plain = zero
    for start in range(0, V, LANES * VECTOR):
        cols = start + lanes
        s, t, _ = load_sides(sides, cols, FORM, "")
        if HAS_SMOOTHING:
            s_plain += tl.sum(tl.where(cols < V, s, 0.0), 1)
        if SHARE & FORM:
            u = s + teacher_share * (t - s)
            _, s_total_T, _, s_ratio_T = fold(s, u, s_top, s_total_T, zero, s_ratio_T, inv_t)
            u_top, t_total_T, _, t_ratio_T = fold(u, s, u_top, t_total_T, zero, t_ratio_T, inv_t)
        elif OWN_SUMS:
            _, s_total_T, _, s_ratio_T = fold(s, t, s_top, s_total_T, zero, s_ratio_T, inv_t)
            _, t_total_T, _, t_ratio_T = fold(t, s, t_top, t_total_T, zero, t_ratio_T, inv_t)
        s_high = tl.max(s, 1)
        at_high = tl.max(tl.where(s == s_high[:, None], t, -1e30), 1)
        t_at_s_top = tl.where(
            s_high > s_top, at_high, tl.where(s_high == s_top, tl.maximum(at_high, t_at_s_top), t_at_s_top)
        )
        s_top, s_total, s_moment, s_ratio = fold(s, t, s_top, s_total, s_moment, s_ratio, 1.0)
        t_top, t_total, t_moment, t_ratio = fold(t, s, t_top, t_total, t_moment, t_ratio, 1.0)
    s_sums = s_total, s_moment, s_ratio, s_total_T, s_ratio_T
    t_sums = t_total, t_moment, t_ratio, t_total_T, t_ratio_T
    return s_sums, t_sums, (s_top, t_top, u_top, t_at_s_top), s_plain


@triton.jit
def write_metrics(out_ptr, stride_out, row, s_sums, t_sums, tops, s_label, t_label, HAS_LABELS: tl.constexpr):
    """Write the metrics, which are at temperature 1; return both sides' (maxima, log-partitions, KLs)."""
    s_total, s_moment, s_ratio, _, _ = s_sums
    t_total, t_moment, t_ratio, _, _ = t_sums
    s_top, t_top, _, t_at_s_top = tops
    s_max = tl.max(s_top, 0)
    t_max = tl.max(t_top, 0)
    s_max = tl.where(s_max == -1e30, float("nan"), s_max)  # a row without any token
    t_max = tl.where(t_max == -1e30, float("nan"), t_max)
    s_share = tl.exp2(s_top - s_max)
    t_share = tl.exp2(t_top - t_max)
    s_sum = tl.sum(s_total * s_share, 0)
    t_sum = tl.sum(t_total * t_share, 0)
    s_lse = s_max + tl.log2(s_sum)
    t_lse = t_max + tl.log2(t_sum)
    forward = unbounded(tl.sum(t_ratio * t_share, 0) / t_sum - (t_lse - s_lse))
    reverse = unbounded(tl.sum(s_ratio * s_share, 0) / s_sum - (s_lse - t_lse))
    agrees = tl.max(tl.where(s_top == s_max, t_at_s_top, -1e30), 0) >= t_max
    log_prob, is_top1, teacher_log_prob = 0.0, 0.0, 0.0
    if HAS_LABELS:
        log_prob, is_top1, teacher_log_prob = (
            s_label - s_lse,
            (s_label >= s_max).to(tl.float32),
            t_label - t_lse,
        )
    tl.store(out_ptr + LOG_PROB * stride_out + row, log_prob * LN2)
    tl.store(out_ptr + ENTROPY * stride_out + row, entropy(s_top - s_max, s_total, s_moment, s_share, s_sum) * LN2)
    tl.store(out_ptr + IS_TOP1 * stride_out + row, is_top1)
    tl.store(out_ptr + FORWARD_KL * stride_out + row, forward * LN2)
    tl.store(out_ptr + REVERSE_KL * stride_out + row, reverse * LN2)
    tl.store(out_ptr + AGREES * stride_out + row, agrees.to(tl.float32))
    tl.store(out_ptr + TEACHER_LOG_PROB * stride_out + row, teacher_log_prob * LN2)
    tl.store(
        out_ptr + TEACHER_ENTROPY * stride_out + row, entropy(t_top - t_max, t_total, t_moment, t_share, t_sum) * LN2
    )
    return s_max, t_max, s_lse, t_lse, forward, reverse


@triton.jit
def at_temperature(s_sums, t_sums, tops, at_one, inv_t, FORM: tl.constexpr, OWN_SUMS: tl.constexpr):
    """Return (both log-partitions, both KLs) of the loss's distributions."""
    s_max, t_max, s_lse, t_lse, forward, reverse = at_one
    s_lse_T, t_lse_T, forward_T, reverse_T = s_lse, t_lse, forward, reverse
    if OWN_SUMS:
        _, _, _, s_total_T, s_ratio_T = s_sums
        _, _, _, t_total_T, t_ratio_T = t_sums
        s_top, t_top, u_top, _ = tops
        u_max = t_max
        if SHARE & FORM:
            u_max = tl.max(u_top, 0)
        else:
            u_top = t_top
        s_share = tl.exp2((s_top - s_max) * inv_t)
        t_share = tl.exp2((u_top - u_max) * inv_t)
        s_sum = tl.sum(s_total_T * s_share, 0)
        t_sum = tl.sum(t_total_T * t_share, 0)
        s_lse_T = s_max * inv_t + tl.log2(s_sum)
        t_lse_T = u_max * inv_t + tl.log2(t_sum)
        forward_T = unbounded(inv_t * tl.sum(t_ratio_T * t_share, 0) / t_sum - (t_lse_T - s_lse_T))
        reverse_T = unbounded(inv_t * tl.sum(s_ratio_T * s_share, 0) / s_sum - (s_lse_T - t_lse_T))
    return s_lse_T, t_lse_T, forward_T, reverse_T


@triton.jit
def second_pass(
    sides, s_lse, t_lse, inv_t, beta, alpha, FORM: tl.constexpr, MEASURED: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Return each lane's sums that need the log-partitions first; zero for kinds that are not in MEASURED."""
    V = sides[9]
    lanes = lanes_of(LANES, VECTOR)
    zero = tl.zeros((LANES,), tl.float32)
    p_sum, q_sum = zero, zero
    skew_sum, skew_rise, reverse_sum, reverse_rise = zero, zero, zero, zero
    gap_sum, sign_sum = zero, zero
    for start in range(0, V, LANES * VECTOR):
        s, t, _ = load_both(sides, start + lanes, FORM, "")
        q, p, d, e = probabilities(s * inv_t - s_lse, t * inv_t - t_lse)
        if JSD & MEASURED:
            q_ratio, p_ratio = log_ratios(d, e, beta)
            q_sum += tl.sum(q * q_ratio, 1)
            p_sum += tl.sum(p * p_ratio, 1)
        if SKEW & MEASURED:
            ratio, rise = skew(q, p, d, e, alpha)
            skew_sum += tl.sum(p * ratio, 1)
            skew_rise += tl.sum(rise, 1)
        if SKEW_REVERSE & MEASURED:
            ratio, rise = skew_reverse(d, e, alpha)
            reverse_sum += tl.sum(q * ratio, 1)
            reverse_rise += tl.sum(q * rise, 1)
        if TVD & MEASURED:
            gap_sum += tl.sum(tl.abs(p - q), 1)
            sign_sum += tl.sum(q * sign(d), 1)
    return p_sum, q_sum, skew_sum, skew_rise, reverse_sum, reverse_rise, gap_sum, sign_sum


@triton.jit
def write_gradient(
    grad_ptr, sides, term_weights, means, s_lse_T, t_lse_T, inv_t, beta, alpha, s_lse, label, softmax_weight,
    label_weight, even_weight, token_weight, FORM: tl.constexpr, GRADED: tl.constexpr, OWN_SUMS: tl.constexpr,
    HAS_CE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, ALIASED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the loss over the student's raw logits.

    term_weights: the weight of each kind's gradient. means: the means under q that these gradients subtract.
    label_weight, even_weight: what the cross-entropy subtracts from its softmax at the label, and everywhere.
    """
    forward_weight, reverse_weight, jsd_weight, skew_weight, skew_reverse_weight, tvd_weight = term_weights
    reverse_T, kl_qm, mean_rise, mean_reverse_rise, mean_sign = means
    V, padded = sides[9], sides[10]
    lanes = lanes_of(LANES, VECTOR)
    for start in range(0, V, LANES * VECTOR):
        cols = start + lanes
        s, t, slope = load_both(sides, cols, FORM, "evict_first")
        if ALIASED:
            # The gradient is narrower than the logits it overwrites: all must be read before any is written.
            tl.debug_barrier()
        log_q = s * inv_t - s_lse_T
        log_p = t * inv_t - t_lse_T
        grad = tl.zeros_like(s)
        if PAIRED & GRADED:
            q, p, d, e = probabilities(log_q, log_p)
        else:
            q = tl.exp2(log_q)
        if JSD & GRADED:
            q_ratio, _ = log_ratios(d, e, beta)
            grad += jsd_weight * q * (q_ratio - kl_qm)
        if SKEW & GRADED:
            _, rise = skew(q, p, d, e, alpha)
            grad += skew_weight * (q * mean_rise - rise)
        if SKEW_REVERSE & GRADED:
            _, rise = skew_reverse(d, e, alpha)
            grad += skew_reverse_weight * q * (rise - mean_reverse_rise)
        if TVD & GRADED:
            grad += tvd_weight * q * (sign(d) - mean_sign)
        if FORWARD & GRADED:
            if not PAIRED & GRADED:
                p = tl.exp2(log_p)
            grad += forward_weight * (q - p)
        if REVERSE & GRADED:
            grad += reverse_weight * q * (log_q - log_p - reverse_T)
        if HAS_CE:
            if OWN_SUMS:
                q = tl.exp2(s - s_lse)
            ce_grad = softmax_weight * q
            ce_grad = tl.where(cols == label, ce_grad - label_weight, ce_grad)
            if HAS_SMOOTHING:
                ce_grad -= even_weight
            grad += ce_grad
        grad = (grad * slope * token_weight).to(grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + cols, grad, mask=cols < padded, eviction_policy="evict_first")
