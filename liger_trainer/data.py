"""The rows of a run: loaded, split, checked one by one, counted and hashed, before any weight is loaded.

A dataset is a demo name, a local file, a directory, a hub id or a TRL mixture. Its rows have one of the forms that
`SFTTrainer` takes; a row of another form is an error that says where it stands, not a stack trace an hour later.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from .run_config import RunConfig

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
# columns that TRL reads beside those of the form
CHAT_COLUMNS = ("tools", "chat_template_kwargs")
TOKEN_COLUMNS = ("labels", "completion_mask", "assistant_masks", "position_ids", "seq_lengths")


@dataclass(frozen=True)
class DataFacts:
    """What is known about the rows; printed at the start and written to metrics.json."""

    name: str
    form: str
    """messages, prompt-completion, conversations, text or input_ids"""
    columns: tuple[str, ...]
    """of the dataset as it came"""
    columns_used: tuple[str, ...]
    train_rows: int
    test_rows: int
    held_out: str
    """how the test rows were chosen"""
    sha256: str
    """of the rows used, as JSON lines with sorted keys, train before test"""
    licence: str | None
    test_rows_seen_in_training: int
    """held-out rows that are, word for word, training rows too"""
    blank_lines_skipped: int = 0


@dataclass(frozen=True)
class RunData:
    """The two splits of a run and the facts about them."""

    train: "Dataset"
    test: "Dataset"
    facts: DataFacts


@dataclass(frozen=True)
class _Source:
    """A dataset as it came: its splits, and how to say where row i of a split stands."""

    splits: dict[str, "Dataset"]
    place: Callable[[str, int], str]
    licence: str | None = None
    held_out: str | None = None
    blank_lines: int = 0


def load_run_datasets(config: "RunConfig") -> RunData:
    """Load and check the training and the held-out rows that `config` names.

    Raises:
        ConfigError: no such file, directory, dataset or split.
        DataError: no rows, no usable column, JSON that cannot be read, a row of the wrong form.
    """
    source = _load(config)
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
        blank_lines_skipped=source.blank_lines,
    )
    return RunData(train, test, facts)


def _load(config: "RunConfig") -> _Source:
    name = config["dataset_name"]
    if config["datasets"]:
        return _load_mixture(config)
    path = Path(name).expanduser()
    if config["dataset_config"] is not None and (name.startswith("demo:") or path.exists()):
        raise config.error("dataset_config", f"has no effect: {name} is not a dataset of the hub.")
    if name.startswith("demo:"):
        return _load_demo(config)
    if path.is_file():
        return _load_files(config, {"train": [path]})
    if path.is_dir():
        return _load_directory(config, path)
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix in SUFFIXES:
        raise config.error("dataset_name", f"no such file or directory: {name}")
    return _load_hub(config)


def _by_name(splits: "DatasetDict") -> dict[str, "Dataset"]:
    return {str(name): rows for name, rows in splits.items()}


def _row_of(split: str, index: int) -> str:
    return f"row {index} of the {split} rows"


def _load_demo(config: "RunConfig") -> _Source:
    from .demo import demo_dataset

    try:
        demo = demo_dataset(config["dataset_name"].removeprefix("demo:"))
    except ConfigError as error:
        raise config.error("dataset_name", str(error)) from None
    held_out = f"{len(demo.held_out_modules)} whole modules: {', '.join(demo.held_out_modules)}"
    return _Source({"train": demo.train, "test": demo.test}, _row_of, demo.licence, held_out)


def _load_hub(config: "RunConfig") -> _Source:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    name = config["dataset_name"]
    try:
        loaded = datasets.load_dataset(name, name=config["dataset_config"])
    except DatasetNotFoundError as error:
        reason = f"neither a file or directory here nor a dataset of the hub that can be read: {error}"
        raise config.error("dataset_name", reason) from None
    except (ConnectionError, OSError) as error:  # offline mode is a ConnectionError
        reason = f"there is no file or directory {name}, and the hub could not be asked: {error}"
        raise config.error("dataset_name", reason) from None
    except ValueError as error:  # an unknown configuration, among others
        raise config.error("dataset_config", str(error)) from None
    assert isinstance(loaded, datasets.DatasetDict)
    licences = {split.info.license for split in loaded.values() if split.info.license}
    return _Source(_by_name(loaded), _row_of, ", ".join(sorted(licences)) or None)


def _load_mixture(config: "RunConfig") -> _Source:
    from trl import get_dataset

    try:
        loaded = get_dataset(config.mixture_args())
    except (FileNotFoundError, ConnectionError, OSError, ValueError, KeyError) as error:
        raise config.error("datasets", f"the mixture could not be loaded: {error}") from None
    share = config["test_split_size"]
    return _Source(_by_name(loaded), _row_of, held_out=f"{share:.0%} of the rows, drawn by TRL" if share else None)


def _load_directory(config: "RunConfig", path: Path) -> _Source:
    import datasets

    if (path / "dataset_dict.json").is_file():
        return _Source(_by_name(datasets.DatasetDict.load_from_disk(str(path))), _row_of)
    if (path / "state.json").is_file():
        return _Source({"train": datasets.Dataset.load_from_disk(str(path))}, _row_of)
    found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
    if not found:
        expected = f"a file ending in {', '.join(SUFFIXES)}, or the output of save_to_disk"
        raise config.error("dataset_name", f"{path} holds no dataset; expected {expected}.")
    names = {config["dataset_train_split"], config["dataset_test_split"]}
    files: dict[str, list[Path]] = {}
    for file in found:  # train.jsonl, train-00000-of-00002.parquet
        split = next((n for n in names if file.stem == n or file.stem.startswith(f"{n}-")), None)
        files.setdefault(split or "", []).append(file)
    if list(files) == [""]:  # no file is named after a split: all are training rows
        return _load_files(config, {config["dataset_train_split"]: found})
    if "" in files:
        others = ", ".join(p.name for p in files[""])
        hint = "name every file after its split, or none"
        raise config.error("dataset_name", f"{path} holds files of no split ({others}); {hint}.")
    return _load_files(config, files)


def _load_files(config: "RunConfig", files: dict[str, list[Path]]) -> _Source:
    """Each split from its files, with the line of each row of JSON lines remembered."""
    import datasets

    splits, places, blank = {}, {}, 0
    for split, paths in files.items():
        parts, where = [], []
        for path in paths:
            part, lines, skipped = _read_file(config, path)
            parts.append(part)
            where.append((len(part), path, lines))
            blank += skipped
        try:
            splits[split] = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
        except ValueError as error:  # the files have different columns
            raise DataError(f"the files of split {split!r} do not fit together: {error}") from None
        places[split] = where

    def place(split: str, index: int) -> str:
        for length, path, lines in places[split]:
            if index < length:
                return _place(path, lines, index)
            index -= length
        raise AssertionError(f"row {index} of {split} is in no file")

    return _Source(splits, place, blank_lines=blank)


def _read_file(config: "RunConfig", path: Path) -> tuple["Dataset", list[int] | None, int]:
    """The rows of a file, the line of each where rows are lines, and the number of blank lines left out."""
    import datasets

    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty.")
    if path.suffix in (".json", ".jsonl"):
        rows, lines, blank = _read_json(path)
        return _to_dataset(rows, path, lines), lines, blank
    if path.suffix == ".txt":
        numbered = [(n, line) for n, line in enumerate(_text(path).splitlines(), 1)]
        kept = [(n, line) for n, line in numbered if line.strip()]
        rows = datasets.Dataset.from_dict({config["dataset_text_field"]: [line for _, line in kept]})
        return rows, [n for n, _ in kept], len(numbered) - len(kept)
    if path.suffix not in (".csv", ".parquet"):
        raise config.error("dataset_name", f"{path.name}: expected a file ending in {', '.join(SUFFIXES)}.")
    read = datasets.Dataset.from_csv if path.suffix == ".csv" else datasets.Dataset.from_parquet
    try:
        loaded = read(str(path))
    except Exception as error:  # pyarrow, pandas and datasets each have their own
        cause = error.__cause__ or error
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]}: {cause}") from None
    assert isinstance(loaded, datasets.Dataset)
    return loaded, None, 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from None


def _place(path: Path, lines: list[int] | None, index: int) -> str:
    return f"{path}:{lines[index]}" if lines else f"{path}, row {index}"


def _read_json(path: Path) -> tuple[list[dict], list[int] | None, int]:
    """JSON lines, or one JSON array of objects (which has no line for a row)."""
    text = _text(path)
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
        lines, blank = None, 0
    else:
        numbered = list(enumerate(text.splitlines(), 1))
        kept = [(n, line) for n, line in numbered if line.strip()]
        lines, blank = [n for n, _ in kept], len(numbered) - len(kept)
        rows = list(_parse_lines(kept, path))
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{_place(path, lines, index)}: expected a JSON object, got {_kind(row)}.")
    return rows, lines, blank


def _parse_lines(numbered: list[tuple[int, str]], path: Path) -> Iterator[Any]:
    """Every line as JSON; of the lines that are none, the first three are named."""
    wrong = []
    for number, line in numbered:
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            wrong.append(f"{path}:{number}: not valid JSON: {error.msg} at character {error.colno}")
    if wrong:
        more = [f"and {len(wrong) - 3} more lines"] if len(wrong) > 3 else []
        raise DataError("\n".join(wrong[:3] + more))


def _to_dataset(rows: list[dict], path: Path, lines: list[int] | None) -> "Dataset":
    import datasets
    import pyarrow

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        return datasets.Dataset.from_dict(columns)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError, OverflowError):
        raise _mixed_types(columns, path, lines) from None


def _mixed_types(columns: dict[str, list], path: Path, lines: list[int] | None) -> DataError:
    """The first value that does not go into one Arrow column with the first of its column."""
    import pyarrow

    for name, values in columns.items():
        first = next((v for v in values if v is not None), None)
        for index, value in enumerate(values):
            try:
                pyarrow.array([first, value])
            except (pyarrow.ArrowException, OverflowError):
                expected = f"expected {_kind(first)} as in the rows before, got {_kind(value)}"
                return DataError(f"{_place(path, lines, index)}: column {name!r}: {expected}.")
    return DataError(f"{path}: the rows do not have one type a column.")


# Splits


def _split(config: "RunConfig", source: _Source) -> tuple["Dataset", "Dataset", str, Callable[[str, int], str]]:
    """Training rows, held-out rows, how those were chosen, and where row i of either stands."""
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


def _pick(config: "RunConfig", source: _Source, key: str) -> "Dataset":
    split = config[key]
    if split not in source.splits:
        raise _no_such_split(config, source, key)
    if len(source.splits[split]) == 0:
        raise DataError(f"{config['dataset_name']}: split {split!r} has no rows.")
    return source.splits[split]


def _no_such_split(config: "RunConfig", source: _Source, key: str) -> ConfigError:
    return config.error(key, f"no split {config[key]!r}; the dataset has {', '.join(map(repr, source.splits))}.")


def _hold_out(config: "RunConfig", count: int) -> tuple[list[int], list[int]]:
    import numpy

    if count < 2:
        raise DataError(f"{config['dataset_name']}: one row cannot be both trained on and held out.")
    size = min(max(1, round(config["holdout_fraction"] * count)), count - 1)
    order = numpy.random.RandomState(config["seed"]).permutation(count)
    return sorted(map(int, order[size:])), sorted(map(int, order[:size]))


# Rows


def _form(train: "Dataset", config: "RunConfig") -> tuple[str, tuple[str, ...]]:
    """The form of the rows, and the columns that are kept: those that the trainer reads."""
    have, text = train.column_names, config["dataset_text_field"]
    if "image" in have or "images" in have:
        raise DataError(f"the rows hold images (columns: {', '.join(have)}); only text is supported.")
    for form, needed in (
        ("input_ids", ("input_ids",)),
        ("prompt-completion", ("prompt", "completion")),
        ("messages", ("messages",)),
        ("conversations", ("conversations",)),
        ("text", (text,)),
    ):
        if all(column in have for column in needed):
            _check_mask_options(config, train, form)
            extras = TOKEN_COLUMNS if form == "input_ids" else CHAT_COLUMNS
            return form, (*needed, *(c for c in extras if c in have))
    raise DataError(
        f"no usable column. Expected messages, or prompt and completion, or {text} (named by dataset_text_field), "
        f"or input_ids; the rows have: {', '.join(have)}."
    )


def _check_mask_options(config: "RunConfig", train: "Dataset", form: str) -> None:
    if config["completion_only_loss"] and form not in ("prompt-completion", "input_ids"):
        raise config.error("completion_only_loss", f"needs prompt and completion columns; the rows have {form}.")
    chat = form in ("messages", "conversations") or isinstance(train[0].get("prompt"), list)
    if config["assistant_only_loss"] and not chat:
        raise config.error("assistant_only_loss", f"needs rows of chat messages; the rows have plain {form}.")


def _check_and_hash(
    rows: Iterable, form: str, config: "RunConfig", digest: Any, place: Callable[[int], str]
) -> Iterator[bytes]:
    """The hash of every row, in order; `digest` takes in all of them. The first wrong row is a DataError."""
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
        return None if good else f"column 'input_ids': expected a list of integers, got {_kind(ids)}"
    if form == "prompt-completion":
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return None
        return _chat_problem(prompt, "prompt") or _chat_problem(completion, "completion")
    if form == "text":
        value = row[text]
        return None if isinstance(value, str) else f"column {text!r}: expected text, got {_kind(value)}"
    return _chat_problem(row[form], form)


def _chat_problem(messages: Any, column: str) -> str | None:
    role, content = ("from", "value") if column == "conversations" else ("role", "content")
    wanted = f"column {column!r}: expected a list of {{{role}, {content}}} messages"
    if column in ("prompt", "completion"):
        wanted = f"column {column!r}: expected text, or in both columns a list of {{role, content}} messages"
    if not isinstance(messages, list) or not messages:
        return f"{wanted}, got {_kind(messages)}"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get(role), str):
            return f"{wanted}, got a message {message!r:.80}"
        said = message.get(content)
        if not isinstance(said, (str, list)) and not message.get("tool_calls"):
            return f"{wanted}, got a message whose {content} is {_kind(said)}"
    return None


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true or false", int: "an integer", float: "a number", type(None): "null"}
    if isinstance(value, (list, dict)):
        return f"{'an empty' if not value else 'a'} {'list' if isinstance(value, list) else 'mapping'}"
    return names.get(type(value), type(value).__name__)
