"""What subclasses make of the loss is what is trained, logged, evaluated and chosen by."""

import functools
from typing import Any

import pytest
from tiny import completions
from trainings import distill, sft, trained
from trl import SFTTrainer

from liger_trainer import LigerDistillTrainer, LigerTrainer

ADDED = 100.0


def takes_outputs(trainer, compute_loss, model, inputs, return_outputs, **kwargs):
    loss, outputs = compute_loss(model, inputs, return_outputs=True, **kwargs)
    return (loss + ADDED, outputs) if return_outputs else loss + ADDED


def passes_it_on(trainer, compute_loss, model, inputs, return_outputs, **kwargs):
    returned = compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
    return (returned[0] + ADDED, returned[1]) if return_outputs else returned + ADDED


def twice(trainer, compute_loss, model, inputs, return_outputs, **kwargs):
    compute_loss(model, dict(inputs), **kwargs)
    return passes_it_on(trainer, compute_loss, model, inputs, return_outputs, **kwargs)


def make(base: Any, change: Any = None, **options) -> Any:
    class Changed(base):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            parent = super().compute_loss
            if change is None:
                return parent(model, inputs, return_outputs=return_outputs, **kwargs)
            return change(self, parent, model, inputs, return_outputs, **kwargs)

    rows = {"data": completions(9), "eval_data": completions(9)}
    options = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 9, **rows, **options}
    return (distill if base is LigerDistillTrainer else sft)(cls=Changed, **options)


@functools.cache
def losses(base: Any, change: Any = None) -> dict[str, float]:
    """Of a training, an evaluation, one by another name and a prediction; and the perplexity of the evaluation."""
    trainer = trained(make(base, change))
    evaluated = trainer.evaluate()
    return {
        "trained": trainer.state.log_history[0]["loss"], "evaluated": evaluated["eval_loss"],
        "named": trainer.evaluate(metric_key_prefix="rows")["rows_loss"],
        "predicted": trainer.predict(trainer.eval_dataset).metrics["test_loss"],
        "perplexity": evaluated["eval_perplexity"],
    }  # fmt: skip


@pytest.mark.parametrize("base", [LigerTrainer, LigerDistillTrainer])
@pytest.mark.parametrize("change", [takes_outputs, passes_it_on, twice])
def test_what_a_subclass_adds_is_in_every_loss(base, change):
    want = {name: loss + ADDED * (name != "perplexity") for name, loss in losses(base).items()}
    assert losses(base, change) == pytest.approx(want, rel=1e-5)


def test_what_a_subclass_makes_of_an_evaluated_batch_counts_too():
    class Rounded(LigerTrainer):
        def prediction_step(self, *args, **kwargs):
            loss, *rest = super().prediction_step(*args, **kwargs)
            return loss * 0 + 7.0, *rest

    assert make(Rounded).evaluate()["eval_loss"] == 7.0

    def own(trainer, compute_loss, model, inputs, return_outputs, **kwargs):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = outputs.logits.float().square().mean()
        return (loss, outputs) if return_outputs else loss

    got, want = (make(base, own).evaluate()["eval_loss"] for base in (LigerTrainer, SFTTrainer))
    assert got == pytest.approx(want, rel=1e-5)


def test_the_best_checkpoint_is_chosen_by_it(tmp_path):
    def worse_each_time(trainer, compute_loss, model, inputs, return_outputs, **kwargs):
        loss = compute_loss(model, inputs, **kwargs)
        loss = loss if model.training else loss * 0 + float(trainer.state.global_step)
        return (loss, {"logits": loss[None]}) if return_outputs else loss

    trainer = make(
        LigerTrainer, worse_each_time, output_dir=str(tmp_path), max_steps=3, learning_rate=1e-2, save_strategy="steps",
        save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 1.0 and trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
