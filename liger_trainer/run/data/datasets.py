"""Load, split, check, count and hash the rows of a run, before any weight is loaded.

Rows have one of the forms that `SFTTrainer` takes, or ShareGPT's or Alpaca's, which `chat_rows` converts. A row of
another form is an error that says where the row stands, not a stack trace an hour later.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, DataError
from ...trainers.chat_rows import check_preferences, check_tools, in_messages, split_last, with_system
from ...trainers.given_datasets import no_usable_column
from ...trainers.rows import NO_PROMPT
from .row_checks import (
    CHAT_COLUMNS,
    CHAT_FORMS,
    FORMS,
    OPTIONAL_COLUMNS,
    BadRows,
    check_unread,
    decoded,
    form_of,
    has_empty_answer,
    hashable,
    image_column,
    image_problem,
    kind_of,
    learned_answers,
    row_problem,
    undecoded,
)
from .sources import LoadedDataset, Place, load_source

if TYPE_CHECKING:
    from datasets import Dataset

    from ...config.run_config import RunConfig


OF_TRAINING = "weight_column"
# Keys that name a column of the rows, the last one only of the training rows.
NAMING = ("teacher_column", "teacher_prompt_column", OF_TRAINING)
VALIDATION = "validation"  # is held out where there is no test split, unless a setting says otherwise
EVERY = "every token"
USERS_TOO = "every message, the user's too"
PLAIN = "the completions, after prompts of plain text"


@dataclass(frozen=True)
class DataFacts:
    """What is known about the rows; printed at the start and written to metrics.json."""

    name: str
    form: str  # messages, prompt-completion, text, input_ids or prompt, as the trainer reads them
    columns: tuple[str, ...]  # all columns of the dataset
    columns_used: tuple[str, ...]
    train_rows: int
    test_rows: int
    held_out: str  # how the test rows were chosen
    # over the used rows as JSON lines with sorted keys, train before test, without columns that settings name
    sha256: str
    licence: str | None
    learned: str  # what of a row is supervised, in words
    test_rows_seen_in_training: int  # held-out rows that equal a training row
    train_rows_repeated: int = 0  # training rows that equal an earlier one
    test_rows_repeated: int = 0  # held-out rows that equal an earlier one
    blank_lines_skipped: int = 0
    rows_skipped: int = 0  # wrong rows that `bad_rows: skip` left out
    # for each kind of problem, how many rows have it and where they are
    rows_skipped_for: dict[str, str] = field(default_factory=dict)
    images: str | None = None  # the column with the images of a row
    empty_answers: str | None = None  # how many rows have an answer that says nothing, and where


@dataclass(frozen=True)
class RunData:
    """The two splits of a run and the facts about them; `place` says where row i of "train" or "test" comes from."""

    train: "Dataset"
    test: "Dataset"
    facts: DataFacts
    place: Callable[[str, int], str]


def load_run_datasets(config: "RunConfig", vocabulary: int | None = None) -> RunData:
    """Load and check the training and the held-out rows that `config` names.

    Args:
        vocabulary: how many tokens the model has; rows that are tokenized are then checked against it.

    Raises:
        ConfigError: no such file, directory, dataset or split.
        DataError: no rows, no usable column, JSON that cannot be read, a row of the wrong form.
    """
    bad = BadRows(config["bad_rows"] == "skip", vocabulary)
    source = _as_read(config, load_source(config, bad))
    bad.check()
    form, used = _form(_pick(config, source, "dataset_train_split"), config)
    images = image_column(used)
    train, test, held_out, at = _split(config, source)
    columns, more = tuple(train.column_names), _further_columns(config, train, test, used)
    whole = [rows.select_columns([*used, *(c for c in more if c in rows.column_names)]) for rows in (train, test)]
    train, test = train.select_columns(list(used)), test.select_columns(list(used))
    digest, first = hashlib.sha256(), train[0]

    def problem_of(row: dict[str, Any]) -> str | None:
        problem = row_problem(row, form, config["dataset_text_field"], vocabulary, learned_answers(config))
        return problem or _unlike(row, first) or (None if images is None else image_problem(row))

    good = {
        split: _good_rows(rows, partial(at, split), problem_of, bad, digest)
        for split, rows in (("train", train), ("test", test))
    }
    bad.check(even_if_skipped=not all(good.values()))
    kept, hashes = {split: list(rows) for split, rows in good.items()}, list(good["test"].values())
    train, test = whole
    if len(bad):
        train, test = train.select(kept["train"]), test.select(kept["test"])
    seen = set(good["train"].values())
    train, test, form = _as_the_trainer_reads(config, train, test, form)
    train, test = decoded(train), decoded(test)
    facts = DataFacts(
        name=config["dataset_name"] or "mixture of " + ", ".join(d["path"] for d in config["datasets"]),
        form=form,
        columns=columns,
        columns_used=(*used, *more),
        train_rows=len(train),
        test_rows=len(test),
        held_out=held_out,
        sha256=digest.hexdigest(),
        licence=source.licence,
        learned=_learned(config, form, train),
        test_rows_seen_in_training=sum(row in seen for row in hashes),
        train_rows_repeated=len(train) - len(seen),
        test_rows_repeated=len(hashes) - len(set(hashes)),
        blank_lines_skipped=source.blank_lines,
        rows_skipped=len(bad),
        rows_skipped_for=bad.summary(),
        images=images,
        empty_answers=bad.empty_answers(),
    )
    for rows in (train, test):
        rows.info.dataset_name = facts.name  # for messages, wherever the rows go
    return RunData(train, test, facts, lambda split, i: BadRows.name(at(split, kept[split][i])))


def _unlike(row: dict[str, Any], first: dict[str, Any]) -> str | None:
    """Return why a row with a prompt does not go with the first row, or None: TRL reads all as it reads the first."""
    chats = isinstance(first.get("prompt"), list)
    if not isinstance(row.get("prompt"), str if chats else list):
        return None
    expected = f"column 'prompt': expected {'messages' if chats else 'text'}, as in the first row"
    return f"{expected}, got {kind_of(row['prompt'])}"


def _further_columns(config: "RunConfig", train: "Dataset", test: "Dataset", used: Sequence[str]) -> list[str]:
    """Return the columns that settings name, but for those that are used.

    Raises:
        DataError: the rows lack a column that they need.
    """
    named = {key: config[key] for key in NAMING if config.values.get(key) is not None}
    for key, column in named.items():
        if column not in train.column_names:
            have = ", ".join(train.column_names)
            raise DataError(f"the training rows have no column {column!r}, which {key} names; they have {have}.")
    missing = [c for c in (*used, *(named.values())) if c not in test.column_names and c != named.get(OF_TRAINING)]
    if missing:
        raise DataError(f"the held-out rows have no column {missing[0]!r}, which the training rows have.")
    return [c for c in dict.fromkeys(named.values()) if c not in used]


def _as_read(config: "RunConfig", source: LoadedDataset) -> LoadedDataset:
    """Return the splits as they are read, with undecoded images, whose files are looked for next to the dataset."""
    path = Path(config["dataset_name"] or "").expanduser()
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    return replace(source, splits={name: undecoded(with_system(rows), folder) for name, rows in source.splits.items()})


def _split(config: "RunConfig", source: LoadedDataset) -> tuple["Dataset", "Dataset", str, Place]:
    """Return training rows, held-out rows, how those were chosen, and the place of a row."""
    train_name, test_name = config["dataset_train_split"], config["dataset_test_split"]
    train = _pick(config, source, "dataset_train_split")
    rows: dict[str, Sequence[int]]
    names: dict[str, str]
    asked = config.given("dataset_test_split"), config.given("holdout_fraction")
    if test_name not in source.splits and VALIDATION in source.splits and not any(asked):
        test_name = VALIDATION
    if test_name in source.splits:
        if config.given("holdout_fraction"):
            raise config.error("holdout_fraction", f"has no effect: the dataset has a split {test_name!r}.")
        test, held_out = source.splits[test_name], source.held_out or f"split {test_name!r}"
        if not len(test):
            raise DataError(f"{config['dataset_name']}: split {test_name!r} has no rows.")
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
        advice = "add rows, or name held-out ones by dataset_test_split"
        raise DataError(f"{config['dataset_name']}: one row cannot be both trained on and held out; {advice}.")
    size = min(max(1, round(config["holdout_fraction"] * count)), count - 1)
    order = numpy.random.RandomState(config["seed"]).permutation(count)
    return sorted(map(int, order[size:])), sorted(map(int, order[:size]))


def _form(train: "Dataset", config: "RunConfig") -> tuple[str, tuple[str, ...]]:
    """Return the form of the rows, and the columns that the trainer reads."""
    have, text = train.column_names, config["dataset_text_field"]
    check_preferences(train, text if config.given("dataset_text_field") else None)
    check_tools(have)
    check_unread(train[0])
    images = image_column(have)
    read = form_of(have, text, config.given("dataset_text_field"), config.recipe != "sft")
    if read is not None:
        form, needed = read
        if images is not None and form not in FORMS:
            raise DataError(
                f"the rows have images and {form}; with images expected messages, conversations, prompt and "
                f"completion, or {text}. Take the column {images} out to learn only text."
            )
        _check_mask_options(config, train, form)
        chat_prompts = form.startswith("prompt") and isinstance(train[0]["prompt"], list)
        extras = OPTIONAL_COLUMNS.get("messages" if chat_prompts else form, CHAT_COLUMNS)
        return form, (*needed, *(c for c in (*extras, images) if c in have))
    raise DataError(no_usable_column(have, text))


def _check_mask_options(config: "RunConfig", train: "Dataset", form: str) -> None:
    if form == "prompt" and config["lmbda"] < 1 and not config["seq_kd"]:
        advice = "set it to 1.0, and the student samples them, or seq_kd: true, and the teacher does what is left"
        raise config.error("lmbda", f"the rows have prompts and no completions; {advice}.")
    if form != "input_ids" and config.init_kwargs("dataset_kwargs").get("skip_prepare_dataset"):
        raise config.error("dataset_kwargs", f"skip_prepare_dataset needs rows of input_ids; the rows have {form}.")
    if config["completion_only_loss"] and form not in ("prompt-completion", "alpaca", "input_ids"):
        raise config.error("completion_only_loss", f"needs prompt and completion columns; the rows have {form}.")
    if config["exact_match"] and (form in ("prompt", "text", "input_ids") or image_column(train.column_names)):
        have = "images" if image_column(train.column_names) else form
        raise config.error("exact_match", f"needs chats, or prompts and completions, of text; the rows have {have}.")
    chat = form in CHAT_FORMS or isinstance(train[0].get("prompt"), list)
    masks = ("assistant_only_loss", "supervised_part", "last_turn_only")
    whole_rows = form == "text" or (form in ("messages", "conversations") and not any(config[key] for key in masks))
    if whole_rows and config.recipe != "sft" and (config["lmbda"] or config["seq_kd"]):
        raise DataError(NO_PROMPT)
    if config.given("alpaca_prompt") and form != "alpaca":
        raise config.error("alpaca_prompt", f"needs the columns instruction and output; the rows have {form}.")
    if config["alpaca_prompt"] == "stanford_text":
        chat = False
    for key in masks:
        if config[key] and not chat:
            raise config.error(key, f"needs rows of chat messages; the rows have plain {form}.")


def _learned(config: "RunConfig", form: str, train: "Dataset") -> str:
    """Say what of a row is supervised, for rows in the form that the trainer reads."""
    part = {"content": " without their headers", "message": " with their headers"}.get(
        config["supervised_part"] or "", ""
    )
    if config["assistant_only_loss"]:
        return f"the answers of each chat{part}"
    if form == "prompt":
        return "completions that are sampled"
    if form == "input_ids":
        masked = {"labels", "completion_mask", "assistant_masks"} & set(train.column_names)
        return f"what {' and '.join(sorted(masked))} say" if masked else EVERY
    if form == "prompt-completion" and config["completion_only_loss"] is not False:
        plain = isinstance(train[0]["prompt"], str) and config["alpaca_prompt"] != "stanford_text"
        return PLAIN if plain else "the completions"
    if form == "messages":
        return f"{USERS_TOO}{part}"
    return EVERY


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


def _good_rows(
    rows: Iterable,
    at: Callable[[int], tuple[str, int]],
    problem_of: Callable[[dict], str | None],
    bad: BadRows,
    digest: Any,
) -> dict[int, bytes]:
    """Return index and hash of every good row and update `digest`; note the others in `bad`."""
    hashes = {}
    for index, row in enumerate(rows):
        problem = problem_of(row)
        if problem:
            bad.add(at(index), problem)
            continue
        line = json.dumps(hashable(row), sort_keys=True, ensure_ascii=False, default=str).encode() + b"\n"
        digest.update(line)
        hashes[index] = hashlib.sha256(line).digest()
        if has_empty_answer(row):
            bad.silent.append(at(index))
    return hashes
