"""What several tools share: where rows come from, and the names of optimizers and schedules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import ForeignConfig, NotHere, Settings

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
OTHER_ROWS = (
    "rows of this form are not read: give them a prompt and a completion, or messages, and name that file in "
    "dataset_name."
)
CHAT_COLUMNS = ("messages", "conversations")


def when_true(**settings: Any) -> Callable[[Any, ForeignConfig], Settings]:
    """Read a switch: return these settings if it is on, none if it is off."""
    return lambda value, source: settings if value else {}


def chat_column(name: Any, where: str, source: ForeignConfig) -> None:
    """Note a column of chats that won't be found by its name."""
    if name not in (None, *CHAT_COLUMNS):
        source.note(
            f"{where}: the column {name} must be called messages, or conversations where it has from and value."
        )


def datasets_of(entries: list[dict[str, Any]], source: ForeignConfig) -> Settings:
    """Return one dataset as dataset_name; several, or a part of a split, as a mixture. An entry has a path, and may
    have a name and a split."""
    entries = [{key: value for key, value in entry.items() if value is not None} for entry in entries]
    if len(entries) == 1 and "[" not in entries[0].get("split", ""):
        here = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        return {here[key]: value for key, value in entries[0].items()}
    if len(entries) > 1:
        source.note("the rows of all these datasets need the same columns.")
    return {"datasets": [_in_mixture(entry) for entry in entries]}


def _in_mixture(entry: dict[str, Any]) -> dict[str, Any]:
    builder = BUILDERS.get(Path(str(entry["path"])).suffix)
    return {**entry, "path": builder, "data_files": entry["path"]} if builder else entry


def optimizer(value: Any, source: ForeignConfig) -> Settings:
    """Translate the name of an optimizer to TRL's."""
    from ..schema import shipped_schema

    name = str(value).rpartition(".")[2]
    known = shipped_schema().keys["optim"].rule["enum"]
    here = {"AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd", "AdamW8bit": "adamw_bnb_8bit",
            "PagedAdamW8bit": "paged_adamw_8bit", "PagedAdamW": "paged_adamw_32bit"}.get(name, name)  # fmt: skip
    if here not in known:
        raise NotHere("no such optimizer in transformers; `liger-trainer schema` lists those of `optim`.")
    return {"optim": here}


def share_or_number(value: Any, source: ForeignConfig) -> Settings:
    """Read a validation size: a share of the rows, a number of rows, or none."""
    if not value:
        source.note("every run is evaluated: a share of the rows, holdout_fraction, is held out.")
        return {}
    if value < 1:
        return {"holdout_fraction": value}
    raise NotHere("a number of rows; say which share of the rows is held out with holdout_fraction.")


def adapter_modules(value: Any, source: ForeignConfig) -> Settings:
    """Return target modules as a list; "all" means all linear layers."""
    names = value.split(",") if isinstance(value, str) else list(value)
    names = [name.strip() for name in names]
    return {"lora_target_modules": "all-linear" if names in (["all"], ["all-linear"]) else names}
