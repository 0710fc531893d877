"""What several tools share: where rows come from, what is learned of them, and the names of optimizers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import ForeignConfig, NotHere, Settings

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
OTHER_ROWS = (
    "rows of this form are not read: give them a prompt and a completion, or messages, and name that file in "
    "dataset_name."
)
NO_EVAL_ROWS = "rows are held out of the training rows; see holdout_fraction and dataset_test_split."
FUSED = "the layers and the loss are fused anyway."
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
_CHATS = {("role", "content"): ("messages", "conversations"), ("from", "value"): ("conversations",)}


def when_true(**settings: Any) -> Callable[[Any, ForeignConfig], Settings]:
    """Read a switch: return these settings if it is on, none if it is off."""
    return lambda value, source: settings if value else {}


def chat_columns(named: Mapping[str, Any], source: ForeignConfig) -> None:
    """Note a column of chats, or fields of its messages, that won't be found by their names.

    Args:
        named: the column, then the fields with role and content, each by the key that names it.
    """
    (key, column), (fields_key, fields) = named.items()
    if fields not in _CHATS:
        source.note(f"messages must have role and content, or from and value, not {' and '.join(fields)}.", fields_key)
    elif column not in _CHATS[fields]:
        source.note(f"the column {column} must be called messages, or conversations where it has from and value.", key)


def datasets_of(entries: list[dict[str, Any]], source: ForeignConfig) -> Settings:
    """Return one dataset as dataset_name; several, or a part of a split, as a mixture. An entry has a path, and may
    have a name, a split, a data_dir and data_files."""
    entries = [{key: value for key, value in entry.items() if value is not None} for entry in entries]
    entries = [_of_files(entry) for entry in entries]
    here = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    # a split like train[:10%] is only read in a mixture
    if len(entries) == 1 and entries[0].keys() <= here.keys() and "[" not in str(entries[0].get("split")):
        return {here[key]: value for key, value in entries[0].items()}
    if len(entries) > 1:
        source.note("the rows of all these datasets need the same columns.")
    return {"datasets": [_in_mixture(entry) for entry in entries]}


def _of_files(entry: dict[str, Any]) -> dict[str, Any]:
    """Name a single file by its path, rather than by a builder and data_files."""
    files = entry.get("data_files")
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    if isinstance(files, str) and entry["path"] in BUILDERS.values() and Path(files).suffix in BUILDERS:
        return {**{key: value for key, value in entry.items() if key != "data_files"}, "path": files}
    return {**entry, "data_files": files} if files else entry


def _in_mixture(entry: dict[str, Any]) -> dict[str, Any]:
    # datasets' loader takes a builder and its files; a mere path would be a hub id
    builder = BUILDERS.get(Path(str(entry["path"])).suffix)
    return {**entry, "path": builder, "data_files": entry["path"]} if builder else entry


def learned_alike(found: Mapping[str, Settings], source: ForeignConfig) -> Settings:
    """Return what is learned of several datasets, by the name of each; note where that differs, since it is set once
    here."""
    here: Settings = {}
    for name, settings in found.items():
        for key, value in settings.items():
            # the first dataset's value stands
            if here.setdefault(key, value) != value:
                source.note(f"here {key} is {here[key]!r} for all datasets, which were to differ.", name)
    return here


def optimizer(value: Any, source: ForeignConfig) -> Settings:
    """Translate the name of an optimizer's class to TRL's."""
    name = str(value).rpartition(".")[2]
    here = {"AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd", "AdamW8bit": "adamw_bnb_8bit",
            "PagedAdamW8bit": "paged_adamw_8bit", "PagedAdamW": "paged_adamw_32bit"}  # fmt: skip
    return {"optim": here.get(name, name)}


def share_or_number(value: Any, source: ForeignConfig) -> Settings:
    """Read a validation size: a share of the rows, a number of rows, or none."""
    if not value:
        return {}
    if value < 1:
        return {"holdout_fraction": value}
    raise NotHere("a number of rows; say which share of the rows is held out with holdout_fraction.")


def one_line(text: str) -> list[str]:
    """Return names that are written with commas between them."""
    return [name.strip() for name in text.split(",")]
