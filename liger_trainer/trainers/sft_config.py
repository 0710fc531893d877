"""LigerConfig: SFTConfig and what LigerTrainer adds about rows, steps and numbers that are not finite."""

from dataclasses import dataclass

from trl import SFTConfig

from ..common.non_finite import NonFiniteConfig
from ..common.options import check_options
from .rows_config import RowsConfig
from .step_config import StepConfig


@dataclass
class LigerConfig(RowsConfig, StepConfig, NonFiniteConfig, SFTConfig):
    """Configuration of `LigerTrainer`, which takes TRL's SFTConfig too.

    Args:
        supervised_part, alpaca_prompt: what is learned of rows; see `RowsConfig`.
        attention: how a step is computed; see `StepConfig`.
        on_non_finite: what is done about numbers in training that are NaN or infinite; see `NonFiniteConfig`.

    Raises:
        ValueError: a value out of range, or options that do not go together.
    """

    def __post_init__(self):
        super().__post_init__()
        check_options(self, RowsConfig, StepConfig, NonFiniteConfig)
