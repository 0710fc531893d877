"""Read JSON lines and JSON arrays into columns. Every row that cannot be read is noted with its line, and left out."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from .row_checks import BadRows, kind_of

if TYPE_CHECKING:
    from datasets import Dataset

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
    """Return the rows of JSON lines or of one JSON array, their lines if they have any, and how many lines are blank.

    Args:
        bad: takes the rows that are wrong.
        check: returns for column names what tells the problem of a row as it is in the file: Arrow makes floats of
            integers and text of nothing.

    Raises:
        DataError: an array that is no JSON; no row is right.
    """
    from datasets import Dataset

    rows, lines, blank = _array(path), None, 0
    if rows is None:
        numbered = list(enumerate(_byte_lines(path), 1))
        kept = [(number, line) for number, line in numbered if line.strip()]
        lines, rows = [number for number, _ in kept], [_parsed(line) for _, line in kept]
        blank = len(numbered) - len(kept)
    problems = _problems(rows, check)
    for i in sorted(problems):
        bad.add(place_in(path, lines, i), problems[i])
    good = [i for i in range(len(rows)) if i not in problems]
    if rows and not good:
        bad.check(even_if_skipped=True)
    names = dict.fromkeys(name for i in good for name in rows[i])
    table = Dataset.from_dict({name: [rows[i].get(name) for i in good] for name in names})
    return table, None if lines is None else [lines[i] for i in good], blank


def _problems(rows: list, check: Check) -> dict[int, str]:
    """Return what is wrong with the rows that are wrong, by their index."""
    found = {i: row if isinstance(row, str) else _problem(row) for i, row in enumerate(rows)}
    good = [i for i, problem in found.items() if problem is None]
    names = dict.fromkeys(name for i in good for name in rows[i])
    row_problem = check(list(names))
    if row_problem is not None:
        nothing = dict.fromkeys(names)
        found.update((i, row_problem({**nothing, **rows[i]})) for i in good)
        good = [i for i in good if found[i] is None]
    misfits = _misfits({name: [rows[i].get(name) for i in good] for name in names})
    found.update((good[position], problem) for position, problem in misfits.items())
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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        return f"expected Unicode text, got half of a surrogate pair alone (\\u{half:04x})"
    return None


def _depth(value: Any) -> int:
    if not isinstance(value, (list, dict)):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def _misfits(columns: dict[str, list]) -> dict[int, str]:
    """Return the problems of rows whose value does not fit into one Arrow column with those of most rows."""
    import pyarrow

    problems: dict[int, str] = {}
    for name, values in columns.items():
        try:
            pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):
            problems = {**_misfits_of(name, values), **problems}
    return problems


def _misfits_of(name: str, values: list) -> dict[int, str]:
    types = [_arrow_type(value) for value in values]
    exemplars = {kind: value for kind, value in zip(reversed(types), reversed(values), strict=True)}
    fitting: list[Any] = []
    wrong = set()
    for kind, _ in Counter(types).most_common():
        if kind is not None and _arrow_type([*fitting, exemplars[kind]]) is not None:
            fitting.append(exemplars[kind])
        else:
            wrong.add(kind)
    usual = kind_of(next((value for value in fitting if value is not None), None))
    return {
        i: f"column {name!r}: expected {usual} as in most rows, got {_what(values[i], usual)}"
        for i, kind in enumerate(types)
        if kind in wrong
    }


def _what(value: Any, usual: str) -> str:
    kind = kind_of(value)
    return kind if kind != usual else f"{kind} of other values: {value!r:.80}"


def _arrow_type(value: Any) -> str | None:
    """Return the Arrow type of a value, None if there is none."""
    import pyarrow

    try:
        return str(pyarrow.array([value]).type)
    except (pyarrow.ArrowException, OverflowError):
        return None
