"""Which rows of a dataset a micro-batch was made of. Found by their tokens, and only when somebody has to be told.

So it needs no bookkeeping in the steps before, and does not depend on samplers, workers, epochs and resumes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor

from .rows import values_of

KEPT = ("input_ids", "attention_mask", "position_ids")  # of a micro-batch
SHOWN = 8  # rows named in a message, and first tokens of a row that is not found

Batch = dict[str, Tensor]


def kept_of(inputs: dict[str, Any]) -> Batch:
    """Return what the search needs of a micro-batch, without copying it."""
    return {name: inputs[name] for name in KEPT if isinstance(inputs.get(name), Tensor)}


def rows_in(batch: Batch, dataset: Any) -> list[str]:
    """Return the rows of a micro-batch in words: their indices in `dataset`, else their first token ids.

    Waits for the device and reads the whole column `input_ids` of the dataset.
    """
    words: list[str] = []
    for sequence, starts in _sequences(batch):
        found = sorted(_indices(sequence, starts, dataset))
        if found:
            words += [str(index) for index in found]
        else:
            words.append(f"one that begins with the token ids {' '.join(map(str, sequence[:SHOWN].tolist()))}")
    return list(dict.fromkeys(words))


def listed(words: list[str]) -> str:
    """Return the first of many rows in one line."""
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more


def _sequences(batch: Batch) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yield the tokens of each sequence without padding, and where rows may start in it."""
    if "input_ids" not in batch:
        return
    ids = batch["input_ids"].cpu().numpy()
    mask, positions = (batch[name].cpu().numpy() if name in batch else None for name in KEPT[1:])
    for i, row in enumerate(ids):
        if mask is not None and mask.shape == ids.shape:
            yield row[mask[i] != 0], [0]
        elif positions is not None and positions.shape == ids.shape:  # rows behind one another
            yield row, np.flatnonzero(positions[i] == 0).tolist()
        else:
            yield row, [0]


def _indices(sequence: np.ndarray, starts: list[int], dataset: Any) -> Iterator[int]:
    """Yield the indices of rows whose tokens stand in the sequence from one of the starts on."""
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names:
        return
    ahead, first = np.concatenate([[0], np.cumsum(sequence, dtype=np.int64)]), 0
    for values, offsets in values_of(dataset, "input_ids"):
        lengths, totals = np.diff(offsets), np.diff(np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[offsets])
        for start in starts:
            ends = np.minimum(start + lengths, len(sequence))
            same_sum = (ahead[ends] - ahead[start] == totals) & (start + lengths <= len(sequence)) & (lengths > 0)
            for row in np.flatnonzero(same_sum):
                tokens = values[offsets[row] : offsets[row + 1]]
                if np.array_equal(tokens, sequence[start : start + len(tokens)]):
                    yield first + int(row)
        first += len(lengths)
