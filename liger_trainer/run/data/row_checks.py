"""What a row may be: the forms that a run reads, what is wrong with a row, and what becomes of wrong rows."""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...errors import DataError
from ...trainers.chat_rows import (
    ALPACA,
    ALPACA_OPTIONAL,
    IMAGE,
    NO_ANSWERS,
    ROLES,
    message_problem,
    no_answer,
    tidy,
    tools_problem,
)
from ...trainers.images import COLUMNS

if TYPE_CHECKING:
    from datasets import Dataset

    from ...config.run_config import RunConfig

# Columns of images in the rows of a run: files named in them, what can be wrong, and what their hash is made of.
#
# A column `image` has one image a row, `images` a list. An image is the path of a file, relative to the folder of the
# dataset, or what `datasets` makes of one: bytes and a path. Images are not decoded until a batch is made.


ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}  # a format's last bytes, of which a file that was cut off has none
TAIL = 4096  # bytes, among which they are looked for
FORMS = ("messages", "conversations", "prompt-completion", "alpaca", "text")


def image_column(columns: Any) -> str | None:
    """Return the name of the column with images, None where there is none."""
    return next((name for name in COLUMNS if name in columns), None)


def undecoded(rows: "Dataset", folder: Path | None) -> "Dataset":
    """Return rows whose images are dictionaries of bytes and path; None where a row has none.

    Args:
        folder: where relative paths begin; None: they stay as they are.

    Raises:
        DataError: the column has something else.
    """
    from datasets import Image, List
    from pyarrow import ArrowException

    name = image_column(rows.column_names)
    if name is None:
        return rows
    feature: Any = rows.features[name]
    image = Image(decode=False)
    if (
        getattr(feature, "dtype", None) == "string"
        or getattr(getattr(feature, "feature", None), "dtype", "") == "string"
    ):
        rows = rows.map(lambda row: {name: _found(row[name], folder)})
    try:
        return rows.cast_column(name, List(image) if name == "images" else image)
    except (TypeError, ValueError, ArrowException) as error:
        raise DataError(
            f"column {name!r}: expected {'lists of images' if name == 'images' else 'images'}, each the path of a file "
            f"or bytes and path, got {feature}: {error}"
        ) from None


def _found(value: Any, folder: Path | None) -> Any:
    if isinstance(value, list):
        return [_found(entry, folder) for entry in value]
    if value is None or folder is None or "://" in value or Path(value).is_absolute():
        return value
    return str(folder / value)


def decoded(rows: "Dataset") -> "Dataset":
    """Return rows whose images are read when a row is: the opposite of `undecoded`."""
    from datasets import Image, List

    name = image_column(rows.column_names)
    if name is None:
        return rows
    return rows.cast_column(name, List(Image()) if name == "images" else Image())


def images_of(row: dict[str, Any]) -> list[Any]:
    """Return the images of a row, as they are."""
    name = image_column(row)
    value = None if name is None else row[name]
    return value if isinstance(value, list) else [] if value is None else [value]


def image_problem(row: dict[str, Any]) -> str | None:
    """Return what is wrong with the images of an undecoded row, or None."""
    from PIL import Image, UnidentifiedImageError

    name, images = image_column(row), images_of(row)
    if name is None or row[name] is None:
        return f"column {name!r}: expected {'a list of images' if name == 'images' else 'an image'}, got null"
    for image in images:
        where = image["path"] if isinstance(image, dict) else image
        try:
            if image is None or not (image["bytes"] or image["path"]):
                return f"column {name!r}: expected images, got one without bytes and path"
            with io.BytesIO(image["bytes"]) if image["bytes"] else Path(image["path"]).open("rb") as file:
                _read(Image.open(file), file)
        except FileNotFoundError:
            return f"an image is not there, got {where}"
        except (UnidentifiedImageError, OSError) as error:
            return f"an image cannot be read, got {where or 'bytes'}: {error}"
    places = _places(row)
    if places is not None and places != len(images):
        return f"expected as many images as its messages have places for, got {len(images)} for {places}"
    return None


def _read(image: Any, file: IO[bytes]) -> None:
    """Decode an image whose file seems to be cut off: Pillow says so only then. Decoding all would take minutes."""
    end = ENDS.get(image.format)
    file.seek(max(0, file.seek(0, io.SEEK_END) - TAIL))
    if end is not None and end not in file.read():
        image.load()


def _places(row: dict[str, Any]) -> int | None:
    """Count the places that messages name for images; None where they name none, and TRL chooses them."""
    columns = [row.get(name) for name in ("messages", "prompt", "conversations")]
    messages = next((column for column in columns if isinstance(column, list)), [])
    contents = [message.get("content", message.get("value")) for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    marks = sum(content.count(IMAGE) for content in contents if isinstance(content, str))
    if any(isinstance(content, list) for content in contents):
        return sum(part.get("type") == "image" for part in parts)
    return marks or None


def hashable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with hashes in place of the bytes of its images, and sizes in place of their files."""
    name = image_column(row)
    if name is None:
        return row
    return {**row, name: [_hash_of(image) for image in images_of(row)]}


def _hash_of(image: dict[str, Any]) -> str:
    if image["bytes"]:
        return hashlib.sha256(image["bytes"]).hexdigest()
    file = Path(image["path"])
    return f"{file.name} of {file.stat().st_size} bytes"


# columns that are read in addition to those of the form
CHAT_COLUMNS = ("tools", "chat_template_kwargs")
TOKEN_COLUMNS = ("labels", "attention_mask", "completion_mask", "assistant_masks", "position_ids", "seq_lengths")
OPTIONAL_COLUMNS = {
    "input_ids": TOKEN_COLUMNS,
    "messages": ("system", *CHAT_COLUMNS),
    "conversations": ("system", *CHAT_COLUMNS),
    "alpaca": (*ALPACA_OPTIONAL, *CHAT_COLUMNS),
}
CHAT_FORMS = ("messages", "conversations", "alpaca")
_UNREAD = re.compile(r"(?!special_tokens).*(mask|weight|loss|label|target).*")
_SOUND = {"audio", "audios", "video", "videos"}
SHOWN = 1000  # places of one kind in a message


def _shown(places: Sequence[tuple[str, int]]) -> str:
    parts = []
    for file, group in groupby(sorted(places)[:SHOWN], lambda place: place[0]):
        parts.append(file.format(_ranges([number for _, number in group])))
    left = len(places) - SHOWN
    return ", ".join(parts) + (f" and {left:,} more" if left > 0 else "")


@dataclass
class BadRows:
    """Wrong rows, with their places, by kind of problem: `bad_rows` says whether they are an error or left out."""

    skip: bool = False
    vocabulary: int | None = None  # how many tokens the model has, for rows that are tokenized already
    # whether rows are trained on; of others only that they can be read is checked, and none may be left out
    to_train: bool = True
    places: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # of each kind, file or split and number
    examples: dict[str, str] = field(default_factory=dict)
    silent: list[tuple[str, int]] = field(default_factory=list)  # rows that are right, with an answer that says nothing

    def add(self, place: tuple[str, int], problem: str) -> None:
        """Note a wrong row. What came, after ", got" or " at character", does not make another kind."""
        kind = re.split(r", got | at character ", problem)[0]
        self.places.setdefault(kind, []).append(place)
        self.examples.setdefault(kind, f"{self.name(place)}: {problem}.")

    @staticmethod
    def name(place: tuple[str, int]) -> str:
        """Return a place as it is shown: its file or split holds braces for the number."""
        return place[0].format(place[1])

    def __len__(self) -> int:
        return sum(map(len, self.places.values()))

    def where(self, kind: str) -> str:
        """Return the places of a kind: `rows.jsonl:3, 7-9, 12`."""
        return _shown(self.places[kind])

    def empty_answers(self) -> str | None:
        """Return how many rows have an answer that says nothing, and where they are; None without one."""
        return f"{len(self.silent):,} rows: {_shown(self.silent)}" if self.silent else None

    def summary(self) -> dict[str, str]:
        """Return for each kind of problem how many rows have it, and where they are."""
        return {kind: f"{len(places):,} rows: {self.where(kind)}" for kind, places in self.places.items()}

    def check(self, even_if_skipped: bool = False) -> None:
        """Raise DataError with all of them, unless they are to be left out."""
        if not self.places or (self.skip and not even_if_skipped):
            return
        lines = []
        for kind, places in self.places.items():
            lines.append(self.examples[kind])
            if len(places) > 1:
                lines.append(f"    {len(places):,} such rows: {self.where(kind)}")
        advice = "Mend them, or leave them out: bad_rows=skip." if self.to_train else "Mend them."
        advice = "Without them no row is left." if self.skip else advice
        raise DataError("\n".join([*lines, f"Wrong rows: {len(self):,}. {advice}"]))


def _ranges(numbers: Sequence[int]) -> str:
    """Return `3, 7-9, 12` for 3, 7, 8, 9, 12."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def form_of(have: Sequence[str], text: str, text_given: bool, prompts: bool) -> tuple[str, tuple[str, ...]] | None:
    """Return the form that rows with the columns `have` are read in, and the columns it needs; None if there is none.

    Args:
        text: the column of plain text; `text_given`: whether the configuration names it.
        prompts: whether rows may be prompts only.
    """
    forms = _forms(text, text_given, prompts)
    return next((entry for entry in forms if all(column in have for column in entry[1])), None)


def _forms(text: str, text_given: bool, prompts: bool) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the forms with the columns that each needs, the first that fits first. See `form_of`."""
    alpaca = ("alpaca", ALPACA)
    return (
        ("input_ids", ("input_ids",)),
        ("prompt-completion", ("prompt", "completion")),
        ("messages", ("messages",)),
        ("conversations", ("conversations",)),
        *([] if text_given else [alpaca]),
        ("text", (text,)),
        alpaca,
        *([("prompt", ("prompt",))] if prompts else []),
    )


def check_unread(row: dict) -> None:
    """Raise DataError where a column that is not read says what is learned of the row's parts, or belongs to its chat.

    Such a column has a number for each token or message.
    """
    ids, chat = row.get("input_ids"), row.get("messages") or row.get("conversations")
    parts = ids or chat
    for name in row.keys() - {*TOKEN_COLUMNS}:
        value = row[name]
        if parts and isinstance(value, list) and len(value) == len(parts) and _UNREAD.fullmatch(name.lower()):
            instead = "Name it completion_mask (1: learned)" if ids else "Give each message a weight of 0 or 1 instead"
            each = "token" if ids else "message"
            raise DataError(f"column {name!r} has a value for each {each}, and is not read. {instead}, or take it out.")
        if chat and name in _SOUND and value:
            raise DataError(f"column {name!r} is not read: chats are learned with text and images. Take it out.")


def learned_answers(config: "RunConfig") -> str | None:
    """Return which answers of a chat are all that is learned: "all", "last", or None where more is learned."""
    return "last" if config["last_turn_only"] else "all" if config["assistant_only_loss"] else None


def has_empty_answer(row: dict) -> bool:
    """Return whether an answer says nothing and calls nothing: the model would learn to be silent there."""
    if any(isinstance(text, str) and not text.strip() for text in (row.get("completion"), row.get("output"))):
        return True
    chats = [row.get(name) for name in ("messages", "conversations", "completion")]
    return any(
        ROLES.get(role := message.get("role", message.get("from")), role) == "assistant"
        and not str(message.get("content", message.get("value")) or "").strip()
        and not message.get("tool_calls")
        and not message.get("function_call")
        for chat in chats
        if isinstance(chat, list)
        for message in chat
        if isinstance(message, dict)
    )


def row_problem(
    row: dict, form: str, text: str, vocabulary: int | None = None, learned: str | None = None
) -> str | None:
    """Return what is wrong with a row of a form, or None.

    Args:
        text: the column of plain text.
        vocabulary: how many tokens the model has, for rows that are tokenized already.
        learned: see `learned_answers`.
    """
    problem = _problem(row, form, text, vocabulary, learned)
    if problem is None:
        return None
    forms, filled = dict(_forms(text, False, True)), [name for name, value in row.items() if value is not None]
    other = form_of(filled, text, False, True)
    if other is None or set(filled) & set(forms[form]):
        return problem
    return f"a row of the form {other[0]!r}, in a file that is read as {form!r}: put each form into a separate file"


def _problem(row: dict, form: str, text: str, vocabulary: int | None, learned: str | None) -> str | None:
    images = any(name in row for name in COLUMNS)
    if form == "input_ids":
        return _token_problem(row, vocabulary)
    if form == "prompt-completion":
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return None
        if isinstance(prompt, str) or isinstance(completion, str):
            column = "completion" if isinstance(prompt, str) else "prompt"
            return f"column {column!r}: expected text, as in the other column, got {kind_of(row[column])}"
        problem = _chat_problem(prompt, "prompt", images) or _chat_problem(completion, "completion", images)
        return problem or _extras_problem(row)
    if form == "prompt" and isinstance(row["prompt"], str):
        return None
    if form == "alpaca":
        return _alpaca_problem(row)
    if form == "text":
        value = row[text]
        return None if isinstance(value, str) else f"column {text!r}: expected text, got {kind_of(value)}"
    problem = _chat_problem(row[form], form, images) or _text_problem(row, ("system",)) or _extras_problem(row)
    if problem or learned is None or form not in ("messages", "conversations"):
        return problem
    names = ("from", "value") if "from" in row[form][0] else ("role", "content")
    chat = [{**message, "role": ROLES.get(message[names[0]], message[names[0]])} for message in row[form]]
    reason = no_answer(tidy({"messages": chat}, images=True)["messages"], NO_ANSWERS, last=learned == "last")
    return reason and f"column {form!r}: {reason}"


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


def _extras_problem(row: dict) -> str | None:
    """Check what a template takes besides messages."""
    options = row.get("chat_template_kwargs")
    wanted = "column 'chat_template_kwargs': expected a mapping or null"
    if not isinstance(options, (dict, type(None))):
        return f"{wanted}, got {kind_of(options)}"
    return tools_problem(row.get("tools"))


def _chat_problem(messages: Any, column: str, images: bool) -> str | None:
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
        if not isinstance(text, (str, list)) and not (message.get("tool_calls") or message.get("function_call")):
            return f"{wanted}, got a message whose {content} is {kind_of(text)}"
        problem = message_problem(message, images, content)
        if problem:
            return f"column {column!r}: {problem}"
    return None


def _token_problem(row: dict, vocabulary: int | None) -> str | None:
    """Check tokens, and the columns that have a value for each of them."""
    ids = row["input_ids"]
    for column in ("input_ids", *TOKEN_COLUMNS):
        values = row.get(column)
        if values is None and column != "input_ids":
            continue
        wanted = f"column {column!r}: expected a list of integers"
        if not isinstance(values, list) or not values:
            return f"{wanted}, got {kind_of(values)}"
        masks = column.endswith(("mask", "masks"))
        strange = next((v for v in values if type(v) is not int and not (masks and type(v) is bool)), None)
        if strange is not None or None in values:
            return f"{wanted}, got one with {kind_of(strange)}"
        if len(values) != len(ids) and column != "seq_lengths":
            return f"column {column!r}: expected as many values as input_ids has, got {len(values)} for {len(ids)}"
        if vocabulary is None or column not in ("input_ids", "labels"):
            continue
        beyond = next((v for v in values if not 0 <= v < vocabulary and (v != -100 or column == "input_ids")), None)
        if beyond is not None:
            return f"column {column!r}: expected ids from 0 to {vocabulary - 1} (the model's), got {beyond}"
    return None


def kind_of(value: Any) -> str:
    """Name the type of a value as JSON users know it."""
    names = {str: "text", bool: "true or false", int: "an integer", float: "a number", type(None): "null"}
    if isinstance(value, (list, dict)):
        return f"{'an empty' if not value else 'a'} {'list' if isinstance(value, list) else 'mapping'}"
    return names.get(type(value), type(value).__name__)
