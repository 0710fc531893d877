"""The datasets that a trainer is given: whether their columns hold what is read of them, and their rows as messages."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, Json, LargeList, List

from ..errors import DataError
from ..teachers.row_keys import column_names
from .chat_rows import ALIKE, ALPACA, ALPACA_OPTIONAL, CHATS, READ, check_preferences, in_messages, with_system
from .chat_template import uneven_labels
from .rows import values_of


def datasets_in_messages(arguments: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return the datasets among a trainer's arguments as `in_messages` makes them, or as its `formatting_func` does.

    TRL decides by the columns what is learned, so it has to get these. Of rows with messages it would read the messages
    and not what the function has made of them.

    Raises:
        DataError: the function returns something other than text.
    """
    text_field, prompt = getattr(args, "dataset_text_field", "text"), getattr(args, "alpaca_prompt", "instruction")
    function = arguments.get("formatting_func")

    def read(dataset: Any) -> Any:
        if function is None or not isinstance(dataset, Dataset | IterableDataset):
            if not (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
                if isinstance(dataset, Dataset | IterableDataset):
                    dataset = with_system(dataset)
                _check_columns(dataset, text_field)
                # rows that come as arrays or frames, as lists and texts; a transform stays, which TRL refuses
                if isinstance(dataset, Dataset) and dataset.format["type"] not in (None, "custom"):
                    dataset = dataset.with_format(None, columns=dataset.format["columns"])
                dataset = _without_padding(dataset)
            return in_messages(dataset, text_field, prompt)
        return _formatted(dataset, function, text_field)

    given = {name: arguments[name] for name in ("train_dataset", "eval_dataset") if arguments.get(name) is not None}
    changed = {name: read(rows) for name, rows in given.items()}
    if isinstance(tests := given.get("eval_dataset"), Mapping):
        changed["eval_dataset"] = {name: read(rows) for name, rows in tests.items()}
    return changed if function is None else {**changed, "formatting_func": None}


MASK = "attention_mask"
BESIDE_IDS = ("labels", "completion_mask", "assistant_masks", "position_ids", "token_type_ids")
# Names of prompts and completions in many public datasets.
_PAIRS = [(asked, said) for asked in ("question", "query", "instruction", "input", "prompt")
          for said in ("answer", "response", "output")]  # fmt: skip


def no_usable_column(have: Iterable[str], text_field: str) -> str:
    """Say which columns rows may have, which these have, and what of them looks like a slip."""
    have = list(have)
    read = {"messages", "prompt", "completion", "input_ids", "conversations", *ALPACA, *ALPACA_OPTIONAL, text_field}
    hints = [
        f" Rename {name!r} to {plain!r}." for name in have if (plain := name.strip().lower()) in read and plain != name
    ]
    lower = {name.strip().lower(): name for name in have}
    if not {*ALPACA} <= lower.keys() and (pair := next((pair for pair in _PAIRS if {*pair} <= lower.keys()), None)):
        names = zip(pair, ("prompt", "completion"), strict=True)
        hints = [f" Rename {lower[name]!r} to {wanted!r}." for name, wanted in names if lower[name] != wanted]
    return (
        f"no usable column. Expected messages, or prompt and completion, or {text_field} (named by "
        "dataset_text_field), or input_ids, or conversations as in ShareGPT, or instruction and output as in Alpaca; "
        f"the rows have: {', '.join(have)}.{''.join(hints)}"
    )


def _check_columns(dataset: Any, text_field: str) -> None:
    """Raise DataError where the trainer would find nothing to read, or numbers where it reads text."""
    if not isinstance(dataset, Dataset | IterableDataset):
        return
    have = column_names(dataset)
    if isinstance(dataset, Dataset) and not len(dataset):
        raise DataError(f"expected rows, got a dataset without any; its columns are: {', '.join(have) or 'none'}.")
    if "input_ids" in have:
        return _check_tokens(dataset)
    if "labels" in have:
        raise DataError(
            "column 'labels': the labels of rows without input_ids are made of their text. Rename it, or take it out: "
            'dataset.remove_columns("labels").'
        )
    check_preferences(dataset, text_field if text_field != "text" else None)
    if {text_field, "messages", "prompt", "conversations"}.isdisjoint(have) and not {*ALPACA} <= {*have}:
        raise DataError(no_usable_column(have, text_field))
    features: Any = dataset.features or {}
    read = _columns_read({*have}, text_field) & features.keys()
    for name in sorted(read):
        _check_column(dataset, name, name == text_field)
    if len({isinstance(features[name], (List, LargeList)) for name in read & {"prompt", "completion"}}) > 1:
        raise DataError(f"columns 'prompt' and 'completion': {ALIKE}.")


def _check_tokens(dataset: Any) -> None:
    """Raise DataError where tokenized rows hold no lists of ids, or another number of labels than of ids."""
    names = [name for name in ("input_ids", "labels") if name in (dataset.features or ())]
    for name in names:
        feature = dataset.features[name]
        entries = getattr(getattr(feature, "feature", None), "dtype", "")
        if not isinstance(feature, (List, LargeList)) or not entries.startswith(("int", "uint")):
            raise DataError(f"column {name!r}: expected a list of token ids in each row, got {feature}.")
        if isinstance(dataset, Dataset):
            _refuse_null(dataset, name, "a list of token ids")
    if len(names) < 2 or not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    lengths = (np.concatenate([np.diff(offsets) for _, offsets in values_of(dataset, name)]) for name in names)
    tokens, labels = lengths
    if len(wrong := np.flatnonzero(tokens != labels)):
        row = int(wrong[0])
        raise uneven_labels(f"row {row}", tokens[row], labels[row])


def _without_padding(dataset: Any) -> Any:
    """Return tokenized rows without the tokens that their `attention_mask` leaves out: the trainer pads each batch."""
    if not isinstance(dataset, Dataset | IterableDataset) or not {"input_ids", MASK} <= {*column_names(dataset)}:
        return dataset
    if isinstance(dataset, Dataset) and all(values.all() for values, _ in values_of(dataset, MASK)):
        return dataset

    def read(row: Any) -> dict[str, Any]:
        kept = [place for place, here in enumerate(row[MASK]) if here]
        of_tokens = {name: row[name] for name in ("input_ids", *BESIDE_IDS) if row.get(name) is not None}
        return {name: [values[place] for place in kept] for name, values in of_tokens.items()}

    return dataset.map(read, remove_columns=MASK)


def _columns_read(have: set[str], text_field: str) -> set[str]:
    """Return which columns of rows with these are read."""
    for names in (("prompt", "completion"), ("messages", "system"), ("conversations", "system")):
        if names[0] in have:
            return have & {*names}
    return {text_field} if text_field in have else have & {*ALPACA, *ALPACA_OPTIONAL}


_NO_TEXT = tuple("int uint float bool decimal timestamp date time duration binary large_binary".split())


def _check_column(dataset: Any, name: str, plain: bool) -> None:
    """Raise DataError where a column holds something else than it is read as, or nothing in some row.

    Args:
        plain: whether it is read as nothing but text.
    """
    feature, chat = dataset.features[name], name in ("messages", "conversations")
    dtype, nested = getattr(feature, "dtype", "string"), isinstance(feature, (List, LargeList, dict))
    nulls = dataset.data.column(name).null_count if isinstance(dataset, Dataset) else 0
    if isinstance(feature, dict) and (chat or name in CHATS):
        raise DataError(f"column {name!r}: expected lists of messages, got mappings of {', '.join(feature)}.")
    if chat and dtype == "string" and not nested and not isinstance(feature, Json):
        raise DataError(
            f"column {name!r}: expected a list of messages, got text. If it is JSON, read it: "
            f"dataset.map(lambda row: {{{name!r}: json.loads(row[{name!r}])}})."
        )
    if plain and nested:
        raise DataError(f"column {name!r}: expected text, got {'mappings' if isinstance(feature, dict) else 'lists'}.")
    # readers of CSV take a column that holds nothing for one of numbers
    if dtype.startswith(_NO_TEXT) and (not isinstance(dataset, Dataset) or nulls < len(dataset.data)):
        raise DataError(f"column {name!r}: expected text, got {dtype}. Cast it: dataset.cast_column(...).")
    if nulls and (plain or name in CHATS):
        _refuse_null(dataset, name, "messages" if chat else "text")


def _refuse_null(dataset: Dataset, name: str, expected: str) -> None:
    if not dataset.data.column(name).null_count:
        return
    values = dataset.select_columns([name]).with_format("arrow")[:][name]
    row = next((i for i, value in enumerate(values) if not value.is_valid), None)
    if row is not None:  # a selection may have left such rows out
        raise DataError(
            f"row {row}: column {name!r}: expected {expected}, got null. Take such rows out: "
            f"dataset.filter(lambda row: row[{name!r}] is not None)."
        )


def _formatted(dataset: Any, function: Callable, text_field: str) -> Any:
    columns = set(column_names(dataset))
    if "input_ids" in columns:
        warnings.warn("formatting_func has no effect on rows that are tokenized.", stacklevel=2)
        return dataset

    def text(row: dict[str, Any]) -> dict[str, Any]:
        made = function(row)
        if not isinstance(made, str):
            raise DataError(
                f"formatting_func: expected the text of one row, got {made!r:.80}. TRL calls it with one row, not with "
                "a batch."
            )
        return {text_field: made}

    return dataset.map(text, remove_columns=sorted(columns & {*READ, text_field}))
