"""Triton kernels of _divergence_shards.py, which says what each computes. They are made of the whole row's pieces.

A program takes a row of this rank's columns, whose first is `first` of the whole vocabulary. Numbers of a row come and
go in nats, (fields, n); the pieces compute in base 2.
"""

from ._divergence_kernels import first_pass, second_pass, write_gradient
from ._divergence_pieces import SHARE, load_labels
from ._triton import tl, triton

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _in_nats(top):
    """Return a maximum in nats. That of a shard whose every token is ruled out stays -1e30."""
    return tl.where(top <= -1e30, -1e30, top * LN2)


@triton.jit
def statistics_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, out_ptr,
    stride_student, stride_teacher, stride_out, V, padded, first,
    scale, softcap, teacher_scale, teacher_softcap, teacher_share, temperature,
    FORM: tl.constexpr, HAS_LABELS: tl.constexpr, OWN_SUMS: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write STATISTICS (out): one value a row of each."""
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    sides = (
        student_ptr + row * stride_student, bias_ptr, scale, softcap, teacher_ptr + row * stride_teacher,
        teacher_bias_ptr, teacher_scale, teacher_softcap, teacher_share, V, padded,
    )  # fmt: skip
    out_ptr += row
    inv_t = 1.0 / temperature
    s_sums, t_sums, tops, s_plain = first_pass(sides, inv_t, FORM, OWN_SUMS, HAS_SMOOTHING, LANES, VECTOR)
    s_total, s_moment, s_ratio, s_total_T, s_ratio_T = s_sums
    t_total, t_moment, t_ratio, u_total_T, u_ratio_T = t_sums
    s_top, t_top, u_top, t_at_s_top = tops
    if not SHARE & FORM:
        u_top = t_top
    s_max = tl.max(s_top, 0)
    t_max = tl.max(t_top, 0)
    u_max = tl.max(u_top, 0)
    s_share = tl.exp2(s_top - s_max)
    t_share = tl.exp2(t_top - t_max)
    tl.store(out_ptr, _in_nats(s_max))
    tl.store(out_ptr + stride_out, _in_nats(t_max))
    tl.store(out_ptr + 2 * stride_out, _in_nats(u_max))
    tl.store(out_ptr + 3 * stride_out, _in_nats(tl.max(tl.where(s_top == s_max, t_at_s_top, -1e30), 0)))
    tl.store(out_ptr + 4 * stride_out, tl.sum(s_total * s_share, 0))
    tl.store(out_ptr + 5 * stride_out, tl.sum((s_moment + (s_top - s_max) * s_total) * s_share, 0) * LN2)
    tl.store(out_ptr + 6 * stride_out, tl.sum(s_ratio * s_share, 0) * LN2)
    tl.store(out_ptr + 7 * stride_out, tl.sum(t_total * t_share, 0))
    tl.store(out_ptr + 8 * stride_out, tl.sum((t_moment + (t_top - t_max) * t_total) * t_share, 0) * LN2)
    tl.store(out_ptr + 9 * stride_out, tl.sum(t_ratio * t_share, 0) * LN2)
    if OWN_SUMS:
        s_share = tl.exp2((s_top - s_max) * inv_t)
        u_share = tl.exp2((u_top - u_max) * inv_t)
        tl.store(out_ptr + 10 * stride_out, tl.sum(s_total_T * s_share, 0))
        tl.store(out_ptr + 11 * stride_out, tl.sum(s_ratio_T * s_share, 0) * LN2)
        tl.store(out_ptr + 12 * stride_out, tl.sum(u_total_T * u_share, 0))
        tl.store(out_ptr + 13 * stride_out, tl.sum(u_ratio_T * u_share, 0) * LN2)
    if HAS_SMOOTHING:
        tl.store(out_ptr + 14 * stride_out, tl.sum(s_plain, 0) * LN2)
    if HAS_LABELS:
        place = tl.load(labels_ptr + row) - first
        s_label, t_label = load_labels(sides, place, FORM)
        inside = (place >= 0) & (place < V)
        tl.store(out_ptr + 15 * stride_out, tl.where(inside, s_label * LN2, 0.0))
        tl.store(out_ptr + 16 * stride_out, tl.where(inside, t_label * LN2, 0.0))


@triton.jit
def second_sums_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, numbers_ptr, out_ptr,
    stride_student, stride_teacher, stride_numbers, stride_out, V, padded,
    scale, softcap, teacher_scale, teacher_softcap, teacher_share, temperature, beta, alpha,
    FORM: tl.constexpr, MEASURED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write SECOND (out). numbers: both log-partitions at the temperature."""
    row = tl.program_id(0).to(tl.int64)
    sides = (
        student_ptr + row * stride_student, bias_ptr, scale, softcap, teacher_ptr + row * stride_teacher,
        teacher_bias_ptr, teacher_scale, teacher_softcap, teacher_share, V, padded,
    )  # fmt: skip
    numbers_ptr += row
    out_ptr += row
    s_lse = tl.load(numbers_ptr) * LOG2E
    u_lse = tl.load(numbers_ptr + stride_numbers) * LOG2E
    p_sum, q_sum, skew_sum, skew_rise, reverse_sum, reverse_rise, gap_sum, sign_sum = second_pass(
        sides, s_lse, u_lse, 1.0 / temperature, beta, alpha, FORM, MEASURED, LANES, VECTOR
    )
    tl.store(out_ptr, tl.sum(p_sum, 0) * LN2)
    tl.store(out_ptr + stride_out, tl.sum(q_sum, 0) * LN2)
    tl.store(out_ptr + 2 * stride_out, tl.sum(skew_sum, 0) * LN2)
    tl.store(out_ptr + 3 * stride_out, tl.sum(skew_rise, 0))
    tl.store(out_ptr + 4 * stride_out, tl.sum(reverse_sum, 0) * LN2)
    tl.store(out_ptr + 5 * stride_out, tl.sum(reverse_rise, 0))
    tl.store(out_ptr + 6 * stride_out, tl.sum(gap_sum, 0))
    tl.store(out_ptr + 7 * stride_out, tl.sum(sign_sum, 0))


@triton.jit
def gradient_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, numbers_ptr, grad_ptr,
    stride_student, stride_teacher, stride_numbers, stride_grad, V, padded, first,
    scale, softcap, teacher_scale, teacher_softcap, teacher_share, temperature, jsd, skew_kl, skew_reverse_kl, tvd,
    beta, alpha, divergence_scale, label_weight, even_weight,
    FORM: tl.constexpr, GRADED: tl.constexpr, OWN_SUMS: tl.constexpr, HAS_CE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, ALIASED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the gradient. numbers: those of `GradientNumbers`, a log-partition as one, and the softmax's weight in CE.

    jsd ... tvd: weights of the kinds. label_weight, even_weight: what CE subtracts at the label, and everywhere.
    """
    row = tl.program_id(0).to(tl.int64)
    sides = (
        student_ptr + row * stride_student, bias_ptr, scale, softcap, teacher_ptr + row * stride_teacher,
        teacher_bias_ptr, teacher_scale, teacher_softcap, teacher_share, V, padded,
    )  # fmt: skip
    numbers_ptr += row
    inv_t = 1.0 / temperature
    s_lse = tl.load(numbers_ptr) * LOG2E
    s_lse_T = tl.load(numbers_ptr + stride_numbers) * LOG2E
    u_lse_T = tl.load(numbers_ptr + 2 * stride_numbers) * LOG2E
    forward_kl = tl.load(numbers_ptr + 3 * stride_numbers)
    reverse_kl = tl.load(numbers_ptr + 4 * stride_numbers)
    reverse_T = tl.load(numbers_ptr + 5 * stride_numbers) * LOG2E
    q_jsd = tl.load(numbers_ptr + 6 * stride_numbers) * LOG2E
    skew_rise = tl.load(numbers_ptr + 7 * stride_numbers)
    reverse_rise = tl.load(numbers_ptr + 8 * stride_numbers)
    signs = tl.load(numbers_ptr + 9 * stride_numbers)
    token_weight = tl.load(numbers_ptr + 10 * stride_numbers)
    softmax_weight = tl.load(numbers_ptr + 11 * stride_numbers)
    label = 0
    if HAS_CE:
        label = tl.load(labels_ptr + row) - first
    coefficient = divergence_scale * inv_t
    term_weights = (
        forward_kl * coefficient, reverse_kl * LN2 * coefficient, jsd * (1.0 - beta) * LN2 * coefficient,
        skew_kl * (1.0 - alpha) * (1.0 - alpha) * coefficient, skew_reverse_kl * coefficient, tvd * 0.5 * coefficient,
    )  # fmt: skip
    means = reverse_T, q_jsd, skew_rise, reverse_rise, signs
    write_gradient(
        grad_ptr + row * stride_grad, sides, term_weights, means, s_lse_T, u_lse_T, inv_t, beta, alpha, s_lse, label,
        softmax_weight, label_weight, even_weight, token_weight, FORM, GRADED, OWN_SUMS, HAS_CE, HAS_SMOOTHING, ALIASED,
        LANES, VECTOR,
    )  # fmt: skip
