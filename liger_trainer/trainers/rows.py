"""Rows of a dataset: what tokenizing, `max_length` and masks leave of them, and rows that are only prompts."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np
from datasets import Dataset

from ..errors import ConfigError, DataError
from ..losses.model_parts import head_rows, known_positions
from ..teachers.row_keys import ragged
from .chat_rows import NO_ANSWERS

NO_PROMPT = (
    "A row has no prompt to complete: its first token is supervised. On-policy distillation and seq_kd need rows with "
    "prompt and completion, with only a prompt, or messages with assistant_only_loss: true."
)


GENERATION_PROMPT = "generation_prompt"  # a column of token ids


@dataclass(frozen=True)
class RowFacts:
    """Counts over the rows of one dataset. A row's first token is never predicted, so it counts as no supervised one.

    A row whose supervised tokens all lie beyond `max_length` is counted as truncated and as dropped.
    """

    rows: int
    """all rows, before any is left out"""
    rows_dropped: int
    """without any supervised token within `max_length`; left out"""
    rows_truncated: int
    """longer than `max_length`"""
    tokens: int
    """tokens of the rows that are kept, within `max_length`"""
    supervised_tokens: int
    supervised_tokens_lost: int
    """beyond `max_length`"""
    sequences: int
    """what the trainer sees: the rows kept, or the packed ones"""
    longest_row: int = 0
    """tokens of the longest row, before it is cut"""


def count_rows(
    dataset: Dataset, max_length: int | None, truncation_mode: str = "keep_start"
) -> tuple[RowFacts, np.ndarray]:
    """Count a tokenized dataset whose rows are not truncated yet.

    Args:
        dataset: with the column `labels`, -100 where nothing is learned.
        max_length: tokens of a row that are kept; None keeps all.
        truncation_mode: "keep_start" or "keep_end".

    Returns:
        The facts, with the number of rows kept as `sequences`, and the indices of those rows, ascending.
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
        longest_row=int(lengths.max(initial=0)),
    )
    return facts, kept


def count_each(
    dataset: Dataset, max_length: int | None, truncation_mode: str = "keep_start"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each row its tokens, its supervised ones, and its supervised ones within `max_length`."""
    counts = [_count(batch, max_length, truncation_mode) for batch in values_of(dataset, "labels")]
    lengths, before, after = (np.concatenate(column) for column in zip(*counts, strict=True))
    return lengths, before, after


RaggedColumn = tuple[np.ndarray, np.ndarray]
"""The values of many rows in one array, and where each row starts; one more offset is the end of the last."""


def values_of(dataset: Dataset, name: str, rows: int = 4096) -> Iterator[RaggedColumn]:
    """Read a column of lists, such as labels, batch by batch."""
    tables: Any = dataset.select_columns([name]).with_format("arrow").iter(rows)
    for table in tables:
        column = table[name].combine_chunks()
        column = ragged(column.chunk(0) if hasattr(column, "chunk") else column)
        offsets = column.offsets.to_numpy()
        yield column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]], offsets - offsets[0]


def _count(
    batch: RaggedColumn, max_length: int | None, truncation_mode: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels, offsets = batch
    starts, ends = offsets[:-1], offsets[1:]
    ahead = np.concatenate([[0], np.cumsum(labels != -100)])  # supervised labels before each position

    def predicted(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        return ahead[last] - ahead[np.minimum(first + 1, last)]

    lengths = ends - starts
    cut = lengths if max_length is None else np.minimum(lengths, max_length)
    first, last = (ends - cut, ends) if truncation_mode == "keep_end" else (starts, starts + cut)
    return lengths, predicted(starts, ends), predicted(first, last)


def longest_row(dataset: Dataset) -> int:
    """Return the number of tokens of the longest row, or of the longest document in packed ones."""
    if "seq_lengths" in dataset.column_names:
        return max((int(values.max(initial=0)) for values, _ in values_of(dataset, "seq_lengths")), default=0)
    return max((int(np.diff(starts).max(initial=0)) for _, starts in values_of(dataset, "input_ids")), default=0)


def longest_prompt(dataset: Dataset) -> int:
    """Return the number of tokens of the longest prompt that is completed in training."""
    if GENERATION_PROMPT in dataset.column_names:
        return max(len(ids) for ids in dataset[GENERATION_PROMPT])
    return max(next((i for i, x in enumerate(row) if x != -100), len(row)) for row in dataset["labels"])


def check_positions(
    datasets: Mapping[str, Any], args: Any, model: Any, whose: str, read: Callable[[int], int] = int
) -> None:
    """Raise ConfigError where rows are longer than the positions that a model has in a table.

    A model that computes its positions, as RoPE does, has no such limit.

    Args:
        datasets: prepared rows by name; of a stream, max_length is the length that is known.
        args: supplies max_length, pad_to_multiple_of, and max_completion_length where completions are sampled.
        read: the length of the longest row that the model reads, by the length of the student's.
    """
    positions = known_positions(model)
    if positions is None:
        return
    multiple = getattr(args, "pad_to_multiple_of", None) or 1
    for name, rows in datasets.items():
        if isinstance(rows, Dataset):
            longest, what = -(-read(longest_row(rows)) // multiple) * multiple, "the longest row"
        else:
            longest, what = args.max_length or positions + 1, "a row of the stream, by max_length,"
        if longest > positions:
            raise ConfigError(
                f"max_length is {args.max_length}, and {what} of the {name} dataset has {longest:,} tokens, but "
                f"{whose} has {positions:,} positions in a table and none beyond. Set max_length to {positions}, "
                "or take a model that computes its positions."
            )
    if getattr(args, "samples", False) and isinstance(datasets.get("train"), Dataset):
        longest = read(longest_prompt(datasets["train"])) + args.max_completion_length
        if longest > positions:
            raise ConfigError(
                f"max_completion_length: {args.max_completion_length} tokens behind the longest prompt make "
                f"{longest:,}, and {whose} has {positions:,} positions in a table and none beyond. Lower it."
            )


def has_only_prompts(dataset: Any) -> bool:
    """Return whether rows are prompts without completions, not tokenized yet."""
    columns = set(next(iter(dataset)))
    return "prompt" in columns and columns.isdisjoint({"completion", "input_ids"})


def prepare_prompts(
    dataset: Any, tokenizer: Any, args: Any, chat_template: str | None, name: str, kept_column: str | None = None
) -> Any:
    """Tokenize prompts into rows without supervised tokens: `input_ids`, and `labels` that are all -100.

    Args:
        dataset: rows with `prompt`, text or messages; and, for messages, perhaps `tools` and `chat_template_kwargs`.
        args: supplies max_length, shuffle_dataset, seed, dataset_num_proc. Prompts that fill max_length are left out.
        chat_template: instead of the tokenizer's own.
        kept_column: stays in the rows.

    Returns:
        The rows, and their facts; None in place of the facts of a stream.

    Raises:
        DataError: nothing is left.
    """

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        ids = _ids(row, tokenizer, chat_template)
        return {"input_ids": ids, "labels": [-100] * len(ids)}

    fixed = isinstance(dataset, Dataset)
    options: dict[str, Any] = {"num_proc": args.dataset_num_proc} if fixed else {}
    columns = [column for column in next(iter(dataset)) if column != kept_column]
    rows = dataset.map(tokenize, remove_columns=columns, **options)
    limit = args.max_length
    kept = rows if limit is None else rows.filter(lambda row: len(row["input_ids"]) < limit, **options)
    if fixed and not len(kept):
        raise DataError(f"Every prompt of the {name} dataset has max_length={limit} tokens or more.")
    facts = None
    if fixed:
        facts = RowFacts(
            rows=len(rows), rows_dropped=len(rows) - len(kept), rows_truncated=0,
            tokens=sum(len(ids) for ids in kept["input_ids"]), supervised_tokens=0, supervised_tokens_lost=0,
            sequences=len(kept), longest_row=max(map(len, rows["input_ids"]), default=0),
        )  # fmt: skip
    return (kept.shuffle(seed=args.seed) if args.shuffle_dataset else kept), facts


def text_prompt_ids(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt of plain text, without the end that some tokenizers put behind every text."""
    ids = list(tokenizer(text)["input_ids"])
    ended = ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return ids[:-1] if ended else ids


def _ids(row: dict[str, Any], tokenizer: Any, chat_template: str | None) -> list[int]:
    from trl.data_utils import is_conversational  # only our trainers, which need TRL, prepare prompts

    if not is_conversational(row):
        return text_prompt_ids(row["prompt"], tokenizer)
    tools = row.get("tools")
    return tokenizer.apply_chat_template(
        row["prompt"], tools=json.loads(tools) if isinstance(tools, str) else tools, add_generation_prompt=True,
        tokenize=True, return_dict=True, chat_template=chat_template, **(row.get("chat_template_kwargs") or {}),
    )["input_ids"]  # fmt: skip


def with_generation_prompts(dataset: Any, tokenizer: Any, args: Any, chat_template: str | None) -> Any:
    """Return prepared rows with the column GENERATION_PROMPT: the token ids behind which a model is asked to go on.

    That is what the chat template ends with for only a prompt, and need not be how the row itself begins: many
    templates open a turn by `<think>` and leave it out of turns that are written.

    Args:
        dataset: rows with input_ids, labels and what they were made of: `prompt`, or `messages`.
        args: supplies max_length, of which a longer prompt keeps the end, and dataset_num_proc.
        chat_template: instead of the tokenizer's own.
    """

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        ids = _ids(asked(row, tokenizer, chat_template), tokenizer, chat_template)
        return {GENERATION_PROMPT: ids if args.max_length is None else ids[-args.max_length :]}

    options: dict[str, Any] = {"num_proc": args.dataset_num_proc} if isinstance(dataset, Dataset) else {}
    return dataset.map(ask, **options)


def asked(row: dict[str, Any], tokenizer: Any, chat_template: str | None) -> dict[str, Any]:
    """Return a prepared row as one with a prompt; of a chat, the one before its first answer that is learned."""
    if "prompt" in row:
        return row
    messages = row["messages"]
    learned = next((i for i, label in enumerate(row["labels"]) if label != -100), 0)
    before, best = row["input_ids"][:learned], (-1, row)
    for place in (i for i, message in enumerate(messages) if i and message["role"] not in NO_ANSWERS):
        candidate = {**row, "prompt": messages[:place]}
        same = len(commonprefix([before, _ids(candidate, tokenizer, chat_template)]))
        best = max(best, (same, candidate), key=lambda each: each[0])
        if same == len(before):
            break
    if best[0] < 0:
        raise DataError(NO_PROMPT)
    return best[1]


def prompt_ids(dataset: Dataset, tokenizer: Any, chat_template: str | None, num_proc: int | None) -> list[list[int]]:
    """Return the token ids of every prompt, in order; see `prepare_prompts`. Rows may be those that `asked` returns."""
    rows = dataset.map(
        lambda row: {"input_ids": _ids(row, tokenizer, chat_template)}, remove_columns=dataset.column_names,
        num_proc=num_proc,
    )  # fmt: skip
    return rows["input_ids"][:]


def check_prompts(dataset: Any) -> None:
    """Raise DataError where a prepared row begins with a supervised token. A stream is checked when it is read."""
    if not isinstance(dataset, Dataset):
        return
    for batch in dataset.select_columns(["labels"]).iter(4096):
        if any(labels[0] != -100 for labels in batch["labels"]):  # pyright: ignore[reportArgumentType, reportCallIssue]
            raise DataError(NO_PROMPT)


# Token ids that a model does not have: rows are searched for them before training, and samplers never draw them.
#
# An id beyond the embeddings is a device error in the middle of a step; an id beyond the vocabulary of a loss makes it
# NaN. Heads are padded beyond that vocabulary, so a model can sample such ids.


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
            has = f"has {what} {ids.view(np.int64)[row]}, but {whose} {size:,} tokens, ids 0 to {size - 1:,}"
            raise DataError(f"Row {row} of the {name} dataset {has}; rows with such ids: {len(beyond):,}. {_TOKENIZE}")


_TOKENIZE = (
    "Tokenize the rows with the model's own tokenizer, or, if tokens were added to it, resize the model's embeddings."
)


@dataclass
class IdsAsRead:
    """Raises DataError where a row of a stream has an id beyond the size of its column, once there is a model."""

    name: str
    sizes: Mapping[str, int]

    def __call__(self, row: Mapping[str, Any], index: int) -> bool:
        for column, size in self.sizes.items():
            ids = np.asarray(row.get(column, ()))
            beyond = ids[((ids < 0) | (ids >= size)) & ((column != "labels") | (ids != -100))]
            if len(beyond):
                has = f"has the id {beyond[0]} in {column!r}, but there are {size:,} tokens, ids 0 to {size - 1:,}"
                raise DataError(f"Row {index} of the {self.name} dataset {has}. {_TOKENIZE}")
        return True


@dataclass(frozen=True)
class AllowedIds:
    """The ids that completions may hold: 0 to `size` - 1, which student and teacher share, without `unshared`."""

    size: int
    unshared: frozenset[int] = frozenset()

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.size and token not in self.unshared

    def others(self, model: Any) -> list[int]:
        """Return the ids of a model's head that are not writable."""
        return [token for token in range(head_rows(model)) if token not in self]
