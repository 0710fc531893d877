"""Measure the rows of a local or demo dataset in tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import LigerTrainerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...config.run_config import RunConfig
    from ...run.data.datasets import RunData

MEASURED = 2000  # rows that are tokenized; of a larger dataset, every n-th


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the training rows, before they are cut at max_length.

    Attributes:
        rows: number of rows.
        mean, longest, shortest: tokens of a row. The last two are None if not every row was tokenized.
    """

    rows: int
    mean: float
    longest: int | None = None
    shortest: int | None = None


def row_lengths(config: "RunConfig") -> RowLengths | str:
    """Measure the training rows, or say why that is not possible."""
    name = config["dataset_name"]
    if config["datasets"] or not (name.startswith("demo:") or _is_local(name)):
        return "the dataset is not local"
    from ...run.data.datasets import load_run_datasets
    from ...run.models import open_model

    try:
        data = load_run_datasets(config)
        if data.facts.form == "prompt" or config.values.get("lmbda") or config.values.get("seq_kd"):
            return "completions are sampled"
        if data.facts.images is not None:
            return "the rows have images, and neither their tokens nor the vision tower's activations are counted"
        tokenizer = open_model(config, "model_name_or_path").tokenizer
        lengths = _lengths(data, tokenizer, config)
    except LigerTrainerError as error:
        return str(error)
    ends = (max(lengths), min(lengths)) if len(lengths) == len(data.train) else ()
    return RowLengths(len(data.train), sum(lengths) / len(lengths), *ends)


def _is_local(name: str) -> bool:
    from pathlib import Path

    return Path(name).expanduser().exists()


def _lengths(data: "RunData", tokenizer: "PreTrainedTokenizerBase", config: "RunConfig") -> list[int]:
    rows = data.train.select(range(0, len(data.train), -(-len(data.train) // MEASURED)))
    return [_tokens(row, data.facts.form, tokenizer, config["dataset_text_field"]) for row in rows]


def _tokens(row: Any, form: str, tokenizer: "PreTrainedTokenizerBase", text: str) -> int:
    if form == "input_ids":
        return len(row["input_ids"])
    if form == "text":
        return len(tokenizer(row[text])["input_ids"]) + 1  # the token that ends the text
    if form == "prompt" and isinstance(row["prompt"], str):
        return len(tokenizer(row["prompt"])["input_ids"])
    if form == "prompt-completion" and isinstance(row["prompt"], str):
        return len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) + 1
    if form in ("prompt", "prompt-completion"):
        messages = row["prompt"] + row.get("completion", [])
    else:
        messages = row["messages"]
    from ...trainers.chat_checks import fitting

    options: Any = {"add_generation_prompt": form == "prompt", **(row.get("chat_template_kwargs") or {})}
    rendered: Any = tokenizer.apply_chat_template(fitting(messages, tokenizer), return_dict=True, **options)
    return len(rendered["input_ids"])
