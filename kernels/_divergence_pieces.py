"""Pieces of linear_divergence.py's row kernel. Logits and sums are in base 2: the hardware computes powers of two.

Formulas: linear_divergence.py.
"""

from ._triton import tl, triton

# Bits of FORM: what a call's logits are made of. Keep them on the left of `&`: the interpreter's ints accept no
# constexpr on their right.
BIAS = tl.constexpr(1)
SOFTCAP = tl.constexpr(2)
TEACHER_BIAS = tl.constexpr(4)
TEACHER_SOFTCAP = tl.constexpr(8)
SHARE = tl.constexpr(16)  # the divergences compare the student with a mixture of both sides' logits


@triton.jit
def _base_two(z, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return (log2(e) * logit, d logit / d raw)."""
    if HAS_SOFTCAP:
        tanh = 2.0 * tl.sigmoid(2.0 * (z * scale) / softcap) - 1.0
        x = tanh * (softcap * 1.4426950408889634)
        slope = (1.0 - tanh * tanh) * scale
    else:
        x = z * (scale * 1.4426950408889634)
        slope = tl.zeros_like(z) + scale
    return x, slope


@triton.jit
def load(
    raw_ptr, bias_ptr, cols, V, padded, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Return (logits in base 2, d logits / d raw). -inf and columns beyond the vocabulary become -1e30: so low that
    they weigh nothing, yet finite, so that two of them differ by 0.

    padded: number of columns that may be read. If it is a multiple of 16, threads load vectors, whatever V is.
    """
    mask = cols < V
    z = tl.load(raw_ptr + cols, mask=cols < padded, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x, slope = _base_two(z, scale, softcap, HAS_SOFTCAP)
    return tl.where((x < -1e30) | (cols >= V), -1e30, x), slope  # NaN passes both comparisons


@triton.jit
def load_label(raw_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Return the label's logit in base 2. It is NaN for a label outside [0, V), so that a wrong label shows."""
    inside = (label >= 0) & (label < V)
    z = tl.load(raw_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + label, mask=inside, other=0.0).to(tl.float32)
    x, _ = _base_two(z, scale, softcap, HAS_SOFTCAP)
    return x


@triton.jit
def fold(x, other, top, total, moment, ratio, inv_t):
    """Add one vector per thread to online sums of e = 2^(inv_t (x - top)), e (x - top) and e (x - other).

    x: (LANES, VECTOR). Sums are rescaled to a new maximum once a vector; threads exchange nothing until the row ends.
    """
    higher = tl.maximum(top, tl.max(x, 1))
    keep = tl.exp2((top - higher) * inv_t)
    below = x - higher[:, None]
    e = tl.exp2(below * inv_t)
    moment = (moment + (top - higher) * total) * keep + tl.sum(e * below, 1)
    total = total * keep + tl.sum(e, 1)
    ratio = ratio * keep + tl.sum(e * (x - other), 1)
    return higher, total, moment, ratio


@triton.jit
def unbounded(kl):
    """Return a KL as infinite if one side has mass where the other has probability 0 (a logit of -1e30)."""
    return tl.where(kl > 1e20, float("inf"), kl)


@triton.jit
def entropy(below, total, moment, share, row_total):
    """Return the row's entropy in base 2 from `fold`'s sums; `below`: each lane's maximum minus the row's."""
    return tl.log2(row_total) - tl.sum((moment + below * total) * share, 0) / row_total


@triton.jit
def lanes_of(LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return the columns (LANES, VECTOR) of the first block. A thread reads VECTOR adjacent numbers."""
    return tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def load_sides(sides, cols, FORM: tl.constexpr, EVICT: tl.constexpr):
    """Return (the student's logits, the teacher's logits, d logits / d raw of the student).

    sides: (student_ptr, bias_ptr, scale, softcap, teacher_ptr, teacher_bias_ptr, teacher_scale, teacher_softcap,
    teacher_share, V, padded). FORM: bits that say which of these the call has.
    """
    student_ptr, bias_ptr, scale, softcap, teacher_ptr, teacher_bias_ptr, teacher_scale, teacher_softcap = sides[:8]
    _, V, padded = sides[8:]
    HAS_BIAS: tl.constexpr = (BIAS & FORM) != 0
    HAS_SOFTCAP: tl.constexpr = (SOFTCAP & FORM) != 0
    HAS_TEACHER_BIAS: tl.constexpr = (TEACHER_BIAS & FORM) != 0
    HAS_TEACHER_SOFTCAP: tl.constexpr = (TEACHER_SOFTCAP & FORM) != 0
    s, slope = load(student_ptr, bias_ptr, cols, V, padded, scale, softcap, HAS_BIAS, HAS_SOFTCAP, EVICT)
    t, _ = load(
        teacher_ptr, teacher_bias_ptr, cols, V, padded, teacher_scale, teacher_softcap, HAS_TEACHER_BIAS,
        HAS_TEACHER_SOFTCAP, EVICT,
    )  # fmt: skip
    return s, t, slope


@triton.jit
def load_both(sides, cols, FORM: tl.constexpr, EVICT: tl.constexpr):
    """Like `load_sides`, but return the mixture in place of the teacher's logits if the call has a teacher_share."""
    s, t, slope = load_sides(sides, cols, FORM, EVICT)
    if SHARE & FORM:
        t = s + sides[8] * (t - s)
    return s, t, slope


@triton.jit
def load_labels(sides, label, FORM: tl.constexpr):
    """Return the label's logits of both sides."""
    student_ptr, bias_ptr, scale, softcap, teacher_ptr, teacher_bias_ptr, teacher_scale, teacher_softcap = sides[:8]
    V = sides[9]
    HAS_BIAS: tl.constexpr = (BIAS & FORM) != 0
    HAS_SOFTCAP: tl.constexpr = (SOFTCAP & FORM) != 0
    HAS_TEACHER_BIAS: tl.constexpr = (TEACHER_BIAS & FORM) != 0
    HAS_TEACHER_SOFTCAP: tl.constexpr = (TEACHER_SOFTCAP & FORM) != 0
    s_label = load_label(student_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    t_label = load_label(
        teacher_ptr, teacher_bias_ptr, label, V, teacher_scale, teacher_softcap, HAS_TEACHER_BIAS, HAS_TEACHER_SOFTCAP
    )
    return s_label, t_label


@triton.jit
def probabilities(log_q, log_p):
    """Return (q, p, d = log2 p/q, e = smaller / larger of both). p - q is exactly 0 where log_q == log_p."""
    d = log_p - log_q
    e = tl.exp2(-tl.abs(d))
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
    return ratio, ratio * 0.6931471805599453 - alpha * above


@triton.jit
def sign(d):
    """Return the sign of q - p, from d = log2 p/q."""
    return tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))
