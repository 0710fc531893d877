"""vLLM's prompt log-probabilities, as it returns them, in files.

A row has the tokens of a prompt, `prompt_token_ids`, and for each of them a dictionary of the likeliest tokens, which
the token itself joins where it is none of them; nothing for the first:

    {"prompt_token_ids": [5, 9, 2],
     "prompt_logprobs": [null, {"9": {"logprob": -0.7, "rank": 1, "decoded_token": "a"}, "4": {...}}, {...}]}

Read are JSON lines of `RequestOutput` of `LLM.generate`, of answers of `/v1/completions` (in `choices`) and of
`/v1/chat/completions`, either also in the frame of a batch run (`response.body`), and Parquet files with these two
columns, where `prompt_logprobs` may be JSON text.

Source: vLLM, vllm/logprobs.py (`PromptLogprobs`), vllm/outputs.py (`RequestOutput`) and
vllm/entrypoints/openai/completion/protocol.py (`CompletionResponseChoice`), Apache-2.0.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, concatenate_datasets

from ...errors import ConfigError, DataError
from .foreign import ForeignRecords, ForeignRow, Listed

LINES, PARQUET = (".jsonl", ".json"), ".parquet"
COLUMNS = ("prompt_token_ids", "prompt_logprobs")
NO_IDS = (
    "has no prompt_token_ids, so nobody knows which tokens it is about. Ask the server with return_token_ids: true, or "
    "write the ids that you sent next to the answer."
)


Entries = dict[int, tuple[float, int | None]]


class _Line(NamedTuple):
    """Where a row is: the file, its line from 1, that line's first byte, and which of the answers in it."""

    file: Path
    line: int
    start: int
    answer: int


class VLLMRecords(ForeignRecords):
    """JSON lines or Parquet files of prompt log-probabilities.

    Args:
        path: a file, or a folder of them.

    Raises:
        ConfigError: there are none; later, no token ids.
        DataError: later, a row is not of this form.
    """

    tool = "vllm"
    most_mass = 1.01  # log-probabilities of bf16 logits are normalised no better
    knows_labels = True

    def __init__(self, path: Path):
        files = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.suffix in (*LINES, PARQUET))
        # in a mixture the order of rows would not be the folder's
        suffixes = {PARQUET if file.suffix == PARQUET else "lines" for file in files}
        if len(suffixes) != 1:
            raise ConfigError(
                f"{path}: expected a file of JSON lines or Parquet, or a folder of files of one kind; found "
                f"{', '.join(file.name for file in files[:3]) or 'none'}."
            )
        self.files = files
        self._lines: list[_Line] = []
        self._table: Dataset | None = None
        if suffixes == {PARQUET}:
            self._table = concatenate_datasets([_columns(file) for file in files])

    def rows(self) -> Iterator[ForeignRow]:
        if self._table is not None:
            for number in range(len(self._table)):
                yield self._row(number, self._table[number])
            return
        self._lines = []
        for file in self.files:
            yield from self._rows_of(file)

    def _rows_of(self, file: Path) -> Iterator[ForeignRow]:
        start = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    for i, answer in enumerate(self._answers(line, f"{file}:{number}")):
                        self._lines.append(_Line(file, number, start, i))
                        yield self._row(len(self._lines) - 1, answer)
                # where each line begins: rows are read again one by one, and files may be larger than memory
                start += len(line)

    def name(self, number: int) -> str:
        if self._table is not None:
            return f"{self.files[0].parent}, row {number}"
        return f"{self._lines[number].file}:{self._lines[number].line}"

    def listed(self, number: int, places: np.ndarray, k: int) -> Listed:
        answer = self._answer(number)
        ids, read = self._ids(number, answer), self._places(number, answer)
        tokens, log_probs = np.empty((len(places), k), np.int64), np.empty((len(places), k))
        labels = np.empty(len(places))
        for row, place in enumerate(places.tolist()):
            entries = read(place)
            # vLLM lists the token that stands there first, whatever its rank
            likeliest = sorted(((x, token) for token, (x, _) in entries.items()), key=lambda pair: -pair[0])[:k]
            log_probs[row], tokens[row] = zip(*likeliest, strict=True)
            labels[row] = entries[ids[place]][0]
        return Listed(tokens, log_probs, labels)

    def _row(self, number: int, answer: Mapping[str, Any]) -> ForeignRow:
        ids, read = self._ids(number, answer), self._places(number, answer)
        # from place 1: nothing is predicted for the first token
        fewest = min((_likeliest(read(place)) for place in range(1, len(ids))), default=0)
        return ForeignRow(number, np.asarray(ids, dtype=np.int64), fewest)

    def _ids(self, number: int, answer: Mapping[str, Any]) -> list[int]:
        ids = answer.get("prompt_token_ids")
        if ids is None:
            raise ConfigError(f"{self.name(number)} {NO_IDS}")
        return ids

    def _places(self, number: int, answer: Mapping[str, Any]) -> Callable[[int], Entries]:
        """Return what reads the entries {token: (log-probability, rank)} at a place."""
        ids, listed = self._ids(number, answer), _positions(answer["prompt_logprobs"])
        if len(listed) != len(ids):
            raise DataError(
                f"{self.name(number)} has {len(ids)} tokens in prompt_token_ids and {len(listed)} places in "
                "prompt_logprobs. They are not of one prompt."
            )

        def read(place: int) -> Entries:
            try:
                entries = _entries(listed[place])
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise DataError(
                    f"{self.name(number)}: place {place} of prompt_logprobs is no dictionary of tokens and their "
                    f"logprob ({type(error).__name__}: {error})."
                ) from None
            if ids[place] not in entries:
                raise DataError(
                    f"{self.name(number)}: at place {place} stands token {ids[place]}, and prompt_logprobs does not "
                    "list it. They are not of one prompt."
                )
            return entries

        return read

    def _answer(self, number: int) -> Mapping[str, Any]:
        if self._table is not None:
            return self._table[number]
        at = self._lines[number]
        with at.file.open("rb") as lines:
            lines.seek(at.start)
            return self._answers(lines.readline(), self.name(number))[at.answer]

    def _answers(self, line: bytes, name: str) -> Sequence[Mapping[str, Any]]:
        """Return what has prompt_logprobs in a line of JSON."""
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{name} is no JSON: {error}") from None
        if isinstance(row, dict) and isinstance(row.get("response"), dict):
            # the frame of a batch run
            row = row["response"].get("body")
        if not isinstance(row, dict):
            raise DataError(f"{name} is no answer of vLLM: expected an object, got {str(row)[:60]}.")
        # the server says which model answered
        self.teacher = row.get("model") or self.teacher
        common = {"prompt_token_ids": row.get("prompt_token_ids")}
        choices = [choice for choice in row.get("choices") or () if choice.get("prompt_logprobs")]
        # vLLM writes a null where it was not asked for ids
        answers = [{**common, **{k: v for k, v in choice.items() if v is not None}} for choice in choices]
        answers = answers or [row]
        if any(answer.get("prompt_logprobs") is None for answer in answers):
            raise DataError(
                f"{name} has no prompt_logprobs; it has {', '.join(list(row)[:6])}. Ask vLLM for them: "
                "prompt_logprobs: 64, in SamplingParams or in the request."
            )
        return answers


def _columns(file: Path) -> Dataset:
    try:
        table = Dataset.from_parquet(str(file))
    except ValueError as error:  # dictionaries of Arrow
        raise ConfigError(f"{file} cannot be read ({error}). Write prompt_logprobs as JSON text.") from None
    assert isinstance(table, Dataset)
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise ConfigError(f"{file} lacks the column {missing[0]}; it has {', '.join(table.column_names)}.")
    return table.select_columns(list(COLUMNS))


def _positions(listed: Any) -> Sequence[Any]:
    return json.loads(listed) if isinstance(listed, str) else listed


def _likeliest(entries: Entries) -> int:
    """Return how many are the likeliest; the token that stands there is listed even where it is none of them."""
    return sum(rank is None or rank <= len(entries) for _, rank in entries.values())


def _entries(place: Any) -> Entries:
    """Return {token: (log-probability, rank)}. Parquet makes pairs of a dictionary, or gives it keys of others."""
    pairs = place.items() if isinstance(place, Mapping) else place
    return {int(token): _entry(entry) for token, entry in pairs if entry is not None}


def _entry(entry: Any) -> tuple[float, int | None]:
    if isinstance(entry, Mapping):
        return float(entry["logprob"]), entry.get("rank")
    return float(entry), None
