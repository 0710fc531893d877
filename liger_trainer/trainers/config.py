"""The arguments of the trainers: SFTConfig's fields and ours, distillation's by TRL's names."""

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available

from ..common.options import OptionValues, check_options, option
from ..compat.sft_trainer import SFTConfig, takes_json
from ..compat.trainers import use_new_names
from ..losses.plan import LossConfig, LossPlan, plan_of, without_effect
from ..losses.spec import Distillation, distillation_of
from ..teachers.config import SAMPLES, TeacherConfig
from .options import (
    ALLOW_MISSING_WEIGHTS,
    ImagesConfig,
    MtpConfig,
    NonFiniteConfig,
    QatConfig,
    RowsConfig,
    SamplingConfig,
    StepConfig,
    choose_direction,
)


def choose_bf16(args: Any) -> None:
    """Set `bf16`, where it is None, to whether the device computes in it: false on a CPU and with fp16."""
    if args.bf16 is None:
        args.bf16 = not (args.fp16 or args.use_cpu) and is_torch_bf16_gpu_available()


@dataclass
class LigerConfig(RowsConfig, ImagesConfig, StepConfig, QatConfig, MtpConfig, NonFiniteConfig, SFTConfig):
    """Configuration of `LigerTrainer`, which takes TRL's SFTConfig too.

    Where `bf16` is not set, the device decides (`choose_bf16`); SFTConfig's default is an error on a CPU. Where
    `greater_is_better` is not set, `metric_for_best_model` decides, if it is a metric of the trainers.

    Args:
        supervised_part, alpaca_prompt: what is learned of rows; see `RowsConfig`.
        learn_image_tokens, freeze_vision_tower: of rows with images and models that read them; see `ImagesConfig`.
        attention, cuda_graphs, memory, vocab_parallel: how a step is computed; see `StepConfig`.
        qat, qat_group_size: weights that will be used quantised; see `QatConfig`.
        mtp_loss_weight: the head for multi-token prediction is trained too; see `MtpConfig`.
        on_non_finite: what is done about numbers in training that are NaN or infinite; see `NonFiniteConfig`.

    Raises:
        ValueError: a value out of range, or options that do not go together.
    """

    def __post_init__(self):
        # Before SFTConfig's own, which would turn bf16 on and guess the direction.
        choose_bf16(self)
        choose_direction(self)
        use_new_names(self)
        super().__post_init__()
        check_options(self, RowsConfig, ImagesConfig, StepConfig, QatConfig, MtpConfig, NonFiniteConfig)


@takes_json("teacher_model_init_kwargs", "generation_kwargs", "schedules", "taid")
@dataclass
class LigerDistillConfig(
    RowsConfig, ImagesConfig, TeacherConfig, LossConfig, SamplingConfig, StepConfig, QatConfig, MtpConfig,
    NonFiniteConfig, SFTConfig,
):  # fmt: skip
    """Configuration of `LigerDistillTrainer`.

    Where `bf16` is not set, the device decides, and where `greater_is_better` is not, the metric, as in `LigerConfig`.

    Args:
        teacher, teachers, teacher_*, cache_*: whose distributions are learned; see `TeacherConfig`.
        losses, beta, temperature, schedules, ...: what is minimised; see `LossConfig`.
        supervised_part, alpaca_prompt: what is learned of rows; see `RowsConfig`.
        learn_image_tokens, freeze_vision_tower: of rows with images and models that read them; see `ImagesConfig`.
        lmbda, seq_kd, ...: completions that are sampled in training; see `SamplingConfig`.
        attention, cuda_graphs, memory, vocab_parallel: how a step is computed; see `StepConfig`.
        qat, qat_group_size: weights that will be used quantised; see `QatConfig`.
        mtp_loss_weight: the head for multi-token prediction is trained too; see `MtpConfig`.
        allow_missing_weights: load a teacher, or a student that is given by name, from files that lack weights of the
            model or have others; what is missing is drawn at random.
        disable_dropout: switch the student's dropout off.
        on_non_finite: what is done about numbers in training that are NaN or infinite; see `NonFiniteConfig`.

    Raises:
        ValueError: a value out of range, or options that do not go together.
    """

    allow_missing_weights: bool = option(False, ALLOW_MISSING_WEIGHTS)
    disable_dropout: bool = option(False, "Switch the student's dropout off.")

    def __post_init__(self):
        choose_bf16(self)
        choose_direction(self)
        use_new_names(self)
        super().__post_init__()
        if self.loss_type == "dft":
            raise ValueError("loss_type='dft' weighs the cross-entropy of fine-tuning; distillation takes 'nll'.")
        if isinstance(self.losses, str):  # HfArgumentParser passes what stands on a command line
            try:
                self.losses = json.loads(self.losses)
            except ValueError:
                raise ValueError(f"losses: expected a list, or JSON text of one, got {self.losses!r}.") from None
        plan = self.loss_plan()
        check_options(
            self, ImagesConfig, LossConfig, MtpConfig, NonFiniteConfig, QatConfig, RowsConfig, SamplingConfig,
            StepConfig, TeacherConfig,
        )  # fmt: skip
        self.check_teachers()
        given = {item.name for item in fields(self) if getattr(self, item.name) != item.default}
        for key, message in without_effect(plan, vars(self), given):
            raise ValueError(f"{key}: {message}")

    @property
    def samples(self) -> bool:
        """Whether completions are sampled at some time in training."""
        return SAMPLES.holds(OptionValues(vars(self), ()))

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
