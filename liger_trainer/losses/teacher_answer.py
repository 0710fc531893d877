"""`TeacherAnswer`, the base of every kind of answer that a teacher gives to a batch, and `BatchLoss`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .spec import BatchTargets, Logits, LossOptions


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
