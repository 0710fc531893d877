"""The Triton kernel for the rows of linear_divergence.py, which has the formulas. Read _divergence_torch.py, its torch
twin, next to it.

The kernel reads a row once for all statistics (`first_pass`). It reads it again for divergences that need the
log-partitions first (`second_pass`: JSD, skewed KLs, total variation), and once to write the gradient over the
student's logits (`write_gradient`). A kernel is compiled for each set of options, and contains only what these ask for.

Logits and sums are in base 2. A kind of the second pass has two sums over the row. Three functions with a branch a kind
say which these are (`sums_of`), its value (`value_of`), and its gradient, which takes the second sum (`gradient_of`).
KIND is the kind's bit, `1 << i` for number i of divergence_kinds.ROW_KINDS.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ._divergence_torch import (
    FORM_BIAS,
    FORM_SHARE,
    FORM_SOFTCAP,
    FORM_TEACHER_BIAS,
    FORM_TEACHER_SOFTCAP,
    DivergenceOptions,
    RowInputs,
    divergence_rows_torch,
    form_of,
)
from ._logits import LN2, LOG2E, load_label_logit, transformed
from ._triton import kept_launch, tl, triton, use_triton
from ._tuning import SHAPES
from .divergence_kinds import BITS, ROW_KINDS, SECOND_PASS

LANES, WARPS = SHAPES.DIVERGENCE  # half of each with a second pass, which computes more per number
VECTOR_BYTES = 16  # of a row that a thread reads at once: the widest load

# Bits of FORM: what a call's logits are made of. Keep them on the left of `&`: the interpreter's ints accept no
# constexpr on their right.
BIAS = tl.constexpr(FORM_BIAS)
SOFTCAP = tl.constexpr(FORM_SOFTCAP)
TEACHER_BIAS = tl.constexpr(FORM_TEACHER_BIAS)
TEACHER_SOFTCAP = tl.constexpr(FORM_TEACHER_SOFTCAP)
SHARE = tl.constexpr(FORM_SHARE)  # the divergences compare the student with a mixture of both sides' logits

# Rows of the output, as _divergence_torch.FIELDS. From FIRST_TERM on they follow the order of ROW_KINDS.
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
FIRST_TERM = tl.constexpr(10)

# Bits of MEASURED and GRADED, and what KIND may be.
FORWARD = tl.constexpr(BITS["forward_kl"])
REVERSE = tl.constexpr(BITS["reverse_kl"])
JSD = tl.constexpr(BITS["jsd"])
SKEW = tl.constexpr(BITS["skew_kl"])
SKEW_REVERSE = tl.constexpr(BITS["skew_reverse_kl"])
TVD = tl.constexpr(BITS["tvd"])
PAIRED = tl.constexpr(sum(BITS[kind] for kind in SECOND_PASS))  # kinds whose gradients need the ratio of both sides
NO_LOG = tl.constexpr(BITS["tvd"])  # kinds whose value is no sum of logarithms, so that it has no base
FIRST_PAIRED = tl.constexpr(len(ROW_KINDS) - len(SECOND_PASS))  # number of the first of them
COUNT = tl.constexpr(len(ROW_KINDS))


class Sides(NamedTuple):
    """Where a row's logits come from. `student`, `bias`, ...: pointers; not read where FORM lacks their bit."""

    student: Any
    bias: Any
    scale: Any
    softcap: Any
    teacher: Any
    teacher_bias: Any
    teacher_scale: Any
    teacher_softcap: Any
    teacher_share: Any
    V: Any
    padded: Any  # number of columns that may be read. If it is a multiple of 16, threads load vectors, whatever V is


@triton.jit
def sums_of(q, p, d, e, beta, alpha, KIND: tl.constexpr):
    """Return what an entry adds to the two sums of a kind. q, p, d, e: see `probabilities`."""
    if KIND == JSD:
        q_ratio, p_ratio = log_ratios(d, e, beta)
        first = p * p_ratio
        second = q * q_ratio
    elif KIND == SKEW:
        ratio, second = skew(q, p, d, e, alpha)
        first = p * ratio
    elif KIND == SKEW_REVERSE:
        ratio, rise = skew_reverse(d, e, alpha)
        first = q * ratio
        second = q * rise
    else:
        tl.static_assert(KIND == TVD)
        first = tl.abs(p - q)
        second = q * sign(d)
    return first, second


@triton.jit
def value_of(first, second, weight, beta, scale, KIND: tl.constexpr):
    """Return (weight * divergence in base 2, scale * divergence in nats) from a kind's sums over the row."""
    value = first
    if KIND == JSD:
        value = beta * first + (1.0 - beta) * second
    elif KIND == TVD:
        value = 0.5 * first
    if NO_LOG & KIND:
        weighted = weight * value * (1.0 / LN2)
        term = value * scale
    else:
        weighted = weight * value
        term = value * (scale * LN2)
    return weighted, term


@triton.jit
def in_nats(first, second, KIND: tl.constexpr):
    """Return a kind's sums in nats: those that are sums of logarithms change their base."""
    if not NO_LOG & KIND:
        first *= LN2
    if KIND == JSD:
        second *= LN2
    return first, second


@triton.jit
def mean_in_base_two(second, KIND: tl.constexpr):
    """Return what `gradient_of` takes from a second sum that `in_nats` returned."""
    if KIND == JSD:
        second *= LOG2E
    return second


@triton.jit
def gradient_weight(weight, beta, alpha, KIND: tl.constexpr):
    """Return a kind's weight times the factor that `gradient_of` leaves out, since it is the same for a whole row."""
    if KIND == JSD:
        weight = weight * (1.0 - beta) * LN2
    elif KIND == SKEW:
        weight = weight * (1.0 - alpha) * (1.0 - alpha)
    elif KIND == TVD:
        weight = weight * 0.5
    return weight


@triton.jit
def gradient_of(weight, q, p, d, e, mean, beta, alpha, KIND: tl.constexpr):
    """Return an entry's gradient with respect to the student's logit. mean: the kind's second sum over the row.

    The second sum is the mean under q of what the entries have: so these gradients sum to 0 over the row.
    """
    if KIND == JSD:
        q_ratio, _ = log_ratios(d, e, beta)
        gradient = weight * q * (q_ratio - mean)
    elif KIND == SKEW:
        _, rise = skew(q, p, d, e, alpha)  # has q in it, which would underflow as a separate factor
        gradient = weight * (q * mean - rise)
    elif KIND == SKEW_REVERSE:
        _, rise = skew_reverse(d, e, alpha)
        gradient = weight * q * (rise - mean)
    else:
        tl.static_assert(KIND == TVD)
        gradient = weight * q * (sign(d) - mean)
    return gradient


@triton.jit
def outcome_of(weight, q, p, d, e, beta, alpha, KIND: tl.constexpr):
    """Return (divergence in nats, weighted gradient in log q) of one of few outcomes: see _sparse_rows.py.

    These are terms of `sums_of` and `gradient_of`, with factors in an order of their own, which rounds otherwise.
    """
    if KIND == REVERSE:
        value = -q * d * LN2
        gradient = weight * value
    elif KIND == JSD:
        q_ratio, p_ratio = log_ratios(d, e, beta)
        of_q = (1.0 - beta) * q * q_ratio * LN2
        value = beta * p * p_ratio * LN2 + of_q
        gradient = weight * of_q
    elif KIND == SKEW:
        ratio, rise = skew(q, p, d, e, alpha)
        value = p * ratio * LN2
        gradient = -(weight * (1.0 - alpha) * (1.0 - alpha) * rise)
    elif KIND == SKEW_REVERSE:
        ratio, rise = skew_reverse(d, e, alpha)
        value = q * ratio * LN2
        gradient = weight * q * rise
    else:
        tl.static_assert(KIND == TVD)
        value = 0.5 * tl.abs(p - q)
        gradient = weight * 0.5 * q * sign(d)
    return value, gradient


@triton.jit
def divergence_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, token_weight_ptr, grad_ptr, out_ptr,
    stride_student, stride_teacher, stride_grad, stride_out, V, padded,
    scale, softcap, teacher_scale, teacher_softcap, teacher_share, temperature, weights, beta, alpha, divergence_scale,
    ce_weight, smoothing, z_loss,
    FORM: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr, OWN_SUMS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_CE: tl.constexpr, MEASURED: tl.constexpr, GRADED: tl.constexpr,
    WRITE_GRAD: tl.constexpr, ALIASED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Compute a row. Logits, log-partitions and divergences are in base 2 until they are stored.

    OWN_SUMS: the divergences need sums of their own, as their distributions aren't those of the metrics, which are at
    temperature 1. MEASURED: kinds that the second pass computes. GRADED: kinds that have a gradient.
    weights: of ROW_KINDS, in their order.
    """
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2^31
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    grad_ptr += row * stride_grad
    inv_t = 1.0 / temperature
    sides = Sides(
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
    s_lse_T, t_lse_T, forward_T, reverse_T = at_temperature(s_sums, t_sums, tops, at_one, inv_t, FORM, OWN_SUMS)

    divergence = tl.where(weights[0] != 0, weights[0] * forward_T, 0.0)  # 0 * an infinite KL would be NaN
    divergence += tl.where(weights[1] != 0, weights[1] * reverse_T, 0.0)
    unit = divergence_scale * LN2
    tl.store(out_ptr + FIRST_TERM * stride_out + row, forward_T * unit)
    tl.store(out_ptr + (FIRST_TERM + 1) * stride_out + row, reverse_T * unit)
    firsts, seconds = (), ()
    if MEASURED:
        firsts, seconds = second_pass(sides, s_lse_T, t_lse_T, inv_t, beta, alpha, FORM, MEASURED, LANES, VECTOR)
    means = (0.0, reverse_T)  # by number of the kind; the forward KL's gradient subtracts none
    for i in tl.static_range(FIRST_PAIRED, COUNT):
        mean = 0.0
        if (1 << i) & MEASURED:
            mean = tl.sum(seconds[i], 0)
            weighted, term = value_of(tl.sum(firsts[i], 0), mean, weights[i], beta, divergence_scale, 1 << i)
            divergence += weighted
            tl.store(out_ptr + (FIRST_TERM + i) * stride_out + row, term)
        means = means + (mean,)

    divergence = divergence * unit
    loss = divergence
    log_partition = s_lse * LN2
    if HAS_CE:
        ce = log_partition - s_label * LN2 + z_loss * log_partition * log_partition
        if HAS_SMOOTHING:
            plain = tl.sum(s_plain, 0)
            # -1e25: a token that is ruled out has -1e30, and makes the mean logit -inf
            ce += smoothing * LN2 * (s_label - tl.where(plain < -1e25, float("-inf"), plain) / V)
        loss += ce_weight * ce
    token_weight = 1.0
    if HAS_TOKEN_WEIGHT:
        token_weight = tl.load(token_weight_ptr + row)
    tl.store(out_ptr + LOSS * stride_out + row, loss * token_weight)
    tl.store(out_ptr + DIVERGENCE * stride_out + row, divergence)

    if WRITE_GRAD:
        scaled = gradient_weights(weights, beta, alpha, divergence_scale * inv_t)
        softmax_weight = ce_weight * (1.0 + 2.0 * z_loss * log_partition)
        write_gradient(
            grad_ptr, sides, scaled, means, s_lse_T, t_lse_T, inv_t, beta, alpha, s_lse, label, softmax_weight,
            ce_weight * (1.0 - smoothing), ce_weight * smoothing / V, token_weight, FORM, GRADED, OWN_SUMS, HAS_CE,
            HAS_SMOOTHING, ALIASED, LANES, VECTOR,
        )  # fmt: skip


@triton.jit
def gradient_weights(weights, beta, alpha, coefficient):
    """Return what `write_gradient` multiplies each kind's gradient by, from the weights of ROW_KINDS."""
    scaled = (weights[0] * coefficient, weights[1] * LN2 * coefficient)
    for i in tl.static_range(FIRST_PAIRED, COUNT):
        scaled = scaled + (gradient_weight(weights[i], beta, alpha, 1 << i) * coefficient,)
    return scaled


@triton.jit
def first_pass(
    sides, inv_t, FORM: tl.constexpr, OWN_SUMS: tl.constexpr, HAS_SMOOTHING: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Read the row once: find maxima, and `fold`'s sums at temperature 1 and for the KLs' own distributions.

    Return (the student's sums, the teacher's sums, (maxima of the student, of the teacher, and of the logits that the
    student is compared with, the teacher's logit at the student's maximum), the student's plain sum), one value a lane.
    """
    lanes = lanes_of(LANES, VECTOR)
    zero = tl.zeros((LANES,), tl.float32)
    s_top = zero - 1e30
    # -1e30 is below every logit but those that are ruled out, which have it too.
    t_top = zero - 1e30
    u_top = zero - 1e30
    t_at_s_top = zero - 1e30
    s_total, s_moment, s_ratio, s_total_T, s_ratio_T = zero, zero, zero, zero, zero
    t_total, t_moment, t_ratio, t_total_T, t_ratio_T = zero, zero, zero, zero, zero
    s_plain = zero
    for start in range(0, sides.V, LANES * VECTOR):
        cols = start + lanes
        s, t, _ = load_sides(sides, cols, FORM, "")
        if HAS_SMOOTHING:
            s_plain += tl.sum(tl.where(cols < sides.V, s, 0.0), 1)  # columns beyond V hold -1e30
        if SHARE & FORM:
            u = s + sides.teacher_share * (t - s)
            _, s_total_T, _, s_ratio_T = fold(s, u, s_top, s_total_T, zero, s_ratio_T, inv_t)
            u_top, t_total_T, _, t_ratio_T = fold(u, s, u_top, t_total_T, zero, t_ratio_T, inv_t)
        elif OWN_SUMS:  # at a temperature, but of the teacher itself
            _, s_total_T, _, s_ratio_T = fold(s, t, s_top, s_total_T, zero, s_ratio_T, inv_t)
            _, t_total_T, _, t_ratio_T = fold(t, s, t_top, t_total_T, zero, t_ratio_T, inv_t)
        # Both sides agree if the teacher has its maximum where the student has its own. Keep the largest of the
        # teacher's logits among the places of the student's maximum: several may share it.
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
    # KL(p || q) = E_p[t - s] - lse_t + lse_s. The mean is one of differences, so equal logits give exactly 0.
    forward = inf_if_ruled_out(tl.sum(t_ratio * t_share, 0) / t_sum - (t_lse - s_lse))
    reverse = inf_if_ruled_out(tl.sum(s_ratio * s_share, 0) / s_sum - (s_lse - t_lse))
    agrees = tl.max(tl.where(s_top == s_max, t_at_s_top, -1e30), 0) >= t_max  # among the lanes that hold the maximum
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
        u_max = t_max  # u: what the student is compared with, the teacher or the mixture
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
        forward_T = inf_if_ruled_out(inv_t * tl.sum(t_ratio_T * t_share, 0) / t_sum - (t_lse_T - s_lse_T))
        reverse_T = inf_if_ruled_out(inv_t * tl.sum(s_ratio_T * s_share, 0) / s_sum - (s_lse_T - t_lse_T))
    return s_lse_T, t_lse_T, forward_T, reverse_T


@triton.jit
def second_pass(
    sides, s_lse, t_lse, inv_t, beta, alpha, FORM: tl.constexpr, MEASURED: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Return each kind's two sums by lane, as two tuples; zero for kinds that are not in MEASURED."""
    lanes = lanes_of(LANES, VECTOR)
    firsts = ()
    for _kind in tl.static_range(COUNT):
        firsts = firsts + (tl.zeros((LANES,), tl.float32),)
    seconds = firsts
    for start in range(0, sides.V, LANES * VECTOR):
        s, t, _ = load_compared(sides, start + lanes, FORM, "")
        q, p, d, e = probabilities(s * inv_t - s_lse, t * inv_t - t_lse)
        for i in tl.static_range(FIRST_PAIRED, COUNT):
            if (1 << i) & MEASURED:
                # Summed over VECTOR at once: one number a lane stays in registers while the row is walked.
                first, second = sums_of(q, p, d, e, beta, alpha, 1 << i)
                firsts = firsts[:i] + (firsts[i] + tl.sum(first, 1),) + firsts[i + 1 :]  # tuples cannot be written to
                seconds = seconds[:i] + (seconds[i] + tl.sum(second, 1),) + seconds[i + 1 :]
    return firsts, seconds


@triton.jit
def write_gradient(
    grad_ptr, sides, weights, means, s_lse_T, t_lse_T, inv_t, beta, alpha, s_lse, label, softmax_weight, label_weight,
    even_weight, token_weight,
    FORM: tl.constexpr, GRADED: tl.constexpr, OWN_SUMS: tl.constexpr, HAS_CE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, ALIASED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the loss over the student's raw logits.

    weights: of each kind's gradient, see `gradient_weights`. means: what they subtract, see `gradient_of`.
    label_weight, even_weight: what the cross-entropy subtracts from its softmax at the label, and everywhere.
    """
    lanes = lanes_of(LANES, VECTOR)
    for start in range(0, sides.V, LANES * VECTOR):
        cols = start + lanes
        s, t, slope = load_compared(sides, cols, FORM, "evict_first")
        if ALIASED:
            # The gradient is narrower than the logits it overwrites, so its entry j lies where logit j / 2 was: all
            # threads must have read their logits of this block before any writes.
            tl.debug_barrier()
        log_q = s * inv_t - s_lse_T  # of the distributions that the divergences compare, at their temperature
        log_p = t * inv_t - t_lse_T
        grad = tl.zeros_like(s)  # in the logits after scale and softcap; `slope` carries it to the raw ones
        if PAIRED & GRADED:
            q, p, d, e = probabilities(log_q, log_p)
        else:
            q = tl.exp2(log_q)
        for i in tl.static_range(FIRST_PAIRED, COUNT):
            if (1 << i) & GRADED:
                grad += gradient_of(weights[i], q, p, d, e, means[i], beta, alpha, 1 << i)
        if FORWARD & GRADED:
            if not PAIRED & GRADED:  # else `probabilities` has given p
                p = tl.exp2(log_p)
            grad += weights[0] * (q - p)
        if REVERSE & GRADED:
            grad += weights[1] * q * (log_q - log_p - means[1])
        if HAS_CE:
            if OWN_SUMS:
                # Cross-entropy is at temperature 1. Without OWN_SUMS that is the q above.
                q = tl.exp2(s - s_lse)
            ce_grad = softmax_weight * q
            ce_grad = tl.where(cols == label, ce_grad - label_weight, ce_grad)
            if HAS_SMOOTHING:
                ce_grad -= even_weight
            grad += ce_grad
        grad = (grad * slope * token_weight).to(grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + cols, grad, mask=cols < sides.padded, eviction_policy="evict_first")


@triton.jit
def load(
    raw_ptr, bias_ptr, cols, V, padded, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Return (logits in base 2, d logits / d raw). -inf and columns beyond the vocabulary become -1e30: so low that
    they weigh nothing, yet finite, so that two of them differ by 0.
    """
    z = tl.load(raw_ptr + cols, mask=cols < padded, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
    x, slope = transformed(z, scale, softcap, HAS_SOFTCAP, True)
    return tl.where((x < -1e30) | (cols >= V), -1e30, x), slope  # NaN passes both comparisons


@triton.jit
def load_sides(sides, cols, FORM: tl.constexpr, EVICT: tl.constexpr):
    """Return (the student's logits, the teacher's logits, d logits / d raw of the student)."""
    HAS_BIAS: tl.constexpr = (BIAS & FORM) != 0
    HAS_SOFTCAP: tl.constexpr = (SOFTCAP & FORM) != 0
    HAS_TEACHER_BIAS: tl.constexpr = (TEACHER_BIAS & FORM) != 0
    HAS_TEACHER_SOFTCAP: tl.constexpr = (TEACHER_SOFTCAP & FORM) != 0
    s, slope = load(
        sides.student, sides.bias, cols, sides.V, sides.padded, sides.scale, sides.softcap, HAS_BIAS, HAS_SOFTCAP, EVICT
    )
    t, _ = load(
        sides.teacher, sides.teacher_bias, cols, sides.V, sides.padded, sides.teacher_scale, sides.teacher_softcap,
        HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP, EVICT,
    )  # fmt: skip
    return s, t, slope


@triton.jit
def load_compared(sides, cols, FORM: tl.constexpr, EVICT: tl.constexpr):
    """Like `load_sides`, but return the mixture in place of the teacher's logits if the call has a teacher_share."""
    s, t, slope = load_sides(sides, cols, FORM, EVICT)
    if SHARE & FORM:
        t = s + sides.teacher_share * (t - s)
    return s, t, slope


@triton.jit
def load_labels(sides, label, FORM: tl.constexpr):
    """Return the label's logits of both sides."""
    HAS_BIAS: tl.constexpr = (BIAS & FORM) != 0
    HAS_SOFTCAP: tl.constexpr = (SOFTCAP & FORM) != 0
    HAS_TEACHER_BIAS: tl.constexpr = (TEACHER_BIAS & FORM) != 0
    HAS_TEACHER_SOFTCAP: tl.constexpr = (TEACHER_SOFTCAP & FORM) != 0
    s_label = load_label_logit(
        sides.student, sides.bias, label, sides.V, sides.scale, sides.softcap, HAS_BIAS, HAS_SOFTCAP, True
    )
    t_label = load_label_logit(
        sides.teacher, sides.teacher_bias, label, sides.V, sides.teacher_scale, sides.teacher_softcap,
        HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP, True,
    )  # fmt: skip
    return s_label, t_label


@triton.jit
def fold(x, other, top, total, moment, ratio, inv_t):
    """Add one vector per thread to online sums of e = 2^(inv_t (x - top)), e (x - top) and e (x - other).

    x: (LANES, VECTOR). Sums are rescaled to a new maximum once a vector; threads exchange nothing until the row ends.
    """
    higher = tl.maximum(top, tl.max(x, 1))
    keep = tl.exp2((top - higher) * inv_t)  # what earlier terms shrink by under the new maximum
    below = x - higher[:, None]
    e = tl.exp2(below * inv_t)
    # its terms are relative to the maximum, which moved
    moment = (moment + (top - higher) * total) * keep + tl.sum(e * below, 1)
    total = total * keep + tl.sum(e, 1)
    ratio = ratio * keep + tl.sum(e * (x - other), 1)
    return higher, total, moment, ratio


@triton.jit
def inf_if_ruled_out(kl):
    """Return a KL as infinite if one side has mass where the other has probability 0 (a logit of -1e30)."""
    return tl.where(kl > 1e20, float("inf"), kl)  # below any real KL in base 2; a logit of -1e30 gives more


@triton.jit
def entropy(below, total, moment, share, row_total):
    """Return the row's entropy in base 2 from `fold`'s sums; `below`: each lane's maximum minus the row's."""
    return tl.log2(row_total) - tl.sum((moment + below * total) * share, 0) / row_total


@triton.jit
def lanes_of(LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return the columns (LANES, VECTOR) of the first block. A thread reads VECTOR adjacent numbers."""
    return tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def probabilities(log_q, log_p):
    """Return (q, p, d = log2 p/q, e = smaller / larger of both). p - q is exactly 0 where log_q == log_p."""
    d = log_p - log_q
    e = tl.exp2(-tl.abs(d))  # at most 1: nothing overflows
    # The smaller is larger * e and not another exponential: so p - q is exactly 0 where d is.
    larger = tl.exp2(tl.maximum(log_q, log_p))
    smaller = larger * e
    q = tl.where(d > 0, smaller, larger)
    p = tl.where(d > 0, larger, smaller)
    return q, p, d, e


@triton.jit
def log_ratios(d, e, beta):
    """Return (log2 q/m, log2 p/m), m = (1 - beta) q + beta p. Exactly 0 where d is; finite if q or p underflows."""
    share = tl.where(d > 0, 1.0 - beta, beta)  # weight in m of the smaller probability
    log_m = tl.log2(1.0 + share * (e - 1.0))  # relative to the larger probability
    return tl.minimum(-d, 0.0) - log_m, tl.minimum(d, 0.0) - log_m


@triton.jit
def _mixture(d, e, p_share, q_share):
    """Return (p_share p + q_share q) / max(p, q), for shares that sum to 1.

    It is exactly 1 where d is 0. Unlike the form in `log_ratios`, it keeps the digits of a share near 0 where e is 0.
    """
    return tl.where(d > 0, p_share, q_share) + tl.where(d > 0, q_share, p_share) * e


@triton.jit
def skew(q, p, d, e, alpha):
    """Return (log2 p/m, (p - q) q/m), m = alpha p + (1 - alpha) q."""
    m = _mixture(d, e, alpha, 1.0 - alpha)
    return tl.minimum(d, 0.0) - tl.log2(m), (p - q) * (tl.where(d > 0, e, 1.0) / m)


@triton.jit
def skew_reverse(d, e, alpha):
    """Return (log2 q/m, log q/m - alpha (q/m - 1)), m = alpha q + (1 - alpha) p."""
    m = _mixture(d, e, 1.0 - alpha, alpha)
    ratio = tl.minimum(-d, 0.0) - tl.log2(m)
    above = (1.0 - alpha) * (tl.where(d > 0, e - 1.0, 1.0 - e) / m)  # q/m - 1
    return ratio, ratio * LN2 - alpha * above


@triton.jit
def sign(d):
    """Return the sign of q - p, from d = log2 p/q."""
    return tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))


def divergence_rows(x: RowInputs, out: Tensor, grad: Tensor | None, options: DivergenceOptions) -> None:
    """Fill out (len(FIELDS), n), and grad (n, V) unless it is None. grad may share the student's memory."""
    if not use_triton(out):
        return divergence_rows_torch(x, out, grad, options)
    student, teacher = x.student, x.teacher
    written = student if grad is None else grad
    vocab = student.shape[1]
    padded = -(-vocab // 16) * 16  # what `workspace` allocates a row
    if min(student.stride(0), teacher.stride(0), written.stride(0)) < padded:  # no padding: not from `workspace`
        padded = vocab
    flags = options.flags
    measured = flags["MEASURED"]
    launched = kept_launch(
        divergence_kernel, (student.shape[0],),
        student.stride(0), teacher.stride(0), written.stride(0), out.stride(0), vocab, padded, *options.numbers,
        FORM=form_of(x, options), HAS_LABELS=x.labels is not None, HAS_TOKEN_WEIGHT=x.token_weight is not None,
        **flags, WRITE_GRAD=grad is not None,
        ALIASED=written.dtype != student.dtype, LANES=LANES // 2 if measured else LANES,
        VECTOR=max(1, VECTOR_BYTES // student.element_size()), num_warps=WARPS // 2 if measured else WARPS,
    )(
        student, teacher, student if x.bias is None else x.bias, teacher if x.teacher_bias is None else x.teacher_bias,
        student if x.labels is None else x.labels, student if x.token_weight is None else x.token_weight, written, out,
        has_twin=True,
    )  # fmt: skip
    if not launched:
        divergence_rows_torch(x, out, grad, options)
