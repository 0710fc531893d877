"""Read JSON lines and JSON arrays into columns. Every row that cannot be read is noted with its line, and left out."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ...trainers.chat_rows import JsonAsWritten, encoded
from .row_checks import BadRows, kind_of

if TYPE_CHECKING:
    from datasets import Dataset

_LONG_NUMBER = re.compile(r"\d{19}")
DEEPEST = 64  # levels of lists and mappings in a row
Check = Callable[[Sequence[str]], Callable[[dict], str | None] | None]


def place_in(path: Path, lines: Sequence[int] | None, index: int) -> tuple[str, int]:
    """Return the place of a row: the file, with braces for the number, and its line, or its index without lines."""
    name = str(path).replace("{", "{{").replace("}", "}}")
    return (f"{name}:{{}}", lines[index]) if lines else (f"{name}, row {{}}", index)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 text with their numbers, from 1.

    A line ends with a line feed, alone or after a carriage return. U+2028, U+0085 and others that `str.splitlines`
    takes for an end may stand within a string. A byte order mark is left out.

    Raises:
        DataError: a line is not UTF-8.
    """
    for number, line in enumerate(_byte_lines(path), 1):
        try:
            yield number, line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: expected UTF-8 text: {error}") from None


def _byte_lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return lines if lines[-1] else lines[:-1]


def read_json(path: Path, bad: BadRows, check: Check) -> "tuple[Dataset, list[int] | None, int]":
    """Return the rows of JSON lines, of a JSON array or of one JSON object, their lines if any, and the blank lines.

    Args:
        bad: takes the rows that are wrong.
        check: returns for column names what tells the problem of a row as it is in the file: Arrow makes floats of
            integers.

    Raises:
        DataError: an array that is no JSON; an object around the list of rows; no row is right.
    """
    rows, lines, blank = _array(path), None, 0
    if rows is None:
        rows = _one_object(path)
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
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content.lstrip().startswith(b"["):
        return None
    try:
        rows = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from None
    except RecursionError:
        raise DataError(f"{path}: nested too deep; expected at most {DEEPEST} levels.") from None
    except json.JSONDecodeError as error:
        if path.suffix == ".jsonl":
            return None
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    return rows


def _one_object(path: Path) -> list | None:
    """Return the row of a file that is one JSON object over several lines; None for any other file."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    first, _, rest = content.partition(b"\n")
    if not (rest and first.startswith(b"{") and content.endswith(b"}")) or isinstance(_parsed(first), dict):
        return None
    value = _parsed(content)
    return [value] if isinstance(value, dict) else None


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
        return f"expected UTF-8 text, got the byte {line[error.start]:#04x} at character {error.start + 1}"
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at character {error.colno}"
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
        return f"expected Unicode text, got half of a surrogate pair alone (\\u{half:04x})"
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
