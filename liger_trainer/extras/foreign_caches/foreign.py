"""Records of other tools: which of their rows says what a teacher predicts in one of ours, and it as our records.

Rows are matched by their tokens. What a teacher predicts at a place follows only from the tokens before it, so a row
of another tool serves every document that begins it: one that was cut shorter, or lacks a token at its end.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, DataError
from ...teachers.cache.records import RecordFormat

DIGEST_BYTES = 16


class ForeignRow(NamedTuple):
    """A row of another tool. `ids` (n,) are the tokens by which a document is matched; `entries`, how many tokens are
    listed at each of its places, at least."""

    number: int
    ids: np.ndarray
    entries: int


class Listed(NamedTuple):
    """What a teacher predicts at n places: the K likeliest tokens, likeliest first."""

    ids: np.ndarray  # (n, K) int64
    log_probs: np.ndarray  # (n, K) fp64, natural
    labels: np.ndarray | None  # (n,) fp64, of the tokens that stand there; None: not known


class ForeignRecords(ABC):
    """Files of another tool.

    Attributes:
        tool: its name.
        files: what is read, in this order.
        most_mass: what the probabilities of a place may add up to: more than 1 by what is lost in writing them.
        knows_labels: whether the log-probability of every token that stands in a row is known.
        teacher: the name of the model, or None.
    """

    tool: str
    files: Sequence[Path]
    most_mass: float
    knows_labels: bool
    teacher: str | None = None

    @abstractmethod
    def rows(self) -> Iterator[ForeignRow]:
        """Yield all rows, in order.

        Raises:
            DataError: a row is not of the tool's form.
        """

    @abstractmethod
    def listed(self, number: int, places: np.ndarray, k: int) -> Listed:
        """Return what is predicted at `places`, from 1, of a row: of the tokens there, from those before."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return a row's name for messages, such as "answers.jsonl:7"."""


def last_place(labels: np.ndarray) -> int:
    """Return the place of a row's last supervised token, of which there is one."""
    return int(np.flatnonzero(labels[1:] != -100)[-1]) + 1


class MatchedRows:
    """The foreign row for each document, by the tokens that are read before its last prediction."""

    def __init__(self, records: ForeignRecords, documents: Iterable[tuple[np.ndarray, np.ndarray]]):
        """`documents`: token ids and labels of each, at least one of them supervised."""
        self._behind = 1 if records.knows_labels else 0  # with the last token itself, whose label is then known too
        self._row: dict[bytes, int | None] = {}
        lengths: set[int] = set()
        for ids, labels in documents:
            part = self._part(ids, labels)
            # None: wanted and not found yet
            self._row[_digest(part)] = None
            lengths.add(len(part))
        self.entries: int | None = None
        """how many tokens are listed at each place of the rows that match, at least; None without any"""
        for row in records.rows():
            for digest in _of_prefixes(row.ids, sorted(lengths)):
                # wanted, and the first row that has it
                if self._row.get(digest, row.number) is None:
                    self._row[digest] = row.number
                    self.entries = row.entries if self.entries is None else min(self.entries, row.entries)

    def find(self, ids: np.ndarray, labels: np.ndarray) -> int | None:
        """Return the number of the foreign row for a document, None without one."""
        return self._row.get(_digest(self._part(ids, labels)))

    def _part(self, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return ids[: last_place(labels) + self._behind]


def _digest(ids: np.ndarray) -> bytes:
    return _hash_of(ids).digest()


def _hash_of(ids: np.ndarray) -> "hashlib.blake2b":
    return hashlib.blake2b(_bytes(ids), digest_size=DIGEST_BYTES)


def _bytes(ids: np.ndarray) -> memoryview:
    return np.ascontiguousarray(ids, dtype="<i8").data


def _of_prefixes(ids: np.ndarray, lengths: Sequence[int]) -> Iterator[bytes]:
    """Yield the digests of the beginnings of a row that have one of the ascending lengths."""
    # one pass over the row for all lengths: a hash goes on where the shorter one ended
    state, before = _hash_of(ids[:0]), 0
    for length in lengths:
        if length > len(ids):
            return
        state.update(_bytes(ids[before:length]))
        before = length
        yield state.copy().digest()


class ForeignReader:
    """Make our records of another tool's; it stands in the place of a `Reader` with a model.

    Args:
        records: the files.
        matched: which of their rows are which documents.
        form: the layout of our records: topk without draws.
    """

    def __init__(self, records: ForeignRecords, matched: MatchedRows, form: RecordFormat):
        self.records, self.matched, self.form = records, matched, form

    def read(self, keys: Sequence[bytes], rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return each row's records (supervised tokens, bytes).

        Raises:
            ConfigError: tokens beyond the vocabulary.
            DataError: numbers that are no log-probabilities, or too few of them.
        """
        return [self._records(ids.numpy(), labels.numpy()) for ids, labels in rows]

    def _records(self, ids: np.ndarray, labels: np.ndarray) -> Tensor:
        number = self.matched.find(ids, labels)
        assert number is not None  # the import begins with a look at all rows
        places = np.flatnonzero(labels[1:] != -100) + 1
        listed = self.records.listed(number, places, self.form.entries)
        self._check(listed, self.records.name(number), places)
        log_probs = torch.from_numpy(listed.log_probs)
        # clamped: rounding may have made the listed mass more than 1
        log_rest = torch.log1p(-log_probs.exp().sum(-1).clamp(max=1.0))
        label = torch.zeros(len(places)) if listed.labels is None else torch.from_numpy(listed.labels)
        return self.form.encode_topk(torch.from_numpy(listed.ids), log_probs, log_rest, label, torch.zeros(len(places)))

    def _check(self, listed: Listed, name: str, places: np.ndarray) -> None:
        ids, log_probs = listed.ids, listed.log_probs
        beyond = (ids < 0) | (ids >= self.form.vocab_size)
        if beyond.any():
            raise ConfigError(
                f"{name} lists token {ids[beyond][0]}, and the student's tokenizer has {self.form.vocab_size}: they do "
                "not share a vocabulary."
            )
        # equal ids lie next to each other then
        ordered = np.sort(ids, -1)
        mass = np.exp(log_probs).sum(-1)
        no_numbers = np.isnan(log_probs).any(-1) | np.isneginf(log_probs[:, 0])
        for wrong, what in (
            ((ordered[:, 1:] == ordered[:, :-1]).any(-1), "a token is listed twice"),
            (no_numbers, "the log-probabilities are NaN, or -inf for every token"),
            (
                ~(mass <= self.records.most_mass) & ~no_numbers,
                f"the probabilities add up to {mass.max():.3g}, and to 1 at most",
            ),
        ):
            if wrong.any():
                raise DataError(
                    f"{name}: at place {places[np.flatnonzero(wrong)[0]]}, {what}: these are no log-probabilities over "
                    "the vocabulary."
                )
