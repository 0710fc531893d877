"""LigerDistillConfig: SFTConfig and what distillation adds, in TRL's field names."""

import json
from dataclasses import dataclass, field
from typing import Any

from trl import SFTConfig

from .kernels.linear_divergence import KINDS, divergence_weights
from .losses import Distillation


@dataclass
class LigerDistillConfig(SFTConfig):
    """Configuration of `LigerDistillTrainer`.

    Args:
        teacher_model_name_or_path: the teacher, when it is not given to the trainer: a model directory or hub id.
        teacher_model_revision: its branch, tag or commit.
        teacher_model_init_kwargs: keywords for its `from_pretrained`. dtype defaults to that of the run: bfloat16
            with `bf16`, float16 with `fp16`, else float32.
        beta: 0 is the forward KL, 1 the reverse KL, between lies the generalised JSD, as in TRL's DistillationConfig.
        losses: replaces `beta` when given: a list such as
            `[{"type": "forward_kl", "weight": 1.0}, {"type": "ce", "weight": 0.1}]`. Types: forward_kl, reverse_kl, jsd
            (its mixture weight is `beta`) and ce, the cross-entropy against the labels. weight defaults to 1.
        temperature: divides both models' logits in the divergences.
        scale_loss_by_temperature_squared: multiply the divergences by temperature^2 (Hinton et al. 2015).
        disable_dropout: switch the student's dropout off.

    Raises:
        ValueError: a value out of range, or a loss that is not known.
    """

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    teacher_model_name_or_path: str | None = field(
        default=None, metadata={"help": "The teacher: a model directory or hub id."}
    )
    teacher_model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the teacher."})
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keywords for the teacher's `from_pretrained`, such as dtype."}
    )
    beta: float = field(
        default=0.0,
        metadata={"help": "0: forward KL, 1: reverse KL, between: generalised Jensen-Shannon divergence."},
    )
    losses: list[dict[str, Any]] | str | None = field(
        default=None,
        metadata={"help": "Weighted losses instead of beta, e.g. [{type: forward_kl}, {type: ce, weight: 0.1}]."},
    )
    temperature: float = field(
        default=1.0, metadata={"help": "Divides the logits of student and teacher in the divergences."}
    )
    scale_loss_by_temperature_squared: bool = field(
        default=True, metadata={"help": "Multiply the divergences by temperature squared."}
    )
    disable_dropout: bool = field(default=False, metadata={"help": "Switch the student's dropout off."})

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must lie in [0, 1], got {self.beta}.")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}.")
        if self.loss_type == "dft":
            raise ValueError("loss_type='dft' weighs the cross-entropy of fine-tuning; distillation takes 'nll'.")
        if isinstance(self.losses, str):
            self.losses = json.loads(self.losses)
        self.distillation()

    def distillation(self, vocab_size: int | None = None) -> Distillation:
        """The loss that these fields describe."""
        weights = {"jsd": 1.0}
        ce_weight = 0.0
        if self.losses is not None:
            weights = weighted_losses(self.losses)
            ce_weight = weights.pop("ce", 0.0)
        return Distillation(
            weights=divergence_weights(weights, self.beta) if weights else {"forward_kl": 0.0},
            beta=self.beta,
            ce_weight=ce_weight,
            temperature=self.temperature,
            scale_by_temperature_squared=self.scale_loss_by_temperature_squared,
            vocab_size=vocab_size,
        )


def weighted_losses(losses: Any) -> dict[str, float]:
    """{type: weight} of a `losses` list. Raises ValueError for what it does not understand."""
    known = (*KINDS, "ce")
    weights: dict[str, float] = {}
    if not isinstance(losses, list) or not losses:
        raise ValueError(f"losses must be a list such as [{{type: forward_kl, weight: 1.0}}], got {losses!r}.")
    for entry in losses:
        if not isinstance(entry, dict) or set(entry) - {"type", "weight"} or entry.get("type") not in known:
            raise ValueError(
                f"Each of losses needs a type out of {', '.join(known)} and may have a weight, got {entry!r}."
            )
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ValueError(f"The weight of a loss must be a number, got {weight!r} for {entry['type']}.")
        if entry["type"] in weights:
            raise ValueError(f"losses names {entry['type']} twice.")
        weights[entry["type"]] = float(weight)
    return weights
