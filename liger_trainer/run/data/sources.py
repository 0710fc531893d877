"""Read rows from a demo, a local file, a directory, the hub or a TRL mixture. Every error names its file and line."""

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import plugins
from ...common.files import EXPECTED, LINES, PACKED, SUFFIXES, hint_of_folder, kind_of_file
from ...errors import ConfigError, DataError
from ...plugins import DEMO, TASK
from ...trainers.chat_rows import JsonAsWritten, encoded
from ...trainers.given_datasets import other_separator
from .row_checks import BadRows, form_of, kind_of, learned_answers, row_problem

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from ...config.run_config import RunConfig

# Read JSON lines and JSON arrays into columns. Every row that cannot be read is noted with its line, and left out.


_LONG_NUMBER = re.compile(r"\d{19}")
_SPACE = re.compile(r"\s*")
DEEPEST = 64  # levels of lists and mappings in a row
Check = Callable[[Sequence[str]], Callable[[dict], str | None] | None]


def place_in(path: Path, lines: Sequence[int] | None, index: int) -> tuple[str, int]:
    """Return the place of a row: the file, with braces for the number, and its line, or its index without lines."""
    name = str(path).replace("{", "{{").replace("}", "}}")
    return (f"{name}:{{}}", lines[index]) if lines else (f"{name}, row {{}}", index)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 text with their numbers, from 1.

    A line ends with a line feed, with or without a carriage return. U+2028, U+0085 and others that `str.splitlines`
    takes for an end may stand within a string. A byte order mark is left out.

    Raises:
        DataError: a line is not UTF-8.
    """
    for number, line in enumerate(_byte_lines(path), 1):
        try:
            yield number, line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: expected UTF-8 text: {error}. Save the file as UTF-8.") from None


def _content(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if it ends in .gz, without a byte order mark.

    Raises:
        DataError: it is not gzip, or has the mark of another encoding than UTF-8.
    """
    content = path.read_bytes()
    if path.suffix.lower() == PACKED:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be unpacked as gzip: {error}.") from None
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: expected UTF-8 text, got UTF-16. Save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE.")
    return content.removeprefix(b"\xef\xbb\xbf")


def _byte_lines(path: Path) -> list[bytes]:
    lines = _content(path).split(b"\n")
    return lines if lines[-1] else lines[:-1]


def read_json(path: Path, bad: BadRows, check: Check) -> "tuple[Dataset, list[int] | None, int]":
    """Return the rows of JSON lines, a JSON array or objects over several lines, the lines if any, and the blank lines.

    Args:
        bad: takes the rows that are wrong.
        check: returns for column names what tells the problem of a row as it is in the file: Arrow makes floats of
            integers.

    Raises:
        DataError: an array that is no JSON; an object around the list of rows; no row is right.
    """
    rows, lines, blank = _array(path), None, 0
    if rows is None:
        rows = _objects(path)
    if rows is None:
        numbered = list(enumerate(_byte_lines(path), 1))
        kept = [(number, line) for number, line in numbered if line.strip()]
        lines, rows = [number for number, _ in kept], [_parsed(line) for _, line in kept]
        blank = len(numbered) - len(kept)
    if len(rows) == 1 and bad.to_train:
        _refuse_wrapped(path, rows[0], check)
    problems = _problems(rows, check)
    for i in sorted(problems):
        bad.add(place_in(path, lines, i), problems[i])
    good = [i for i in range(len(rows)) if i not in problems]
    if rows and not good:
        bad.check(even_if_skipped=True)
    names = dict.fromkeys(name for i in good for name in rows[i])
    table = as_written({name: [rows[i].get(name) for i in good] for name in names})
    return table, None if lines is None else [lines[i] for i in good], blank


def as_written(columns: dict[str, list]) -> "Dataset":
    """Return a dataset of columns whose values come out as they are here.

    Arrow gives each mapping the keys of all others, and makes floats of integers among floats. So a column where that
    would happen, or whose values have no type in common, is one of JSON.
    """
    import pyarrow
    from datasets import Dataset, Features, List, concatenate_datasets

    plain, of_json = {}, {}
    for name, values in columns.items():
        try:
            array = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):
            array = None
        if array is not None and ("struct" not in str(array.type) or _dumped(array.to_pylist()) == _dumped(values)):
            plain[name] = values
        else:
            of_json[name] = values
    if not of_json:
        return Dataset.from_dict(plain)
    features: Any = Features()
    for name, values in of_json.items():
        lists = all(isinstance(value, (list, type(None))) for value in values)
        features[name] = List(JsonAsWritten()) if lists else JsonAsWritten()
        of_json[name] = [encoded({name: value}, features)[name] for value in values]
    parts = [Dataset.from_dict(plain)] if plain else []
    parts.append(Dataset.from_dict(of_json, features=features))
    return concatenate_datasets(parts, axis=1).select_columns(list(columns))


def _dumped(values: list) -> list[str]:
    return [json.dumps(value) for value in values]


def _problems(rows: list, check: Check) -> dict[int, str]:
    """Return what is wrong with the rows that are wrong, by their index."""
    found = {i: row if isinstance(row, str) else _problem(row) for i, row in enumerate(rows)}
    good = [i for i, problem in found.items() if problem is None]
    names = dict.fromkeys(name for i in good for name in rows[i])
    row_problem = check(list(names))
    if row_problem is not None:
        nothing = dict.fromkeys(names)
        found.update((i, row_problem({**nothing, **rows[i]})) for i in good)
    return {i: problem for i, problem in found.items() if problem is not None}


def _array(path: Path) -> list | None:
    """Return the elements of a file that is one JSON array; None for JSON lines, one of which may be a list."""
    content = _content(path)
    if not content.lstrip().startswith(b"["):
        return None
    try:
        rows = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from None
    except RecursionError:
        raise DataError(f"{path}: nested too deep; expected at most {DEEPEST} levels.") from None
    except json.JSONDecodeError as error:
        if kind_of_file(path) in LINES:
            return None
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    return rows


def _objects(path: Path) -> list | None:
    """Return the rows of a file of JSON objects that take several lines each, as `jq` prints them; None for others."""
    content = _content(path).strip()
    first, _, rest = content.partition(b"\n")
    if not (rest and first.startswith(b"{") and content.endswith(b"}")) or isinstance(_parsed(first), dict):
        return None
    rows, at = [], 0
    try:
        text = content.decode()
        while at < len(text):
            row, end = json.JSONDecoder().raw_decode(text, at)
            rows.append(row)
            at = _SPACE.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess] - it always matches
    except (ValueError, RecursionError):
        return None  # a wrong line of JSON lines
    return rows


def _refuse_wrapped(path: Path, row: Any, check: Check) -> None:
    """Raise DataError for an object around the list of rows, as SQuAD has it."""
    if not isinstance(row, dict) or check(list(row)) is not None:
        return
    lists = {name: value for name, value in row.items() if isinstance(value, list) and value}
    around = next((name for name, value in lists.items() if isinstance(value[0], dict)), None)
    if around is not None:
        raise DataError(
            f"{path}: expected a list of rows, or a row a line, got one JSON object that holds a list under "
            f"{around!r}. Write only that list into the file."
        )


def _parsed(line: bytes) -> Any:
    """Return the value of a line, or, as text, what is wrong with it; a value that is text is wrong as well."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        got = f"got the byte {line[error.start]:#04x} at character {error.start + 1}"
        return f"expected UTF-8 text, {got}: save the file as UTF-8"
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.doc[error.pos :].strip() == ",":
            return "expected one JSON object a line, got a comma after it"
        return f"not valid JSON: {error.msg.removesuffix(' at')} at character {error.colno}"
    except RecursionError:
        return f"expected at most {DEEPEST} levels of lists and mappings, got more"
    except ValueError:  # Python's limit for the digits of a number
        return "expected numbers of 64 bits, got one of thousands of digits"
    return "expected a JSON object, got text" if isinstance(value, str) else value


def _problem(row: Any) -> str | None:
    """Return what is wrong with a row, whatever its columns are."""
    if not isinstance(row, dict):
        return f"expected a JSON object, got {kind_of(row)}"
    text = json.dumps(row, ensure_ascii=False)
    if text.count("[") + text.count("{") > DEEPEST and _depth(row) > DEEPEST:
        return f"expected at most {DEEPEST} levels of lists and mappings, got more"
    if _LONG_NUMBER.search(text) and not _fits(row):
        return "expected numbers of 64 bits, got a longer one"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        return f"expected Unicode text, got one half of a surrogate pair (\\u{half:04x})"
    return None


def _fits(value: Any) -> bool:
    """Return whether every integer has at most 64 bits, which is what Arrow and readers of JSON take."""
    if isinstance(value, (list, dict)):
        return all(map(_fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _depth(value: Any) -> int:
    if not isinstance(value, (list, dict)):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


# Columns of a CSV file that are text whatever their cells look like: "42", "NA" and "null" are answers too.
_TEXTS = ("prompt", "completion", "instruction", "input", "output", "system")
_HELD_OUT = re.compile(r"(?<![a-z])(test|val|valid|validation|dev|eval|held_?out|holdout)(?![a-z])", re.IGNORECASE)
_FILE_OF_ARROW = b"ARROW1"  # how an IPC file (Feather) begins; `save_to_disk` writes IPC streams


# A file or split, with braces for a number, and the number of row i of a split in it.
Place = Callable[[str, int], tuple[str, int]]


@dataclass(frozen=True)
class LoadedDataset:
    """The splits of a dataset as they were read; `place` says where row i of a split comes from."""

    splits: dict[str, "Dataset"]
    place: Place
    licence: str | None = None
    held_out: str | None = None
    blank_lines: int = 0


def load_source(config: "RunConfig", bad: BadRows) -> LoadedDataset:
    """Load the dataset that `dataset_name` or `datasets` names.

    Args:
        bad: takes the rows that cannot be read; they are left out.

    Raises:
        ConfigError: there is no such dataset.
        DataError: a file of it cannot be read.
    """
    name = config["dataset_name"]
    if config["datasets"]:
        return _load_mixture(config)
    path = Path(name).expanduser()
    if config["task_config"] is not None and not name.startswith(TASK):
        raise config.error("task_config", f"belongs to a task, {TASK}...; leave it out for {name} (~task_config).")
    if config["dataset_config"] is not None and (name.startswith((DEMO, TASK)) or path.exists()):
        raise config.error("dataset_config", f"has no effect: {name} is not a dataset of the hub.")
    if name.startswith(DEMO):
        return _load_demo(config)
    if name.startswith(TASK):
        if config["exact_match"]:
            raise config.error("exact_match", "has no effect: a task's own checker always counts; leave it out.")
        rows = plugins.load(TASK).load_task(config)
        return LoadedDataset({"train": rows.train, "test": rows.test}, _row_of, rows.licence, rows.held_out)
    if path.is_file():
        return _load_files(config, bad, {"train": [path]})
    if path.is_dir():
        return _load_directory(config, bad, path)
    if path.is_absolute() or name.startswith((".", "~")) or kind_of_file(path) in SUFFIXES:
        raise config.error("dataset_name", f"no such file or directory: {name}{hint_of_folder(config.source, name)}")
    return _load_hub(config)


def _by_name(splits: "DatasetDict") -> dict[str, "Dataset"]:
    return {str(name): rows for name, rows in splits.items()}


def _row_of(split: str, index: int) -> tuple[str, int]:
    return f"row {{}} of the {split} rows", index


def _load_demo(config: "RunConfig") -> LoadedDataset:
    try:
        demo = plugins.load(DEMO).demo_dataset(config["dataset_name"].removeprefix(DEMO))
    except ConfigError as error:
        raise config.error("dataset_name", str(error)) from None
    held_out = f"{len(demo.held_out_modules)} whole modules: {', '.join(demo.held_out_modules)}"
    return LoadedDataset({"train": demo.train, "test": demo.test}, _row_of, demo.licence, held_out)


def _load_hub(config: "RunConfig") -> LoadedDataset:
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
    return LoadedDataset(_by_name(loaded), _row_of, ", ".join(sorted(licences)) or None)


def _load_mixture(config: "RunConfig") -> LoadedDataset:
    from trl import get_dataset

    try:
        loaded = get_dataset(config.mixture_args())
    except (FileNotFoundError, ConnectionError, OSError, ValueError, KeyError) as error:
        raise config.error("datasets", f"the mixture could not be loaded: {error}") from None
    share = config["test_split_size"]
    return LoadedDataset(
        _by_name(loaded), _row_of, held_out=f"{share:.0%} of the rows, drawn by TRL" if share else None
    )


def _load_directory(config: "RunConfig", bad: BadRows, path: Path) -> LoadedDataset:
    import datasets

    try:
        if (path / "dataset_dict.json").is_file():
            return LoadedDataset(_by_name(datasets.DatasetDict.load_from_disk(str(path))), _row_of)
        if (path / "state.json").is_file():
            return LoadedDataset({"train": datasets.Dataset.load_from_disk(str(path))}, _row_of)
    except Exception as error:  # json, pyarrow and datasets each have their own
        raise DataError(f"{path}: cannot be read as the output of save_to_disk: {error}") from None
    candidates = sorted(p for p in path.iterdir() if kind_of_file(p) in SUFFIXES)
    if not candidates:
        below = sorted({p.parent for p in path.glob("*/*") if kind_of_file(p) in SUFFIXES or p.name == "state.json"})
        hint = f" There are some in {', '.join(map(str, below))}; name one folder." if below else ""
        expected = f"{EXPECTED}, or the output of save_to_disk"
        raise config.error("dataset_name", f"{path} holds no dataset; expected {expected}.{hint}")
    names = {config["dataset_train_split"], config["dataset_test_split"]}
    files: dict[str, list[Path]] = {}
    for file in candidates:  # train.jsonl, train-00000-of-00002.parquet
        stem = Path(file.stem).stem if file.suffix.lower() == PACKED else file.stem
        split = next((n for n in names if stem == n or stem.startswith(f"{n}-")), None)
        files.setdefault(split or "", []).append(file)
    if list(files) == [""]:  # no file is named after a split: all are training rows
        held_out = [file.name for file in candidates if _HELD_OUT.search(file.stem)]
        if held_out and len(held_out) < len(candidates):
            reason = f"{path} holds files that look held out ({', '.join(held_out)}) beside others. Name each after its"
            raise config.error("dataset_name", f"{reason} split, as in train.jsonl and test.jsonl, or take one file.")
        return _load_files(config, bad, {config["dataset_train_split"]: candidates})
    if "" in files:
        others = ", ".join(p.name for p in files[""])
        hint = "name every file after its split, or none"
        raise config.error("dataset_name", f"{path} holds files of no split ({others}); {hint}.")
    return _load_files(config, bad, files)


def _load_files(config: "RunConfig", bad: BadRows, files: dict[str, list[Path]]) -> LoadedDataset:
    """Read each split from its files, and remember the line of each row."""
    splits, places, blank = {}, {}, 0
    for split, paths in files.items():
        parts, where = [], []
        for path in paths:
            part, lines, skipped = _read_file(config, bad, path)
            parts.append(part)
            where.append((len(part), path, lines))
            blank += skipped
        splits[split] = parts[0] if len(parts) == 1 else _joined(parts, split)
        places[split] = where

    def place(split: str, index: int) -> tuple[str, int]:
        for length, path, lines in places[split]:
            if index < length:
                return place_in(path, lines, index)
            index -= length
        raise AssertionError(f"row {index} of {split} is in no file")

    return LoadedDataset(splits, place, blank_lines=blank)


def _joined(parts: list["Dataset"], split: str) -> "Dataset":
    """Return the rows of several files, such as CSV and JSON, whose columns may have other types in each."""
    import datasets

    try:
        return datasets.concatenate_datasets(parts)
    except ValueError as error:
        try:
            names = dict.fromkeys(name for part in parts for name in part.column_names)
            return as_written({name: [dict(row).get(name) for part in parts for row in part] for name in names})
        except (TypeError, ValueError):  # images, among others
            raise DataError(f"the files of split {split!r} do not fit together: {error}") from None


def _read_file(config: "RunConfig", bad: BadRows, path: Path) -> tuple["Dataset", list[int] | None, int]:
    """Return the rows of a file, their lines if rows are lines, and the number of blank lines left out."""
    import datasets

    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty.")
    kind = kind_of_file(path)
    if kind in (".json", *LINES):
        return read_json(path, bad, partial(_problem_in, config, bad))
    if kind == ".txt":
        numbered = list(numbered_lines(path))
        kept = [(n, line) for n, line in numbered if line.strip()]
        rows = datasets.Dataset.from_dict({config["dataset_text_field"]: [line for _, line in kept]})
        return rows, [n for n, _ in kept], len(numbered) - len(kept)
    texts = *_TEXTS, config["dataset_text_field"]
    readers = {
        ".csv": partial(_read_csv, texts=texts), ".tsv": partial(_read_csv, texts=texts, separator="\t"),
        ".parquet": datasets.Dataset.from_parquet, ".arrow": _read_arrow,
    }  # fmt: skip
    read = readers.get(kind)
    if read is None:
        raise config.error("dataset_name", f"{path.name}: expected {EXPECTED}.")
    if kind in (".csv", ".tsv"):
        _check_cells(path, "," if kind == ".csv" else "\t")
    try:
        loaded = read(str(path))
    except Exception as error:  # pyarrow, pandas and datasets each have their own
        cause = error.__cause__ or error
        advice = ". Save it as UTF-8" if isinstance(cause, UnicodeDecodeError) else ""
        raise DataError(f"{path}: cannot be read as {kind[1:]}: {cause}{advice}") from None
    assert isinstance(loaded, datasets.Dataset)
    return loaded, None, 0


def _check_cells(path: Path, separator: str) -> None:
    """Raise DataError for a row with more cells than the first line, such as a text whose comma is not in quotes.

    pandas would take the first cell for a label of the row, and move the others one column to the left.
    """
    opened: Any = gzip.open if path.suffix.lower() == PACKED else open
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=separator)
            header = next((cells for cells in rows if "".join(cells).strip() or len(cells) > 1), [])
            line = rows.line_num
            for cells in rows:
                start, line = line + 1, rows.line_num
                if len(cells) > len(header):
                    quoted = f"Put texts with {'a tab' if separator == chr(9) else 'a comma'} in double quotes."
                    raise DataError(
                        f"{path}:{start}: expected {len(header)} cells, as in the first line, got {len(cells)}. "
                        f"{other_separator(header) or quoted}"
                    )
    except (csv.Error, OSError, EOFError, zlib.error, UnicodeDecodeError):
        return  # who reads it says what is wrong
    finally:
        csv.field_size_limit(limit)


def _read_csv(path: str, texts: Sequence[str], separator: str = ",") -> "Dataset":
    """Read a CSV file, whose empty cells are null."""
    import datasets

    of_text: dict[str | int, Callable] = dict.fromkeys(texts, str)
    how: dict[str, Any] = {"converters": of_text, "keep_default_na": False, "na_values": [""]}
    return datasets.Dataset.from_csv(path, sep=separator, **how)


def _read_arrow(path: str) -> "Dataset":
    """Read an IPC stream, as `save_to_disk` writes it, or an IPC file, which is Feather."""
    import datasets
    import pyarrow
    from datasets.table import InMemoryTable

    with Path(path).open("rb") as file:
        is_stream = file.read(len(_FILE_OF_ARROW)) != _FILE_OF_ARROW
    if is_stream:
        return datasets.Dataset.from_file(path)
    with pyarrow.memory_map(path) as source:
        return datasets.Dataset(InMemoryTable(pyarrow.ipc.open_file(source).read_all()))


def _problem_in(config: "RunConfig", bad: BadRows, columns: Sequence[str]) -> Callable[[dict], str | None] | None:
    """Return the check of rows with these columns, as they are in the file; None where they have no form."""
    text = config["dataset_text_field"]
    read = form_of(columns, text, config.given("dataset_text_field"), config.recipe != "sft")
    if read is None or not bad.to_train:
        return None
    return partial(row_problem, form=read[0], text=text, vocabulary=bad.vocabulary, learned=learned_answers(config))
