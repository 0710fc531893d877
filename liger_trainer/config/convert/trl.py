"""TRL: `trl sft`, `trl distillation` and the script of its experimental GKD trainer."""

from collections.abc import Iterator

from . import ForeignConfig, Settings, Tool


def _defaults(source: ForeignConfig) -> Settings:
    """Set the defaults of TRL's distillation trainers where they differ from ours; SFT has the same."""
    if source.get("teacher_model_name_or_path") is None:
        return {"recipe": "sft"}
    if "lmbda" in source.values or "seq_kd" in source.values:  # GKDConfig
        return {
            "recipe": "distill",
            "beta": 0.5,
            "lmbda": 0.5,
            "temperature": 0.9,
            "kd_temperature": 1.0,  # its temperature is only for sampling
            "max_completion_length": 128,
            "disable_dropout": True,
            "last_turn_only": True,  # its collator learns only the last message of a chat
            "truncation_mode": "keep_end",
        }
    return {
        "recipe": "distill",
        "beta": 1.0,
        "lmbda": 1.0,
        "learning_rate": 1e-6,
        "scale_loss_by_temperature_squared": False,
    }


def _differences(source: ForeignConfig) -> Iterator[str]:
    yield "Of conversations with from and value, TRL writes human and gpt as roles; here they are user and assistant."


TOOL = Tool(
    name="TRL",
    names={"max_new_tokens": "max_completion_length"},
    unneeded={
        "use_liger_kernel": "the layers and the loss are fused anyway.",
    },
    unsupported={
        "dataset_streaming": "every row is checked before training, so a stream is not supported.",
    },
    passes=("",),
    defaults=_defaults,
    differences=_differences,
)
