"""Trainers of tiny models in one line each, and what they log."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch
from splits import capture_gradients
from tiny import assert_same_gradients, completions, tiny_model, tiny_tokenizer, train_args
from transformers import TrainerCallback
from trl import SFTConfig

from liger_trainer import LigerDistillConfig, LigerDistillTrainer, LigerTrainer


def sft(model=None, data=None, eval_data=None, *, cls: Any = LigerTrainer, config: Any = SFTConfig, **options) -> Any:
    """Return a trainer. Options are fields of its configuration, and what is none of those is passed to the trainer."""
    known = {field.name for field in fields(config)} & options.keys()
    given = {name: value for name, value in options.items() if name not in known}
    return cls(
        tiny_model() if model is None else model, args=train_args(config, **{name: options[name] for name in known}),
        train_dataset=completions() if data is None else data, eval_dataset=eval_data,
        **{"processing_class": tiny_tokenizer(), **given},
    )  # fmt: skip


def a_teacher(**options) -> Any:
    """Another family and width than the student's, with a softcap."""
    return tiny_model("gemma2", **{"seed": 5, "hidden_size": 48, **options})


def distill(
    student=None, teacher=None, data=None, eval_data=None, *, cls: Any = LigerDistillTrainer,
    config: Any = LigerDistillConfig, **options,
) -> Any:  # fmt: skip
    """The same with a teacher: a model, several by name, a path, a value of the key `teacher`, or named in options."""
    if teacher in ("self", "cache", "server"):
        options["teacher"], teacher = teacher, None
    elif teacher is None and not options.keys() & {"teacher_model_name_or_path", "teachers"}:
        teacher = a_teacher()
    return sft(student, data, eval_data, cls=cls, config=config, teacher_model=teacher, **options)


def trained(trainer: Any, resume: Any = None) -> Any:
    """Train, and return the trainer."""
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any, name: str = "loss") -> list[Any]:
    """The values of a name in the order of the logs that have it."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def batches_of(trainer: Any) -> list[dict[str, Any]]:
    """Return a list to which each micro-batch is added when its loss is asked for."""
    seen, compute = [], trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        seen.append({name: x.clone() if torch.is_tensor(x) else x for name, x in inputs.items()})
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    return seen


class OnStep(TrainerCallback):
    """Calls a function at the end of each step."""

    def __init__(self, act: Callable[[], Any]):
        self.act = act

    def on_step_end(self, *args, **kwargs):
        self.act()


def supervised_logits(models: Iterable[Any], row: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Each model's logits of a row at the places of its supervised tokens, and these tokens."""
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
    keep = labels != -100
    return *(model(input_ids=ids).logits[0, :-1][keep] for model in models), labels[keep]


def step(trainer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train; return the first logs, without times, and the gradients of the last step."""
    gradients = capture_gradients(trainer)
    return measured(trained(trainer).state.log_history[0]), gradients


def measured(logs: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    return {name: value for name, value in logs.items() if not name.endswith(("runtime", "per_second", "_time"))}


def assert_same_step(got: Any, want: Any, rtol: float = 1e-5, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The first step of two trainings logs the same, of these names or of all, and has the same gradients."""
    (logs, gradients), (truth, expected) = step(got), step(want)
    for name in truth if names is None else names:
        assert logs[name] == pytest.approx(truth[name], rel=rtol, abs=rtol / 10), name
    assert_same_gradients(gradients, expected, 10 * rtol)
    return logs
