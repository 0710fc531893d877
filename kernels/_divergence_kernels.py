"""The Triton kernel of linear_divergence.py's row pass. Formulas: linear_divergence.py.

A row is read once for all statistics; once more for the divergences that need the log-partitions first (JSD, skewed
KLs, total variation, adaptive KL); a few times more, the teacher alone, for the adaptive KL's head; and once to write
the gradient over the student's logits. What a call doesn't ask for is no part of the kernel compiled for it.
"""

from ._divergence_pieces import (
    entropy,
    fold,
    head_floor,
    load,
    load_both,
    load_label,
    log_ratios,
    probabilities,
    sign,
    skew,
    skew_reverse,
    unbounded,
)
from ._triton import tl, triton


@triton.jit
def divergence_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, token_weight_ptr, grad_ptr, out_ptr,
    stride_student, stride_teacher, stride_grad, stride_out, V, padded,
    scale, softcap, teacher_scale, teacher_softcap, teacher_share, temperature, forward_kl, reverse_kl, jsd, skew_kl,
    skew_reverse_kl, tvd, adaptive_kl, beta, alpha, divergence_scale, ce_weight, smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_TEACHER_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr,
    OWN_SUMS: tl.constexpr, HAS_SHARE: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CE: tl.constexpr,
    SECOND_PASS: tl.constexpr, HAS_JSD: tl.constexpr, HAS_SKEW: tl.constexpr, HAS_SKEW_REVERSE: tl.constexpr,
    HAS_GAPS: tl.constexpr, HAS_TVD: tl.constexpr, HAS_ADAPTIVE: tl.constexpr, GRAD_FORWARD: tl.constexpr,
    GRAD_REVERSE: tl.constexpr, GRAD_PAIRED: tl.constexpr, GRAD_JSD: tl.constexpr, GRAD_SKEW: tl.constexpr,
    GRAD_SKEW_REVERSE: tl.constexpr, GRAD_TVD: tl.constexpr, WRITE_GRAD: tl.constexpr, ALIASED: tl.constexpr,
    STEPS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Logits, log-partitions and divergences are in base 2 until they are stored.

    OWN_SUMS: the divergences' distributions are not those at temperature 1 that the metrics are of. HAS_...: what is
    measured, GRAD_...: what has a gradient.
    """
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    grad_ptr += row * stride_grad
    inv_t = 1.0 / temperature
    if HAS_LABELS:
        label = tl.load(labels_ptr + row)
        s_label = load_label(student_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        t_label = load_label(
            teacher_ptr, teacher_bias_ptr, label, V, teacher_scale, teacher_softcap, HAS_TEACHER_BIAS,
            HAS_TEACHER_SOFTCAP,
        )  # fmt: skip

    # One pass: maxima, log-partitions, entropies and KLs at temperature 1, and the KLs' sums at T where T is not 1.
    lanes = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    zero = tl.zeros((LANES,), tl.float32)
    s_top = zero - 1e30
    t_top = zero - 1e30
    u_top = zero - 1e30  # of the logits that the divergences hold the student against
    t_at_s_top = zero - 1e30
    s_total, s_own, s_ratio, s_total_T, s_ratio_T = zero, zero, zero, zero, zero
    t_total, t_own, t_ratio, t_total_T, t_ratio_T = zero, zero, zero, zero, zero
    s_plain = zero
    for start in range(0, V, LANES * VECTOR):
        cols = start + lanes
        s, _ = load(student_ptr, bias_ptr, cols, V, padded, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "")
        t, _ = load(
            teacher_ptr, teacher_bias_ptr, cols, V, padded, teacher_scale, teacher_softcap, HAS_TEACHER_BIAS,
            HAS_TEACHER_SOFTCAP, "",
        )  # fmt: skip
        if HAS_SMOOTHING:
            s_plain += tl.sum(tl.where(cols < V, s, 0.0), 1)
        if HAS_SHARE:
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
        s_top, s_total, s_own, s_ratio = fold(s, t, s_top, s_total, s_own, s_ratio, 1.0)
        t_top, t_total, t_own, t_ratio = fold(t, s, t_top, t_total, t_own, t_ratio, 1.0)

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
    out_forward = unbounded(tl.sum(t_ratio * t_share, 0) / t_sum - (t_lse - s_lse))
    out_reverse = unbounded(tl.sum(s_ratio * s_share, 0) / s_sum - (s_lse - t_lse))
    agrees = tl.max(tl.where(s_top == s_max, t_at_s_top, -1e30), 0) >= t_max
    log_prob, is_top1, teacher_log_prob = 0.0, 0.0, 0.0
    if HAS_LABELS:
        log_prob, is_top1, teacher_log_prob = (
            s_label - s_lse,
            (s_label >= s_max).to(tl.float32),
            t_label - t_lse,
        )
    tl.store(out_ptr + 2 * stride_out + row, log_prob * LN2)
    tl.store(out_ptr + 3 * stride_out + row, entropy(s_top - s_max, s_total, s_own, s_share, s_sum) * LN2)
    tl.store(out_ptr + 4 * stride_out + row, is_top1)
    tl.store(out_ptr + 5 * stride_out + row, out_forward * LN2)
    tl.store(out_ptr + 6 * stride_out + row, out_reverse * LN2)
    tl.store(out_ptr + 7 * stride_out + row, agrees.to(tl.float32))
    tl.store(out_ptr + 8 * stride_out + row, teacher_log_prob * LN2)
    tl.store(out_ptr + 9 * stride_out + row, entropy(t_top - t_max, t_total, t_own, t_share, t_sum) * LN2)

    # The loss's own KLs and log-partitions.
    s_lse_T, t_lse_T, forward_T, reverse_T, u_max = s_lse, t_lse, out_forward, out_reverse, t_max
    if OWN_SUMS:
        if HAS_SHARE:
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
    divergence = tl.where(forward_kl != 0, forward_kl * forward_T, 0.0)  # 0 of an infinite KL is no number
    divergence += tl.where(reverse_kl != 0, reverse_kl * reverse_T, 0.0)
    unit = divergence_scale * LN2
    tl.store(out_ptr + 10 * stride_out + row, forward_T * unit)
    tl.store(out_ptr + 11 * stride_out + row, reverse_T * unit)

    if SECOND_PASS:
        if HAS_ADAPTIVE:
            floor = head_floor(
                student_ptr, bias_ptr, teacher_ptr, teacher_bias_ptr, V, padded, scale, softcap, teacher_scale,
                teacher_softcap, teacher_share, u_max, t_lse_T, inv_t, HAS_BIAS, HAS_SOFTCAP, HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP, HAS_SHARE, STEPS, LANES, VECTOR,
            )  # fmt: skip
        p_sum, q_sum = zero, zero
        skew_sum, skew_rise, reverse_sum, reverse_rise = zero, zero, zero, zero
        gap_sum, head_sum, sign_sum = zero, zero, zero
        for start in range(0, V, LANES * VECTOR):
            s, t, _ = load_both(
                student_ptr, bias_ptr, teacher_ptr, teacher_bias_ptr, start + lanes, V, padded, scale, softcap,
                teacher_scale, teacher_softcap, teacher_share, HAS_BIAS, HAS_SOFTCAP, HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP, HAS_SHARE, "",
            )  # fmt: skip
            q, p, d, e = probabilities(s * inv_t - s_lse_T, t * inv_t - t_lse_T)
            if HAS_JSD:
                q_ratio, p_ratio = log_ratios(d, e, beta)
                q_sum += tl.sum(q * q_ratio, 1)
                p_sum += tl.sum(p * p_ratio, 1)
            if HAS_SKEW:
                ratio, rise = skew(q, p, d, e, alpha)
                skew_sum += tl.sum(p * ratio, 1)
                skew_rise += tl.sum(rise, 1)
            if HAS_SKEW_REVERSE:
                ratio, rise = skew_reverse(d, e, alpha)
                reverse_sum += tl.sum(q * ratio, 1)
                reverse_rise += tl.sum(q * rise, 1)
            if HAS_GAPS:
                gap = tl.abs(p - q)
                gap_sum += tl.sum(gap, 1)
            if HAS_TVD:
                sign_sum += tl.sum(q * sign(d), 1)
            if HAS_ADAPTIVE:
                head_sum += tl.sum(tl.where(t >= floor, gap, 0.0), 1)
        gaps = tl.sum(gap_sum, 0)  # twice the total variation
        if HAS_JSD:
            kl_qm = tl.sum(q_sum, 0)
            value = beta * tl.sum(p_sum, 0) + (1.0 - beta) * kl_qm
            divergence += jsd * value
            tl.store(out_ptr + 12 * stride_out + row, value * unit)
        if HAS_SKEW:
            value = tl.sum(skew_sum, 0)
            mean_rise = tl.sum(skew_rise, 0)
            divergence += skew_kl * value
            tl.store(out_ptr + 13 * stride_out + row, value * unit)
        if HAS_SKEW_REVERSE:
            value = tl.sum(reverse_sum, 0)
            mean_reverse_rise = tl.sum(reverse_rise, 0)
            divergence += skew_reverse_kl * value
            tl.store(out_ptr + 14 * stride_out + row, value * unit)
        if HAS_TVD:
            mean_sign = tl.sum(sign_sum, 0)
            divergence += tvd * gaps * (0.5 / LN2)
            tl.store(out_ptr + 15 * stride_out + row, gaps * (0.5 * divergence_scale))
        if HAS_ADAPTIVE:
            of_head = tl.where(gaps > 0, tl.sum(head_sum, 0) / tl.where(gaps > 0, gaps, 1.0), 0.5)  # of the gaps
            value = of_head * forward_T + (1.0 - of_head) * reverse_T
            divergence += adaptive_kl * value
            forward_kl += adaptive_kl * of_head
            reverse_kl += adaptive_kl * (1.0 - of_head)
            tl.store(out_ptr + 16 * stride_out + row, value * unit)

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
    tl.store(out_ptr + row, loss * token_weight)
    tl.store(out_ptr + stride_out + row, divergence)

    if WRITE_GRAD:
        coefficient = divergence_scale * inv_t
        of_forward = forward_kl * coefficient
        of_reverse = reverse_kl * LN2 * coefficient
        of_jsd = jsd * (1.0 - beta) * LN2 * coefficient
        of_skew = skew_kl * (1.0 - alpha) * (1.0 - alpha) * coefficient
        of_skew_reverse = skew_reverse_kl * coefficient
        of_tvd = tvd * 0.5 * coefficient
        softmax_weight = ce_weight * (1.0 + 2.0 * z_loss * log_partition)
        for start in range(0, V, LANES * VECTOR):
            cols = start + lanes
            s, t, slope = load_both(
                student_ptr, bias_ptr, teacher_ptr, teacher_bias_ptr, cols, V, padded, scale, softcap,
                teacher_scale, teacher_softcap, teacher_share, HAS_BIAS, HAS_SOFTCAP, HAS_TEACHER_BIAS,
                HAS_TEACHER_SOFTCAP, HAS_SHARE, "evict_first",
            )  # fmt: skip
            if ALIASED:
                # The gradient is narrower than the logits it overwrites: all must be read before any is written.
                tl.debug_barrier()
            log_q = s * inv_t - s_lse_T
            log_p = t * inv_t - t_lse_T
            grad = tl.zeros_like(s)
            if GRAD_PAIRED:
                q, p, d, e = probabilities(log_q, log_p)
            else:
                q = tl.exp2(log_q)
            if GRAD_JSD:
                q_ratio, _ = log_ratios(d, e, beta)
                grad += of_jsd * q * (q_ratio - kl_qm)
            if GRAD_SKEW:
                _, rise = skew(q, p, d, e, alpha)
                grad += of_skew * (q * mean_rise - rise)
            if GRAD_SKEW_REVERSE:
                _, rise = skew_reverse(d, e, alpha)
                grad += of_skew_reverse * q * (rise - mean_reverse_rise)
            if GRAD_TVD:
                grad += of_tvd * q * (sign(d) - mean_sign)
            if GRAD_FORWARD:
                if not GRAD_PAIRED:
                    p = tl.exp2(log_p)
                grad += of_forward * (q - p)
            if GRAD_REVERSE:
                grad += of_reverse * q * (log_q - log_p - reverse_T)
            if HAS_CE:
                if OWN_SUMS:
                    q = tl.exp2(s - s_lse)
                ce_grad = softmax_weight * q
                ce_grad = tl.where(cols == label, ce_grad - ce_weight * (1.0 - smoothing), ce_grad)
                if HAS_SMOOTHING:
                    ce_grad -= ce_weight * smoothing / V
                grad += ce_grad
            grad = (grad * slope * token_weight).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + cols, grad, mask=cols < padded, eviction_policy="evict_first")
