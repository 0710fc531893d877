"""The keys a configuration may have, read from the dataclasses of TRL and ours, as one strict pydantic model a recipe.

Nothing is instantiated: `SFTConfig.__post_init__` looks for devices, and an error in line 3 should not wait for that.
"""

import dataclasses
import types
from dataclasses import MISSING, dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig


@dataclass
class RunOptions:
    """Our own keys: everything that neither TRL nor transformers has a name for."""

    recipe: str = field(default="sft", metadata={"choices": ["sft", "distill"]})
    """sft, or distill; when absent, distill if a teacher is named and sft otherwise."""
    keep_every_nth_layer: int | None = field(default=None, metadata={"limits": {"ge": 2}})
    """Make the student from model_name_or_path by keeping layers 0, n, 2n, ... and the last."""
    keep_layers: list[int] | None = None
    """Make the student from model_name_or_path by keeping the layers with these indices, from 0."""
    holdout_fraction: float = field(default=0.05, metadata={"limits": {"gt": 0, "lt": 1}})
    """Share of the training rows held out when the dataset has no split named dataset_test_split."""
    max_eval_rows: int | None = field(default=None, metadata={"limits": {"ge": 1}})
    """Evaluate on the first so many held-out rows instead of all."""
    num_sample_completions: int = field(default=3, metadata={"limits": {"ge": 0}})
    """Held-out prompts completed greedily by the teacher and by the student before and after training."""
    max_new_tokens: int = field(default=64, metadata={"limits": {"ge": 1}})
    """Longest sample completion, in tokens."""
    overwrite_output_dir: bool = False
    """Allow an output_dir that already holds a finished run."""


SECTIONS = {"run": RunOptions, "dataset": ScriptArguments, "mixture": DatasetMixtureConfig, "model": ModelConfig}

# Known to TRL and transformers, but without effect in these recipes: refused when set to anything but the default.
REFUSED = {
    "dataset_streaming": "every row is checked, counted and hashed before training, so a stream is not supported",
    "streaming": "every row is checked, counted and hashed before training, so a stream is not supported",
    "ignore_bias_buffers": "no trainer reads it",
    "do_predict": "a run ends with an evaluation on the held-out rows; there is no prediction pass",
    "include_for_metrics": "it feeds a compute_metrics function, and a run has none",
    "batch_eval_metrics": "it feeds a compute_metrics function, and a run has none",
    "parallelism_config": "it comes from the launcher: `accelerate launch --config_file ... -m liger_trainer run ...`",
}
LAUNCHER_KEYS = ("accelerate_config", "num_processes", "num_machines", "machine_rank", "main_process_port", "gpu_ids")
RENAMED = {
    "batch_size": "per_device_train_batch_size",
    "dataset": "dataset_name",
    "epochs": "num_train_epochs",
    "evaluation_strategy": "eval_strategy",
    "group_by_length": "train_sampling_strategy (group_by_length)",
    "kd_temperature": "temperature",
    "lora_rank": "lora_r",
    "lr": "learning_rate",
    "max_seq_length": "max_length",
    "model": "model_name_or_path",
    "no_cuda": "use_cpu",
    "teacher": "teacher_model_name_or_path",
    "teacher_model": "teacher_model_name_or_path",
    "tokenizer_name_or_path": "model_name_or_path, where the tokenizer is read from",
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps (a number below 1 is a share of the steps)",
}
_AT_LEAST_ONE = (
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_length lora_r lora_alpha "
    "dataset_num_proc save_total_limit"
)
_NOT_NEGATIVE = "learning_rate warmup_steps weight_decay max_grad_norm dataloader_num_workers seed"
LIMITS: dict[str, dict[str, float]] = {
    **{name: {"ge": 1} for name in _AT_LEAST_ONE.split()},
    **{name: {"ge": 0} for name in _NOT_NEGATIVE.split()},
    "num_train_epochs": {"gt": 0},
    "max_steps": {"ge": -1},
    "lora_dropout": {"ge": 0, "lt": 1},
    "label_smoothing_factor": {"ge": 0, "lt": 1},
    "test_split_size": {"gt": 0, "lt": 1},
    "temperature": {"gt": 0},
    "beta": {"ge": 0, "le": 1},
}
CHOICES = {"lora_task_type": ["CAUSAL_LM"]}
# wider than annotated, as TRL's own YAML reading allows: `all-linear`, and `true` for the newest checkpoint
TYPES = {
    "lora_target_modules": list[str] | str | None,
    "lora_target_parameters": list[str] | str | None,
    "resume_from_checkpoint": str | bool | None,
}
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One key: the section it belongs to, its default, its strict type and that type in words."""

    section: str
    default: Any
    annotation: Any
    expects: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Schema:
    """The keys of a recipe, the pydantic model that checks them, and the class of its training arguments."""

    keys: dict[str, Key]
    model: type[BaseModel]
    training_class: type[SFTConfig]


@lru_cache
def schema_of(recipe: str) -> Schema:
    """The schema of recipe `sft` (SFTConfig) or `distill` (LigerDistillConfig)."""
    if recipe == "distill":
        from .distill_config import LigerDistillConfig as training_class
    else:
        training_class = SFTConfig
    keys: dict[str, Key] = {}
    for section, cls in {**SECTIONS, "training": training_class}.items():
        keys.update(_keys_of(cls, section))
    return Schema(keys, _strict_model(f"{recipe} configuration", keys), training_class)


def _keys_of(cls: type, section: str) -> dict[str, Key]:
    hints = get_type_hints(cls)
    keys = {}
    for item in dataclasses.fields(cls):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        choices = CHOICES.get(item.name) or item.metadata.get("choices") or ()
        annotation = TYPES.get(item.name, hints[item.name])
        limits = item.metadata.get("limits") or LIMITS.get(item.name)
        members, words = _members(annotation), _words(annotation, choices)
        keys[item.name] = Key(
            section, default, _strict(annotation, choices, limits), words, tuple(choices) or _enum_values(members)
        )
    return keys


def _strict_model(name: str, keys: dict[str, Key]) -> type[BaseModel]:
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    fields: dict[str, Any] = {key: (spec.annotation, spec.default) for key, spec in keys.items()}
    return create_model(name, __config__=config, **fields)


def _strict(annotation: Any, choices: Any, limits: dict[str, float] | None) -> Any:
    members = _members(annotation)
    if len(members) > 1:
        if _enum_values(members):
            members = tuple(m for m in members if m is not str)
        return Union[tuple(_strict(m, choices, limits) for m in members)]  # noqa: UP007 - built at run time
    if annotation is bool:
        return Annotated[bool, BeforeValidator(_switch)]
    if annotation in (int, float) and limits:
        return Annotated[annotation, Field(**limits)]  # type: ignore[arg-type]
    if annotation is str and choices:
        return Literal[tuple(choices)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Literal[tuple(m.value for m in annotation)]
    if get_origin(annotation) is list:
        return list[_strict(get_args(annotation)[0], (), None)]
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _strict_model(annotation.__name__, _keys_of_required(annotation))
    return annotation


def _keys_of_required(cls: type) -> dict[str, Key]:
    keys = _keys_of(cls, cls.__name__)
    return {k: dataclasses.replace(v, default=...) if v.default is MISSING else v for k, v in keys.items()}


def _members(annotation: Any) -> tuple:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _enum_values(members: tuple) -> tuple[str, ...]:
    return tuple(m.value for e in members if isinstance(e, type) and issubclass(e, Enum) for m in e)


def _words(annotation: Any, choices: Any) -> str:
    members = _members(annotation)
    options = tuple(choices) or _enum_values(members)
    if options:
        members = tuple(m for m in members if m is not str and not (isinstance(m, type) and issubclass(m, Enum)))
    words = [f"one of {', '.join(options)}"] if options else []
    return " or ".join(words + [_word(m) for m in members])


def _word(annotation: Any) -> str:
    if annotation in _NAMES:
        return _NAMES[annotation]
    origin = get_origin(annotation) or annotation
    if origin is list:
        inner = get_args(annotation)
        if inner and dataclasses.is_dataclass(inner[0]):
            return "a list of mappings"
        return "a list of integers" if inner and inner[0] is int else "a list of text"
    if origin is dict or dataclasses.is_dataclass(annotation):
        return "a mapping"
    if origin is Literal:
        return " or ".join(str(value).lower() for value in get_args(annotation))
    return getattr(annotation, "__name__", str(annotation))


def _switch(value: Any) -> Any:
    """YAML 1.1 words for a boolean; anything else is left to the strict check."""
    if isinstance(value, str):
        return {"yes": True, "on": True, "no": False, "off": False}.get(value.lower(), value)
    return value
