"""LigerConfig: SFTConfig and what LigerTrainer adds about rows, steps and numbers that are not finite."""

from dataclasses import dataclass
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available
from trl import SFTConfig

from ..common.non_finite import NonFiniteConfig
from ..common.options import check_options
from .best_metric import choose_direction
from .images_config import ImagesConfig
from .qat_config import QatConfig
from .rows_config import RowsConfig
from .step_config import StepConfig


def choose_bf16(args: Any) -> None:
    """Set `bf16`, where it is None, to whether the device computes in it: false on a CPU and with fp16."""
    if args.bf16 is None:
        args.bf16 = not (args.fp16 or args.use_cpu) and is_torch_bf16_gpu_available()


@dataclass
class LigerConfig(RowsConfig, ImagesConfig, StepConfig, QatConfig, NonFiniteConfig, SFTConfig):
    """Configuration of `LigerTrainer`, which takes TRL's SFTConfig too.

    Where `bf16` is not set, the device decides (`choose_bf16`); SFTConfig's default is an error on a CPU. Where
    `greater_is_better` is not set, `metric_for_best_model` decides, if it is a metric of the trainers.

    Args:
        supervised_part, alpaca_prompt: what is learned of rows; see `RowsConfig`.
        learn_image_tokens, freeze_vision_tower: of rows with images and models that read them; see `ImagesConfig`.
        attention, cuda_graphs, memory, vocab_parallel: how a step is computed; see `StepConfig`.
        qat, qat_group_size: weights that will be used quantised; see `QatConfig`.
        on_non_finite: what is done about numbers in training that are NaN or infinite; see `NonFiniteConfig`.

    Raises:
        ValueError: a value out of range, or options that do not go together.
    """

    def __post_init__(self):
        choose_bf16(self)
        choose_direction(self)
        super().__post_init__()
        check_options(self, RowsConfig, ImagesConfig, StepConfig, QatConfig, NonFiniteConfig)
