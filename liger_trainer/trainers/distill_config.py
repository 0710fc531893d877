"""LigerDistillConfig: SFTConfig and what distillation adds, in TRL's field names."""

import json
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trl import SFTConfig

from ..common.non_finite import HELP, POLICIES, STOP, check_policy
from ..common.weights import ALLOW_MISSING_WEIGHTS
from ..losses.plan import SKEW_ALPHA, LossPlan, plan_of, without_effect
from ..losses.spec import Distillation, distillation_of
from ..teachers.config import TeacherConfig
from .sampling_config import SamplingConfig


@dataclass
class LigerDistillConfig(TeacherConfig, SamplingConfig, SFTConfig):
    """Configuration of `LigerDistillTrainer`.

    Args:
        teacher, teachers, teacher_*, cache_*, ...: whose distributions are learned; see `TeacherConfig`.
        allow_missing_weights: load a teacher, or a student that is given by name, from files that lack weights of the
            model or have others; what is missing is drawn at random.
        beta: 0 is the forward KL, 1 the reverse KL, between lies the generalised JSD, as in TRL's DistillationConfig.
        losses: replaces `beta` when given: a list such as
            `[{"type": "forward_kl", "weight": 1.0}, {"type": "ce", "weight": 0.1}]`. Types, and what their entries take
            beside a weight (default 1): docs/losses.md.
        skew_alpha: of skew_kl and skew_reverse_kl.
        schedules: {name: {from, to, kind, warmup_steps, steps}} of temperature, beta, skew_alpha, lmbda or the weight
            of a loss, `<type>_weight`.
        taid: the teacher's share in what the student is held against: {start, end, adaptive, alpha, beta}, see
            `schedules.Taid`; {} for the defaults.
        temperature: divides both models' logits in the divergences, and the logits that completions are sampled from.
        kd_temperature: the temperature of the divergences, where it is to be another than that of sampling.
        scale_loss_by_temperature_squared: multiply the divergences by temperature^2 (Hinton et al. 2015).
        disable_dropout: switch the student's dropout off.
        lmbda, seq_kd, ...: completions that are sampled in training; see `SamplingConfig`.
        on_non_finite: what is done about numbers in training that are NaN or infinite: "stop" or "skip_step".

    Raises:
        ValueError: a value out of range, or a loss that is not known.
    """

    _VALID_DICT_FIELDS = [
        *SFTConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs", "generation_kwargs", "schedules", "taid",
    ]  # fmt: skip

    allow_missing_weights: bool = field(default=False, metadata={"help": ALLOW_MISSING_WEIGHTS})
    beta: float = field(
        default=0.0,
        metadata={"help": "0: forward KL, 1: reverse KL, between: generalised Jensen-Shannon divergence."},
    )
    losses: list[dict[str, Any]] | str | None = field(
        default=None,
        metadata={"help": "Weighted losses instead of beta, e.g. [{type: forward_kl}, {type: ce, weight: 0.1}]."},
    )
    skew_alpha: float = field(
        default=SKEW_ALPHA,
        metadata={"limits": {"ge": 0, "lt": 1}, "help": "Share of the other side in the mixture of the skewed KLs."},
    )
    schedules: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Scalars of the loss that change, e.g. {temperature: {to: 1.0, kind: cosine}}."}
    )
    taid: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Teacher's share, rising with the steps: {start, end, adaptive, alpha, beta}."}
    )
    temperature: float = field(
        default=1.0, metadata={"help": "Divides the logits in the divergences, and those that are sampled from."}
    )
    kd_temperature: float | None = field(
        default=None,
        metadata={"limits": {"gt": 0}, "help": "Temperature of the divergences; default: temperature."},
    )
    scale_loss_by_temperature_squared: bool = field(
        default=True, metadata={"help": "Multiply the divergences by temperature squared."}
    )
    disable_dropout: bool = field(default=False, metadata={"help": "Switch the student's dropout off."})
    on_non_finite: str = field(default=STOP, metadata={"choices": POLICIES, "help": HELP})

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type == "dft":
            raise ValueError("loss_type='dft' weighs the cross-entropy of fine-tuning; distillation takes 'nll'.")
        check_policy(self.on_non_finite)
        if isinstance(self.losses, str):
            self.losses = json.loads(self.losses)
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {self.temperature}.")
        self._check_sampling()
        self.check_teacher(self.distillation())
        given = {item.name for item in fields(self) if getattr(self, item.name) != item.default}
        for key, message in without_effect(self.loss_plan(), vars(self), given):
            raise ValueError(f"{key} {message}")
        self._check_cache()

    def _check_cache(self) -> None:
        if self.cache_kind not in ("topk", "sampled"):
            raise ValueError(f"cache_kind must be one of topk, sampled, got {self.cache_kind!r}.")
        if self.cache_bits not in (8, 16):
            raise ValueError(f"cache_bits must be 8 or 16, got {self.cache_bits}.")
        if self.cache_entries is not None and self.cache_entries < 1:
            raise ValueError(f"cache_entries must be at least 1, got {self.cache_entries}.")
        draws = self.cache_tail_draws or 0
        if draws < 0 or (draws and self.cache_kind == "sampled"):
            raise ValueError(
                "cache_tail_draws are drawn beyond the likeliest tokens of cache_kind='topk', 0 or more; got "
                f"{draws} with {self.cache_kind!r}."
            )
        if self.cache_shard_mb < 1:
            raise ValueError(f"cache_shard_mb must be at least 1, got {self.cache_shard_mb}.")
        if self.teacher != "cache":
            return
        if self.teacher_cache_dir is None:
            raise ValueError("teacher='cache' needs teacher_cache_dir, the directory of the cache.")
        if self.samples:
            raise ValueError(
                "A teacher cache knows the completions of the dataset alone: set lmbda to 0.0 and seq_kd to false, or "
                "take the teacher itself, with teacher='model'."
            )

    @property
    def samples(self) -> bool:
        """Whether completions are sampled at some time in training."""
        return self.lmbda > 0 or self.seq_kd or "lmbda" in (self.schedules or {})

    @property
    def loss_temperature(self) -> float:
        return self.temperature if self.kd_temperature is None else self.kd_temperature

    def loss_plan(self) -> LossPlan:
        """The terms of the loss that these fields describe, and how they change while training."""
        return plan_of(vars(self))

    def distillation(self, vocab_size: int | None = None) -> Distillation:
        """The loss that these fields describe, before any schedule."""
        how = distillation_of(self.loss_plan(), self.scale_loss_by_temperature_squared)
        return replace(how, vocab_size=vocab_size)
