"""Columns of images in the rows of a run: files named in them, what can be wrong, and what their hash is made of.

A column `image` has one image a row, `images` a list. An image is the path of a file, relative to the folder of the
dataset, or what `datasets` makes of one: bytes and a path. Images are not decoded until a batch is made.
"""

import hashlib
import io
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...errors import DataError
from ...trainers.chat_rows import IMAGE
from ...trainers.images import COLUMNS

if TYPE_CHECKING:
    from datasets import Dataset

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
