"""The fields of LigerConfig and LigerDistillConfig about how a step is computed: which attention reads packed rows."""

from dataclasses import dataclass

from ..common.options import option

AUTO, MODEL = "auto", "model"


@dataclass
class StepConfig:
    """How a step is computed. None of these fields changes what is learned.

    Args:
        attention: what reads rows in which several documents stand (packing, padding-free batches). "auto": attention
            over each document by its length, for models that run PyTorch's or eager attention; other
            implementations, such as flash_attention_2, stay. "model": the model's own implementation in any case,
            which masks the row with a matrix of its length squared.
    """

    attention: str = option(
        AUTO,
        "What reads packed rows: auto takes each document by its length where the model runs sdpa or eager attention; "
        "model leaves the model's own attention, whose mask is as large as the row's length squared.",
        choices=[AUTO, MODEL],
    )
