"""Datasets whose completions are sampled: rows of prompts alone, and whether rows have prompts at all."""

import json
from typing import Any

from datasets import Dataset
from trl.data_utils import is_conversational

from ..errors import DataError
from .rows import RowFacts

NO_PROMPT = (
    "A row has no prompt to complete: its first token is supervised. On-policy distillation and seq_kd need rows with "
    "prompt and completion, with a prompt alone, or messages with assistant_only_loss: true."
)


def prompts_alone(dataset: Any) -> bool:
    """Whether the rows are prompts without completions, not tokenized yet."""
    columns = set(next(iter(dataset)))
    return "prompt" in columns and columns.isdisjoint({"completion", "input_ids"})


def prepare_prompts(dataset: Any, tokenizer: Any, args: Any, chat_template: str | None, name: str) -> Any:
    """Rows of prompts as rows without any supervised token: `input_ids` and `labels`, which are all -100.

    Args:
        dataset: rows with `prompt`, text or messages; and, for messages, perhaps `tools` and `chat_template_kwargs`.
        args: max_length, shuffle_dataset, seed, dataset_num_proc. Prompts that fill `max_length` are left out.
        chat_template: instead of the tokenizer's own.

    Returns:
        The rows, and what was counted; None for a stream.

    Raises:
        DataError: nothing is left.
    """

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        ids = _ids(row, tokenizer, chat_template)
        return {"input_ids": ids, "labels": [-100] * len(ids)}

    fixed = isinstance(dataset, Dataset)
    options: dict[str, Any] = {"num_proc": args.dataset_num_proc} if fixed else {}
    columns = list(next(iter(dataset)))
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


def _facts(rows: Dataset, kept: Dataset) -> RowFacts:
    tokens = sum(len(ids) for ids in kept["input_ids"])
    lost = len(rows) - len(kept)
    return RowFacts(
        rows=len(rows), rows_dropped=lost, rows_truncated=0, tokens=tokens, supervised_tokens=0,
        supervised_tokens_lost=0, sequences=len(kept),
    )  # fmt: skip


def check_prompts(dataset: Any) -> None:
    """Raise DataError where a prepared row begins with a supervised token. Streams show it when they are read."""
    if not isinstance(dataset, Dataset):
        return
    for batch in dataset.select_columns(["labels"]).iter(4096):
        if any(labels[0] != -100 for labels in batch["labels"]):  # pyright: ignore[reportArgumentType, reportCallIssue]
            raise DataError(NO_PROMPT)
