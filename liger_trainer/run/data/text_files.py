"""Read text files, packed or not: lines, JSON lines and arrays, CSV and TSV.

Every row of JSON that cannot be read is noted with its line, and left out.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.files import LINES, kind_of_file
from ...errors import DataError
from ...trainers.chat_rows import JsonAsWritten, encoded
from .row_checks import BadRows, kind_of

if TYPE_CHECKING:
    from datasets import Dataset


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
    for number, line in enumerate(_byte_lines(_content(path)), 1):
        try:
            yield number, line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: expected UTF-8 text: {error}. Save the file as UTF-8.") from None


def _content(path: Path) -> bytes:
    """Return the bytes of a file as UTF-8 without a byte order mark, unpacked if they are packed, whatever its name.

    Raises:
        DataError: they cannot be unpacked, or are not what they begin like.
    """
    content = path.read_bytes()
    unpack = next((unpack for mark, unpack in _UNPACK.items() if content.startswith(mark)), None)
    try:
        content = content if unpack is None else unpack(content)
        encoding = json.detect_encoding(content)  # by the mark, or by where the zeros of the first letters are
        if not encoding.startswith("utf-8"):
            content = content.decode(encoding).encode()
    except Exception as error:  # each kind of file has its own
        raise DataError(f"{path}: cannot be unpacked or decoded: {error}.") from None
    return content.removeprefix(b"\xef\xbb\xbf")


def _only_file(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name for name in archive.namelist() if not name.startswith("__MACOSX/") and not name.endswith("/")]
        if len(names) != 1:
            raise ValueError(f"expected one file in it, got {len(names)}; unpack it and name the folder")
        return archive.read(names[0])


def _of_zstandard(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.input_stream(pyarrow.BufferReader(content), compression="zstd").read()


# By the first bytes, since a name may say nothing of it, or something else.
_UNPACK = {
    b"\x1f\x8b": gzip.decompress, b"BZh": bz2.decompress, b"\xfd7zXZ": lzma.decompress, b"(\xb5/\xfd": _of_zstandard,
    b"PK\3\4": _only_file,
}  # fmt: skip


def _byte_lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
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
    content = _content(path)
    rows, lines, blank = _array(path, content), None, 0
    if rows is None:
        rows = _objects(content)
    if rows is None:
        numbered = list(enumerate(_byte_lines(content), 1))
        kept = [(number, line) for number, line in numbered if line.strip()]
        lines, rows = [number for number, _ in kept], [_parsed(line) for _, line in kept]
        blank = len(numbered) - len(kept)
    if len(rows) == 1 and bad.to_train and (around := _list_within(rows[0], check)):
        rows, lines = around, None
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


def _array(path: Path, content: bytes) -> list | None:
    """Return the elements of a file that is one JSON array; None for JSON lines, one of which may be a list."""
    if not content.lstrip().startswith(b"["):
        return None
    try:
        rows = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}. Save the file as UTF-8.") from None
    except RecursionError:
        raise DataError(f"{path}: nested too deep; expected at most {DEEPEST} levels.") from None
    except json.JSONDecodeError as error:
        if kind_of_file(path) in LINES:
            return None
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    return _rows_of(rows)


def _rows_of(values: list) -> list:
    """Return the elements of a list, with what is wrong with it, as text, in place of each text."""
    return ["expected a JSON object, got text" if isinstance(value, str) else value for value in values]


def _objects(content: bytes) -> list | None:
    """Return the rows of a file of JSON objects that take several lines each, as `jq` prints them; None for others."""
    content = content.strip()
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


def _list_within(row: Any, check: Check) -> list | None:
    """Return the rows that one JSON object holds in a list, such as "data"; None where it is a row itself."""
    if not isinstance(row, dict) or check(list(row)) is not None:
        return None
    lists = [value for value in row.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return _rows_of(lists[0]) if len(lists) == 1 else None


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


def read_table(path: str, texts: Sequence[str], separators: str) -> "Dataset":
    """Read a CSV or TSV file, whose empty cells are null. The first line says which of the separators it has.

    Raises:
        DataError: a column that is there twice; quotes that do not end, or end within a cell; a row with more cells
            than the first line, such as a text whose comma is not in quotes: pandas would take the first cell for a
            label of the row, and move the others to the left.
    """
    import pandas
    from datasets import Dataset

    text = _content(Path(path)).decode()
    first = next((line for line in text.splitlines() if line.strip()), "")
    separator = next((sign for sign in separators if sign in first), separators[0])
    limit = csv.field_size_limit(sys.maxsize)
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header = next((cells for cells in rows if "".join(cells).strip() or len(cells) > 1), [])
        twice = next((name for name in header if name and header.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{path}: the first line names the column {twice!r} twice. Rename one of them.")
        line = rows.line_num
        for cells in rows:
            start, line = line + 1, rows.line_num
            if len(cells) > len(header):
                raise DataError(
                    f"{path}:{start}: expected {len(header)} cells, as in the first line, got {len(cells)}. Put texts "
                    f"with {separator!r} in double quotes."
                )
    except csv.Error as error:
        raise DataError(f"{path}:{rows.line_num}: {error}. A quote within a text in quotes is written twice.") from None
    finally:
        csv.field_size_limit(limit)
    of_text: Any = dict.fromkeys(texts, str)
    how: Any = {"sep": separator, "converters": of_text, "keep_default_na": False, "na_values": [""]}
    return Dataset.from_pandas(pandas.read_csv(io.StringIO(text), **how), preserve_index=False)
