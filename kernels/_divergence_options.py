"""Inputs of linear_divergence.py's row kernels: a call's scalars, a chunk of logits, names of the values they write."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._logits import LogitTransform, check_scalars
from .divergence_kinds import ROW_KINDS

FIELDS = (
    "loss", "divergence", "log_prob", "entropy", "is_top1", "forward_kl", "reverse_kl", "agrees",
    "teacher_log_prob", "teacher_entropy", *(f"{kind} of the loss" for kind in ROW_KINDS),
)  # fmt: skip
TERMS = len(FIELDS) - len(ROW_KINDS)  # the loss's divergences start here; those not asked for stay unwritten
SECOND_PASS = ("jsd", "skew_kl", "skew_reverse_kl", "tvd")  # kinds that need the log-partitions first
SOFTCAP, TEACHER_SOFTCAP, SHARE = 2, 8, 16  # bits of FORM, as in _divergence_pieces.py
BITS = {kind: 1 << place for place, kind in enumerate(ROW_KINDS)}  # the kernel calls them FORWARD, REVERSE, ...


@dataclass(frozen=True)
class DivergenceOptions:
    """Scalars of one call; `linear_divergence` explains them."""

    weights: Mapping[str, float]  # of ROW_KINDS; a kind of weight 0 is only measured
    beta: float = 0.5
    alpha: float = 0.1
    teacher_share: float = 1.0
    ce_weight: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale_by_temperature_squared: bool = True
    student: LogitTransform = field(default_factory=LogitTransform)
    teacher: LogitTransform = field(default_factory=LogitTransform)
    logits_dtype: torch.dtype | None = None

    def __post_init__(self):
        check_scalars(self.temperature, self.label_smoothing)
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must lie in [0, 1], got {self.beta}.")
        if not 0 <= self.alpha < 1:
            raise ValueError(
                f"alpha must lie in [0, 1), got {self.alpha}. It is a distribution's share in its own mixture with the "
                "other: at 1 nothing of the other is left, and the divergence is 0."
            )
        if not 0 <= self.teacher_share <= 1:
            raise ValueError(f"teacher_share must lie in [0, 1], got {self.teacher_share}.")

    @property
    def divergence_scale(self) -> float:
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0

    def weight(self, kind: str) -> float:
        return float(self.weights.get(kind, 0.0))

    @property
    def measured(self) -> int:
        """Return the kernel's MEASURED: bits of the kinds that take a second pass."""
        return sum([BITS[kind] for kind in self.weights if kind in SECOND_PASS])

    @property
    def graded(self) -> int:
        """Return the kernel's GRADED: bits of the kinds that have a gradient."""
        return sum([BITS[kind] for kind, weight in self.weights.items() if weight])

    @property
    def form(self) -> int:
        """Return the kernel's FORM without the bits of the biases."""
        student, teacher = self.student.softcap is not None, self.teacher.softcap is not None
        return SOFTCAP * student + TEACHER_SOFTCAP * teacher + SHARE * (self.teacher_share != 1.0)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return the kernel's scalars, from `scale` on."""
        return (
            float(self.student.scale), float(self.student.softcap or 1.0), float(self.teacher.scale),
            float(self.teacher.softcap or 1.0), float(self.teacher_share), float(self.temperature),
            *(self.weight(kind) for kind in ROW_KINDS), float(self.beta), float(self.alpha),
            float(self.divergence_scale), float(self.ce_weight), float(self.label_smoothing), float(self.z_loss),
        )  # fmt: skip

    @property
    def flags(self) -> dict[str, bool | int]:
        """Return the kernel's constants that depend on these options."""
        return {
            "OWN_SUMS": self.temperature != 1.0 or self.teacher_share != 1.0,
            "HAS_SMOOTHING": self.label_smoothing > 0, "HAS_CE": self.ce_weight != 0,
            "MEASURED": self.measured, "GRADED": self.graded,
        }  # fmt: skip


@dataclass(frozen=True)
class RowInputs:
    """A chunk of logits of both sides, with the labels and weights of its rows."""

    student: Tensor  # (n, V), raw
    teacher: Tensor  # (n, V), raw
    bias: Tensor | None  # (V,)
    teacher_bias: Tensor | None
    labels: Tensor | None  # (n,) int64
    token_weight: Tensor | None  # (n,) fp32
