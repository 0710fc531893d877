"""The card of generated data: README.md with the YAML header that the hub reads."""

from typing import Any

import yaml

from ...run.data.demo_model import DEMO_MODELS, PREFIX
from ...run.reports.model_card import public
from ...secrets import redact
from .options import GenerateOptions
from .sieve import FILTERS

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
_SAMPLING = (
    "seed", "temperature", "top_p", "top_k", "max_new_tokens", "max_prompt_tokens", "batch_size",
    "completions_per_prompt", "system_prompt", "dtype", "revision", "teacher_server_model",
)  # fmt: skip
_FILTERS = (
    "keep_unfinished",
    "min_completion_words",
    "max_repetition",
    "near_duplicates",
    "held_out",
    "held_out_ngram",
)


def card(teacher: str, options: GenerateOptions, summary: dict[str, Any]) -> str:
    """Return the text of README.md.

    Args:
        summary: the fields of `Generated`.
    """
    rows, name, source = summary["rows"], public(teacher), public(options.prompts)
    header = {
        "task_categories": ["text-generation"],
        "tags": ["synthetic", "distillation", "liger-trainer"],
        "size_categories": [next((name for limit, name in _SIZES if rows < limit), "n>1M")],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "train.jsonl"}]}],
    }
    origin = f"rows of {source} ({options.prompts_split})" if options.prompts else (
        "drawn by the teacher from its chat template's empty user turn (Magpie, arXiv:2406.08464)"
    )  # fmt: skip
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
        f"# Completions of {name}\n",
        f"{rows:,} rows that a language model wrote. Nobody has read them: they may be wrong, unfair or offensive.\n",
        _table(("", ""), [("teacher", name), ("prompts", origin), *_set(options, _SAMPLING)]),
        "## Licence\n",
        _licence(teacher, options),
        "## Filters\n",
        f"Of {summary['samples']:,} samples with {summary['tokens']:,} tokens, {rows:,} were kept. "
        "Each was dropped by the first filter that it failed.\n",
        _table(
            ("dropped", "samples", "why", "the first"),
            [
                (reason, f"{summary['dropped'][reason]:,}", why, summary["examples"][reason])
                for reason, why in FILTERS.items()
                if reason in summary["dropped"]
            ],
        ),
        _table(("filter", "value"), _set(options, _FILTERS)),
        "## Use\n",
        "```yaml\ndataset_name: path/to/this/folder\n```\n",
        "Written by `liger-trainer generate`. `samples/` has every sample, those that were dropped too.",
    ]
    return redact("\n".join(part for part in parts if part) + "\n")


def _licence(teacher: str, options: GenerateOptions) -> str:
    demo = DEMO_MODELS.get(teacher.removeprefix(PREFIX)) if teacher.startswith(PREFIX) else None
    of_teacher = f"{teacher} is under {demo.licence}" if demo else f"See the licence of {public(teacher)}"
    of_prompts = f", and that of the prompts from {public(options.prompts)}" if options.prompts else ""
    return (
        f"{of_teacher}{of_prompts}: some licences say what may be trained on a model's output, or how such a model "
        "must be called. This card names no licence for the rows; add one before you publish them.\n"
    )


def _set(options: GenerateOptions, names: tuple[str, ...]) -> list[tuple[str, str]]:
    values = (
        (name, public(getattr(options, name)) if name == "held_out" else getattr(options, name)) for name in names
    )
    return [(name, str(value)) for name, value in values if value is not None]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table; nothing without rows."""
    if not rows:
        return ""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """Return a text for a table's cell: what a model wrote must not end the cell or become HTML."""
    text = " ".join(text.split())
    return "".join("&lt;" if sign == "<" else f"\\{sign}" if sign in "\\|`[*_$!" else sign for sign in text)
