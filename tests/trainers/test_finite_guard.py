"""Numbers that are not finite stop a training within a step, before a checkpoint of them is written."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from planted import PLACES, Plant
from tiny import completions, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import OnStep, batches_of, logged, trained
from transformers import TrainerCallback
from trl import SFTTrainer

from liger_trainer import DistillationCallback
from liger_trainer.common.checkpoints import checkpoints_in
from liger_trainer.errors import ConfigError, NonFiniteError
from liger_trainer.trainers.finite_guard import MOST_IN_A_ROW
from liger_trainer.trainers.finite_report import is_finite

RUN: dict[str, Any] = {
    "max_steps": 8, "save_strategy": "steps", "save_steps": 2, "logging_steps": 500, "max_grad_norm": 1.0,
}  # fmt: skip


def sft(**options):
    return trainings.sft(**{**RUN, **options})


def distill(**options):
    return trainings.distill(teacher=tiny_model(seed=1), **{**RUN, **options})


def by_callback(**options):
    """A stock SFTTrainer with a DistillationCallback, which has no part in what the trainer computes outside."""
    keywords = {name: options.pop(name) for name in ("on_non_finite",) if name in options}
    callback = DistillationCallback(teacher := tiny_model(seed=1), **keywords)
    trainer = sft(cls=SFTTrainer, callbacks=[callback], **options)
    trainer.teacher = teacher
    return trainer, callback


def saved_by(trainer) -> list[Path]:
    return checkpoints_in(Path(trainer.args.output_dir))


def stopped(trainer, **options) -> str:
    with pytest.raises(NonFiniteError) as error:
        trainer.train(**options)
    return str(error.value)


STOPS = [*((distill, place, "adamw_torch_fused") for place in PLACES), (distill, "gradient", "adamw_torch"),
         *(pytest.param(by_callback, place, "adamw_torch_fused", marks=[pytest.mark.slow] * (place not in PLACES[:2]))
           for place in PLACES)]  # fmt: skip


@pytest.mark.parametrize("make, place, optim", STOPS)
def test_nan_stops_within_a_step_and_the_advice_loads(make, place, optim):
    """Step 5 is poisoned; a checkpoint follows steps 2, 4, 6."""
    trainer, callback = (make(optim=optim), None) if make is distill else make(optim=optim)
    Plant(trainer, place, 5)
    message = stopped(trainer)
    saved = saved_by(trainer)
    assert trainer.state.global_step <= 6
    assert [path.name for path in saved] == ["checkpoint-2", "checkpoint-4"] and all(map(is_finite, saved))
    quantity = {"teacher": "the teacher's logits", "gradient": "the gradient norm"}.get(place, "the loss")
    if callback is not None:  # what a stock trainer computes outside comes to light in one or the other
        callback.undo()
        assert trainer.args.logging_nan_inf_filter  # as it was
        quantity = quantity if place == "teacher" else "the (?!teacher)"
    assert re.match(rf"In step 5 {quantity}", message), message
    assert re.search(r"as the trainer holds it: \d+, \d+, \d+, \d+\.", message)
    advised = re.search(r"resume_from_checkpoint='(.*?)'", message)
    assert advised and advised[1] == str(saved[-1])
    if place == "gradient" and callback is None:
        again = distill(output_dir=trainer.args.output_dir, max_steps=6)  # fused, on a state that need not be
        assert trained(again, advised[1]).state.global_step == 6


def test_the_entropy_alone_tells_of_the_teacher():
    """The loss, and what the teacher says of the labels, are finite."""
    trainer = distill()
    plant, per_token = Plant(trainer, "entropy", 5), trainer.per_token

    def spoiled(outputs):
        values = per_token(outputs)
        return {**values, "teacher_entropy": values["teacher_entropy"] * (torch.nan if plant.active else 1.0)}

    trainer.per_token = spoiled
    message = stopped(trainer)
    assert message.startswith("In step 5 the teacher's logits are not finite."), message
    assert [path.name for path in saved_by(trainer)] == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("place", [None, "loss", "weight", "moments"])
def test_a_checkpoint_that_a_later_callback_asks_for_loses_its_name(place):
    """When the callbacks before it, the guard among them, have had their turn."""
    trainer, _ = by_callback(max_steps=6)
    folder = Path(trainer.args.output_dir)
    (folder / "_not-finite-checkpoint-5").mkdir(parents=True)  # of a training before

    def ask():
        trainer.control.should_save |= trainer.state.global_step == 5
        if trainer.state.global_step == 5 and place == "moments":
            next(iter(trainer.optimizer.state.values()))["exp_avg"].view(-1)[0] = torch.inf

    trainer.add_callback(OnStep(ask))
    if place is None:
        trainer.train()
    else:
        Plant(trainer, place, 5)
        message = stopped(trainer)
        assert "checkpoint-5, saved before its state was checked, was renamed to _not-finite-checkpoint-5-2." in message
        assert trainer.state.global_step == 5 and message.endswith(f"{str(folder / 'checkpoint-4')!r})")
        assert (folder / "_not-finite-checkpoint-5-2" / "model.safetensors").is_file()
    left = [2, 4] if place else [2, 4, 5, 6]
    assert [path.name for path in checkpoints_in(folder)] == [f"checkpoint-{step}" for step in left]


def test_a_loss_that_is_left_out_is_logged_and_counted():
    """transformers' filter puts the mean of the losses before in place of NaN; with LigerTrainer it is off. The
    callback leaves out steps too."""
    trainer = sft(logging_nan_inf_filter=True, on_non_finite="skip_step", logging_steps=1, max_steps=3)
    Plant(trainer, "loss", 2)
    with pytest.warns(UserWarning, match="In step 2 the loss and the gradient norm are not finite"):
        trainer.train()
    losses = logged(trainer)
    assert [math.isnan(loss) for loss in losses] == [False, True, False]
    assert logged(trainer, "train_loss")[-1] == pytest.approx((losses[0] + losses[2]) / 2, rel=1e-4)
    trainer, _ = by_callback(on_non_finite="skip_step", max_steps=4, logging_steps=2)
    Plant(trainer, "batch", 2)
    with pytest.warns(UserWarning, match="In step 2 .* left out"):
        trainer.train()
    assert logged(trainer, "skipped_steps") == [1, 1]
    states = json.loads((Path(trainer.args.output_dir) / "checkpoint-4" / "trainer_state.json").read_text())
    assert states["stateful_callbacks"]["LigerTrainer"]["skipped_steps"] == 1


@pytest.mark.parametrize(
    "planted, logging_steps, steps", [(1, 1, 4), (4, 1, 4), (3, 2, 4), (1, 4, 4), (5, 4, 6), (2, 4, 6), (2, 10, 4)]
)
def test_the_mean_loss_of_a_run_leaves_out_logs_that_are_not_finite(planted, logging_steps, steps):
    """Those of steps behind the last log are a log of their own."""
    trainer, losses = sft(on_non_finite="skip_step", logging_steps=logging_steps, max_steps=steps), []
    step = trainer.training_step
    trainer.training_step = lambda *args: losses.append(loss := step(*args)) or loss
    Plant(trainer, "loss", planted)
    with pytest.warns(UserWarning, match="is left out"):
        result = trainer.train()
    losses = [loss.item() for loss in losses]
    assert len(losses) == steps and math.isnan(losses[planted - 1])
    windows = [losses[i : i + logging_steps] for i in range(0, steps, logging_steps)]
    finite = [loss for window in windows if all(map(math.isfinite, window)) for loss in window]
    mean = sum(finite) / len(finite) if finite else math.nan
    assert result.training_loss == pytest.approx(mean, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_skip_step_trains_as_if_the_step_had_not_been(optim):
    """A learning rate that stays, so that the steps after the one left out are those of a training without it."""
    how = {"optim": optim, "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "save_steps": 4}
    skipping = sft(on_non_finite="skip_step", max_steps=6, logging_steps=2, **how)
    Plant(skipping, "loss", 3)
    with pytest.warns(UserWarning, match=r"The step is left out, 1 in all. Rows of .* 8, 9, 10, 11\."):
        skipping.train()
    assert logged(skipping, "skipped_steps") == [0, 1, 1] and skipping.finite.skipped == 1
    rows = completions().select([i for i in range(24) if not 8 <= i < 12])
    without = trained(sft(data=rows, **{**how, "max_steps": 5}))
    for got, want in zip(skipping.model.parameters(), without.model.parameters(), strict=True):
        torch.testing.assert_close(got, want)
    resumed = sft(on_non_finite="skip_step", max_steps=6, output_dir=skipping.args.output_dir, **how)
    assert trained(resumed, str(saved_by(skipping)[0])).finite.skipped == 1


def test_skip_step_stops_after_too_many_in_a_row():
    trainer = sft(on_non_finite="skip_step", max_steps=40)
    Plant(trainer, "gradient", 3, several=40)
    with pytest.warns(UserWarning, match="is left out"):
        message = stopped(trainer)
    assert f"{MOST_IN_A_ROW} steps in a row were left out" in message
    assert trainer.state.global_step <= 3 + MOST_IN_A_ROW
    assert "The weights are finite still." in message


def test_weights_that_no_row_uses_and_the_optimizer_state_are_looked_at_before_they_are_saved():
    """The loss does not show a NaN in the embedding of a token that no row has."""
    trainer = sft()
    unused = sorted(set(range(64)) - {i for row in trainer.train_dataset["input_ids"] for i in row})[0]
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[unused] = torch.nan
    message = stopped(trainer)
    assert "After step 2 the weights are not finite" in message and "embed_tokens.weight" in message
    assert not saved_by(trainer) and "No checkpoint with finite weights" in message
    trainer = sft(learning_rate=0.0)
    trainer.add_callback(OnStep(lambda: next(iter(trainer.optimizer.state.values()))["exp_avg"].fill_(torch.inf)))
    assert re.match("After step 2 the (weights and the )?optimizer state", stopped(trainer))


def multiply_loss(trainer, factor):
    """By what the function returns at each micro-batch."""
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs) * factor()


@pytest.mark.parametrize("packing", [False, True])
def test_the_rows_named_are_those_of_the_micro_batch(packing):
    trainer = sft(packing=packing, max_length=32, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    multiply_loss(trainer, lambda: torch.nan if len(seen) == 4 else 1.0)  # the second micro-batch of step 2
    seen = batches_of(trainer)
    message = stopped(trainer)
    (index,) = map(int, re.search(r"as the trainer holds it: ([\d, ]+)\.", message)[1].split(", "))
    ids = trainer.train_dataset[index]["input_ids"]
    assert seen[3]["input_ids"].flatten()[: len(ids)].tolist() == ids


class DropsGradients(TrainerCallback):
    """As a scaler does where some are not finite."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        model.zero_grad(set_to_none=True)


def test_an_infinite_gradient_under_a_scaler_is_no_error(monkeypatch):
    """fp16 finds its scale by gradients that overflow; a loss that is NaN is none of that."""
    overflown, broken = (sft(max_steps=1, save_strategy="no", callbacks=[DropsGradients()]) for _ in range(2))
    monkeypatch.setattr(type(overflown.accelerator), "mixed_precision", "fp16")
    Plant(overflown, "gradient", 1)
    Plant(broken, "loss", 1)
    assert trained(overflown).state.global_step == 1
    assert stopped(broken).startswith("In step 1 the loss")


class Reads(TorchDispatchMode):
    """Fails where a value of a tensor is asked for, which on a GPU waits for all that is queued."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item", "masked_select", "unique")
        assert func.__name__.partition(".")[0] not in waits, func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_between_logs(monkeypatch):
    """What the guard does in a step asks for no value. It learns of one when a step later has been queued."""
    trainer = sft(max_steps=6, save_strategy="no")
    taken = [name for name in dir(trainer.finite) if name.startswith("record_")]
    for name in (*taken, "on_pre_optimizer_step", "on_optimizer_step"):
        called = getattr(trainer.finite, name)

        def unread(*args, called=called, **kwargs):
            with Reads():
                return called(*args, **kwargs)

        monkeypatch.setattr(trainer.finite, name, unread)
    Plant(trainer, "loss", 4)
    assert stopped(trainer).startswith("In step 4 the loss") and trainer.state.global_step == 5


def test_an_optimizer_that_updates_in_the_backward_leaves_no_step_out():
    trainer = sft(on_non_finite="skip_step")
    trainer.args.optim = "lomo"
    with pytest.raises(ConfigError, match="optim=lomo updates weights in its backward"):
        trainer.finite.on_train_begin(trainer.args, trainer.state, None)
