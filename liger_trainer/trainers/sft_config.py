"""LigerConfig: SFTConfig and what LigerTrainer adds about rows."""

from dataclasses import dataclass

from trl import SFTConfig

from ..common.options import check_options
from .rows_config import RowsConfig


@dataclass
class LigerConfig(RowsConfig, SFTConfig):
    """Configuration of `LigerTrainer`, which takes TRL's SFTConfig too.

    Args:
        supervised_part, alpaca_prompt: what is learned of rows; see `RowsConfig`.

    Raises:
        ValueError: a value out of range, or options that do not go together.
    """

    def __post_init__(self):
        super().__post_init__()
        check_options(self, RowsConfig)
