"""Rows of cross_entropy.py and linear_cross_entropy.py: `cross_entropy_reference`, which both must equal, and kernels
that turn logits into per-token values and a gradient.

    x = transform(raw) / temperature,  nll = lse - x[label]
    loss = w f [(1 - s) c[label] nll + s / V sum_j c_j (lse - x_j) + z lse^2]
    d loss / d x_j = w f [q_j ((1 - s) c[label] + s / V sum c + 2 z lse) - (1 - s) c[label] [j = label] - s / V c_j]

w is the token's weight, c the class's, s label_smoothing, z z_loss; f = exp(-nll) held constant for DFT, else 1.
A tile's gradient may have the gradient of the entropy E added: d E / d x_j = -q_j (x_j - lse + E), times each row's
factor.

If a row is whole, one kernel reads it twice and writes the gradient over it. If it comes in tiles of the vocabulary,
each tile's statistics are folded into a carry; then the tiles come again for their gradient. Each Triton kernel has a
torch twin that takes the same arguments.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import stats_dtype
from ._linear_head import token_count
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
)
from ._triton import kept_launch, tl, triton, use_triton
from ._tuning import SHAPES

BLOCK, WARPS = SHAPES.CROSS_ENTROPY
TILE_BLOCK, TILE_WARPS = SHAPES.CROSS_ENTROPY_TILE
FIELDS = ("loss", "log_prob", "entropy", "is_top1", "lse")
LOSS, LOG_PROB, ENTROPY, IS_TOP1, LSE = range(len(FIELDS))
CARRY = ("top", "total", "weighted", "plain", "x_label")  # see `_statistics`
TOP, TOTAL, WEIGHTED, PLAIN, X_LABEL = range(len(CARRY))


class CrossEntropy(NamedTuple):
    """Loss and per-token values. The latter are fp32 (fp64 for fp64 inputs), and 0 where ignored."""

    loss: Tensor  # scalar, or (N,) with reduction="none"; differentiable
    log_prob: Tensor  # (N,) log-probability of the label, nats
    entropy: Tensor  # (N,) entropy of the predicted distribution, nats
    is_top1: Tensor  # (N,) bool, whether no token is likelier than the label


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, token_weight: Tensor | None = None,
    num_items: float | Tensor | None = None, reduction: str = "mean", scale: float = 1.0, softcap: float | None = None,
    temperature: float = 1.0, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100,
    dft: bool = False,
) -> CrossEntropy:  # fmt: skip
    """Return the loss of logits (N, V) in plain torch."""
    x = transform(logits, None, LogitTransform(scale, softcap))[0] / temperature
    keep = labels != ignore_index
    label = labels * keep
    log_probs = x.log_softmax(-1)
    log_prob = log_probs.gather(1, label[:, None]).squeeze(1)
    weight = None if weight is None else weight.to(x.dtype)
    per_token = -(1 - label_smoothing) * (log_prob if weight is None else weight[label] * log_prob)
    if label_smoothing:
        per_token = per_token - label_smoothing * (log_probs if weight is None else log_probs * weight).mean(-1)
    parts = torch.stack([per_token, z_loss * x.logsumexp(-1).square() if z_loss else torch.zeros_like(per_token)])
    if dft:
        parts = parts * log_prob.detach().exp()
    if token_weight is not None:
        parts = parts * token_weight
    parts = parts.where(keep, 0)
    if reduction == "mean":
        count = token_count(keep, num_items, parts.dtype)
        weighed = count if weight is None or num_items is not None else weight_of_labels(labels, weight, ignore_index)
        parts = parts.sum(-1) / torch.stack([weighed, count])
    loss = parts.sum() if reduction == "sum" else parts.sum(0)
    is_top1 = (log_prob >= log_probs.amax(-1)) & keep
    log_prob, entropy = (x.where(keep, 0).detach() for x in (log_prob, entropy_of(log_probs)))
    return CrossEntropy(loss, log_prob, entropy, is_top1)


def weight_of_labels(labels: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """Return the sum of the class weights of the labels in use, on their device; 1 if it is 0 (torch gives NaN)."""
    keep = (labels != ignore_index) & (labels >= 0) & (labels < weight.shape[0])  # others give NaN, not an assert
    total = weight.gather(0, labels.where(keep, 0)).where(keep, 0).sum()
    return total.where(total != 0, 1)


@dataclass(frozen=True)
class CrossEntropyOptions:
    """Scalars of one call; `linear_cross_entropy` explains them."""

    transform: LogitTransform = field(default_factory=LogitTransform)
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dft: bool = False

    def __post_init__(self):
        check_scalars(self.temperature, self.label_smoothing)


@dataclass(frozen=True)
class Targets:
    """Labels and weights of a chunk of rows."""

    labels: Tensor  # (n,) int64
    token_weight: Tensor | None = None  # (n,) fp32
    class_weight: Tensor | None = None  # (V,) fp32
    ignore_index: int | None = None  # rows with this label give 0; None if they were dropped earlier

    def rows(self, chunk: slice) -> "Targets":
        token_weight = None if self.token_weight is None else self.token_weight[chunk]
        return replace(self, labels=self.labels[chunk], token_weight=token_weight)


@dataclass(frozen=True)
class Tile:
    """Columns [first, first + logits.shape[1]) of a vocabulary of size `vocab`."""

    logits: Tensor  # (n, columns), raw
    bias: Tensor | None  # (columns,)
    first: int
    vocab: int

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.logits.shape[1])


def new_carry(rows: int, like: Tensor) -> Tensor:
    """Return the carry (len(CARRY), rows) for the first tile. The label's logit stays NaN until its tile comes."""
    apart = -(-rows // 16) * 16  # one kernel for any number of rows; see `LinearLoss.new_values`
    carry = like.new_zeros(len(CARRY), apart, dtype=stats_dtype(like.dtype))[:, :rows]
    carry[TOP].fill_(-1e30)  # below every logit, and finite
    carry[X_LABEL].fill_(float("nan"))  # stays, and shows, if no tile holds the label
    return carry


def finish(carry: Tensor, targets: Targets, vocab: int, o: CrossEntropyOptions) -> Tensor:
    """Return the values (len(FIELDS), n) of rows from their complete statistics."""
    top, total, weighted, plain, x_label = carry
    lse = top + total.log()
    nll = lse - x_label
    loss = (1 - o.label_smoothing) * nll + o.z_loss * lse.square()
    if targets.class_weight is not None:
        loss += (1 - o.label_smoothing) * nll * (_of_label(targets) - 1)
    if o.label_smoothing:
        total_weight = vocab if targets.class_weight is None else targets.class_weight.sum()
        loss += o.label_smoothing / vocab * (total_weight * lse - plain)
    fields = torch.stack([_weighted(loss, nll, targets, o), -nll, lse - weighted / total, x_label >= top, lse])
    return fields if targets.ignore_index is None else fields.where(targets.labels != targets.ignore_index, 0)


def _weighted(x: Tensor, nll: Tensor, targets: Targets, o: CrossEntropyOptions) -> Tensor:
    if targets.token_weight is not None:
        x = x * targets.token_weight
    return x * (-nll).exp() if o.dft else x


def _of_label(targets: Targets) -> Tensor:
    """Return the class weight (n,) of each row's label."""
    assert targets.class_weight is not None
    return targets.class_weight.gather(0, _gatherable(targets))


def _gatherable(targets: Targets) -> Tensor:
    """Return labels that `gather` accepts: 0 replaces ignored ones."""
    labels = targets.labels
    return labels if targets.ignore_index is None else labels.where(labels != targets.ignore_index, 0)


@triton.jit
def _rounded(z, inv_temperature):
    """Return z / temperature by powers of two, like `_statistics`: a label that is the maximum equals it exactly."""
    return z * (inv_temperature * LOG2E) * LN2


@triton.jit
def _statistics(
    logits_ptr, bias_ptr, class_weight_ptr, V, scale, softcap, inv_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    READ_AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return (top in base 2, total, weighted, plain) of a row: max, sum e^(x - top), that sum times x, sum c x.

    Lanes are reduced once, when the row ends.
    """
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)  # finite: -inf - -inf would be NaN in `keep`
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + lanes
        mask = cols < V
        # READ_AGAIN: the gradient's pass over this row follows at once, and should find it in L2
        x, _ = load_logits(
            logits_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_last" if READ_AGAIN else ""
        )
        x = x * (inv_temperature * LOG2E)
        higher = tl.maximum(top, x)
        keep = tl.exp2(top - higher)
        e = tl.exp2(x - higher)
        total = total * keep + e
        weighted = weighted * keep + tl.where(e > 0, e * x, 0.0)  # 0 * -inf would be NaN
        top = higher
        if HAS_SMOOTHING:
            share = 1.0
            if HAS_CLASS_WEIGHT:
                share = tl.load(class_weight_ptr + cols, mask=mask, other=0.0)
            plain += tl.where(mask, share * x, 0.0)
    highest = tl.max(top, 0)  # in base 2, as x
    share = tl.exp2(top - highest)
    total = tl.sum(total * share, 0)
    weighted = tl.sum(weighted * share, 0)
    return highest, total, weighted * LN2, tl.sum(plain, 0) * LN2


@triton.jit
def _write_gradient(
    logits_ptr, grad_ptr, bias_ptr, class_weight_ptr, V, label, lse, softmax_weight, label_weight, even_weight, factor,
    entropy, entropy_factor, scale, softcap, inv_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write factor * d loss / d raw, plus entropy_factor * d entropy / d raw where HAS_ENTROPY."""
    lanes = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        cols = start + lanes
        mask = cols < V
        # evict_first: the last reading
        x, slope = load_logits(logits_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_first")
        q = tl.exp2(x * (inv_temperature * LOG2E) - lse * LOG2E)
        grad = q * softmax_weight
        grad = tl.where(cols == label, grad - label_weight, grad)
        if HAS_SMOOTHING:
            share = 1.0
            if HAS_CLASS_WEIGHT:
                share = tl.load(class_weight_ptr + cols, mask=mask, other=0.0)
            grad -= even_weight * share
        grad *= factor
        if HAS_ENTROPY:
            surprise = tl.where(q > 0, x * inv_temperature - lse + entropy, 0.0)  # 0 * -inf would be NaN
            grad -= entropy_factor * q * surprise
        tl.store(
            grad_ptr + cols, (grad * slope).to(grad_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first"
        )


@triton.jit
def _label_weights(
    label, lse, vocab, class_weight_ptr, class_weight_sum_ptr, smoothing, z_loss, HAS_CLASS_WEIGHT: tl.constexpr
):
    """Return the weights of softmax, label and every class in the gradient."""
    label_weight = 1.0 - smoothing
    even_weight = smoothing / vocab
    softmax_weight = 1.0 + 2.0 * z_loss * lse
    if HAS_CLASS_WEIGHT:
        label_weight *= tl.load(class_weight_ptr + label, mask=(label >= 0) & (label < vocab), other=0.0)
        # what softmax is multiplied by
        softmax_weight = label_weight + even_weight * tl.load(class_weight_sum_ptr) + 2.0 * z_loss * lse
    return softmax_weight, label_weight, even_weight


@triton.jit
def _whole_rows_kernel(
    logits_ptr, grad_ptr, bias_ptr, labels_ptr, token_weight_ptr, class_weight_ptr, class_weight_sum_ptr, out_ptr,
    stride_row, stride_grad, stride_out, V, scale, softcap, inv_temperature, smoothing, z_loss, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr, HAS_IGNORED: tl.constexpr, DFT: tl.constexpr, WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride_row passes 2^31
    logits_ptr += row * stride_row
    grad_ptr += row * stride_grad
    label = tl.load(labels_ptr + row)
    used = V  # columns that are read: none of an ignored row
    if HAS_IGNORED:
        used = tl.where(label == ignore_index, 0, V)
    z_label = load_label_logit(logits_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP, False)
    x_label = _rounded(z_label, inv_temperature)
    highest, total, weighted, plain = _statistics(
        logits_ptr, bias_ptr, class_weight_ptr, used, scale, softcap, inv_temperature,
        HAS_BIAS, HAS_SOFTCAP, HAS_SMOOTHING, HAS_CLASS_WEIGHT, WRITE_GRAD, BLOCK,
    )  # fmt: skip
    top = highest * LN2  # in nats, rounded as every logit is: see `_rounded`
    lse = top + tl.log(total)
    nll = lse - x_label
    softmax_weight, label_weight, even_weight = _label_weights(
        label, lse, V, class_weight_ptr, class_weight_sum_ptr, smoothing, z_loss, HAS_CLASS_WEIGHT
    )
    loss = label_weight * nll + z_loss * lse * lse
    if HAS_SMOOTHING:
        total_weight = V * 1.0
        if HAS_CLASS_WEIGHT:
            total_weight = tl.load(class_weight_sum_ptr)
        loss += even_weight * (total_weight * lse - plain)
    factor = 1.0
    if HAS_TOKEN_WEIGHT:
        factor = tl.load(token_weight_ptr + row)
    if DFT:  # the label's probability, as a constant
        factor = factor * tl.exp(-nll)
    seen = used > 0
    # in the order of FIELDS
    tl.store(out_ptr + row, tl.where(seen, loss * factor, 0.0))
    tl.store(out_ptr + stride_out + row, tl.where(seen, -nll, 0.0))
    tl.store(out_ptr + 2 * stride_out + row, tl.where(seen, lse - weighted / total, 0.0))
    tl.store(out_ptr + 3 * stride_out + row, tl.where(seen & (x_label >= top), 1.0, 0.0))
    tl.store(out_ptr + 4 * stride_out + row, tl.where(seen, lse, 0.0))
    if WRITE_GRAD:
        # lse has one rounding error for the whole row: this factor makes the softmax sum to 1.
        softmax_weight *= tl.exp2(lse * LOG2E - highest) / total
        _write_gradient(
            logits_ptr, grad_ptr, bias_ptr, class_weight_ptr, used, label, lse, softmax_weight, label_weight,
            even_weight, factor * inv_temperature, 0.0, 0.0, scale, softcap, inv_temperature,
            HAS_BIAS, HAS_SOFTCAP, HAS_SMOOTHING, HAS_CLASS_WEIGHT, False, BLOCK,
        )  # fmt: skip
        if HAS_IGNORED:
            _write_zeros(grad_ptr, used, V, BLOCK)


@triton.jit
def _write_zeros(grad_ptr, first, V, BLOCK: tl.constexpr):
    """Zero the columns from `first` on: all of an ignored row, none of any other."""
    lanes = tl.arange(0, BLOCK)
    for start in range(first, V, BLOCK):
        cols = start + lanes
        tl.store(grad_ptr + cols, tl.zeros((BLOCK,), grad_ptr.dtype.element_ty), mask=cols < V)


@triton.jit
def _tile_statistics_kernel(
    logits_ptr, bias_ptr, labels_ptr, class_weight_ptr, carry_ptr, stride_row, stride_carry, columns, first,
    scale, softcap, inv_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    carry_ptr += row
    label = tl.load(labels_ptr + row)
    top, total, weighted, plain = _statistics(
        logits_ptr, bias_ptr, class_weight_ptr, columns, scale, softcap, inv_temperature,
        HAS_BIAS, HAS_SOFTCAP, HAS_SMOOTHING, HAS_CLASS_WEIGHT, False, BLOCK,
    )  # fmt: skip
    top *= LN2
    before = tl.load(carry_ptr)
    highest = tl.maximum(top, before)
    keep = tl.exp(before - highest)  # what the former tiles shrink by
    share = tl.exp(top - highest)
    # in the order of CARRY
    tl.store(carry_ptr, highest)
    tl.store(carry_ptr + stride_carry, tl.load(carry_ptr + stride_carry) * keep + total * share)
    tl.store(carry_ptr + 2 * stride_carry, tl.load(carry_ptr + 2 * stride_carry) * keep + weighted * share)
    tl.store(carry_ptr + 3 * stride_carry, tl.load(carry_ptr + 3 * stride_carry) + plain)
    place = label - first  # in the tile; most labels lie in another
    if (place >= 0) & (place < columns):
        x = load_label_logit(logits_ptr, bias_ptr, place, columns, scale, softcap, HAS_BIAS, HAS_SOFTCAP, False)
        tl.store(carry_ptr + 4 * stride_carry, _rounded(x, inv_temperature))


@triton.jit
def _tile_gradient_kernel(
    logits_ptr, grad_ptr, bias_ptr, labels_ptr, factor_ptr, class_weight_ptr, class_weight_sum_ptr, lse_ptr,
    entropy_ptr, entropy_factor_ptr,
    stride_row, stride_grad, columns, first, vocab, scale, softcap, inv_temperature, smoothing, z_loss, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_IGNORED: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    grad_ptr += row * stride_grad
    label = tl.load(labels_ptr + row)
    used = columns
    if HAS_IGNORED:
        used = tl.where(label == ignore_index, 0, columns)
    lse = tl.load(lse_ptr + row)
    factor = tl.load(factor_ptr + row)
    entropy = 0.0
    entropy_factor = 0.0
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        entropy_factor = tl.load(entropy_factor_ptr + row)
    softmax_weight, label_weight, even_weight = _label_weights(
        label, lse, vocab, class_weight_ptr, class_weight_sum_ptr, smoothing, z_loss, HAS_CLASS_WEIGHT
    )
    _write_gradient(
        # the class weights of the tile's columns, and the label's place in it: outside of it for most rows
        logits_ptr, grad_ptr, bias_ptr, class_weight_ptr + first, used, label - first, lse, softmax_weight,
        label_weight, even_weight, factor * inv_temperature, entropy, entropy_factor * inv_temperature,
        scale, softcap, inv_temperature,
        HAS_BIAS, HAS_SOFTCAP, HAS_SMOOTHING, HAS_CLASS_WEIGHT, HAS_ENTROPY, BLOCK,
    )  # fmt: skip
    if HAS_IGNORED:
        _write_zeros(grad_ptr, used, columns, BLOCK)


def _launch(
    logits: Tensor, bias: Tensor | None, targets: Targets, o: CrossEntropyOptions, most: int, warps: int
) -> dict:
    """Return the constants that every kernel of this file takes. At most so many columns of a row at a time."""
    plain = bias is None and targets.class_weight is None and o.transform.softcap is None and not o.label_smoothing
    block = min(most if plain else most // 2, 1 << (logits.shape[1] - 1).bit_length())  # half: no spilling
    return {
        "BLOCK": block,
        "num_warps": min(warps, max(4, block // 256)),
        "HAS_BIAS": bias is not None,
        "HAS_SOFTCAP": o.transform.softcap is not None,
        "HAS_SMOOTHING": o.label_smoothing > 0,
        "HAS_CLASS_WEIGHT": targets.class_weight is not None,
    }


def _scalars(o: CrossEntropyOptions) -> tuple[float, float, float]:
    # without a softcap any number will do: HAS_SOFTCAP is False, and it is not read
    return float(o.transform.scale), float(o.transform.softcap or 1.0), 1.0 / o.temperature


def whole_rows(logits: Tensor, bias: Tensor | None, targets: Targets, out: Tensor, grad: Tensor | None, o) -> None:
    """Fill out (len(FIELDS), n), and grad (n, V) unless it is None. grad may be logits itself."""
    if not use_triton(logits):
        return _whole_rows_torch(logits, bias, targets, out, grad, o)
    # Here and below the logits stand in for pointers that the kernel does not read.
    class_weight = logits if targets.class_weight is None else targets.class_weight
    class_weight_sum = logits if targets.class_weight is None else targets.class_weight.sum()
    launched = kept_launch(
        _whole_rows_kernel, (logits.shape[0],),
        logits.stride(0), logits.stride(0) if grad is None else grad.stride(0), out.stride(0), logits.shape[1],
        *_scalars(o), float(o.label_smoothing), float(o.z_loss), targets.ignore_index or 0,
        **_launch(logits, bias, targets, o, BLOCK, WARPS), HAS_TOKEN_WEIGHT=targets.token_weight is not None,
        HAS_IGNORED=targets.ignore_index is not None, DFT=o.dft, WRITE_GRAD=grad is not None,
    )(
        logits, logits if grad is None else grad, logits if bias is None else bias, targets.labels,
        logits if targets.token_weight is None else targets.token_weight, class_weight, class_weight_sum, out,
        has_twin=True,
    )  # fmt: skip
    if not launched:
        _whole_rows_torch(logits, bias, targets, out, grad, o)


def _whole_rows_torch(logits, bias, targets, out, grad, o) -> None:
    tile = Tile(logits, bias, 0, logits.shape[1])
    carry = new_carry(logits.shape[0], logits)
    tile_statistics(tile, targets, carry, o)
    out.copy_(finish(carry, targets, tile.vocab, o))
    if grad is not None:
        factor = gradient_factor(torch.ones_like(out[LSE]), out[LOG_PROB], targets, o)
        tile_gradient(tile, targets, out[LSE], factor, grad, o)


def gradient_factor(upstream: Tensor, log_prob: Tensor, targets: Targets, o: CrossEntropyOptions) -> Tensor:
    """Return the factor (n,) of each row's gradient. upstream: (n,) gradient of each row's loss."""
    return _weighted(upstream, -log_prob, targets, o)


def tile_statistics(tile: Tile, targets: Targets, carry: Tensor, o: CrossEntropyOptions) -> None:
    """Fold a tile into the carry (len(CARRY), n)."""
    class_weight = None if targets.class_weight is None else targets.class_weight[tile.columns]
    if not use_triton(tile.logits):
        return _tile_statistics_torch(tile, targets, class_weight, carry, o)
    logits = tile.logits
    launched = kept_launch(
        _tile_statistics_kernel, (logits.shape[0],), logits.stride(0), carry.stride(0), logits.shape[1], tile.first,
        *_scalars(o), **_launch(logits, tile.bias, targets, o, TILE_BLOCK, TILE_WARPS),
    )(
        logits, logits if tile.bias is None else tile.bias, targets.labels,
        logits if class_weight is None else class_weight, carry,
        has_twin=True,
    )  # fmt: skip
    if not launched:
        _tile_statistics_torch(tile, targets, class_weight, carry, o)


def _tile_statistics_torch(tile: Tile, targets: Targets, class_weight, carry: Tensor, o) -> None:
    x = transform(tile.logits, tile.bias, o.transform)[0] / o.temperature
    top, total, weighted, plain, x_label = carry
    highest = torch.maximum(top, x.amax(-1))
    keep, e = (top - highest).exp(), (x - highest[:, None]).exp()
    place = _gatherable(targets) - tile.first
    inside = (place >= 0) & (place < x.shape[1])
    if x.shape[1] == tile.vocab:
        inside = torch.ones_like(inside)  # then `gather` raises for a label outside the vocabulary, as torch does
    carry[TOP] = highest
    carry[TOTAL] = total * keep + e.sum(-1)
    carry[WEIGHTED] = weighted * keep + torch.linalg.vecdot(e, x.clamp(min=LOWEST))
    if o.label_smoothing:
        carry[PLAIN] = plain + (x.sum(-1) if class_weight is None else x @ class_weight.to(x.dtype))
    carry[X_LABEL] = x.gather(1, place.where(inside, 0)[:, None]).squeeze(1).where(inside, x_label)


def tile_gradient(
    tile: Tile, targets: Targets, lse: Tensor, factor: Tensor, grad: Tensor, o: CrossEntropyOptions,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write factor * d loss / d raw logits into grad (n, columns), which may be the tile. lse, factor: (n,).

    entropy: of each row (n,), and the factor (n,) of its gradient, which is added.
    """
    if not use_triton(tile.logits):
        return _tile_gradient_torch(tile, targets, lse, factor, grad, o, entropy)
    logits = tile.logits
    class_weight = logits if targets.class_weight is None else targets.class_weight
    class_weight_sum = logits if targets.class_weight is None else targets.class_weight.sum()
    launched = kept_launch(
        _tile_gradient_kernel, (logits.shape[0],),
        logits.stride(0), grad.stride(0), logits.shape[1], tile.first, tile.vocab,
        *_scalars(o), float(o.label_smoothing), float(o.z_loss), targets.ignore_index or 0,
        **_launch(logits, tile.bias, targets, o, TILE_BLOCK, TILE_WARPS), HAS_IGNORED=targets.ignore_index is not None,
        HAS_ENTROPY=entropy is not None,
    )(
        logits, grad, logits if tile.bias is None else tile.bias, targets.labels, factor, class_weight,
        class_weight_sum, lse, *((lse, lse) if entropy is None else entropy), has_twin=True,
    )  # fmt: skip
    if not launched:
        _tile_gradient_torch(tile, targets, lse, factor, grad, o, entropy)


def _tile_gradient_torch(tile: Tile, targets: Targets, lse, factor, grad: Tensor, o, entropy) -> None:
    x, slope = transform(tile.logits, tile.bias, o.transform)
    class_weight = targets.class_weight
    label_weight = torch.full_like(lse, 1 - o.label_smoothing)
    even_weight, softmax_weight = o.label_smoothing / tile.vocab, 1 + 2 * o.z_loss * lse
    if class_weight is not None:
        label_weight *= _of_label(targets)
        softmax_weight = label_weight + even_weight * class_weight.sum() + 2 * o.z_loss * lse
    if targets.ignore_index is not None:
        factor = factor.where(targets.labels != targets.ignore_index, 0)
    x = x / o.temperature
    # lse has one rounding error for the whole row; softmax sums to 1.
    q = x.softmax(-1) if x.shape[1] == tile.vocab else (x - lse[:, None]).exp_()
    of_entropy = None
    if entropy is not None:
        of_entropy = q * (x - lse[:, None] + entropy[0][:, None]).clamp(min=LOWEST) * entropy[1][:, None]
    dx = q.mul_(softmax_weight[:, None])
    place = targets.labels - tile.first
    inside = (place >= 0) & (place < x.shape[1])
    dx.scatter_add_(1, place.where(inside, 0)[:, None], (-label_weight).where(inside, 0)[:, None])
    if o.label_smoothing:
        dx -= even_weight if class_weight is None else even_weight * class_weight[tile.columns]
    dx.mul_((factor / o.temperature)[:, None])
    if of_entropy is not None:
        dx -= of_entropy / o.temperature
    grad.copy_(dx.mul_(slope))
