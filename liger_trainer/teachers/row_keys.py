"""The key of a row: a digest of its tokens and labels.

A row is known only by its content, so it is found again after shuffling, in batches of another size, and inside a
packed row, whose `seq_lengths` say where one document ends and the next begins.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch.nn.functional import pad

from ..errors import ConfigError, DataError
from ..losses.spec import IGNORE_INDEX

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
    # the length first, so that ids and labels of rows of other lengths cannot run into one another
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


def column_names(dataset: Any) -> list[str]:
    """Return the names of a dataset's columns, of a stream those of its first row where it does not know them.

    Raises:
        DataError: such a stream has no row.
    """
    if dataset.column_names is not None:
        return dataset.column_names
    first = next(iter(dataset), None)
    if first is None:
        raise DataError("expected a stream of rows, got one that is empty.")
    return list(first)


def ragged(array: Any) -> Any:
    """Return a column of fixed-size lists as one of lists with offsets; other columns as they are."""
    fixed = pa.types.is_fixed_size_list(array.type)
    return array.cast(pa.list_(array.type.value_type)) if fixed else array


def _lists(column: Any) -> list[np.ndarray]:
    array = ragged(column.combine_chunks())
    offsets, values = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False)
    return [values[offsets[i] : offsets[i + 1]] for i in range(len(array))]


# TRL's packing and its collator keep token ids, labels and the lengths of what was packed, and no other column. So
# what a teacher knows of a row cannot travel with the row; it is looked up by the row's key.


class DocumentCollator(ABC):
    """Add what a teacher knows of each document to the batch of TRL's collator.

    Args:
        collator: TRL's own.
        unknown: ends the message about a document that is not found, after "A row of 9 tokens, beginning with [...],".

    Raises, when called:
        DataError: a document is not found, or the batch has other labels than its rows.
    """

    def __init__(self, collator: Any, unknown: str):
        self.collator, self._unknown = collator, unknown

    @abstractmethod
    def look_up(self, key: bytes, tokens: int) -> Any:
        """Return what is known of a document with so many supervised tokens; None where it is not found."""

    @abstractmethod
    def columns(self, answers: list[Any], predicts: torch.Tensor) -> dict[str, Any]:
        """Return the columns to add, from what `look_up` returned for each document.

        `predicts` (batch, length) is true at positions that predict a supervised token, in the documents' order.
        """

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(examples)
        documents = [document for example in examples for document in supervised_documents(example)]
        answers = [self._answer(ids, labels) for ids, labels in documents]
        predicts = pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX) != IGNORE_INDEX
        # A collator that masks or cuts more than the rows say would put answers at other positions.
        in_rows, in_batch = sum(supervised_tokens(labels) for _, labels in documents), int(predicts.sum())
        if in_rows != in_batch:
            raise DataError(
                f"A batch has {in_batch} supervised tokens, and its rows have {in_rows}. Labels must be as the rows "
                "have them: with eval_packing, use packing too, so that the collator keeps documents apart."
            )
        return {**batch, **self.columns(answers, predicts)}

    def _answer(self, ids: Any, labels: Any) -> Any:
        answer = self.look_up(row_key(ids, labels), supervised_tokens(labels))
        if answer is None:
            raise DataError(f"A row of {len(ids)} tokens, beginning with {list(ids[:8])}, {self._unknown}")
        return answer


def supervised_documents(example: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield token ids and labels of each document of an example that has something to predict."""
    ids, labels = example["input_ids"], example.get("labels", example["input_ids"])
    for start, end in spans(len(ids), example.get("seq_lengths")):
        if supervised_tokens(labels[start:end]):
            yield ids[start:end], labels[start:end]
