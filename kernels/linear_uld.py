"""Universal logit distillation of a linear head from a teacher with another vocabulary; no logits are stored.

    s = transform(hidden @ weight.T + bias + lora) / T,  q = softmax(s)   student; lora: see _linear_head.py
    t = the same for the teacher,                        p = softmax(t)   teacher, at the aligned position

    uld  sum_i |sort(q)_i - sort(p)_i|, both descending, the shorter one padded with zeros
                                                 d/ds_j = q_j (g_j - sum_k q_k g_k), g = sign(sort(q) - sort(p)) at j
    loss = sum over rows of w [T^2 uld + ce_weight CE] / num_items,  CE at T = 1, w token_weight

Meaning       the Wasserstein-1 distance of the two distributions if moving mass from any token to any other costs the
              same: it ignores which token has a probability, and compares only how the probabilities are spread.
Shapes        hidden: (N, Hs)  weight: (Vs, Hs)  teacher_hidden: (M, Ht)  teacher_weight: (Vt, Ht)
              labels, partners, token_weight: (N,)
Vocabularies  the first vocab_size rows of the student's head, and the first teacher_vocab_size of the teacher's.
Method        as in linear_cross_entropy.py, with a second workspace for the teacher's logits: four products. torch.sort
              sorts a chunk's rows a few at a time, so the memory for sorting stays small.
Numerics      softmax, sorting and sums in fp32. A student equal to its teacher gives exactly loss 0 and gradient 0. The
              gradient belongs to the order that sorting found: for equal probabilities it is one of several, as for
              |x| at 0.
Source        Boizard et al. 2024, arXiv:2402.12030, eq. 4; T^2: Hinton et al. 2015, arXiv:1503.02531
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._linear_head import (
    Adapters,
    LinearHead,
    Lora,
    Operands,
    Rows,
    RowSelection,
    check_head,
    check_overwritten,
    gather_rows,
    labelled_weight,
    linear_reference,
    token_count,
    vocabulary,
)
from ._linear_loss import (
    Execution,
    LinearLoss,
    LogitChunk,
    LossOp,
    check_execution,
    check_labels,
    workspace,
)
from ._logits import LogitTransform, check_scalars, entropy_of, transform

__all__ = ["LinearUld", "Lora", "linear_uld", "linear_uld_reference", "uld_reference"]

SORTED_BYTES = 2**28  # that sorting may take besides the workspace
BYTES_A_NUMBER = 48  # sorted probabilities of both sides, their places and differences, and torch.sort's own memory
FIELDS = ("loss", "uld", "log_prob", "entropy", "is_top1")
LOSS, ULD, LOG_PROB, ENTROPY, IS_TOP1 = range(len(FIELDS))


class LinearUld(NamedTuple):
    """The result of `linear_uld`. Per-token values are fp32 (fp64 for fp64 inputs), 0 where ignored.

    Without labels, the fields that need them are 0.
    """

    loss: Tensor  # scalar, differentiable in hidden, weight and bias
    uld: Tensor  # (N,) from 0 to 2, times T^2 if the loss is; 0 if no position of the teacher is aligned
    log_prob: Tensor  # (N,) the student's log-probability of the label, at temperature 1
    entropy: Tensor  # (N,) the student's entropy, at temperature 1
    is_top1: Tensor  # (N,) bool, whether the student finds no token likelier than the label


def uld_reference(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return distances (N,) of logits (N, Vs) and (N, Vt), in plain torch, without the factor T^2."""
    sides = [(x / temperature).softmax(-1).sort(-1, descending=True).values for x in (student_logits, teacher_logits)]
    width = max(x.shape[-1] for x in sides)
    q, p = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in sides)
    return (q - p).abs().sum(-1)


def linear_uld_reference(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    partners: Tensor | None = None, labels: Tensor | None = None, temperature: float = 1.0, bias: Tensor | None = None,
    teacher_bias: Tensor | None = None, scale: float = 1.0, teacher_scale: float = 1.0, softcap: float | None = None,
    teacher_softcap: float | None = None, scale_by_temperature_squared: bool = True, vocab_size: int | None = None,
    teacher_vocab_size: int | None = None, lora: Adapters = None, teacher_lora: Adapters = None, **options,
) -> LinearUld:  # fmt: skip
    """Return in plain torch what the op must equal. Tests import this."""

    def logits(hidden, weight, bias, size, how, lora):
        cut = size or weight.shape[0]
        return transform(linear_reference(hidden, weight, lora)[:, :cut], None if bias is None else bias[:cut], how)[0]

    s = logits(hidden, weight, bias, vocab_size, LogitTransform(scale, softcap), lora)
    with torch.no_grad():
        teacher_transform = LogitTransform(teacher_scale, teacher_softcap)
        t = logits(teacher_hidden, teacher_weight, teacher_bias, teacher_vocab_size, teacher_transform, teacher_lora)
        t = t.to(s.dtype)
    # (N,): the teacher's row of each
    index = torch.arange(s.shape[0], device=s.device) if partners is None else partners
    aligned = index >= 0
    uld = uld_reference(s[aligned], t[index[aligned]], temperature)
    uld = s.new_zeros(s.shape[0]).masked_scatter(aligned, uld * (temperature**2 if scale_by_temperature_squared else 1))
    return stored_uld(s, uld, labels, **options)


def stored_uld(
    s: Tensor, uld: Tensor, labels: Tensor | None, uld_weight: float = 1.0, ce_weight: float = 0.0,
    label_smoothing: float = 0.0, num_items: float | Tensor | None = None, ignore_index: int = -100,
    token_weight: Tensor | None = None, reduction: str = "mean",
) -> LinearUld:  # fmt: skip
    """Return the result from stored logits s (N, V) and their distances uld (N,)."""
    keep = torch.ones_like(s[:, 0], dtype=torch.bool) if labels is None else labels != ignore_index
    has_label = keep & (labels is not None)
    label = torch.zeros_like(keep, dtype=torch.int64) if labels is None else labels * keep
    log_q = s.log_softmax(-1)
    log_prob = log_q.gather(1, label[:, None]).squeeze(1).where(has_label, 0)
    loss = uld_weight * uld
    if ce_weight:
        loss = loss - ce_weight * (1 - label_smoothing) * log_prob
    if ce_weight and label_smoothing:
        loss = loss - ce_weight * label_smoothing * log_q.mean(-1)
    loss = loss.where(keep, 0)
    if token_weight is not None:
        loss = loss * token_weight
    if reduction == "mean":
        loss = loss.sum() / token_count(keep, num_items, loss.dtype)
    fields = uld, log_prob, entropy_of(log_q), (log_prob >= log_q.amax(-1)) & has_label
    return LinearUld(loss, *(x.where(keep, x.new_zeros(())).detach() for x in fields))


@dataclass(frozen=True)
class UldOptions:
    """Scalars of one call; `linear_uld` explains them."""

    uld_weight: float = 1.0
    ce_weight: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    scale_by_temperature_squared: bool = True
    student: LogitTransform = field(default_factory=LogitTransform)
    teacher: LogitTransform = field(default_factory=LogitTransform)

    def __post_init__(self):
        check_scalars(self.temperature, self.label_smoothing)

    @property
    def uld_scale(self) -> float:
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0


class LogitPair(NamedTuple):
    """A few rows of both sides."""

    student: Tensor  # (n, Vs)
    teacher: Tensor  # (n, Vt)
    bias: Tensor | None  # (Vs,)
    teacher_bias: Tensor | None  # (Vt,)
    labels: Tensor | None  # (n,)
    aligned: Tensor | None  # (n,) bool; None: all
    token_weight: Tensor | None  # (n,)

    def rows(self, part: slice) -> "LogitPair":
        by_row = (None if x is None else x[part] for x in (self.labels, self.aligned, self.token_weight))
        return LogitPair(self.student[part], self.teacher[part], self.bias, self.teacher_bias, *by_row)


def uld_rows(x: LogitPair, out: Tensor, grad: Tensor | None, o: UldOptions) -> None:
    """Fill out (FIELDS, n), and grad (n, Vs) unless it is None. grad may share the student's memory."""
    s, slope = transform(x.student, x.bias, o.student)
    t = transform(x.teacher, x.teacher_bias, o.teacher)[0].to(s.dtype)
    log_q, q = s.log_softmax(-1), s.softmax(-1)
    out[ENTROPY] = entropy_of(log_q)
    out[LOG_PROB] = out[IS_TOP1] = 0
    if x.labels is not None:
        out[LOG_PROB] = log_q.gather(1, x.labels[:, None]).squeeze(1)
        out[IS_TOP1] = s.gather(1, x.labels[:, None]).squeeze(1) >= s.amax(-1)
    at_t = q if o.temperature == 1.0 else (s / o.temperature).softmax(-1)  # (n, Vs)
    uld, sign = _distance(at_t, (t if o.temperature == 1.0 else t / o.temperature).softmax(-1))
    aligned = uld.new_ones(()) if x.aligned is None else x.aligned.to(uld.dtype)
    out[ULD] = uld * o.uld_scale * aligned
    out[LOSS] = o.uld_weight * out[ULD]
    factor = aligned * (o.uld_weight * o.uld_scale / o.temperature)
    dlogits = None
    if grad is not None:
        dlogits = at_t * (sign - torch.linalg.vecdot(at_t, sign)[:, None]) * factor.unsqueeze(-1)
    if o.ce_weight:
        out[LOSS] += o.ce_weight * (o.label_smoothing - 1) * out[LOG_PROB]
        if o.label_smoothing:
            out[LOSS] -= o.ce_weight * o.label_smoothing * log_q.mean(-1)
        if dlogits is not None and x.labels is not None:
            onehot = torch.zeros_like(q).scatter_(1, x.labels[:, None], 1 - o.label_smoothing)
            dlogits += o.ce_weight * (q - onehot - o.label_smoothing / q.shape[1])
    if x.token_weight is not None:
        out[LOSS] *= x.token_weight
        slope = slope * x.token_weight[:, None]
    if grad is not None and dlogits is not None:
        grad.copy_(dlogits.mul_(slope))


def _distance(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances (n,) of probabilities (n, Vs) and (n, Vt), and their derivatives (n, Vs) with respect to q."""
    gaps, order = q.sort(-1, descending=True)  # `gaps` is q until p is subtracted
    p = p.sort(-1, descending=True).values
    both = min(q.shape[1], p.shape[1])  # beyond it one side is padded with zeros
    gaps[:, :both] -= p[:, :both]
    return gaps.abs().sum(-1) + p[:, both:].sum(-1), torch.empty_like(gaps).scatter_(1, order, gaps.sign())


@dataclass(frozen=True)
class UldPair(LinearLoss):
    """A student's head against a teacher's of another vocabulary. Row tensors hold the rows that take part."""

    teacher: LinearHead
    teacher_vocab: int
    partners: Rows  # the teacher's row for each row of the student
    aligned: Tensor | None  # (rows.count,) bool; False: row 0 stands in, and doesn't count. None: all are aligned
    labels: Tensor | None  # (rows.count,)
    token_weight: Tensor | None  # (rows.count,)
    options: UldOptions

    fields = FIELDS

    def chunk_state(self, rows: int) -> tuple[Operands, Tensor]:
        """Return (operands of the teacher's logits, a workspace for a chunk of them)."""
        columns = slice(0, self.teacher_vocab)
        operands = self.teacher.operands(self.partners, self.teacher_vocab).part(slice(None), columns)
        return operands, workspace(rows, self.teacher_vocab, self.teacher.dtype, self.teacher.hidden.device)

    def write_rows(self, chunk: LogitChunk) -> None:
        """Write a few rows at a time, so that sorting takes at most SORTED_BYTES."""
        operands, ws = chunk.chunk_state
        teacher = operands.part(chunk.rows, slice(0, self.teacher_vocab))
        by_row = (None if x is None else x[chunk.rows] for x in (self.labels, self.aligned, self.token_weight))
        both = LogitPair(chunk.logits, teacher.logits(ws), chunk.bias, teacher.bias, *by_row)
        few = max(1, SORTED_BYTES // (BYTES_A_NUMBER * max(self.vocab, self.teacher_vocab)))  # rows at a time
        for start in range(0, chunk.logits.shape[0], few):
            part, dlogits = slice(start, start + few), chunk.dlogits
            uld_rows(both.rows(part), chunk.values[:, part], None if dlogits is None else dlogits[part], self.options)

    def weighted(self, factor: Tensor) -> "UldPair":
        return replace(self, token_weight=factor if self.token_weight is None else factor * self.token_weight)

    def bytes_per_logit(self, dtype: torch.dtype) -> int:
        """Return the bytes of both sides' logits per word of the student's vocabulary."""
        return -(-(dtype.itemsize * self.vocab + self.teacher.dtype.itemsize * self.teacher_vocab) // self.vocab)


def _loss(
    rows: Rows, how: Execution, head: LinearHead, labels: Tensor | None, token_weight: Tensor | None,
    teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None, teacher_low: Tensor | None,
    teacher_low_weight: Tensor | None, teacher_dtype: torch.dtype, partners: Tensor | None, vocab: int,
    teacher_vocab: int, uld_weight: float, ce_weight: float, temperature: float, label_smoothing: float,
    scale_by_temperature_squared: bool, scale: float, softcap: float | None, teacher_scale: float,
    teacher_softcap: float | None,
) -> UldPair:  # fmt: skip
    options = UldOptions(
        uld_weight, ce_weight, temperature, label_smoothing, scale_by_temperature_squared,
        LogitTransform(scale, softcap), LogitTransform(teacher_scale, teacher_softcap),
    )  # fmt: skip
    teacher = LinearHead(teacher_hidden, teacher_weight, teacher_bias, teacher_low, teacher_low_weight, teacher_dtype)
    aligned, teacher_rows = None, rows
    if partners is not None:
        partners = gather_rows(partners, rows)
        aligned = partners >= 0
        teacher_rows = Rows(partners.clamp(min=0), rows.count, rows.num_items)  # row 0 stands in for none
    labels = None if labels is None else gather_rows(labels, rows).contiguous()
    weight = labelled_weight(token_weight, rows, head.hidden.dtype)
    return UldPair(rows, vocab, how, teacher, teacher_vocab, teacher_rows, aligned, labels, weight, options)


_op = LossOp("linear_uld", _loss)


def linear_uld(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    partners: Tensor | None = None, labels: Tensor | None = None, uld_weight: float = 1.0, ce_weight: float = 0.0,
    temperature: float = 1.0, num_items: float | Tensor | None = None, bias: Tensor | None = None,
    teacher_bias: Tensor | None = None, scale: float = 1.0, teacher_scale: float = 1.0, softcap: float | None = None,
    teacher_softcap: float | None = None, label_smoothing: float = 0.0, scale_by_temperature_squared: bool = True,
    ignore_index: int = -100, token_weight: Tensor | None = None, reduction: str = "mean",
    vocab_size: int | None = None, teacher_vocab_size: int | None = None, rows: RowSelection | None = None,
    recompute: bool = False, workspace_mb: float | None = None, accumulate_dtype: torch.dtype | None = None,
    overwrite_hidden: bool = False, lora: Adapters = None, teacher_lora: Adapters = None,
) -> LinearUld:  # fmt: skip
    """Distill across vocabularies: match how the teacher spreads probability, whatever its tokens are. Cross-entropy is
    mixed in in the same pass.

    The formulas are at the top of this file. The teacher gets no gradient.

    Args:
        hidden: (N, Hs), fp32, fp16, bf16 (fp64: torch).
        weight: (Vs, Hs). Frozen if it requires no gradient: its product is skipped.
        teacher_hidden: (M, Ht), any float dtype.
        teacher_weight: (Vt, Ht).
        partners: (N,) int64, the row of teacher_hidden that is aligned with each row of hidden. Negative means none:
            the row has no distance, but counts in num_items and in the cross-entropy. Without partners, row i is
            aligned with row i, and M must be N.
        labels: (N,) int64. Rows with ignore_index take no part in either loss. Without labels, every row does.
        uld_weight, ce_weight: weights of the distance, and of the cross-entropy against labels at temperature 1.
        temperature: divides both sides' logits in the distance.
        num_items: divisor of the sum over tokens; default: the number of rows that take part.
        bias, teacher_bias: (Vs,) and (Vt,), added to the logits.
        scale, teacher_scale, softcap, teacher_softcap: what each model does to its logits, see `linear_cross_entropy`.
        label_smoothing: of the cross-entropy, see `linear_cross_entropy`.
        scale_by_temperature_squared: multiply the distance, value and gradient, by temperature^2.
        token_weight, reduction, rows, recompute, accumulate_dtype, overwrite_hidden: see `linear_divergence`.
        vocab_size, teacher_vocab_size: the real vocabularies, if a head is padded beyond its own.
        workspace_mb: MiB for both chunks of logits. Sorting takes up to 256 MiB more.
        lora, teacher_lora: low-rank additions to each head, see `linear_cross_entropy`.

    Returns:
        LinearUld: loss and per-token values.

    Raises:
        ValueError: if shapes don't fit, an option is out of range, or ce_weight lacks labels.
    """
    check_head(hidden, weight, bias, lora)
    check_head(teacher_hidden, teacher_weight, teacher_bias, teacher_lora, "teacher_")
    _check_partners(hidden, teacher_hidden, partners)
    check_labels(hidden, labels, ce_weight)
    check_execution(hidden, token_weight, reduction, num_items, recompute, overwrite_hidden)
    check_overwritten(overwrite_hidden, lora)
    vocab, teacher_vocab = vocabulary(weight, vocab_size), vocabulary(teacher_weight, teacher_vocab_size, "teacher_")
    head = LinearHead.of(hidden, weight, bias, lora)
    with torch.no_grad():
        teacher = LinearHead.of(teacher_hidden, teacher_weight, teacher_bias, teacher_lora).detached()
    arguments: list[Any] = [
        *teacher.tensors, teacher.dtype, partners, vocab, teacher_vocab, uld_weight, ce_weight, temperature,
        label_smoothing, scale_by_temperature_squared, scale, softcap, teacher_scale, teacher_softcap,
    ]  # fmt: skip
    value, per_token = _op(
        head, labels, token_weight, arguments, rows=rows, num_items=num_items, ignore_index=ignore_index,
        reduction=reduction, recompute=recompute, workspace_mb=workspace_mb, accumulate_dtype=accumulate_dtype,
        overwrite_hidden=overwrite_hidden,
    )  # fmt: skip
    return _named(value, per_token)


def _named(loss: Tensor, per_token: Tensor) -> LinearUld:
    _, uld, log_prob, entropy, is_top1 = per_token.unbind(0)
    return LinearUld(loss, uld, log_prob, entropy, is_top1 > 0)


def _check_partners(hidden: Tensor, teacher_hidden: Tensor, partners: Tensor | None) -> None:
    if partners is None and hidden.shape[0] != teacher_hidden.shape[0]:
        raise ValueError(
            f"hidden has {hidden.shape[0]} rows and teacher_hidden {teacher_hidden.shape[0]}: give partners, which "
            "says which of them belong together."
        )
    if partners is not None and (partners.shape != hidden.shape[:1] or partners.dtype != torch.int64):
        raise ValueError(
            f"partners must be int64, one per row of hidden: partners is {tuple(partners.shape)} of "
            f"{partners.dtype}, hidden {tuple(hidden.shape)}."
        )
    if partners is not None and hidden.shape[0] and not teacher_hidden.shape[0]:
        raise ValueError("teacher_hidden has no rows, so no row of hidden has a partner: leave the teacher out.")
