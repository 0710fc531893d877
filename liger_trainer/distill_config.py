"""LigerDistillConfig: SFTConfig and what distillation adds, in TRL's field names."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from trl import SFTConfig

from .loss_terms import distillation_of
from .losses import Distillation


@dataclass
class LigerDistillConfig(SFTConfig):
    """Configuration of `LigerDistillTrainer`.

    Args:
        teacher: "model", in this process, or "cache", what `liger-trainer cache` wrote down of one (docs/cache.md).
        teacher_cache_dir: the directory of that cache. `liger-trainer cache` writes it.
        verify_teacher_cache: read the whole cache and compare its checksums before training.
        cache_kind, cache_entries, cache_bits, cache_shard_mb: what is captured: "topk", the likeliest tokens and the
            mass of the rest, or "sampled", tokens drawn from the teacher; how many (default 64 likeliest, 12 drawn);
            bits of a log-probability, 8 or 16; MiB of a shard. Training reads them out of the cache.
        teacher_model_name_or_path: the teacher, when it is not given to the trainer: a model directory or hub id. With
            a cache: the one it must have been captured from, if named.
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

    teacher: str = field(
        default="model",
        metadata={"choices": ["model", "cache"], "help": "model: in this process; cache: out of teacher_cache_dir."},
    )
    teacher_cache_dir: str | None = field(
        default=None, metadata={"help": "Directory of the teacher cache that `liger-trainer cache` writes."}
    )
    verify_teacher_cache: bool = field(
        default=False, metadata={"help": "Compare the checksums of the whole cache before training."}
    )
    cache_kind: str = field(
        default="topk",
        metadata={
            "choices": ["topk", "sampled"],
            "help": "Captured: the likeliest tokens and the rest's mass, or draws.",
        },
    )
    cache_entries: int | None = field(
        default=None,
        metadata={"limits": {"ge": 1, "le": 1024}, "help": "Tokens captured a position: 64 likeliest, or 12 draws."},
    )
    cache_bits: int = field(default=8, metadata={"choices": [8, 16], "help": "Bits of a captured log-probability."})
    cache_shard_mb: int = field(default=64, metadata={"limits": {"ge": 1}, "help": "MiB of a shard of the cache."})
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
        if self.loss_type == "dft":
            raise ValueError("loss_type='dft' weighs the cross-entropy of fine-tuning; distillation takes 'nll'.")
        if isinstance(self.losses, str):
            self.losses = json.loads(self.losses)
        self._check_cache(self.distillation())

    def _check_cache(self, distillation: Distillation) -> None:
        for name, choices in (("teacher", ("model", "cache")), ("cache_kind", ("topk", "sampled"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if self.cache_bits not in (8, 16):
            raise ValueError(f"cache_bits must be 8 or 16, got {self.cache_bits}.")
        if self.cache_shard_mb < 1:
            raise ValueError(f"cache_shard_mb must be at least 1, got {self.cache_shard_mb}.")
        if self.teacher != "cache":
            return
        if self.teacher_cache_dir is None:
            raise ValueError("teacher='cache' needs teacher_cache_dir, the directory of the cache.")
        used = {kind for kind, weight in distillation.weights.items() if weight}
        if used != {"forward_kl"}:
            raise ValueError(
                "A teacher cache determines the forward KL alone, with or without ce beside it; the loss asks for "
                f"{', '.join(sorted(used)) or 'no divergence'}. Use beta=0, or losses with forward_kl and ce."
            )
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is not part of the loss against a teacher cache: leave it at 0.")

    def distillation(self, vocab_size: int | None = None) -> Distillation:
        """The loss that these fields describe."""
        assert not isinstance(self.losses, str)  # parsed above
        how = distillation_of(self.losses, self.beta, self.temperature, self.scale_loss_by_temperature_squared)
        return replace(how, vocab_size=vocab_size)
