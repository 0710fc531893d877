"""Rows of linear_divergence.py whose vocabulary lies on several ranks: statistics, their sums over ranks, gradients.

Each rank holds some columns of both sides' logits. Read it beside _divergence_torch.py, whose formulas these are:

1. `shard_statistics`: maxima, and sums of exponentials relative to them. Ranks' maxima are combined by one all-reduce,
   the sums, rescaled to the common maxima, by a second: now each rank knows both log-partitions and both KLs.
2. `second_sums`, of the kinds that need the log-partitions first: one more all-reduce.
3. `shard_gradient`: the gradient of a rank's own logits is a function of these and of the numbers of the row.

All numbers are in nats, (n,) a row.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._cross_entropy_rows import RankSums
from ._divergence_options import TERMS, DivergenceOptions, RowInputs
from ._divergence_rows import BIAS, LANES, TEACHER_BIAS, VECTOR_BYTES, WARPS
from ._divergence_shard_kernels import gradient_kernel, second_sums_kernel, statistics_kernel
from ._divergence_torch import (
    AGREES,
    DIVERGENCE,
    ENTROPY,
    FORWARD_KL,
    IS_TOP1,
    LOG_PROB,
    LOSS,
    REVERSE_KL,
    TEACHER_ENTROPY,
    TEACHER_LOG_PROB,
    Distributions,
    log_ratios,
)
from ._logits import LOWEST, transform
from ._triton import kept_launch, use_triton
from .divergence_kinds import ROW_KINDS

STATISTICS = (
    "s_top", "t_top", "u_top", "t_at_s_top", "s_total", "s_moment", "s_ratio", "t_total", "t_moment", "t_ratio",
    "s_total_T", "s_ratio_T", "u_total_T", "u_ratio_T", "plain", "s_label", "t_label",
)  # fmt: skip
SECOND = ("p_jsd", "q_jsd", "skew", "skew_rise", "reverse", "reverse_rise", "gaps", "signs")
BLOCK = 2**22  # numbers of a block of rows: what plain torch computes in passing takes some 16 MiB each


class ShardInputs(NamedTuple):
    """A chunk of rows over this rank's columns [first, first + c) of a vocabulary of size `vocab`."""

    rows: RowInputs
    first: int
    vocab: int
    options: DivergenceOptions

    def launch(self, kernel: Any, outputs: Sequence[Tensor], numbers: Sequence[float], **constants: Any) -> bool:
        """Launch a kernel over this rank's columns, if Triton runs here. Return whether it did.

        outputs: the pointers behind the logits and biases. numbers: what follows the scalars of the logits.
        """
        x, o = self.rows, self.options
        n, columns = x.student.shape
        if not columns or not use_triton(x.student):
            return not columns
        padded = -(-columns // 16) * 16
        gradient = outputs[-1] if kernel is gradient_kernel else x.student
        if min(x.student.stride(0), x.teacher.stride(0), gradient.stride(0)) < padded:
            padded = columns
        strides = [y.stride(0) for y in (x.student, x.teacher, *outputs) if y.dim() == 2]
        first = [self.first] if kernel in (statistics_kernel, gradient_kernel) else []
        launch = kept_launch(
            kernel, (n,), *strides, columns, padded, *first, *o.numbers[:6], *map(float, numbers),
            FORM=o.form + BIAS * (x.bias is not None) + TEACHER_BIAS * (x.teacher_bias is not None), **constants,
            LANES=LANES // 2, VECTOR=max(1, VECTOR_BYTES // x.student.element_size()), num_warps=WARPS // 2,
        )  # fmt: skip
        biases = (x.student if bias is None else bias for bias in (x.bias, x.teacher_bias))
        return launch(x.student, x.teacher, *biases, *outputs, has_twin=True)

    def blocks(self) -> Iterator[tuple[slice, "ShardInputs"]]:
        """Yield blocks of rows. There are none where this rank has no columns."""
        n, columns = self.rows.student.shape
        rows = max(1, BLOCK // max(columns, 1))
        for start in range(0, n if columns else 0, rows):
            at, x = slice(start, start + rows), self.rows
            labels, weight = (None if y is None else y[at] for y in (x.labels, x.token_weight))
            block = RowInputs(x.student[at], x.teacher[at], x.bias, x.teacher_bias, labels, weight)
            yield at, self._replace(rows=block)

    def logits(self) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        """Return (student's, teacher's, those that the student is compared with, d student's / d raw), (n, c)."""
        x, o = self.rows, self.options
        s, slope = transform(x.student, x.bias, o.student)
        s = s.clamp(min=LOWEST)
        t = transform(x.teacher, x.teacher_bias, o.teacher)[0].to(s.dtype).clamp(min=LOWEST)
        return s, t, t if o.teacher_share == 1 else torch.lerp(s, t, o.teacher_share), slope

    def places(self) -> tuple[Tensor, Tensor]:
        """Return (the labels' columns, 0 where another rank has them; whether they are here), (n,)."""
        assert self.rows.labels is not None
        place = self.rows.labels - self.first
        inside = (place >= 0) & (place < self.rows.student.shape[1])
        return place.where(inside, 0), inside


class Partition(NamedTuple):
    """A log-partition (n,) as maximum + log of the sum: subtracted one by one, they round less than their sum."""

    top: Tensor
    log_total: Tensor

    def at(self, rows: slice) -> "Partition":
        return Partition(self.top[rows], self.log_total[rows])

    @property
    def lse(self) -> Tensor:
        return self.top + self.log_total

    def above(self, other: "Partition") -> Tensor:
        """Return by how much this log-partition exceeds another, (n,)."""
        return (self.top - other.top) + (self.log_total - other.log_total)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities (n, c) from logits (n, c) at the partition's temperature."""
        return logits - self.top[:, None] - self.log_total[:, None]


class RowNumbers(NamedTuple):
    """What all ranks know of a chunk's rows after the statistics: (n,) each. T: at the loss's temperature."""

    s: Partition
    s_T: Partition
    u_T: Partition
    forward_T: Tensor
    reverse_T: Tensor
    s_label: Tensor
    plain: Tensor


class GradientNumbers(NamedTuple):
    """What the gradient of a row's logits depends on beside the logits: (n,) each."""

    s: Partition
    s_T: Partition
    u_T: Partition
    forward_weight: Tensor
    reverse_weight: Tensor
    reverse_T: Tensor
    q_jsd: Tensor
    skew_rise: Tensor
    reverse_rise: Tensor
    signs: Tensor
    token_weight: Tensor

    def at(self, rows: slice) -> "GradientNumbers":
        numbers: Any = (x[rows] for x in self[3:])
        return GradientNumbers(self.s.at(rows), self.s_T.at(rows), self.u_T.at(rows), *numbers)


def divergence_shard(
    x: RowInputs, first: int, vocab: int, out: Tensor, grad: Tensor | None, o: DivergenceOptions, ranks: RankSums
) -> None:
    """Fill out (len(FIELDS), n), the same on all ranks, and grad (n, c) unless it is None.

    x: logits of this rank's columns; grad may share the student's memory.
    """
    shard = ShardInputs(x, first, vocab, o)
    row = _combined(shard_statistics(shard, out), shard, out, ranks)
    sums = out.new_zeros(len(SECOND), out.shape[1])
    if o.measured:
        sums = ranks.sum_(second_sums(shard, row))
    _write_terms(row, dict(zip(SECOND, sums, strict=True)), out, o)
    _write_loss(row, x, out, vocab, o)
    if grad is not None and grad.shape[1]:
        shard_gradient(shard, _gradient_numbers(row, dict(zip(SECOND, sums, strict=True)), x, o), grad)


def shard_statistics(shard: ShardInputs, like: Tensor) -> Tensor:
    """Return this rank's STATISTICS (len(STATISTICS), n). like: in their dtype."""
    every = like.new_zeros(len(STATISTICS), like.shape[1])
    every[:4] = LOWEST
    labels, flags = shard.rows.labels, shard.options.flags
    constants = {name: flags[name] for name in ("OWN_SUMS", "HAS_SMOOTHING")}
    outputs = [torch.empty_like(every[0], dtype=torch.int64) if labels is None else labels, every]
    if shard.launch(statistics_kernel, outputs, [], HAS_LABELS=labels is not None, **constants):
        return every
    for at, block in shard.blocks():
        _block_statistics(block, every[:, at])
    return every


def _block_statistics(shard: ShardInputs, part: Tensor) -> None:
    o = shard.options
    s, t, u, _ = shard.logits()
    part[0], part[1], part[2] = s.amax(-1), t.amax(-1), u.amax(-1)
    part[3] = t.masked_fill(s != part[0][:, None], LOWEST).amax(-1)
    part[4:7] = _sums(s, t, part[0], 1.0)
    part[7:10] = _sums(t, s, part[1], 1.0)
    if o.flags["OWN_SUMS"]:
        part[10], _, part[11] = _sums(s, u, part[0], o.temperature)
        part[12], _, part[13] = _sums(u, s, part[2], o.temperature)
    if o.label_smoothing:
        part[14] = s.sum(-1)
    if shard.rows.labels is not None:
        place, inside = shard.places()
        for i, logits in ((15, s), (16, t)):
            part[i] = logits.gather(1, place[:, None]).squeeze(1).where(inside, 0)


def _sums(x: Tensor, other: Tensor, top: Tensor, temperature: float) -> Tensor:
    """Return sums (3, n) of e = exp((x - top) / T), e (x - top) and e (x - other)."""
    below = x - top[:, None]
    e = (below / temperature).exp()
    return torch.stack([e.sum(-1), torch.linalg.vecdot(e, below), torch.linalg.vecdot(e, x - other)])


def _combined(part: Tensor, shard: ShardInputs, out: Tensor, ranks: RankSums) -> RowNumbers:
    """Combine the ranks' statistics and write the metrics, which are at temperature 1."""
    o = shard.options
    tops = ranks.max_(part[:3].clone())
    below = part[:3] - tops
    share, share_T = below.exp(), (below / o.temperature).exp()
    agrees = (part[0] == tops[0]) & (part[3] >= tops[1])
    s_total, s_moment, s_ratio, t_total, t_moment, t_ratio, s_total_T, s_ratio_T, u_total_T, u_ratio_T, *labels = part[
        4:
    ]
    sums = torch.stack([
        s_total * share[0], (s_moment + below[0] * s_total) * share[0], s_ratio * share[0],
        t_total * share[1], (t_moment + below[1] * t_total) * share[1], t_ratio * share[1],
        s_total_T * share_T[0], s_ratio_T * share_T[0], u_total_T * share_T[2], u_ratio_T * share_T[2],
        *labels, agrees.to(part.dtype),
    ])  # fmt: skip
    sums = ranks.sum_(sums)
    s_top, t_top, u_top = tops.masked_fill(tops <= LOWEST, torch.nan)  # a row without any token
    s_total, s_moment, s_ratio, t_total, t_moment, t_ratio, *at_T, plain, s_label, t_label, agrees = sums
    s, t = Partition(s_top, s_total.log()), Partition(t_top, t_total.log())
    forward = _unbounded(t_ratio / t_total - t.above(s))
    reverse = _unbounded(s_ratio / s_total - s.above(t))
    out[ENTROPY], out[TEACHER_ENTROPY] = s_total.log() - s_moment / s_total, t_total.log() - t_moment / t_total
    out[FORWARD_KL], out[REVERSE_KL], out[AGREES] = forward, reverse, agrees > 0
    out[LOG_PROB] = out[IS_TOP1] = out[TEACHER_LOG_PROB] = 0
    labels = shard.rows.labels
    if labels is not None:
        s_label = s_label.where((labels >= 0) & (labels < shard.vocab), torch.nan)  # a wrong label shows
        out[LOG_PROB], out[TEACHER_LOG_PROB], out[IS_TOP1] = s_label - s.lse, t_label - t.lse, s_label >= s_top
    if not o.flags["OWN_SUMS"]:
        return RowNumbers(s, s, t, forward, reverse, s_label, plain)
    T = o.temperature
    s_total_T, s_ratio_T, u_total_T, u_ratio_T = at_T
    s_T, u_T = Partition(s_top / T, s_total_T.log()), Partition(u_top / T, u_total_T.log())
    forward_T = _unbounded(u_ratio_T / u_total_T / T - u_T.above(s_T))
    reverse_T = _unbounded(s_ratio_T / s_total_T / T - s_T.above(u_T))
    return RowNumbers(s, s_T, u_T, forward_T, reverse_T, s_label, plain)


def _unbounded(kl: Tensor) -> Tensor:
    """Return a KL as infinite where one side has mass and the other none."""
    return kl.masked_fill(kl > 1e20, torch.inf)


def _distributions(shard: ShardInputs, s_T: Partition, u_T: Partition) -> tuple[Distributions, Tensor, Tensor | float]:
    """Return (both sides at the loss's temperature, the student's logits, their slope), (n, c)."""
    s, _, u, slope = shard.logits()
    T = shard.options.temperature
    log_q, log_p = s_T.log_probs(s / T), u_T.log_probs(u / T)
    return Distributions(log_q, log_p, log_q.exp(), log_p.exp(), True), s, slope


def second_sums(shard: ShardInputs, row: RowNumbers) -> Tensor:
    """Return this rank's SECOND sums (len(SECOND), n); those of kinds that are not asked for stay 0."""
    o, numbers = shard.options, torch.stack([row.s_T.lse, row.u_T.lse])
    every = numbers.new_zeros(len(SECOND), numbers.shape[1])
    if shard.launch(second_sums_kernel, [numbers, every], [o.beta, o.alpha], MEASURED=o.measured):
        return every
    for at, block in shard.blocks():
        _block_sums(block, row.s_T.at(at), row.u_T.at(at), every[:, at])
    return every


def _block_sums(shard: ShardInputs, s_T: Partition, u_T: Partition, sums: Tensor) -> None:
    o = shard.options
    x, *_ = _distributions(shard, s_T, u_T)
    dot = torch.linalg.vecdot
    if "jsd" in o.weights:
        q_ratio, p_ratio = log_ratios(x, o.beta)
        sums[0], sums[1] = dot(x.p, p_ratio), dot(x.q, q_ratio)
    if "skew_kl" in o.weights:
        q_ratio, p_ratio = log_ratios(x, o.alpha)
        sums[2], sums[3] = dot(x.p, p_ratio), dot(x.p - x.q, q_ratio.exp())
    if "skew_reverse_kl" in o.weights:
        ratio, _ = log_ratios(x, 1 - o.alpha)
        sums[4], sums[5] = dot(x.q, ratio), dot(x.q, ratio - o.alpha * torch.expm1(ratio))
    if "tvd" in o.weights:
        sums[6], sums[7] = (x.p - x.q).abs().sum(-1), dot(x.q, torch.sign(x.log_q - x.log_p))


def _write_terms(row: RowNumbers, sums: dict[str, Tensor], out: Tensor, o: DivergenceOptions) -> None:
    """Write the divergences, and their weighted sum into DIVERGENCE."""
    values = {
        "forward_kl": row.forward_T,
        "reverse_kl": row.reverse_T,
        "jsd": o.beta * sums["p_jsd"] + (1 - o.beta) * sums["q_jsd"],
        "skew_kl": sums["skew"],
        "skew_reverse_kl": sums["reverse"],
        "tvd": sums["gaps"] / 2,
    }
    out[DIVERGENCE] = 0
    for i, kind in enumerate(ROW_KINDS):
        out[TERMS + i] = values[kind] * o.divergence_scale
        if o.weight(kind):  # 0 * an infinite divergence would be NaN
            out[DIVERGENCE] += o.weight(kind) * out[TERMS + i]


def _write_loss(row: RowNumbers, x: RowInputs, out: Tensor, vocab: int, o: DivergenceOptions) -> None:
    out[LOSS] = out[DIVERGENCE]
    if o.ce_weight:
        ce = row.s.lse - row.s_label + o.z_loss * row.s.lse.square()
        if o.label_smoothing:
            plain = row.plain.masked_fill(row.plain < -1e25, -torch.inf)
            ce += o.label_smoothing * (row.s_label - plain / vocab)
        out[LOSS] += o.ce_weight * ce
    if x.token_weight is not None:
        out[LOSS] *= x.token_weight


def _gradient_numbers(row: RowNumbers, sums: dict[str, Tensor], x: RowInputs, o: DivergenceOptions):
    forward, reverse = (torch.full_like(row.plain, o.weight(kind)) for kind in ("forward_kl", "reverse_kl"))
    weight = torch.ones_like(row.plain) if x.token_weight is None else x.token_weight
    return GradientNumbers(
        row.s, row.s_T, row.u_T, forward, reverse, row.reverse_T, sums["q_jsd"], sums["skew_rise"],
        sums["reverse_rise"], sums["signs"], weight,
    )  # fmt: skip


def shard_gradient(shard: ShardInputs, row: GradientNumbers, grad: Tensor) -> None:
    """Write the gradient (n, c) of the loss over this rank's raw student logits."""
    if _launched_gradient(shard, row, grad):
        return
    for at, block in shard.blocks():
        _block_gradient(block, row.at(at), grad[at])


def _launched_gradient(shard: ShardInputs, row: GradientNumbers, grad: Tensor) -> bool:
    o, labels = shard.options, shard.rows.labels
    lse = row.s.lse
    softmax_weight = o.ce_weight * (1 + 2 * o.z_loss * lse)
    numbers = torch.stack([lse, row.s_T.lse, row.u_T.lse, *row[3:], softmax_weight])  # pyright: ignore
    outputs = [torch.empty_like(lse, dtype=torch.int64) if labels is None else labels, numbers, grad]
    kinds = [o.weight(kind) for kind in ("jsd", "skew_kl", "skew_reverse_kl", "tvd")]
    even = o.ce_weight * o.label_smoothing / shard.vocab
    scalars = [*kinds, o.beta, o.alpha, o.divergence_scale, o.ce_weight * (1 - o.label_smoothing), even]
    constants = {name: o.flags[name] for name in ("GRADED", "OWN_SUMS", "HAS_CE", "HAS_SMOOTHING")}
    aliased = grad.dtype != shard.rows.student.dtype
    return shard.launch(gradient_kernel, outputs, scalars, **constants, ALIASED=aliased)


def _block_gradient(shard: ShardInputs, row: GradientNumbers, grad: Tensor) -> None:
    o = shard.options
    x, s, slope = _distributions(shard, row.s_T, row.u_T)

    def column(numbers: Tensor) -> Tensor:
        return numbers[:, None]

    total = torch.zeros_like(s)
    if o.weight("jsd"):
        q_ratio, _ = log_ratios(x, o.beta)
        total.addcmul_(x.q, q_ratio - column(row.q_jsd), value=o.weight("jsd") * (1 - o.beta))
    if o.weight("skew_kl"):
        q_ratio, _ = log_ratios(x, o.alpha)
        rise = (x.p - x.q) * q_ratio.exp()
        total.add_(x.q * column(row.skew_rise) - rise, alpha=o.weight("skew_kl") * (1 - o.alpha) ** 2)
    if o.weight("skew_reverse_kl"):
        ratio, _ = log_ratios(x, 1 - o.alpha)
        rise = ratio - o.alpha * torch.expm1(ratio)
        total.addcmul_(x.q, rise - column(row.reverse_rise), value=o.weight("skew_reverse_kl"))
    if o.weight("tvd"):
        total.addcmul_(x.q, torch.sign(x.log_q - x.log_p) - column(row.signs), value=o.weight("tvd") / 2)
    if o.weight("forward_kl"):
        total.addcmul_(x.q - x.p, column(row.forward_weight))
    if o.weight("reverse_kl"):
        total += column(row.reverse_weight) * x.q * (x.log_q - x.log_p - column(row.reverse_T))
    total *= o.divergence_scale / o.temperature
    if o.ce_weight:
        assert shard.rows.labels is not None
        place, inside = shard.places()
        total.addcmul_(row.s.log_probs(s).exp(), column(o.ce_weight * (1 + 2 * o.z_loss * row.s.lse)))
        of_label = inside.to(total.dtype) * (o.ce_weight * (o.label_smoothing - 1))
        total.scatter_add_(1, column(place), column(of_label))
        total -= o.ce_weight * o.label_smoothing / shard.vocab
    grad.copy_(total.mul_(slope).mul_(column(row.token_weight)))
