"""TRL: `trl sft`, `trl distillation` and the script of its experimental GKD trainer."""

from typing import Any

from . import NotHere, Settings, Source, Tool

_OFF_POLICY = "nothing is generated in training: the completions in the rows are distilled."


def _on_policy_share(value: Any, source: Source) -> Settings:
    if value:
        raise NotHere(_OFF_POLICY)
    return {}


def _defaults(source: Source) -> Settings:
    """Where TRL's trainers of distillation start from other values than ours; SFT has the same."""
    if source.get("teacher_model_name_or_path") is None:
        return {"recipe": "sft"}
    if "lmbda" in source.values or "seq_kd" in source.values:  # GKDConfig
        return {"recipe": "distill", "beta": 0.5, "scale_loss_by_temperature_squared": False}
    return {
        "recipe": "distill",
        "beta": 1.0,
        "learning_rate": 1e-6,
        "scale_loss_by_temperature_squared": False,
    }


TOOL = Tool(
    name="TRL",
    values={"lmbda": _on_policy_share, "seq_kd": _on_policy_share},
    unneeded={
        "use_liger_kernel": "the layers and the loss are fused anyway.",
    },
    unsupported={
        "max_new_tokens": f"{_OFF_POLICY} The key of this name here is the length of sample completions.",
        "dataset_streaming": "every row is checked before training, so a stream is not supported.",
    },
    passes=("",),
    defaults=_defaults,
)
