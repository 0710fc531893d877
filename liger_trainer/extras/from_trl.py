"""The arguments of TRL's distillation trainers read as LigerDistillConfig's, so that a run moves over by its class.

Every field is carried over as it is, under another name, or refused where we have no counterpart. Where defaults differ
in meaning, TRL's are set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError
from ..trainers.chat_rows import split_last
from ..trainers.config import LigerDistillConfig
from ..trainers.options import ELSEWHERE


@dataclass(frozen=True)
class Origin:
    """One of TRL's classes of arguments.

    Attributes:
        names: TRL's name -> ours, for values that stay as they are.
        refused: TRL's name -> why there is no counterpart. The field's default is fine.
        settings: what that trainer always does, in our fields.
        values: TRL's name -> our settings that follow from its value.
        rows: how that trainer changes the rows of a dataset; None if it does not.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Callable[[Any], dict[str, Any]]] = field(default_factory=dict)
    rows: Callable[[Any], Any] | None = None


ORIGINS: dict[str, Origin] = {
    # Always on-policy, no T^2, prompts of any length; unshuffled rows keep the dataset's order.
    "DistillationConfig": Origin(
        refused=ELSEWHERE,
        settings={"lmbda": 1.0, "scale_loss_by_temperature_squared": False, "max_length": None},
        values={
            "shuffle_dataset": lambda shuffle: {} if shuffle else {"train_sampling_strategy": "sequential"},
        },
    ),
    # The temperature is only sampling's; rows that are too long lose their beginning.
    "GKDConfig": Origin(
        names={"max_new_tokens": "max_completion_length"},
        settings={"kd_temperature": 1.0, "truncation_mode": "keep_end"},
        values={"dataset_kwargs": lambda _: {}},  # GKDTrainer itself writes into them that it prepares the rows
        rows=split_last,  # GKD's collator learns only the last message of a chat
    ),
}


def from_trl(args: Any, arguments: Mapping[str, Any]) -> tuple[LigerDistillConfig, dict[str, Any]]:
    """Return the arguments of one of TRL's trainers as those of `LigerDistillTrainer`.

    Args:
        args: its configuration.
        arguments: its other arguments, by name.

    Raises:
        ConfigError: another class, or a field that is set to something that is not here.
    """
    bases = (cls for cls in type(args).__mro__ if cls.__module__.startswith("trl."))
    origin = next((ORIGINS[cls.__name__] for cls in bases if cls.__name__ in ORIGINS), None)
    if origin is None:
        raise ConfigError(
            f"args must be a LigerDistillConfig, got {type(args).__name__}. TRL's DistillationConfig and GKDConfig "
            "are taken too."
        )
    arguments = dict(arguments)
    if arguments.pop("tools", None):
        raise ConfigError("tools: tools are not called in training. Leave them out, or stay with TRL's trainer.")
    if origin.rows is not None:
        rows = origin.rows
        arguments.update({name: _each(rows, arguments.get(name)) for name in ("train_dataset", "eval_dataset")})
    try:
        return LigerDistillConfig(**_settings(args, origin)), arguments
    except ValueError as error:
        raise ConfigError(f"{type(args).__name__}: {error}") from error


def _each(rows: Callable[[Any], Any], dataset: Any) -> Any:
    if dataset is None:
        return None
    return {name: rows(part) for name, part in dataset.items()} if isinstance(dataset, dict) else rows(dataset)


def _settings(args: Any, origin: Origin) -> dict[str, Any]:
    here = {item.name for item in fields(LigerDistillConfig) if item.init}
    values = {item.name: getattr(args, item.name) for item in fields(args) if item.init}
    defaults = {item.name: item.default for item in fields(type(args))}
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if name in origin.refused:
            if value != defaults[name]:
                raise ConfigError(f"{type(args).__name__}.{name}={value!r} has no counterpart: {origin.refused[name]}.")
        elif name in origin.values:
            settings.update(origin.values[name](value))
        elif origin.names.get(name, name) in here:
            settings[origin.names.get(name, name)] = value
        elif value != defaults.get(name):
            raise ConfigError(f"{type(args).__name__}.{name}={value!r} has no counterpart here: leave it out.")
    return {**settings, **origin.settings}
