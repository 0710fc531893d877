"""Load, split, check, count and hash the rows of a run, before any weight is loaded.

Rows have one of the forms that `SFTTrainer` takes, or that of ShareGPT or Alpaca, which `chat_rows` converts. A row of
another form is an error that says where the row stands, not a stack trace an hour later.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, DataError
from ...trainers.chat_rows import ALPACA, ALPACA_OPTIONAL, in_messages, split_last
from .sources import LoadedDataset, kind_of, load_source

if TYPE_CHECKING:
    from datasets import Dataset

    from ...config.run_config import RunConfig

# columns that are read in addition to those of the form
CHAT_COLUMNS = ("tools", "chat_template_kwargs")
TOKEN_COLUMNS = ("labels", "completion_mask", "assistant_masks", "position_ids", "seq_lengths")
OPTIONAL_COLUMNS = {
    "input_ids": TOKEN_COLUMNS,
    "conversations": ("system", *CHAT_COLUMNS),
    "alpaca": (*ALPACA_OPTIONAL, *CHAT_COLUMNS),
}
CHAT_FORMS = ("messages", "conversations", "alpaca")


@dataclass(frozen=True)
class DataFacts:
    """What is known about the rows; printed at the start and written to metrics.json."""

    name: str
    form: str
    """messages, prompt-completion, text, input_ids or prompt, as the trainer reads them"""
    columns: tuple[str, ...]
    """all columns of the dataset"""
    columns_used: tuple[str, ...]
    train_rows: int
    test_rows: int
    held_out: str
    """how the test rows were chosen"""
    sha256: str
    """over the used rows as JSON lines with sorted keys, train before test"""
    licence: str | None
    test_rows_seen_in_training: int
    """held-out rows that equal a training row"""
    train_rows_repeated: int = 0
    """training rows that equal an earlier one"""
    test_rows_repeated: int = 0
    """held-out rows that equal an earlier one"""
    blank_lines_skipped: int = 0


@dataclass(frozen=True)
class RunData:
    """The two splits of a run and the facts about them; `place` says where row i of "train" or "test" comes from."""

    train: "Dataset"
    test: "Dataset"
    facts: DataFacts
    place: Callable[[str, int], str]


def load_run_datasets(config: "RunConfig") -> RunData:
    """Load and check the training and the held-out rows that `config` names.

    Raises:
        ConfigError: no such file, directory, dataset or split.
        DataError: no rows, no usable column, JSON that cannot be read, a row of the wrong form.
    """
    source = load_source(config)
    form, used = _form(_pick(config, source, "dataset_train_split"), config)
    train, test, held_out, place = _split(config, source)
    columns = tuple(train.column_names)
    missing = [c for c in used if c not in test.column_names]
    if missing:
        raise DataError(f"the held-out rows have no column {missing[0]!r}, which the training rows have.")
    train, test = train.select_columns(list(used)), test.select_columns(list(used))
    digest = hashlib.sha256()
    seen = set(_check_and_hash(train, form, config, digest, lambda i: place("train", i)))
    hashes = list(_check_and_hash(test, form, config, digest, lambda i: place("test", i)))
    train, test, form = _as_the_trainer_reads(config, train, test, form)
    facts = DataFacts(
        name=config["dataset_name"] or "mixture of " + ", ".join(d["path"] for d in config["datasets"]),
        form=form,
        columns=columns,
        columns_used=used,
        train_rows=len(train),
        test_rows=len(test),
        held_out=held_out,
        sha256=digest.hexdigest(),
        licence=source.licence,
        test_rows_seen_in_training=sum(row in seen for row in hashes),
        train_rows_repeated=len(train) - len(seen),
        test_rows_repeated=len(hashes) - len(set(hashes)),
        blank_lines_skipped=source.blank_lines,
    )
    for rows in (train, test):
        rows.info.dataset_name = facts.name  # for messages, wherever the rows go
    return RunData(train, test, facts, place)


def _split(config: "RunConfig", source: LoadedDataset) -> tuple["Dataset", "Dataset", str, Callable[[str, int], str]]:
    """Return training rows, held-out rows, how those were chosen, and the place of a row."""
    train_name, test_name = config["dataset_train_split"], config["dataset_test_split"]
    train = _pick(config, source, "dataset_train_split")
    rows: dict[str, Sequence[int]]
    names: dict[str, str]
    if test_name in source.splits:
        if config.given("holdout_fraction"):
            raise config.error("holdout_fraction", f"has no effect: the dataset has a split {test_name!r}.")
        test, held_out = _pick(config, source, "dataset_test_split"), source.held_out or f"split {test_name!r}"
        rows = {"train": range(len(train)), "test": range(len(test))}
        names = {"train": train_name, "test": test_name}
    elif config.given("dataset_test_split"):
        raise _no_such_split(config, source, "dataset_test_split")
    else:
        rows = dict(zip(("train", "test"), _hold_out(config, len(train)), strict=True))
        train, test = train.select(rows["train"]), train.select(rows["test"])
        held_out = f"{config['holdout_fraction']:.1%} of the rows, drawn with seed {config['seed']}"
        names = {"train": train_name, "test": train_name}
    limit = config["max_eval_rows"]
    if limit is not None and limit < len(test):
        held_out = f"the first {limit} of {len(test)} rows: {held_out}"
        test = test.select(range(limit))
    return train, test, held_out, lambda split, i: source.place(names[split], rows[split][i])


def _pick(config: "RunConfig", source: LoadedDataset, key: str) -> "Dataset":
    split = config[key]
    if split not in source.splits:
        raise _no_such_split(config, source, key)
    if len(source.splits[split]) == 0:
        raise DataError(f"{config['dataset_name']}: split {split!r} has no rows.")
    return source.splits[split]


def _no_such_split(config: "RunConfig", source: LoadedDataset, key: str) -> ConfigError:
    return config.error(key, f"no split {config[key]!r}; the dataset has {', '.join(map(repr, source.splits))}.")


def _hold_out(config: "RunConfig", count: int) -> tuple[list[int], list[int]]:
    import numpy

    if count < 2:
        raise DataError(f"{config['dataset_name']}: one row cannot be both trained on and held out.")
    size = min(max(1, round(config["holdout_fraction"] * count)), count - 1)
    order = numpy.random.RandomState(config["seed"]).permutation(count)
    return sorted(map(int, order[size:])), sorted(map(int, order[:size]))


def _form(train: "Dataset", config: "RunConfig") -> tuple[str, tuple[str, ...]]:
    """Return the form of the rows, and the columns that the trainer reads."""
    have, text, alpaca = train.column_names, config["dataset_text_field"], ("alpaca", ALPACA)
    if "image" in have or "images" in have:
        raise DataError(f"the rows hold images (columns: {', '.join(have)}); only text is supported.")
    for form, needed in (
        ("input_ids", ("input_ids",)),
        ("prompt-completion", ("prompt", "completion")),
        ("messages", ("messages",)),
        ("conversations", ("conversations",)),
        *([] if config.given("dataset_text_field") else [alpaca]),
        ("text", (text,)),
        alpaca,
        *([("prompt", ("prompt",))] if config.recipe == "distill" else []),
    ):
        if all(column in have for column in needed):
            _check_mask_options(config, train, form)
            extras = OPTIONAL_COLUMNS.get(form, CHAT_COLUMNS)
            return form, (*needed, *(c for c in extras if c in have))
    raise DataError(
        f"no usable column. Expected messages, or prompt and completion, or {text} (named by dataset_text_field), "
        "or input_ids, or conversations as in ShareGPT, or instruction and output as in Alpaca; the rows have: "
        f"{', '.join(have)}."
    )


def _check_mask_options(config: "RunConfig", train: "Dataset", form: str) -> None:
    if form == "prompt" and config["lmbda"] < 1 and not config["seq_kd"]:
        advice = "set it to 1.0, and the student samples them, or seq_kd: true, and the teacher does what is left"
        raise config.error("lmbda", f"the rows have prompts and no completions; {advice}.")
    if config["completion_only_loss"] and form not in ("prompt-completion", "alpaca", "input_ids"):
        raise config.error("completion_only_loss", f"needs prompt and completion columns; the rows have {form}.")
    chat = form in CHAT_FORMS or isinstance(train[0].get("prompt"), list)
    if config.given("alpaca_prompt") and form != "alpaca":
        raise config.error("alpaca_prompt", f"needs the columns instruction and output; the rows have {form}.")
    if config["alpaca_prompt"] == "stanford_text":
        chat = False
    for key in ("assistant_only_loss", "supervised_part", "last_turn_only"):
        if config[key] and not chat:
            raise config.error(key, f"needs rows of chat messages; the rows have plain {form}.")


def _as_the_trainer_reads(
    config: "RunConfig", train: "Dataset", test: "Dataset", form: str
) -> tuple["Dataset", "Dataset", str]:
    """Convert rows of ShareGPT and Alpaca to messages, or to prompt and completion; return their new form too."""
    train, test = (in_messages(rows, alpaca_prompt=config["alpaca_prompt"]) for rows in (train, test))
    if config["last_turn_only"]:
        train, test = split_last(train), split_last(test)
    if form not in CHAT_FORMS:
        return train, test, form
    return train, test, "messages" if "messages" in train.column_names else "prompt-completion"


def _check_and_hash(
    rows: Iterable, form: str, config: "RunConfig", digest: Any, place: Callable[[int], str]
) -> Iterator[bytes]:
    """Yield the hash of every row and update `digest`. Raises DataError at the first wrong row."""
    for index, row in enumerate(rows):
        problem = _row_problem(row, form, config["dataset_text_field"])
        if problem:
            raise DataError(f"{place(index)}: {problem}.")
        line = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode() + b"\n"
        digest.update(line)
        yield hashlib.sha256(line).digest()


def _row_problem(row: dict, form: str, text: str) -> str | None:
    if form == "input_ids":
        ids = row["input_ids"]
        good = isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids)
        return None if good else f"column 'input_ids': expected a list of integers, got {kind_of(ids)}"
    if form == "prompt-completion":
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return None
        if isinstance(prompt, str) or isinstance(completion, str):
            column = "completion" if isinstance(prompt, str) else "prompt"
            return f"column {column!r}: expected text, as in the other column, got {kind_of(row[column])}"
        return _chat_problem(prompt, "prompt") or _chat_problem(completion, "completion")
    if form == "prompt" and isinstance(row["prompt"], str):
        return None
    if form == "alpaca":
        return _alpaca_problem(row)
    if form == "text":
        value = row[text]
        return None if isinstance(value, str) else f"column {text!r}: expected text, got {kind_of(value)}"
    return _chat_problem(row[form], form) or _text_problem(row, ("system",) if form == "conversations" else ())


def _alpaca_problem(row: dict) -> str | None:
    for column in ALPACA:
        if not isinstance(row[column], str):
            return f"column {column!r}: expected text, got {kind_of(row[column])}"
    for turn in row.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            return f"column 'history': expected pairs of an instruction and an answer, got {turn!r:.80}"
    return _text_problem(row, ("input", "system"))


def _text_problem(row: dict, columns: Iterable[str]) -> str | None:
    """Check columns that may be absent or null."""
    for column in columns:
        if not isinstance(row.get(column), (str, type(None))):
            return f"column {column!r}: expected text or null, got {kind_of(row[column])}"
    return None


def _chat_problem(messages: Any, column: str) -> str | None:
    first = messages[0] if isinstance(messages, list) and messages else None
    sharegpt = column == "conversations" and not (isinstance(first, dict) and "role" in first)
    role, content = ("from", "value") if sharegpt else ("role", "content")
    wanted = f"column {column!r}: expected a list of {{{role}, {content}}} messages"
    if column in ("prompt", "completion"):
        wanted = f"column {column!r}: expected text, or in both columns a list of {{role, content}} messages"
    if not isinstance(messages, list) or not messages:
        return f"{wanted}, got {kind_of(messages)}"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get(role), str):
            return f"{wanted}, got a message {message!r:.80}"
        text = message.get(content)
        if not isinstance(text, (str, list)) and not message.get("tool_calls"):
            return f"{wanted}, got a message whose {content} is {kind_of(text)}"
    return None
