"""Rows of a dataset: what tokenizing, `max_length` and masks leave of them, and rows of prompts alone."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from trl.data_utils import is_conversational

from ..errors import DataError
from ..teachers.row_keys import ragged

NO_PROMPT = (
    "A row has no prompt to complete: its first token is supervised. On-policy distillation and seq_kd need rows with "
    "prompt and completion, with a prompt alone, or messages with assistant_only_loss: true."
)


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
    facts = _facts(rows, kept) if fixed else None
    return (kept.shuffle(seed=args.seed) if args.shuffle_dataset else kept), facts


def _ids(row: dict[str, Any], tokenizer: Any, chat_template: str | None) -> list[int]:
    if not is_conversational(row):
        return tokenizer(row["prompt"])["input_ids"]
    tools = row.get("tools")
    return tokenizer.apply_chat_template(
        row["prompt"], tools=json.loads(tools) if isinstance(tools, str) else tools, add_generation_prompt=True,
        tokenize=True, return_dict=True, chat_template=chat_template, **(row.get("chat_template_kwargs") or {}),
    )["input_ids"]  # fmt: skip


def prompt_ids(dataset: Dataset, tokenizer: Any, chat_template: str | None, num_proc: int | None) -> list[list[int]]:
    """Return the token ids of every prompt, in order; see `prepare_prompts`."""
    rows = dataset.map(
        lambda row: {"input_ids": _ids(row, tokenizer, chat_template)}, remove_columns=dataset.column_names,
        num_proc=num_proc,
    )  # fmt: skip
    return rows["input_ids"][:]


def _facts(rows: Dataset, kept: Dataset) -> RowFacts:
    tokens = sum(len(ids) for ids in kept["input_ids"])
    lost = len(rows) - len(kept)
    return RowFacts(
        rows=len(rows), rows_dropped=lost, rows_truncated=0, tokens=tokens, supervised_tokens=0,
        supervised_tokens_lost=0, sequences=len(kept),
    )  # fmt: skip


def check_prompts(dataset: Any) -> None:
    """Raise DataError where a prepared row begins with a supervised token. A stream is checked when it is read."""
    if not isinstance(dataset, Dataset):
        return
    for batch in dataset.select_columns(["labels"]).iter(4096):
        if any(labels[0] != -100 for labels in batch["labels"]):  # pyright: ignore[reportArgumentType, reportCallIssue]
            raise DataError(NO_PROMPT)
