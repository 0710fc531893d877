"""The fields of LigerConfig and LigerDistillConfig about weights that will be used quantised."""

from dataclasses import dataclass

from ..common.options import equals, on, option

QAT = on("qat")
INT4, INT8, NVFP4 = "int4", "int8", "nvfp4"


@dataclass
class QatConfig:
    """Quantisation-aware training.

    Args:
        qat: the format of torchao in which the linear layers will be used. Each step computes with the quantised
            weights and moves the weights behind them, which are what is saved. "int4": groups of `qat_group_size`
            inputs; "int8": a scale for each output; "nvfp4": groups of 16 with scales in fp8, emulated.
        qat_group_size: see `qat`.
    """

    qat: str | None = option(
        None,
        "Compute each step with the linear layers' weights as torchao quantises them, and train the weights behind "
        "them, which are what is saved.",
        choices=[INT4, INT8, NVFP4],
    )
    qat_group_size: int = option(32, "Weights of an output that share a scale.", needs=equals("qat", INT4), ge=1)
