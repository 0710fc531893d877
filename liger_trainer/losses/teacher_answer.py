"""`TeacherAnswer`, the base of every kind of answer that a teacher gives to a batch, and `BatchLoss`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .spec import IGNORE_INDEX, BatchTargets, Logits, LossOptions


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
        """Return the answer with whatever depends on the targets alone.

        It is called before the backbone runs, so that the host need not wait for the device later.
        """
        return self

    @abstractmethod
    def loss(self, student: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
        """Return the loss of the student's logits (batch, length, V)."""


# What a model with a fused loss returns where a trainer asks for per-token values.


# ModelOutput wants a default for every field:
# pyright: reportAssignmentType=false


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
        terms=each(_listed_terms(result, options)),
        parts=each(result.parts),
    )
    if not torch.compiler.is_compiling():
        output.uncast = Uncast(output)
    return output


def _listed_terms(result: BatchLoss, options: LossOptions) -> dict[str, Tensor] | None:
    """Return the values of the terms that `losses` lists, by type: without weight, and T^2 times if the loss is."""
    how = options.distillation
    if how is None or not how.terms or result.terms is None:
        return None
    values = {"ce": -result.log_prob, **result.terms}
    return {name: values[name] for name in how.terms if name in values}
