"""What tokenizing, `max_length` and masks leave of a dataset's rows, counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from ..teachers.row_keys import ragged


@dataclass(frozen=True)
class RowFacts:
    """Counts over the rows of one dataset. A row's first token is never predicted, so it counts as no supervised one.

    A row whose supervised tokens all lie beyond `max_length` is counted as truncated and as dropped.
    """

    rows: int
    """before anything is left out"""
    rows_dropped: int
    """without any supervised token within `max_length`; left out"""
    rows_truncated: int
    """longer than `max_length`"""
    tokens: int
    """of the rows that are kept, within `max_length`"""
    supervised_tokens: int
    supervised_tokens_lost: int
    """beyond `max_length`"""
    sequences: int
    """that the trainer sees: the rows kept, or the packed ones"""


def count_rows(
    dataset: Dataset, max_length: int | None, truncation_mode: str = "keep_start"
) -> tuple[RowFacts, np.ndarray]:
    """Count a tokenized dataset whose rows are not truncated yet.

    Args:
        dataset: with the column `labels`, -100 where nothing is learned.
        max_length: tokens of a row that are kept; None keeps all.
        truncation_mode: "keep_start" or "keep_end".

    Returns:
        The facts, `sequences` being the rows kept, and the indices of those, ascending.
    """
    lengths, before, after = count_each(dataset, max_length, truncation_mode)
    kept = np.flatnonzero(after)
    within = lengths if max_length is None else np.minimum(lengths, max_length)
    facts = RowFacts(
        rows=len(lengths),
        rows_dropped=len(lengths) - len(kept),
        rows_truncated=int((lengths > within).sum()),
        tokens=int(within[kept].sum()),
        supervised_tokens=int(after.sum()),
        supervised_tokens_lost=int((before - after).sum()),
        sequences=len(kept),
    )
    return facts, kept


def count_each(
    dataset: Dataset, max_length: int | None, truncation_mode: str = "keep_start"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row: its tokens, its supervised ones, those of them within `max_length`. Arguments as of `count_rows`."""
    counts = [_count(batch, max_length, truncation_mode) for batch in values_of(dataset, "labels")]
    lengths, before, after = (np.concatenate(column) for column in zip(*counts, strict=True))
    return lengths, before, after


Batch = tuple[np.ndarray, np.ndarray]
"""The values of many rows in one array, and where each row starts, with the end of the last."""


def values_of(dataset: Dataset, name: str, rows: int = 4096) -> Iterator[Batch]:
    """A column of lists, such as labels."""
    tables: Any = dataset.select_columns([name]).with_format("arrow").iter(rows)
    for table in tables:
        column = table[name].combine_chunks()
        column = ragged(column.chunk(0) if hasattr(column, "chunk") else column)
        offsets = column.offsets.to_numpy()
        yield column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]], offsets - offsets[0]


def _count(batch: Batch, max_length: int | None, truncation_mode: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels, offsets = batch
    starts, ends = offsets[:-1], offsets[1:]
    ahead = np.concatenate([[0], np.cumsum(labels != -100)])  # supervised labels before each position

    def predicted(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return ahead[last] - ahead[np.minimum(first + 1, last)]

    lengths = ends - starts
    cut = lengths if max_length is None else np.minimum(lengths, max_length)
    first, last = (ends - cut, ends) if truncation_mode == "keep_end" else (starts, starts + cut)
    return lengths, predicted(starts, ends), predicted(first, last)
