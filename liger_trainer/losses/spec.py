"""What is minimised, on which positions, and what comes of it.

A configuration's `LossPlan` becomes a `Distillation` here. `TeacherAnswer` is the base of every kind of answer that a
teacher gives to a batch.
"""

# ModelOutput wants a default for every field:
# pyright: reportAssignmentType=false

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.utils import ModelOutput

from ..kernels.types import RowSelection
from .deferred_logits import DeferredLogits
from .plan import LossPlan

Logits = DeferredLogits | Tensor
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Distillation:
    """The loss of a student: sum_k weights[k] D_k (times T^2) + ce_weight CE + sum_k hidden_weights[k] H_k.

    A divergence with weight 0 is only measured.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"forward_kl": 1.0}))
    beta: float = 0.5  # of the JSD, in TRL's convention
    ce_weight: float = 0.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = True
    vocab_size: int | None = None  # the real vocabulary, where heads are padded beyond it
    skew_alpha: float = 0.1  # of the skewed KLs
    teacher_share: float = 1.0  # TAID: the divergences compare with share * teacher + (1 - share) * student, in logits
    hidden_weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    terms: tuple[str, ...] = ()  # the types that are returned and logged by name
    measure_jsd: bool = False  # the JSD at temperature 1 and beta 0.5, whatever is minimised
    uld_weight: float = 0.0  # in place of the divergences, where the teacher has another tokenizer
    alm_weight: float = 0.0  # so, too
    alm_tau: float = 100.0  # softens the likelihoods of spans


@dataclass(frozen=True)
class LossOptions:
    """The loss of a training run."""

    label_smoothing: float = 0.0
    dft: bool = False
    distillation: Distillation | None = None

    def for_teacher(self) -> Distillation:
        """Return the part about a teacher. Raises ValueError where the loss has none."""
        if self.distillation is None:
            raise ValueError("Teacher logits were given to a model whose loss has no distillation part.")
        return self.distillation


class TokenWeights:
    """Weights (batch, length) fp32 of the positions of a batch, each for the token that follows it.

    No dataclass: engines look into these, and FSDP2 would round the weights to bf16.
    """

    def __init__(self, values: Tensor):
        self.values = values


@dataclass
class BatchTargets:
    """The labels that the positions of a batch predict. Made before the backbone runs: see `RowSelection`."""

    labels: Tensor  # (batch * length,) aligned with the hidden states, IGNORE_INDEX where nothing is predicted
    shape: torch.Size  # (batch, length)
    shifted: bool  # whether `of` shifted them; the last position then predicts nothing
    num_items: float | Tensor | None  # the divisor of the loss; None: the number of labels that are not ignored
    rows: RowSelection | None  # None under torch.compile, where the losses select the rows themselves
    source: Tensor  # the caller's labels, or shifted labels
    weights: Tensor | None = None  # (batch * length,) fp32; each multiplies the loss at its position, not the divisor

    @classmethod
    def of(
        cls, labels: Tensor | None, shift_labels: Tensor | None, num_items: float | Tensor | None,
        ignore_index: int = IGNORE_INDEX, weights: "TokenWeights | None" = None,
    ) -> "BatchTargets":  # fmt: skip
        source = labels if shift_labels is None else shift_labels
        assert source is not None
        aligned = source if shift_labels is not None else pad(source[..., 1:], (0, 1), value=ignore_index)
        flat = aligned.reshape(-1)
        if ignore_index != IGNORE_INDEX:
            flat = flat.masked_fill(flat == ignore_index, IGNORE_INDEX)
        if flat.dtype in (torch.int32, torch.int16):  # as TRL's own loss takes them
            flat = flat.long()
        factors = None if weights is None else weights.values.reshape(-1).to(flat.device)
        rows = _selection(flat, num_items)
        return cls(flat, source.shape, shift_labels is None, num_items, rows, source, factors)

    def match_labels(self, labels: Tensor | None, shift_labels: Tensor | None) -> bool:
        """Whether these targets belong to the labels that a model hands to its loss.

        The tensor objects are compared, not their values, which would wait for the device. So labels that the model has
        moved or copied do not match. A model without shifted labels in its signature hands them as labels.
        """
        handed_over = labels if shift_labels is None else shift_labels
        return handed_over is self.source and (shift_labels is None or not self.shifted)

    def to(self, device: torch.device) -> "BatchTargets":
        """Return the targets on the logits' device: a model spread over devices does not end where it begins."""
        if self.labels.device == device:
            return self
        flat = self.labels.to(device)
        weights = None if self.weights is None else self.weights.to(device)
        return replace(self, labels=flat, rows=_selection(flat, self.num_items), weights=weights)

    def divided_by(self, num_items: float | Tensor | None) -> "BatchTargets":
        """Return the targets with another divisor of the loss."""
        if num_items is self.num_items:
            return self
        return replace(self, num_items=num_items, rows=_selection(self.labels, num_items))

    def only(self, taught: Tensor) -> "BatchTargets":
        """Return the targets at the positions `taught` (batch, length), with the divisor of all of them."""
        num_items = self.num_items
        if num_items is None:
            num_items = (self.labels != IGNORE_INDEX).sum().clamp(min=1)
        flat = self.labels.masked_fill(~taught.reshape(-1).to(self.labels.device), IGNORE_INDEX)
        return replace(self, labels=flat, num_items=num_items, rows=_selection(flat, num_items))

    def per_token(self, values: Tensor) -> Tensor:
        """Return (batch, length - 1) if shifted here, else (batch, length), as TRL's fused head does."""
        values = values.view(self.shape)
        return values[..., :-1] if self.shifted else values

    def for_ops(self) -> dict[str, Any]:
        """Return the rows as an op's arguments: their selection, or under torch.compile what the op makes it from. With
        their weights."""
        rows = {"num_items": self.num_items} if self.rows is None else {"rows": self.rows}
        return {**rows, "token_weight": self.weights}


def check_lengths(targets: BatchTargets, *sides: Any) -> None:
    """Raise ValueError where logits or a teacher's answer have other positions than the labels."""
    for side in sides:
        if side.shape[: len(targets.shape)] != targets.shape:
            raise ValueError(
                f"Logits are {tuple(side.shape)}, but labels are {tuple(targets.shape)}: lengths must agree."
            )


def _selection(labels: Tensor, num_items: float | Tensor | None) -> RowSelection | None:
    return None if torch.compiler.is_compiling() else RowSelection(labels, num_items, IGNORE_INDEX)


def distillation_of(plan: LossPlan, scale_by_temperature_squared: bool) -> Distillation:
    """Return the loss as configured, before any schedule."""
    return Distillation(
        scale_by_temperature_squared=scale_by_temperature_squared,
        terms=tuple(term.type for term in plan.terms),
        **distillation_fields(plan, {}),
    )


def distillation_fields(plan: LossPlan, moved: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of `Distillation` that scalars decide. `moved` overrides scalars of the plan."""
    scalars = {**plan.scalars, **moved}

    def weights(family: str) -> dict[str, float]:
        return {term.type: scalars[f"{term.type}_weight"] for term in plan.of(family)}

    return {
        "weights": weights("divergence"),
        "ce_weight": weights("ce").get("ce", 0.0),
        "uld_weight": weights("uld").get("uld", 0.0),
        "alm_weight": weights("alm").get("alm", 0.0),
        "hidden_weights": weights("hidden"),
        **{name: scalars[name] for name in ("temperature", "beta", "skew_alpha", "alm_tau")},
    }


_FIELD_OF = {
    "divergence": "weights",
    "ce": "ce_weight",
    "uld": "uld_weight",
    "alm": "alm_weight",
    "hidden": "hidden_weights",
}


def moved_fields(plan: LossPlan, moved: Mapping[str, float]) -> dict[str, Any]:
    """Return only the fields of `Distillation` that the `moved` scalars change."""
    fields = distillation_fields(plan, moved)
    weight_fields = {f"{term.type}_weight": _FIELD_OF[term.family] for term in plan.terms}
    names = [weight_fields.get(name, name) for name in moved]
    return {name: fields[name] for name in names if name in fields}


def final_fields(plan: LossPlan) -> dict[str, Any]:
    """Return the fields that differ in evaluations: scheduled scalars have their final values at every step."""
    share = {} if plan.taid is None else {"teacher_share": plan.taid.end}
    return {**moved_fields(plan, plan.final()), **share, "measure_jsd": True}


class BatchLoss(NamedTuple):
    """The loss of a batch and its per-token values, (batch * length,), 0 where ignored and without gradient.

    Values about a teacher are None without one, and where its answer does not determine them. They are those at
    temperature 1, except `divergence` and `terms`.
    """

    loss: Tensor
    log_prob: Tensor
    entropy: Tensor
    is_top1: Tensor
    divergence: Tensor | None = None  # weighted, at the loss's temperature
    forward_kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    agrees: Tensor | None = None
    teacher_log_prob: Tensor | None = None
    teacher_entropy: Tensor | None = None
    jsd: Tensor | None = None  # at beta 0.5, where `Distillation.measure_jsd` asks for it
    terms: Mapping[str, Tensor] | None = None  # by type of loss, without its weight
    parts: Mapping[str, Tensor] | None = None  # "x/share" and other "x/...", of tokens of a kind, as of one teacher

    @classmethod
    def of_term(cls, kind: str, weight: float, result: Any, parts: Mapping[str, Tensor] | None = None) -> "BatchLoss":
        """Read an op's result, where a field named after the type of loss is all that the teacher adds to it."""
        value = getattr(result, kind)
        return cls(
            result.loss, result.log_prob, result.entropy, result.is_top1, divergence=weight * value,
            terms={kind: value}, parts=parts,
        )  # fmt: skip


class TeacherAnswer(ABC):
    """What a teacher knows about one batch, and how a student's loss follows from it.

    Attributes:
        covers_all_tokens: whether the answer holds at every position, whatever its label. It can then be compared with
            labels that the model makes itself.
    """

    covers_all_tokens = False

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(batch, length, ...) in the student's positions."""

    @property
    def teacher_positions(self) -> Tensor | None:
        """(batch, length) int64, the teacher's position for each of the student's, negative for none; None where both
        models read the same tokens."""
        return None

    def for_targets(self, targets: BatchTargets) -> "TeacherAnswer":
        """Return the answer with whatever depends only on the targets.

        It is called before the backbone runs, so that the host need not wait for the device later.
        """
        return self

    @abstractmethod
    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return the loss of the student's logits (batch, length, V)."""


@dataclass
class TokenLossOutput(ModelOutput):
    """The output of a call with `fused_lm_head=True`, TRL's protocol, and what distillation adds to it.

    Per-token fields are (batch, length - 1), or (batch, length) with `shift_labels`; fp32, in nats, 0 where ignored,
    and without gradient. Those about a teacher are None without one, and where its answer does not determine them.
    """

    loss: Tensor = None  # scalar: the tokens' loss, and a mixture of experts' auxiliary loss where asked for
    token_loss: Tensor = None  # scalar: the tokens' part
    log_probs: Tensor = None
    entropy: Tensor = None
    is_top1: Tensor = None
    label_mask: Tensor = None
    aux_loss: Tensor = None
    divergence: Tensor = None
    forward_kl: Tensor = None
    reverse_kl: Tensor = None
    agrees: Tensor = None
    teacher_log_probs: Tensor = None
    teacher_entropy: Tensor = None
    jsd: Tensor = None  # at temperature 1 and beta 0.5, where `Distillation.measure_jsd` asks for it
    terms: dict[str, Tensor] = None  # by type of loss, of a `Distillation` that lists them
    parts: dict[str, Tensor] = None  # see `BatchLoss`
    uncast: "Uncast" = None

    def __getattr__(self, name: str) -> Any:
        """Say it where an adapter (PEFT's CPT) or another wrapper computes with logits."""
        also = ", which this loss never stores: what computes with them trains with transformers' Trainer"
        raise AttributeError(f"{type(self).__name__} has no {name!r}{also if name == 'logits' else ''}")

    def in_fp32(self) -> "TokenLossOutput":
        """Return the output as it was before an engine cast it, as FSDP2 does to its `output_dtype`."""
        if self.uncast is None or self.token_loss.dtype == self.uncast.values["token_loss"].dtype:
            return self
        return TokenLossOutput(**self.uncast.values)


class Uncast:
    """The values of an output where the casts of engines, which look into mappings and dataclasses, do not reach."""

    def __init__(self, output: TokenLossOutput):
        self.values = dict(output)


def token_output(outputs: Any, result: BatchLoss, targets: BatchTargets, options: LossOptions) -> TokenLossOutput:
    """Return the per-token values of one pass, whose model returned `outputs`."""

    # The terms that `losses` lists, by type: without weight, and T^2 times if the loss is.
    how, terms = options.distillation, None
    if how is not None and how.terms and result.terms is not None:
        values = {"ce": -result.log_prob, **result.terms}
        terms = {name: values[name] for name in how.terms if name in values}

    def laid_out(values: Tensor | None) -> Any:
        return None if values is None else targets.per_token(values)

    def each(values: Mapping[str, Tensor] | None) -> Any:
        return None if values is None else {name: targets.per_token(value) for name, value in values.items()}

    output = TokenLossOutput(
        loss=outputs["loss"],
        token_loss=result.loss,
        log_probs=laid_out(result.log_prob),
        entropy=laid_out(result.entropy),
        is_top1=laid_out(result.is_top1),
        label_mask=laid_out(targets.labels != IGNORE_INDEX),
        aux_loss=outputs.get("aux_loss"),
        divergence=laid_out(result.divergence),
        forward_kl=laid_out(result.forward_kl),
        reverse_kl=laid_out(result.reverse_kl),
        agrees=laid_out(result.agrees),
        teacher_log_probs=laid_out(result.teacher_log_prob),
        teacher_entropy=laid_out(result.teacher_entropy),
        jsd=laid_out(result.jsd),
        terms=each(terms),
        parts=each(result.parts),
    )
    if not torch.compiler.is_compiling():
        output.uncast = Uncast(output)
    return output
