"""From (deferred) logits and labels to the loss of a batch: which rows count, and what they are compared with.

The same shift and the same rows serve cross-entropy and distillation. Real logits, where a model could not defer them,
take the plain torch reference of the same loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels._chunks import RowSelection
from ..kernels.cross_entropy import CrossEntropy, cross_entropy_reference
from ..kernels.linear_cross_entropy import linear_cross_entropy
from ..kernels.linear_divergence import LinearDivergence, distillation_reference, linear_divergence
from .deferred_logits import DeferredLogits
from .sparse import SparseDistillation, SparseTeacher, sparse_distillation
from .uld import UldAnswer, UldDistillation, uld_distillation

IGNORE_INDEX = -100
MEASURED_JSD = "measured_jsd"  # among a result's terms: the JSD at temperature 1 and beta 0.5


@dataclass(frozen=True)
class Distillation:
    """What a student learns from its teacher: sum_k weights[k] D_k (times T^2) + ce_weight CE
    + sum_k hidden_weights[k] H_k. A divergence with weight 0 is measured only."""

    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"forward_kl": 1.0}))
    beta: float = 0.5  # of the JSD, in TRL's convention
    ce_weight: float = 0.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = True
    vocab_size: int | None = None  # the real vocabulary, where heads are padded beyond it
    skew_alpha: float = 0.1  # of the skewed KLs
    teacher_share: float = 1.0  # in the logits that the divergences hold the student against; the rest is its own
    hidden_weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    terms: tuple[str, ...] = ()  # whose values are returned by name
    measure_jsd: bool = False  # the JSD at temperature 1 and beta 0.5, whatever is minimised
    uld_weight: float = 0.0  # against a teacher of another tokenizer, in the place of the divergences


@dataclass(frozen=True)
class LossOptions:
    """The loss of a training run."""

    label_smoothing: float = 0.0
    dft: bool = False
    distillation: Distillation | None = None


@dataclass
class Targets:
    """What the positions of a batch are to predict. Made before the backbone runs: see `RowSelection`."""

    labels: Tensor  # (batch * length,) aligned with the hidden states, IGNORE_INDEX where nothing is predicted
    shape: torch.Size  # (batch, length)
    shifted: bool  # whether they were shifted here; the last position then predicts nothing
    num_items: float | Tensor | None
    rows: RowSelection | None  # None under torch.compile, where the losses select the rows themselves
    source: Tensor  # the labels, or shifted labels, that these are made of

    @classmethod
    def of(
        cls, labels: Tensor | None, shift_labels: Tensor | None, num_items: float | Tensor | None,
        ignore_index: int = IGNORE_INDEX,
    ) -> "Targets":  # fmt: skip
        source = labels if shift_labels is None else shift_labels
        assert source is not None
        aligned = source if shift_labels is not None else pad(source[..., 1:], (0, 1), value=ignore_index)
        flat = aligned.reshape(-1)
        if ignore_index != IGNORE_INDEX:
            flat = flat.masked_fill(flat == ignore_index, IGNORE_INDEX)
        return cls(flat, source.shape, shift_labels is None, num_items, _selection(flat, num_items), source)

    def made_of(self, labels: Tensor | None, shift_labels: Tensor | None) -> bool:
        """Whether these are the targets of what a model hands to its loss. Known by the object, without a look inside:
        labels that the model has moved or copied are others. A model that knows no shifted labels hands them as labels.
        """
        handed = labels if shift_labels is None else shift_labels
        return handed is self.source and (shift_labels is None or not self.shifted)

    def to(self, device: torch.device) -> "Targets":
        """Where the logits are: a model spread over devices ends on another than it begins."""
        if self.labels.device == device:
            return self
        flat = self.labels.to(device)
        return replace(self, labels=flat, rows=_selection(flat, self.num_items))

    def only(self, taught: Tensor) -> "Targets":
        """Those at the positions `taught` (batch, length), still divided by the items of all."""
        items = self.num_items
        if items is None:
            items = (self.labels != IGNORE_INDEX).sum().clamp(min=1)
        flat = self.labels.masked_fill(~taught.reshape(-1).to(self.labels.device), IGNORE_INDEX)
        return replace(self, labels=flat, num_items=items, rows=_selection(flat, items))

    def per_token(self, values: Tensor) -> Tensor:
        """(batch, length - 1) if shifted here, else (batch, length): the shapes of TRL's fused head."""
        values = values.view(self.shape)
        return values[..., :-1] if self.shifted else values

    def for_ops(self) -> dict[str, Any]:
        """The rows as an op takes them: their selection, or else what it makes one of."""
        return {"num_items": self.num_items} if self.rows is None else {"rows": self.rows}


def _selection(labels: Tensor, num_items: float | Tensor | None) -> RowSelection | None:
    return None if torch.compiler.is_compiling() else RowSelection(labels, num_items, IGNORE_INDEX)


Logits = DeferredLogits | Tensor
TeacherAnswer = Logits | SparseTeacher | UldAnswer


def terms_of(result: Any, distillation: Distillation) -> dict[str, Tensor]:
    """The values of the loss's terms, (batch * length,), by type: without weight, and T^2 times if the loss is."""
    values = {"ce": -result.log_prob, **result.terms}
    return {name: values[name] for name in distillation.terms if name in values}


def batch_loss(
    logits: Logits, targets: Targets, options: LossOptions, teacher: TeacherAnswer | None = None
) -> CrossEntropy | LinearDivergence | SparseDistillation | UldDistillation:
    """The loss of one batch and its per-token values, each (batch * length,).

    Args:
        logits: (batch, length, V) of the student.
        teacher: (batch, length, Vt) for `options.distillation`, or (batch, length, K) out of a cache; cross-entropy
            alone without.

    Raises:
        ValueError: logits and labels of different lengths, or a teacher without `options.distillation`.
    """
    for side in (logits, teacher):
        if side is not None and side.shape[:-1] != targets.shape:
            raise ValueError(
                f"Logits are {tuple(side.shape)}, but labels are {tuple(targets.shape)}: lengths must agree."
            )
    if teacher is None:
        return _cross_entropy(logits, targets, options)
    if options.distillation is None:
        raise ValueError("Teacher logits were given to a model whose loss has no distillation part.")
    if isinstance(teacher, UldAnswer):
        return uld_distillation(logits, teacher, targets, options, options.distillation)
    if isinstance(teacher, SparseTeacher):
        return sparse_distillation(logits, teacher, targets, options.distillation)
    return _distillation(logits, teacher, targets, options, options.distillation)


def _cross_entropy(logits: Logits, targets: Targets, options: LossOptions) -> CrossEntropy:
    common = {"label_smoothing": options.label_smoothing, "dft": options.dft, "ignore_index": IGNORE_INDEX}
    if not isinstance(logits, DeferredLogits):
        return cross_entropy_reference(logits.flatten(0, -2), targets.labels, num_items=targets.num_items, **common)
    return linear_cross_entropy(
        logits.hidden.flatten(0, -2), logits.head.weight, targets.labels, bias=logits.head.bias,
        scale=logits.scale, softcap=logits.softcap, lora=logits.head.lora, **targets.for_ops(), **common,
    )  # fmt: skip


def _distillation(
    student: Logits, teacher: Logits, targets: Targets, options: LossOptions, distillation: Distillation
) -> LinearDivergence:
    def loss(how: Distillation) -> LinearDivergence:
        return _divergence(student, teacher, targets, options, how)

    if not distillation.measure_jsd:
        return loss(distillation)
    if distillation.temperature == distillation.teacher_share == 1 and (
        distillation.beta == 0.5 or "jsd" not in distillation.weights
    ):
        result = loss(replace(distillation, weights={"jsd": 0.0, **distillation.weights}, beta=0.5))
        measured = result
    else:
        result = loss(distillation)
        with torch.no_grad():
            measured = loss(Distillation({"jsd": 0.0}, vocab_size=distillation.vocab_size))
    return result._replace(terms={**result.terms, MEASURED_JSD: measured.terms["jsd"]})


def _divergence(
    student: Logits, teacher: Logits, targets: Targets, options: LossOptions, distillation: Distillation
) -> LinearDivergence:
    common = {
        "kind": distillation.weights or {"forward_kl": 0.0}, "beta": distillation.beta, "labels": targets.labels,
        "ce_weight": distillation.ce_weight, "temperature": distillation.temperature,
        "scale_by_temperature_squared": distillation.scale_by_temperature_squared,
        "label_smoothing": options.label_smoothing, "ignore_index": IGNORE_INDEX, "alpha": distillation.skew_alpha,
        "teacher_share": distillation.teacher_share,
    }  # fmt: skip
    if not (isinstance(student, DeferredLogits) and isinstance(teacher, DeferredLogits)):
        vocab = min(student.shape[-1], teacher.shape[-1], distillation.vocab_size or student.shape[-1])
        s, t = (x.compute("a distillation loss") if isinstance(x, DeferredLogits) else x for x in (student, teacher))
        s, t = s.flatten(0, -2)[:, :vocab], t.flatten(0, -2)[:, :vocab]
        return distillation_reference(s, t, num_items=targets.num_items, **common)
    return linear_divergence(
        student.hidden.flatten(0, -2), student.head.weight, teacher.hidden.flatten(0, -2), teacher.head.weight,
        bias=student.head.bias, teacher_bias=teacher.head.bias, scale=student.scale, teacher_scale=teacher.scale,
        softcap=student.softcap, teacher_softcap=teacher.softcap, vocab_size=distillation.vocab_size,
        lora=student.head.lora, teacher_lora=teacher.head.lora, **targets.for_ops(), **common,
    )  # fmt: skip
