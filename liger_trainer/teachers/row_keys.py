"""The key of a row: a digest of its tokens and labels.

A row is known by its content alone, so it is found again after shuffling, in batches of another size, and inside a
packed row, whose `seq_lengths` say where one document ends and the next begins.
"""

import hashlib
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset

from ..errors import ConfigError, DataError

KEY_BYTES = 16


class Document(NamedTuple):
    """A row of a prepared dataset, or one of the documents in a packed row."""

    row: int
    start: int
    input_ids: np.ndarray
    labels: np.ndarray

    @property
    def key(self) -> bytes:
        return row_key(self.input_ids, self.labels)

    @property
    def tokens(self) -> int:
        """The number of supervised tokens."""
        return supervised_tokens(self.labels)


def row_key(input_ids: Any, labels: Any) -> bytes:
    """Hash a row's token ids and labels. The first label is never predicted, so it is left out."""
    digest = hashlib.blake2b(len(input_ids).to_bytes(8, "little"), digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(input_ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(labels, dtype="<i4")[1:].data)
    return digest.digest()


def supervised_tokens(labels: Any) -> int:
    """Return how many tokens of a row are predicted; the first never is."""
    return int((np.asarray(labels)[1:] != -100).sum())


def documents(dataset: Dataset) -> Iterator[Document]:
    """Yield the documents of a prepared dataset with columns input_ids, labels, and seq_lengths where it is packed."""
    row = 0
    for table in dataset.with_format("arrow").iter(1000):
        columns: Any = table
        ids, labels = _lists(columns["input_ids"]), _lists(columns["labels"])
        lengths = _lists(columns["seq_lengths"]) if "seq_lengths" in columns.column_names else None
        for place, (row_ids, row_labels) in enumerate(zip(ids, labels, strict=True)):
            for start, end in spans(len(row_ids), None if lengths is None else lengths[place]):
                yield Document(row, start, row_ids[start:end], row_labels[start:end])
            row += 1


def rows_with(column: str, dataset: Dataset, option: str, name: str) -> Iterator[tuple[Any, Document]]:
    """Yield each tokenized row, before it is packed, with its value in a column.

    Args:
        option: which names the column.
        name: the dataset's.

    Raises:
        DataError: no such column.
    """
    if column not in dataset.column_names:
        raise DataError(
            f"The {name} dataset has no column {column!r}, which {option} names; it has "
            f"{', '.join(dataset.column_names)}."
        )
    values = dataset[column]
    for document in documents(dataset.select_columns(["input_ids", "labels"])):
        yield values[document.row], document


def check_known(prepared: Any, known: Container[bytes], option: str, strategy: str | None) -> None:
    """Raise ConfigError where rows were not read, or packing has cut them so that they are not found again.

    Args:
        prepared: the dataset as the trainer reads it, or None if nothing was read.
        known: keys of the rows that were read.
        option: which needs them.
        strategy: of packing.
    """
    if not isinstance(prepared, Dataset):
        raise ConfigError(
            f"{option} needs rows that the trainer prepares and can read beforehand: no stream, and no "
            "skip_prepare_dataset."
        )
    if any(document.tokens and document.key not in known for document in documents(prepared)):
        raise ConfigError(
            f"{option} does not go with packing_strategy: {strategy}, which cuts documents up. Use bfd, or no packing."
        )


def spans(length: int, seq_lengths: Iterable[int] | None) -> list[tuple[int, int]]:
    """Return where the documents of a row begin and end."""
    if seq_lengths is None:
        return [(0, length)]
    ends = np.cumsum(np.asarray(seq_lengths, dtype=np.int64)).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def ragged(array: Any) -> Any:
    """Return a column of fixed-size lists as one of lists with offsets; other columns as they are."""
    fixed = pa.types.is_fixed_size_list(array.type)
    return array.cast(pa.list_(array.type.value_type)) if fixed else array


def _lists(column: Any) -> list[np.ndarray]:
    array = ragged(column.combine_chunks())
    offsets, values = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False)
    return [values[offsets[i] : offsets[i + 1]] for i in range(len(array))]
