"""TRL's trainers on tiny models: two steps of each on data of its form, and what it logs."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from tiny import FirstGradients, completions, tiny_model, tiny_tokenizer, train_args

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TIMES = ("runtime", "per_second", "step_time", "epoch")


def preferences(n: int = 8) -> Dataset:
    data = completions(n)
    return data.rename_column("completion", "chosen").add_column("rejected", completions(n, seed=9)["completion"])


def judged(n: int = 8) -> Dataset:
    return completions(n).add_column("label", [i % 2 == 0 for i in range(n)])


def prompts(n: int = 8) -> Dataset:
    return completions(n).remove_columns("completion")


def length(completions: list[str], **_) -> list[float]:
    return [float(len(text.split())) for text in completions]


SAMPLED = {
    "max_completion_length": 6, "num_generations": 2, "temperature": 0.9, "beta": 0.1,
    "generation_kwargs": {"min_new_tokens": 2},
}  # fmt: skip
# name: (trainer, its arguments' class, rows, options, arguments of the trainer)
TRAINERS: dict[str, tuple[Any, Any, Any, dict, dict]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, completions, {}, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, preferences, {}, {}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, judged, {}, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, prompts, SAMPLED, {"reward_funcs": length}),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, prompts, SAMPLED, {"reward_funcs": length}),
    "distillation": (trl.DistillationTrainer, trl.DistillationConfig, prompts, {"max_completion_length": 6}, {}),
    "orpo": (ORPOTrainer, ORPOConfig, preferences, {"max_length": 64}, {}),
    "cpo": (CPOTrainer, CPOConfig, preferences, {"max_length": 64}, {}),
}


def make(name: str, model: Any = None, folder: Path | None = None, peft_config: Any = None, **options) -> Any:
    """The trainer, of a model whose weights are in `folder`, where GRPO and RLOO load their reference from."""
    cls, config, data, needed, arguments = TRAINERS[name]
    model = tiny_model() if model is None else model
    if folder is not None:
        model.save_pretrained(folder)
        model.config._name_or_path = str(folder)
    if name == "distillation":
        arguments = {"teacher_model": tiny_model("qwen3", seed=3)}
    tokenizer = tiny_tokenizer()
    if name not in ("orpo", "cpo"):
        tokenizer.padding_side = "left"
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        return cls(
            model=model, args=train_args(config, **{"max_steps": 2, "seed": 3, **needed, **options}),
            train_dataset=data(8), eval_dataset=data(4), processing_class=tokenizer, peft_config=peft_config,
            callbacks=[FirstGradients()], **arguments,
        )  # fmt: skip


def trained(name: str, folder: Path | None = None, family: str = "llama", **options) -> tuple[Any, dict]:
    """Train two steps and evaluate. Returns (trainer, gradients of the first step)."""
    trainer = make(name, tiny_model(family), folder, **options)
    trainer.train()
    trainer.evaluate()
    (gradients,) = (c.values for c in trainer.callback_handler.callbacks if isinstance(c, FirstGradients))
    return trainer, gradients


def assert_same_numbers(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """All that two trainers logged but the times."""
    ours, theirs = (
        [(name, x) for log in trainer.state.log_history for name, x in log.items()
         if isinstance(x, (int, float)) and not any(time in name for time in TIMES)]
        for trainer in (got, want)
    )  # fmt: skip
    assert [name for name, _ in ours] == [name for name, _ in theirs] and len(theirs) > 10
    np.testing.assert_allclose([x for _, x in ours], [x for _, x in theirs], rtol=tolerance, atol=tolerance)
