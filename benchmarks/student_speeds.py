"""What `benchmarks.students` measures beside the held-out metrics: an instruction followed, speeds of generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .measure import Spread
from .student_ways import CONFIG, LOSING_LAYERS, Setup, on_gpu

SPANISH = {"el", "la", "los", "las", "un", "una", "que", "de", "en", "es", "y", "para", "se", "del", "por", "con"}


def followed(model: str, setup: Setup, instruction: str | None, prompts: int = 24) -> dict[str, Any]:
    """Return the `share` of held-out questions that a model answers in Spanish, and three `answers`."""
    from liger_trainer.config.run_config import load_run_config
    from liger_trainer.run.data.datasets import load_run_datasets
    from liger_trainer.run.models import open_model
    from liger_trainer.run.samples import complete, held_out_prompts

    settings = [*setup.common("docstrings"), f"model_name_or_path={model}", LOSING_LAYERS]
    config = load_run_config(CONFIG, [*settings, f"num_sample_completions={prompts}"], exact=True)
    files, data = open_model(config, "model_name_or_path"), load_run_datasets(config)
    if instruction is not None:
        system = {"role": "system", "content": instruction}
        rows = data.test.to_list()
        data = replace(data, test=type(data.test).from_list([{**r, "prompt": [system, *r["prompt"]]} for r in rows]))
    asked = held_out_prompts(config, data, files.tokenizer)
    texts = complete(load_plain(model), files.tokenizer, asked, 24)
    return {"share": sum(map(is_spanish, texts)) / len(texts), "answers": texts[:3]}


def is_spanish(text: str) -> bool:
    """Whether a fifth of the words at least are among the commonest ones of that language."""
    words = [word.strip(".,:;()`'\"").lower() for word in text.split()]
    return sum(word in SPANISH for word in words) >= max(1, len(words) / 5)


def load_plain(model: str) -> Any:
    """Load a model as it is used: by transformers alone, in bf16 on a GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from liger_trainer.run.data.demo_model import resolve_model

    dtype, device = (torch.bfloat16, "cuda") if on_gpu() else (torch.float32, "cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=dtype)
    return loaded.to(device)


def writing_speeds(models: Mapping[str, str], setup: Setup, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Return tokens a second of models that take turns on the device, one text at a time: a median and quartiles. What
    else the host does then slows all of them."""
    from liger_trainer.config.run_config import load_run_config
    from liger_trainer.run.data.datasets import load_run_datasets
    from liger_trainer.run.models import open_model
    from liger_trainer.run.samples import Writing, complete, held_out_prompts

    settings = [*setup.common("docstrings"), f"model_name_or_path={setup.teacher}", LOSING_LAYERS]
    config = load_run_config(CONFIG, [*settings, f"num_sample_completions={min(4, setup.prompts)}"], exact=True)
    tokenizer = open_model(config, "model_name_or_path").tokenizer
    asked = held_out_prompts(config, load_run_datasets(config), tokenizer)
    loaded = {name: load_plain(model) for name, model in models.items()}
    written = {name: Writing() for name in models}
    for number in range(rounds + 1):  # the first one warms up
        for name, model in loaded.items():
            complete(model, tokenizer, [asked[number % len(asked)]], 64, written[name])
    return {name: _speed(writing.completions[1:]) for name, writing in written.items()}


def _speed(completions: Sequence[tuple[int, float]]) -> dict[str, float]:
    spread = Spread.of([tokens / seconds for tokens, seconds in completions])
    return {"tokens_per_second": spread.median, "p25": spread.p25, "p75": spread.p75}
