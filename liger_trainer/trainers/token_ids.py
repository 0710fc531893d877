"""Token ids that a model does not have: rows are searched for them before training, and samplers never draw them.

An id beyond the embeddings is a device error in the middle of a step; an id beyond the vocabulary of a loss makes it
NaN. Heads are padded beyond that vocabulary, so a model can sample such ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from ..errors import DataError
from ..losses.model_parts import head_rows
from .rows import values_of


@dataclass(frozen=True)
class LargestIds:
    """The largest token id and the largest label of each row. An id below 0 counts as above all others."""

    tokens: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, dataset: Dataset) -> "LargestIds":
        """Read them from tokenized rows, with or without labels."""
        columns = ("input_ids", "labels" if "labels" in dataset.column_names else "input_ids")
        return cls(*(_largest(dataset, column) for column in columns))


def _largest(dataset: Dataset, column: str) -> np.ndarray:
    parts = [np.zeros(0, dtype=np.uint64)]
    for values, offsets in values_of(dataset, column):
        ids = np.where(values == -100, 0, values) if column == "labels" else values
        filled = np.diff(offsets) > 0
        largest = np.zeros(len(filled), dtype=np.uint64)
        if filled.any():
            largest[filled] = np.maximum.reduceat(ids.astype(np.int64).view(np.uint64), offsets[:-1][filled])
        parts.append(largest)
    return np.concatenate(parts)


def check_ids(largest_ids: Mapping[str, LargestIds], kind: str, size: int, whose: str) -> None:
    """Raise DataError where the "tokens" or "labels", by `kind`, exceed the ids 0 to size - 1 of `whose`."""
    for name, largest in largest_ids.items():
        ids = getattr(largest, kind)
        beyond = np.flatnonzero(ids >= size)
        if len(beyond):
            row = int(beyond[0])
            what = "token id" if kind == "tokens" else "a supervised token of id"
            raise DataError(
                f"Row {row} of the {name} dataset has {what} {ids.view(np.int64)[row]}, but {whose} {size:,} tokens, "
                f"ids 0 to {size - 1:,}; rows with such ids: {len(beyond):,}. Tokenize the rows with the model's own "
                "tokenizer, or, if tokens were added to it, resize the model's embeddings."
            )


@dataclass(frozen=True)
class Writable:
    """The ids that completions may hold: 0 to `size` - 1, which student and teacher share, without `unshared`."""

    size: int
    unshared: frozenset[int] = frozenset()

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.size and token not in self.unshared

    def others(self, model: Any) -> list[int]:
        """Return the ids of a model's head that are not writable."""
        return [token for token in range(head_rows(model)) if token not in self]
