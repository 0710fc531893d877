"""TRL: `trl sft`, `trl distillation` and the script of its experimental GKD trainer."""

from collections.abc import Iterator

from . import ALL, Default, ForeignConfig, Tool

# SFT has the same defaults.
_DISTILLATION: tuple[Default, ...] = (
    ("beta", 1.0, "beta"),
    ("lmbda", 1.0, "lmbda"),
    ("learning_rate", 1e-6, "learning_rate"),
    ("scale_loss_by_temperature_squared", False, "scale_loss_by_temperature_squared"),  # TRL does not scale it
)
_GKD: tuple[Default, ...] = (
    ("beta", 0.5, "beta"),
    ("lmbda", 0.5, "lmbda"),
    ("temperature", 0.9, "temperature"),
    ("temperature", 1.0, "kd_temperature"),  # its temperature is only for sampling
    ("max_new_tokens", 128, "max_completion_length"),
    ("disable_dropout", True, "disable_dropout"),
    ("last_turn_only", True, "last_turn_only"),  # its collator learns only the last message of a chat
    ("truncation_mode", "keep_end", "truncation_mode"),
)


def _defaults(source: ForeignConfig) -> Iterator[Default]:
    if source.get("teacher_model_name_or_path") is None:
        return
    yield "recipe", "distill", "recipe"
    yield from _GKD if "lmbda" in source.nodes or "seq_kd" in source.nodes else _DISTILLATION


def _differences(source: ForeignConfig) -> Iterator[str]:
    yield "Of conversations with from and value, TRL writes human and gpt as roles; here they are user and assistant."


TOOL = Tool(
    name="TRL",
    names={"max_new_tokens": "max_completion_length"},
    unneeded={"use_liger_kernel": "the layers and the loss are fused anyway."},
    unsupported={"dataset_streaming": "every row is checked before training, so a stream is not supported."},
    passes={"": ALL},
    nulls=True,
    defaults=_defaults,
    differences=_differences,
)
