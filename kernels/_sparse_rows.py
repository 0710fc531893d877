"""Row kernels of linear_sparse_divergence.py: they turn a chunk of logits into per-token values and their gradient.

A row's K entries that the teacher named are taken out first: their logits go to registers, and -inf takes their places.
So one pass over the row sees only the rest of the vocabulary, and the rest's mass is a separate sum. (1 minus the
others would lose every digit where a student is sure.) A second pass writes the rest's gradient over the logits, and
the K entries are filled in last. The Triton kernel and its torch twin take the same arguments.
Formulas: linear_sparse_divergence.py.

For kinds other than the forward KL, a row's K entries and the rest are the K + 1 outcomes of two distributions:

    kind             value                                  r = d value / d q, up to a constant
    reverse_kl       -sum q d                               -d
    jsd              b sum p log p/m + (1 - b) sum q log q/m    (1 - b) log q/m       m = (1 - b) q + b p
    skew_kl          sum p log p/m                          -(1 - a) (p/m - 1)        m = a p + (1 - a) q
    skew_reverse_kl  sum q log q/m                          log q/m - a (q/m - 1)     m = a q + (1 - a) p
    tvd              sum |p - q| / 2                        sign(q - p) / 2

with d = log p/q. Ratios come from d by expm1 and log1p, so they are exactly 0 where q and p are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ._divergence_kernels import COUNT, outcome_of, probabilities
from ._divergence_torch import Outcomes, inf_if_ruled_out
from ._divergence_torch import outcome_of as outcome_of_torch
from ._logits import (
    LN2,
    LOG2E,
    LOWEST,
    LogitTransform,
    check_scalars,
    entropy_of,
    load_label_logit,
    load_logits,
    transform,
    transformed,
)
from ._triton import kept_launch, tl, triton, use_triton
from ._tuning import SHAPES
from .divergence_kinds import BITS, ROW_KINDS

BLOCK, WARPS = (
    SHAPES.SPARSE_ROWS
)  # so many warps that a multiprocessor holds one row, which L2 keeps for the second pass
FIELDS = (
    "loss", "divergence", "log_prob", "entropy", "is_top1", "teacher_mass", "agrees",
    *(f"{kind} of the loss" for kind in ROW_KINDS),
)  # fmt: skip
TERMS = len(FIELDS) - len(ROW_KINDS)  # the divergences start here; those not asked for stay unwritten
LOSS, DIVERGENCE, LOG_PROB, ENTROPY, IS_TOP1, TEACHER_MASS, AGREES = range(TERMS)
TAILS = ("bucket", "none")
BLOCK_LOGITS = 2**24  # of the twin on a GPU: 64 MiB in fp32, and again as much for each step on them
LEAST_REST = 2.0**-24  # what fp32 log-probabilities tell of the rest's mass; below it, reverse KLs would be infinite


@dataclass(frozen=True)
class SparseOptions:
    """Scalars of one call; `linear_sparse_divergence` explains them."""

    tail: str = "bucket"
    transform: LogitTransform = field(default_factory=LogitTransform)
    temperature: float = 1.0
    ce_weight: float = 0.0
    scale_by_temperature_squared: bool = True
    weights: Mapping[str, float] = field(default_factory=lambda: {"forward_kl": 1.0})  # of ROW_KINDS
    beta: float = 0.5
    alpha: float = 0.1

    def __post_init__(self):
        if self.tail == "none" and not self.plain:
            raise ValueError(
                f"tail none determines only the forward KL, got kind {', '.join(self.weights)}: draws do not tell the "
                "teacher's probability of other tokens."
            )
        if self.tail not in TAILS:
            raise ValueError(f"tail must be one of {', '.join(TAILS)}, got {self.tail!r}.")
        check_scalars(self.temperature)
        if not 0 <= self.beta <= 1 or not 0 <= self.alpha < 1:
            raise ValueError(f"beta must lie in [0, 1] and alpha in [0, 1), got {self.beta} and {self.alpha}.")

    @property
    def plain(self) -> bool:
        """Whether the loss is the forward KL, and nothing else is measured."""
        return self.weights == {"forward_kl": 1.0}

    @property
    def kinds(self) -> int:
        """Return the kernel's KINDS: bits of the divergences besides the forward KL, whose bit says that there are."""
        return (
            0 if self.plain else BITS["forward_kl"] | sum(BITS[kind] for kind in self.weights if kind != "forward_kl")
        )

    @property
    def divergence_scale(self) -> float:
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0


@dataclass(frozen=True)
class SparseTargets:
    """The teacher's entries, labels and weights of a chunk of rows."""

    ids: Tensor  # (n, K) int64 or int32, contiguous
    log_probs: Tensor  # (n, K), contiguous
    labels: Tensor | None = None  # (n,) int64
    token_weight: Tensor | None = None  # (n,) fp32
    top_ids: Tensor | None = None  # (n,) int64 or int32, the teacher's likeliest token

    def rows(self, chunk: slice) -> "SparseTargets":
        optional = {"labels": self.labels, "token_weight": self.token_weight, "top_ids": self.top_ids}
        chunked = {name: None if x is None else x[chunk] for name, x in optional.items()}
        return replace(self, ids=self.ids[chunk], log_probs=self.log_probs[chunk], **chunked)


@triton.jit
def _weighted(weight, value):
    """Return weight * value; 0 for a kind that is only measured, whose value may be infinite."""
    return tl.where(weight != 0.0, weight * value, 0.0)


@triton.jit
def _outcomes(log_q, log_p, here, weights, beta, alpha, KINDS: tl.constexpr):
    """Return (what outcomes add to each kind in KINDS, in nats; minus their part of the weighted gradient in log q).

    log_q, log_p: in base 2, a block of outcomes or one. here: which there are. The forward KL is not computed here.
    """
    q, p, d, e = probabilities(log_q, log_p)
    q = tl.where(here, q, 0.0)
    p = tl.where(here, p, 0.0)
    d = tl.where(here, d, 0.0)
    zero = tl.where(here, 0.0, 0.0 * q)
    values = (zero,)
    down = zero
    for i in tl.static_range(1, COUNT):
        value = zero
        if (1 << i) & KINDS:
            value, gradient = outcome_of(weights[i], q, p, d, e, beta, alpha, 1 << i)
            down -= gradient
        values = values + (value,)
    return values, down


@triton.jit
def _load_rest(
    raw_ptr, bias_ptr, cols, V, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVICT: tl.constexpr
):
    """Like `load_logits` for the entries that were not taken out; also return which these are."""
    z = tl.load(raw_ptr + cols, mask=cols < V, other=float("-inf"), eviction_policy=EVICT).to(tl.float32)
    # A logit that is -inf by itself counts as taken, too: it has no mass.
    rest = z != float("-inf")
    z = tl.where(rest, z, 0.0)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
    x, slope = transformed(z, scale, softcap, HAS_SOFTCAP, False)
    return tl.where(rest & (x != float("-inf")), x, -1e30), slope, rest


@triton.jit
def _rest_statistics(
    logits_ptr, bias_ptr, V, scale, softcap, inv_t,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return, for x = logit * log2(e) over the rest: the maximum, sum 2^(x - maximum), the same sum times x,
    sum 2^((x - maximum) / T), and the number of entries. Each lane has its maximum; lanes are reduced once, at the end.
    """
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)  # below every logit
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    total_T = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        x, _, rest = _load_rest(
            logits_ptr, bias_ptr, start + lanes, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_last"
        )
        x = x * LOG2E
        higher = tl.maximum(top, x)
        keep = tl.exp2(top - higher)
        e = tl.exp2(x - higher)
        total = total * keep + e
        weighted = weighted * keep + e * x
        if HAS_TEMPERATURE:
            total_T = total_T * tl.exp2((top - higher) * inv_t) + tl.exp2((x - higher) * inv_t)
        top = higher
        count += rest.to(tl.int32)  # how many entries are the rest: none, if the teacher named all
    highest = tl.max(top, 0)  # over lanes
    share = tl.exp2(top - highest)  # what a lane's sums shrink by
    total_sum = tl.sum(total * share, 0)
    total_T_sum = total_sum
    if HAS_TEMPERATURE:
        total_T_sum = tl.sum(total_T * tl.exp2((top - highest) * inv_t), 0)
    return highest, total_sum, tl.sum(weighted * share, 0), total_T_sum, tl.sum(count, 0)


@triton.jit
def _sparse_kernel(
    logits_ptr, grad_ptr, bias_ptr, ids_ptr, log_probs_ptr, labels_ptr, token_weight_ptr, top_ids_ptr, out_ptr,
    stride_row, stride_grad, stride_out, V, K, scale, softcap, temperature, divergence_scale, ce_weight,
    weights, beta, alpha,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr,
    HAS_TOP_IDS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_CE: tl.constexpr, HAS_BUCKET: tl.constexpr,
    KINDS: tl.constexpr, WRITE_GRAD: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride_row passes 2^31
    logits_ptr += row * stride_row
    grad_ptr += row * stride_grad
    inv_t = 1.0 / temperature

    # The teacher's entries and the student's logits there: NaN for an id beyond the vocabulary.
    entries = tl.arange(0, K_BLOCK)
    ids = tl.load(ids_ptr + row * K + entries, mask=entries < K, other=-1).to(tl.int64)
    log_p = tl.load(log_probs_ptr + row * K + entries, mask=entries < K, other=float("-inf")).to(tl.float32)
    present = (ids >= 0) & (log_p != float("-inf"))  # others are padding
    inside = present & (ids < V)  # what is present, but beyond the vocabulary, becomes NaN below
    log_p = tl.where(present, log_p, 0.0)
    p = tl.where(present, tl.exp(log_p), 0.0)
    x_k, slope_k = load_logits(logits_ptr, bias_ptr, ids, inside, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "")
    x_k = tl.where(present & (ids >= V), float("nan"), x_k) * LOG2E  # powers of two from here on
    if HAS_LABELS:
        label = tl.load(labels_ptr + row)
        x_label = load_label_logit(logits_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP, False)
        x_label = x_label * LOG2E
    if HAS_TOP_IDS:
        top_id = tl.load(top_ids_ptr + row).to(tl.int64)
        x_top_id = load_label_logit(logits_ptr, bias_ptr, top_id, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP, False)
        x_top_id = x_top_id * LOG2E
    tl.debug_barrier()  # all threads must read before any writes
    taken = tl.full((K_BLOCK,), float("-inf"), tl.float32)  # a mark, which `_load_rest` recognises
    tl.store(logits_ptr + ids, taken.to(logits_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()

    top_rest, total_rest, weighted_rest, total_rest_T, count = _rest_statistics(
        logits_ptr, bias_ptr, V, scale, softcap, inv_t, HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, BLOCK
    )
    twice = count + tl.sum(inside.to(tl.int32), 0) > V  # ids came twice: fewer places were taken
    top_rest = tl.where(twice, float("nan"), top_rest)
    top = tl.maximum(top_rest, tl.max(x_k, 0))  # of the whole row
    keep = tl.exp2(top_rest - top)
    e_k = tl.where(present, tl.exp2(x_k - top), 0.0)
    total = total_rest * keep + tl.sum(e_k, 0)
    lse = top + tl.log2(total)
    entropy = lse - (weighted_rest * keep + tl.sum(tl.where(e_k > 0, e_k * x_k, 0.0), 0)) / total
    e_k_T, total_T = e_k, total
    if HAS_TEMPERATURE:
        e_k_T = tl.where(present, tl.exp2((x_k - top) * inv_t), 0.0)
        total_T = total_rest_T * tl.exp2((top_rest - top) * inv_t) + tl.sum(e_k_T, 0)

    # The divergence. Without a rest, 1 - sum p is only rounding, and log_rest_q may be any finite number.
    mass = tl.sum(p, 0)  # P; rounding in a cache may bring it above 1
    total_rest_T = tl.where(count > 0, total_rest_T, 1.0)
    log_rest_q = ((top_rest - top) * inv_t + tl.log2(total_rest_T / total_T)) * LN2
    log_q_k = ((x_k - top) * inv_t - tl.log2(total_T)) * LN2
    divergence = tl.sum(tl.where(p > 0, p * (log_p - log_q_k), 0.0), 0)  # 0 * an infinite one would be NaN
    rest_p = 0.0
    if HAS_BUCKET:
        rest_p = tl.where(count > 0, tl.maximum(1.0 - mass, 0.0), 0.0)
        divergence += rest_p * (tl.log(tl.where(rest_p > 0.0, rest_p, 1.0)) - log_rest_q)
    down_k, down_rest, down = p, rest_p, mass + rest_p  # minus the gradient in log q, and its sum
    if KINDS:
        # Each outcome adds to each kind; the rest is one, of which fp32 tells 2^-24 at least.
        log_p_rest = tl.log2(tl.maximum(1.0 - mass, 5.9604644775390625e-08))
        of_k, more_k = _outcomes(log_q_k * LOG2E, log_p * LOG2E, present, weights, beta, alpha, KINDS)
        of_rest, more_rest = _outcomes(log_rest_q * LOG2E, log_p_rest, count > 0, weights, beta, alpha, KINDS)
        unsound = divergence != divergence  # ids twice or beyond the vocabulary: minima and maxima hide NaN
        forward = divergence
        tl.store(out_ptr + 7 * stride_out + row, forward * divergence_scale)
        divergence = _weighted(weights[0], forward)
        for i in tl.static_range(1, COUNT):
            value = tl.sum(of_k[i], 0) + of_rest[i]
            # below any real divergence; a logit of -1e30 gives more
            value = tl.where(value > 1e20, float("inf"), value)
            value = tl.where(unsound, float("nan"), value)
            tl.store(out_ptr + (7 + i) * stride_out + row, value * divergence_scale)
            divergence += _weighted(weights[i], value)
        divergence = tl.where(unsound, float("nan"), divergence)
        down_k = weights[0] * p + more_k
        down_rest = weights[0] * rest_p + more_rest
        down = tl.where(unsound, float("nan"), tl.sum(down_k, 0) + down_rest)
    divergence = divergence * divergence_scale
    loss = divergence
    log_prob, is_top1 = 0.0, 0.0
    if HAS_LABELS:
        log_prob, is_top1 = (x_label - lse) * LN2, (x_label >= top).to(tl.float32)
    if HAS_CE:
        loss -= ce_weight * log_prob
    token_weight = 1.0
    if HAS_TOKEN_WEIGHT:
        token_weight = tl.load(token_weight_ptr + row)
    tl.store(out_ptr + row, loss * token_weight)
    tl.store(out_ptr + stride_out + row, divergence)
    tl.store(out_ptr + 2 * stride_out + row, log_prob)
    tl.store(out_ptr + 3 * stride_out + row, entropy * LN2)
    tl.store(out_ptr + 4 * stride_out + row, is_top1)
    tl.store(out_ptr + 5 * stride_out + row, mass)
    agrees = 0.0
    if HAS_TOP_IDS:
        agrees = (x_top_id >= top).to(tl.float32)
    tl.store(out_ptr + 6 * stride_out + row, agrees)

    if WRITE_GRAD:
        coefficient = divergence_scale * inv_t
        rest_q = tl.exp(log_rest_q)  # Q of the rest as a whole
        rest_weight = coefficient * (down * rest_q - down_rest)
        if HAS_CE and not HAS_TEMPERATURE:  # one softmax for both losses
            rest_weight += ce_weight * rest_q
        lse_rest_T = top_rest * inv_t + tl.log2(total_rest_T)  # of the rest by itself: its mass is in rest_weight
        lanes = tl.arange(0, BLOCK)
        for start in range(0, V, BLOCK):
            cols = start + lanes
            x, slope, _ = _load_rest(
                logits_ptr, bias_ptr, cols, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_first"
            )
            x = x * LOG2E
            grad = rest_weight * tl.exp2(x * inv_t - lse_rest_T)
            if HAS_CE:
                if HAS_TEMPERATURE:
                    grad += ce_weight * tl.exp2(x - lse)
                grad = tl.where(cols == label, grad - ce_weight, grad)
            grad = (grad * slope * token_weight).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + cols, grad, mask=cols < V, eviction_policy="evict_first")
        tl.debug_barrier()  # the pass also wrote over the taken entries
        # q times the sum of the gradients in log q, minus the gradient of each
        grad_k = coefficient * (down * e_k_T / total_T - down_k)
        if HAS_CE:
            grad_k += ce_weight * (e_k / total - tl.where(ids == label, 1.0, 0.0))
        grad_k = grad_k * slope_k * token_weight
        tl.store(grad_ptr + ids, grad_k.to(grad_ptr.dtype.element_ty), mask=inside)


def sparse_rows(
    logits: Tensor, bias: Tensor | None, targets: SparseTargets, out: Tensor, grad: Tensor | None, o: SparseOptions
) -> None:
    """Fill out (len(FIELDS), n), and grad (n, V) unless it is None. grad may be logits itself. Overwrite logits."""
    if not use_triton(logits):
        return _in_blocks(logits, bias, targets, out, grad, o)
    K, block = targets.ids.shape[1], min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    launched = kept_launch(
        _sparse_kernel, (logits.shape[0],),
        logits.stride(0), logits.stride(0) if grad is None else grad.stride(0), out.stride(0), logits.shape[1], K,
        float(o.transform.scale), float(o.transform.softcap or 1.0), float(o.temperature), float(o.divergence_scale),
        float(o.ce_weight), tuple(float(o.weights.get(kind, 0.0)) for kind in ROW_KINDS),
        float(o.beta), float(o.alpha),
        HAS_BIAS=bias is not None, HAS_SOFTCAP=o.transform.softcap is not None, HAS_LABELS=targets.labels is not None,
        HAS_TOKEN_WEIGHT=targets.token_weight is not None, HAS_TOP_IDS=targets.top_ids is not None,
        HAS_TEMPERATURE=o.temperature != 1.0, HAS_CE=o.ce_weight != 0, HAS_BUCKET=o.tail == "bucket",
        KINDS=o.kinds, WRITE_GRAD=grad is not None, BLOCK=block, K_BLOCK=triton.next_power_of_2(K),
        num_warps=min(WARPS, max(4, block // 256)),
    )(
        logits, logits if grad is None else grad, logits if bias is None else bias, targets.ids, targets.log_probs,
        logits if targets.labels is None else targets.labels,
        logits if targets.token_weight is None else targets.token_weight,
        logits if targets.top_ids is None else targets.top_ids, out, has_twin=True,
    )  # fmt: skip
    if not launched:
        _rows_torch(logits, bias, targets, out, grad, o)


def _in_blocks(logits: Tensor, bias: Tensor | None, targets: SparseTargets, out: Tensor, grad, o) -> None:
    """Call the torch twin; on a GPU for some rows at a time: it holds several fp32 copies of its logits."""
    n, vocab = logits.shape
    size = n if logits.device.type == "cpu" else max(1, BLOCK_LOGITS // vocab)
    for start in range(0, n, max(size, 1)):
        rows = slice(start, start + size)
        _rows_torch(logits[rows], bias, targets.rows(rows), out[:, rows], None if grad is None else grad[rows], o)


def _rows_torch(logits: Tensor, bias: Tensor | None, targets: SparseTargets, out: Tensor, grad, o) -> None:
    x, slope = transform(logits, bias, o.transform)
    ids, log_p, labels = targets.ids.long(), targets.log_probs.to(x.dtype), targets.labels
    present = (ids >= 0) & (log_p != -torch.inf)
    index = ids.where(present, 0)
    taken = x.new_zeros(x.shape[0], x.shape[1] + 1, dtype=torch.bool)  # one column more, where padding goes
    taken = taken.scatter_(1, ids.where(present, x.shape[1]), True)[:, :-1]
    log_q = x.log_softmax(-1).masked_fill((taken.sum(-1) < present.sum(-1))[:, None], torch.nan)  # an id came twice
    log_q_T = log_q if o.temperature == 1.0 else log_q.div(o.temperature).log_softmax(-1)

    log_p, p = log_p.where(present, 0), log_p.exp().where(present, 0)
    mass, log_q_k = p.sum(-1), log_q_T.gather(1, index)
    log_rest_q = log_q_T.masked_fill(taken, -torch.inf).logsumexp(-1)
    divergence, rest_p = torch.linalg.vecdot(p, log_p - log_q_k.where(p > 0, 0)), torch.zeros_like(mass)
    if o.tail == "bucket":
        rest_p = (1 - mass).clamp(min=0).where(~taken.all(-1), 0)
        divergence += (rest_p * (rest_p.log() - log_rest_q)).where(rest_p > 0, 0)
    all_p = mass + rest_p
    d_entries, d_rest = all_p[:, None] * log_q_k.exp() - p, all_p * log_rest_q.exp() - rest_p
    if not o.plain:
        divergence, d_entries, d_rest = _of_outcomes(log_q_k, log_rest_q, log_p, mass, present, ~taken.all(-1), out, o)
    out[LOSS] = out[DIVERGENCE] = divergence * o.divergence_scale
    out[LOG_PROB] = out[IS_TOP1] = out[AGREES] = 0
    out[ENTROPY], out[TEACHER_MASS] = entropy_of(log_q), mass
    if labels is not None:
        out[LOG_PROB] = log_q.gather(1, labels[:, None]).squeeze(1)
        out[IS_TOP1] = x.gather(1, labels[:, None]).squeeze(1) >= x.amax(-1)
    if targets.top_ids is not None:
        out[AGREES] = x.gather(1, targets.top_ids[:, None].long()).squeeze(1) >= x.amax(-1)
    if o.ce_weight:
        out[LOSS] -= o.ce_weight * out[LOG_PROB]
    factor = torch.ones_like(mass) if targets.token_weight is None else targets.token_weight
    out[LOSS] *= factor
    if grad is None:
        return
    dx = (log_q_T - log_rest_q[:, None]).exp_().mul_(d_rest[:, None]).masked_fill_(taken, 0)
    dx.scatter_add_(1, index, d_entries.where(present, 0))
    dx *= o.divergence_scale / o.temperature  # T^2, and 1 / T from the logits
    if o.ce_weight and labels is not None:
        dx += o.ce_weight * log_q.exp()
        dx.scatter_add_(1, labels[:, None], torch.full_like(dx[:, :1], -o.ce_weight))
    grad.copy_(dx.mul_(slope).mul_(factor[:, None]))


def _of_outcomes(
    log_q_k: Tensor, log_rest_q: Tensor, log_p: Tensor, mass: Tensor, present: Tensor, has_rest: Tensor, out: Tensor,
    o: SparseOptions,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the weighted divergence (n,) of the entries and the rest, and its gradient in the logits of the entries,
    (n, K), and of the rest as a whole, (n,). Write each kind's value to `out`."""
    log_rest_p = (1 - mass).clamp(min=LEAST_REST).log()
    log_q, log_p = (torch.cat([a, b[:, None]], -1) for a, b in ((log_q_k, log_rest_q), (log_p, log_rest_p)))
    here = torch.cat([present, has_rest[:, None]], -1)
    floor_q, floor_p = (x.clamp(min=LOWEST).where(here, 0) for x in (log_q, log_p))
    outcomes = Outcomes(floor_q.exp().where(here, 0), floor_p.exp().where(here, 0), floor_p - floor_q)
    divergence, gradient = torch.zeros_like(mass), torch.zeros_like(log_q)
    for kind, weight in o.weights.items():
        value, each = outcome_of_torch(kind, outcomes, o.beta, o.alpha)
        value = inf_if_ruled_out(value)
        out[TERMS + ROW_KINDS.index(kind)] = value * o.divergence_scale
        if weight:  # 0 * an infinite divergence would be NaN
            gradient += weight * each
            divergence += weight * value
    in_logits = gradient - log_q.exp().where(here, 0) * gradient.sum(-1, keepdim=True)
    return divergence, in_logits[:, :-1], in_logits[:, -1]
