"""Rows of linear_divergence.py whose vocabulary lies on several ranks: statistics, their sums over ranks, gradients.

Each rank holds some columns of both sides' logits. The formulas are those of _divergence_kernels.py, whose pieces the
Triton kernels here are made of, and of _divergence_torch.py:

1. `shard_statistics`: maxima, and sums of exponentials relative to them. Ranks' maxima are combined by one all-reduce,
   the sums, rescaled to the common maxima, by a second: now each rank knows both log-partitions and both KLs.
2. `second_sums`, of the kinds that need the log-partitions first: one more all-reduce.
3. `shard_gradient`: the gradient of a rank's own logits is a function of these and of the numbers of the row.

A program takes a row of this rank's columns, whose first is `first` of the whole vocabulary. Numbers of a row are in
nats, (n,) each, and pass between the kernels so; the pieces compute in base 2.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._divergence_kernels import (
    COUNT,
    FIRST_PAIRED,
    LANES,
    SHARE,
    VECTOR_BYTES,
    WARPS,
    Sides,
    first_pass,
    gradient_weights,
    in_nats,
    load_labels,
    mean_in_base_two,
    second_pass,
    write_gradient,
)
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
    TERMS,
    Distributions,
    DivergenceOptions,
    RowInputs,
    add_gradient,
    form_of,
    inf_if_ruled_out,
    pieces_of,
    sums_of,
    value_of,
)
from ._logits import LN2, LOG2E, LOWEST, transform
from ._ranks import RankSums
from ._triton import kept_launch, tl, triton, use_triton
from .divergence_kinds import ROW_KINDS, SECOND_PASS

STATISTICS = (
    "s_top", "t_top", "u_top", "t_at_s_top", "s_total", "s_moment", "s_ratio", "t_total", "t_moment", "t_ratio",
    "s_total_T", "s_ratio_T", "u_total_T", "u_ratio_T", "plain", "s_label", "t_label",
)  # fmt: skip
BLOCK = 2**22  # numbers of a block of rows: what plain torch computes in passing takes some 16 MiB each


@triton.jit
def _in_nats(top):
    """Return a maximum in nats. The maximum of a shard whose every token is ruled out stays -1e30."""
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
    sides = Sides(
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
    """Write both sums of each kind of the second pass (out). numbers: both log-partitions at the temperature."""
    row = tl.program_id(0).to(tl.int64)
    sides = Sides(
        student_ptr + row * stride_student, bias_ptr, scale, softcap, teacher_ptr + row * stride_teacher,
        teacher_bias_ptr, teacher_scale, teacher_softcap, teacher_share, V, padded,
    )  # fmt: skip
    numbers_ptr += row
    out_ptr += row
    s_lse = tl.load(numbers_ptr) * LOG2E
    u_lse = tl.load(numbers_ptr + stride_numbers) * LOG2E
    firsts, seconds = second_pass(sides, s_lse, u_lse, 1.0 / temperature, beta, alpha, FORM, MEASURED, LANES, VECTOR)
    for i in tl.static_range(FIRST_PAIRED, COUNT):
        first, second = in_nats(tl.sum(firsts[i], 0), tl.sum(seconds[i], 0), 1 << i)
        tl.store(out_ptr, first)
        tl.store(out_ptr + stride_out, second)
        out_ptr += 2 * stride_out


@triton.jit
def gradient_kernel(
    student_ptr, teacher_ptr, bias_ptr, teacher_bias_ptr, labels_ptr, numbers_ptr, grad_ptr,
    stride_student, stride_teacher, stride_numbers, stride_grad, V, padded, first,
    scale, softcap, teacher_scale, teacher_softcap, teacher_share, temperature, weights, beta, alpha, divergence_scale,
    label_weight, even_weight,
    FORM: tl.constexpr, GRADED: tl.constexpr, OWN_SUMS: tl.constexpr, HAS_CE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, ALIASED: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write the gradient. numbers: see `_launched_gradient`. weights: of ROW_KINDS.

    label_weight, even_weight: what CE subtracts at the label, and everywhere.
    """
    row = tl.program_id(0).to(tl.int64)
    sides = Sides(
        student_ptr + row * stride_student, bias_ptr, scale, softcap, teacher_ptr + row * stride_teacher,
        teacher_bias_ptr, teacher_scale, teacher_softcap, teacher_share, V, padded,
    )  # fmt: skip
    numbers_ptr += row
    inv_t = 1.0 / temperature
    s_lse = tl.load(numbers_ptr) * LOG2E
    s_lse_T = tl.load(numbers_ptr + stride_numbers) * LOG2E
    u_lse_T = tl.load(numbers_ptr + 2 * stride_numbers) * LOG2E
    token_weight = tl.load(numbers_ptr + 3 * stride_numbers)
    softmax_weight = tl.load(numbers_ptr + 4 * stride_numbers)
    means = (0.0, tl.load(numbers_ptr + 5 * stride_numbers) * LOG2E)
    for i in tl.static_range(FIRST_PAIRED, COUNT):
        means = means + (mean_in_base_two(tl.load(numbers_ptr + (4 + i) * stride_numbers), 1 << i),)
    label = 0
    if HAS_CE:
        label = tl.load(labels_ptr + row) - first
    scaled = gradient_weights(weights, beta, alpha, divergence_scale * inv_t)
    write_gradient(
        grad_ptr + row * stride_grad, sides, scaled, means, s_lse_T, u_lse_T, inv_t, beta, alpha, s_lse, label,
        softmax_weight, label_weight, even_weight, token_weight, FORM, GRADED, OWN_SUMS, HAS_CE, HAS_SMOOTHING, ALIASED,
        LANES, VECTOR,
    )  # fmt: skip


class ShardInputs(NamedTuple):
    """A chunk of rows over this rank's columns [first, first + c) of a vocabulary of size `vocab`."""

    rows: RowInputs
    first: int
    vocab: int
    options: DivergenceOptions

    def launch(self, kernel: Any, outputs: Sequence[Tensor], numbers: Sequence[Any], **constants: Any) -> bool:
        """Launch a kernel over this rank's columns, if Triton runs here. Return whether it did.

        outputs: the pointers behind the logits and biases. numbers: what follows the scalars of the logits.
        """
        x, o = self.rows, self.options
        n, columns = x.student.shape
        # A rank without columns has nothing to launch, and is done.
        if not columns or not use_triton(x.student):
            return not columns
        padded = -(-columns // 16) * 16
        gradient = outputs[-1] if kernel is gradient_kernel else x.student
        if min(x.student.stride(0), x.teacher.stride(0), gradient.stride(0)) < padded:
            padded = columns
        strides = [y.stride(0) for y in (x.student, x.teacher, *outputs) if y.dim() == 2]
        first = [self.first] if kernel in (statistics_kernel, gradient_kernel) else []
        launch = kept_launch(
            kernel, (n,), *strides, columns, padded, *first, *o.of_logits, *numbers, FORM=form_of(x, o), **constants,
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
    """What the gradient of a row's logits depends on besides the logits: (n,) each."""

    s: Partition
    s_T: Partition
    u_T: Partition
    token_weight: Tensor
    reverse_T: Tensor
    means: Tensor  # (len(SECOND_PASS), n), the second sum of each kind

    def at(self, rows: slice) -> "GradientNumbers":
        s, s_T, u_T = self.s.at(rows), self.s_T.at(rows), self.u_T.at(rows)
        return GradientNumbers(s, s_T, u_T, self.token_weight[rows], self.reverse_T[rows], self.means[:, rows])


def divergence_shard(
    x: RowInputs, first: int, vocab: int, out: Tensor, grad: Tensor | None, o: DivergenceOptions, ranks: RankSums
) -> None:
    """Fill out (len(FIELDS), n), the same on all ranks, and grad (n, c) unless it is None.

    x: logits of this rank's columns; grad may share the student's memory.
    """
    shard = ShardInputs(x, first, vocab, o)
    row = _combined(shard_statistics(shard, out), shard, out, ranks)
    sums = out.new_zeros(len(SECOND_PASS), 2, out.shape[1])
    if o.measured:
        sums = ranks.sum_(second_sums(shard, row)).view(sums.shape)
    _write_terms(row, sums, out, o)
    _write_loss(row, x, out, vocab, o)
    if grad is not None and grad.shape[1]:
        weight = torch.ones_like(row.plain) if x.token_weight is None else x.token_weight
        shard_gradient(shard, GradientNumbers(row.s, row.s_T, row.u_T, weight, row.reverse_T, sums[:, 1]), grad)


def shard_statistics(shard: ShardInputs, like: Tensor) -> Tensor:
    """Return this rank's STATISTICS (len(STATISTICS), n). like: in their dtype."""
    every = like.new_zeros(len(STATISTICS), like.shape[1])
    every[:4] = LOWEST  # the maxima of a rank without columns: below all others
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
    tops = ranks.max_(part[:3].clone())  # the first all-reduce
    below = part[:3] - tops
    # what this rank's sums shrink by, relative to the common maxima
    share, share_T = below.exp(), (below / o.temperature).exp()
    agrees = (part[0] == tops[0]) & (part[3] >= tops[1])  # on the rank that holds the maximum; summed, any rank will do
    s_total, s_moment, s_ratio, t_total, t_moment, t_ratio, s_total_T, s_ratio_T, u_total_T, u_ratio_T, *labels = part[
        4:
    ]
    sums = torch.stack([
        s_total * share[0], (s_moment + below[0] * s_total) * share[0], s_ratio * share[0],
        t_total * share[1], (t_moment + below[1] * t_total) * share[1], t_ratio * share[1],
        s_total_T * share_T[0], s_ratio_T * share_T[0], u_total_T * share_T[2], u_ratio_T * share_T[2],
        *labels, agrees.to(part.dtype),
    ])  # fmt: skip
    sums = ranks.sum_(sums)  # the second
    s_top, t_top, u_top = tops.masked_fill(tops <= LOWEST, torch.nan)  # a row without any token
    s_total, s_moment, s_ratio, t_total, t_moment, t_ratio, *at_T, plain, s_label, t_label, agrees = sums
    s, t = Partition(s_top, s_total.log()), Partition(t_top, t_total.log())
    forward = inf_if_ruled_out(t_ratio / t_total - t.above(s))
    reverse = inf_if_ruled_out(s_ratio / s_total - s.above(t))
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
    forward_T = inf_if_ruled_out(u_ratio_T / u_total_T / T - u_T.above(s_T))
    reverse_T = inf_if_ruled_out(s_ratio_T / s_total_T / T - s_T.above(u_T))
    return RowNumbers(s, s_T, u_T, forward_T, reverse_T, s_label, plain)


def _distributions(shard: ShardInputs, s_T: Partition, u_T: Partition) -> tuple[Distributions, Tensor, Tensor | float]:
    """Return (both sides at the loss's temperature, the student's logits, their slope), (n, c)."""
    s, _, u, slope = shard.logits()
    T = shard.options.temperature
    log_q, log_p = s_T.log_probs(s / T), u_T.log_probs(u / T)
    return Distributions(log_q, log_p, log_q.exp(), log_p.exp()), s, slope


def second_sums(shard: ShardInputs, row: RowNumbers) -> Tensor:
    """Return this rank's part of both sums of each kind of SECOND_PASS, (2 len(SECOND_PASS), n); 0 if not asked for."""
    o, numbers = shard.options, torch.stack([row.s_T.lse, row.u_T.lse])
    every = numbers.new_zeros(2 * len(SECOND_PASS), numbers.shape[1])
    if shard.launch(second_sums_kernel, [numbers, every], [float(o.beta), float(o.alpha)], MEASURED=o.measured):
        return every
    for at, block in shard.blocks():
        x, *_ = _distributions(block, row.s_T.at(at), row.u_T.at(at))
        for i, kind in enumerate(SECOND_PASS):
            if kind in o.weights:
                every[2 * i, at], every[2 * i + 1, at] = sums_of(kind, x, pieces_of(kind, x, o.beta, o.alpha))
    return every


def _write_terms(row: RowNumbers, sums: Tensor, out: Tensor, o: DivergenceOptions) -> None:
    """Write the divergences, and their weighted sum into DIVERGENCE."""
    values = {"forward_kl": row.forward_T, "reverse_kl": row.reverse_T}
    for kind, (first, second) in zip(SECOND_PASS, sums, strict=True):
        values[kind] = value_of(kind, first, second, o.beta)
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
    numbers = torch.stack([lse, row.s_T.lse, row.u_T.lse, row.token_weight, softmax_weight, row.reverse_T, *row.means])
    outputs = [torch.empty_like(lse, dtype=torch.int64) if labels is None else labels, numbers, grad]
    even = o.ce_weight * o.label_smoothing / shard.vocab
    scalars = [*o.of_kinds, float(o.ce_weight * (1 - o.label_smoothing)), float(even)]
    constants = {name: o.flags[name] for name in ("GRADED", "OWN_SUMS", "HAS_CE", "HAS_SMOOTHING")}
    aliased = grad.dtype != shard.rows.student.dtype
    return shard.launch(gradient_kernel, outputs, scalars, **constants, ALIASED=aliased)


def _block_gradient(shard: ShardInputs, row: GradientNumbers, grad: Tensor) -> None:
    o = shard.options
    x, s, slope = _distributions(shard, row.s_T, row.u_T)
    total, means = torch.zeros_like(s), dict(zip(SECOND_PASS, row.means, strict=True))
    for kind in ROW_KINDS:
        if o.weight(kind):
            pieces = pieces_of(kind, x, o.beta, o.alpha) if kind in means else None
            add_gradient(total, kind, x, pieces, means.get(kind, row.reverse_T), o)
    if o.ce_weight:
        assert shard.rows.labels is not None
        place, inside = shard.places()
        total.addcmul_(row.s.log_probs(s).exp(), (o.ce_weight * (1 + 2 * o.z_loss * row.s.lse))[:, None])
        of_label = inside.to(total.dtype) * (o.ce_weight * (o.label_smoothing - 1))
        total.scatter_add_(1, place[:, None], of_label[:, None])
        total -= o.ce_weight * o.label_smoothing / shard.vocab
    grad.copy_(total.mul_(slope).mul_(row.token_weight[:, None]))
