"""Numbers that are not finite stop a training within a step, before a checkpoint of them is written."""

import json
import math
import re
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from planted import PLACES, Plant
from quick_cases import slow_but
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from liger_trainer import DistillationCallback, LigerConfig, LigerDistillConfig, LigerDistillTrainer, LigerTrainer
from liger_trainer.common.checkpoints import checkpoints_in
from liger_trainer.errors import ConfigError, NonFiniteError
from liger_trainer.trainers.finite_guard import MOST_IN_A_ROW, FiniteGuard, LossSpikes
from liger_trainer.trainers.finite_report import is_finite

RUN: dict[str, Any] = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 2,
    "logging_steps": 500,
    "max_grad_norm": 1.0,
}


def sft(**options):
    keywords = {name: options.pop(name) for name in ("on_non_finite",) if name in options}
    return LigerTrainer(
        tiny_model("llama"), train_args(SFTConfig, **{**RUN, **options}), train_dataset=completions(),
        processing_class=tiny_tokenizer(), **keywords,
    )  # fmt: skip


def distill(**options):
    return LigerDistillTrainer(
        tiny_model("llama"), tiny_model("llama", seed=1), train_args(LigerDistillConfig, **{**RUN, **options}),
        train_dataset=completions(), processing_class=tiny_tokenizer(),
    )  # fmt: skip


def stopped(trainer, **options) -> str:
    with pytest.raises(NonFiniteError) as error:
        trainer.train(**options)
    return str(error.value)


@pytest.mark.parametrize(
    "place, optim", [*((place, "adamw_torch_fused") for place in PLACES), ("gradient", "adamw_torch")]
)
def test_nan_stops_within_a_step_and_the_advice_loads(place, optim):
    """Step 5 is poisoned; a checkpoint follows steps 2, 4, 6."""
    trainer = distill(optim=optim)
    Plant(trainer, place, 5)
    message = stopped(trainer)
    assert trainer.state.global_step <= 6
    saved = checkpoints_in(Path(trainer.args.output_dir))
    assert [path.name for path in saved] == ["checkpoint-2", "checkpoint-4"]
    assert all(map(is_finite, saved))
    quantity = {"teacher": "the teacher's logits", "gradient": "the gradient norm"}.get(place, "the loss")
    assert re.match(rf"In step 5 {quantity}", message), message
    advised = re.search(r"resume_from_checkpoint='(.*?)'", message)
    assert advised and advised[1] == str(saved[-1])
    if place != "gradient":
        return
    again = distill(output_dir=trainer.args.output_dir, max_steps=6)  # fused, on a state that need not be
    again.train(resume_from_checkpoint=advised[1])
    assert again.state.global_step == 6


def by_callback(**options):
    """A stock SFTTrainer with a DistillationCallback, which has no part in what the trainer computes outside."""
    keywords = {name: options.pop(name) for name in ("on_non_finite",) if name in options}
    teacher = tiny_model("llama", seed=1)
    callback = DistillationCallback(teacher, **keywords)
    trainer = SFTTrainer(
        tiny_model("llama"), args=train_args(SFTConfig, **{**RUN, **options}), train_dataset=completions(),
        processing_class=tiny_tokenizer(), callbacks=[callback],
    )  # fmt: skip
    trainer.teacher = teacher
    return trainer, callback


@pytest.mark.parametrize("place", slow_but(PLACES, *PLACES[:2]))
def test_nan_stops_a_stock_trainer_with_the_callback(place):
    trainer, callback = by_callback()
    Plant(trainer, place, 5)
    message = stopped(trainer)
    assert trainer.state.global_step <= 6 and re.match("In step 5 the ", message)
    assert ("In step 5 the teacher's logits" in message) == (place == "teacher")
    assert re.search(r"as the trainer holds it: \d+, \d+, \d+, \d+\.", message)
    saved = checkpoints_in(Path(trainer.args.output_dir))
    assert [path.name for path in saved] == ["checkpoint-2", "checkpoint-4"] and all(map(is_finite, saved))
    assert message.endswith(f"trainer.train(resume_from_checkpoint={str(saved[-1])!r})")
    callback.undo()
    assert trainer.args.logging_nan_inf_filter  # as it was


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
    assert [path.name for path in checkpoints_in(Path(trainer.args.output_dir))] == ["checkpoint-2", "checkpoint-4"]


class AsksLater(TrainerCallback):
    """Asks for a checkpoint of step 5, when the callbacks before it have had their turn."""

    def __init__(self, spoils_moments: bool):
        self.spoils_moments = spoils_moments

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        control.should_save |= state.global_step == 5
        if state.global_step == 5 and self.spoils_moments:
            next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] = torch.inf


@pytest.mark.parametrize("place", [None, "loss", "weight", "moments"])
def test_a_checkpoint_that_a_later_callback_asks_for_loses_its_name(place):
    trainer, _ = by_callback(max_steps=6)
    trainer.add_callback(AsksLater(place == "moments"))
    folder = Path(trainer.args.output_dir)
    (folder / "_not-finite-checkpoint-5").mkdir(parents=True)  # of a training before
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


def test_the_callback_leaves_out_steps_too():
    trainer, callback = by_callback(on_non_finite="skip_step", max_steps=4, logging_steps=2)
    Plant(trainer, "batch", 2)
    with pytest.warns(UserWarning, match="In step 2 .* left out"):
        trainer.train()
    assert [entry["skipped_steps"] for entry in trainer.state.log_history if "skipped_steps" in entry] == [1, 1]
    states = json.loads((Path(trainer.args.output_dir) / "checkpoint-4" / "trainer_state.json").read_text())
    assert states["stateful_callbacks"]["LigerTrainer"]["skipped_steps"] == 1


def test_a_loss_that_cannot_be_seen_is_not_logged_as_zero_either():
    """transformers' filter puts the mean of the losses before in place of NaN; with LigerTrainer it is off."""
    trainer = sft(logging_nan_inf_filter=True, on_non_finite="skip_step", logging_steps=1, max_steps=3)
    Plant(trainer, "loss", 2)
    with pytest.warns(UserWarning, match="In step 2 the loss and the gradient norm are not finite"):
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [math.isnan(loss) for loss in losses] == [False, True, False]
    mean = trainer.state.log_history[-1]["train_loss"]
    assert mean == pytest.approx((losses[0] + losses[2]) / 2, rel=1e-4)


@pytest.mark.parametrize(
    "planted, logging_steps, steps",
    [(1, 1, 4), (4, 1, 4), (3, 2, 4), (1, 4, 4), (5, 4, 6), (2, 4, 6), (2, 10, 4)],
)
def test_the_mean_loss_of_a_run_leaves_out_logs_that_are_not_finite(planted, logging_steps, steps):
    """Those of steps behind the last log are a log of their own."""
    trainer, losses = sft(on_non_finite="skip_step", logging_steps=logging_steps, max_steps=steps), []
    saw = trainer.finite.record_loss
    trainer.finite.record_loss = lambda loss, inputs: (losses.append(loss.item()), saw(loss, inputs))
    Plant(trainer, "loss", planted)
    with pytest.warns(UserWarning, match="is left out"):
        result = trainer.train()
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
    logs = [entry["skipped_steps"] for entry in skipping.state.log_history if "skipped_steps" in entry]
    assert logs == [0, 1, 1] and skipping.finite.skipped == 1
    rows = completions().select([i for i in range(24) if not 8 <= i < 12])
    without = LigerTrainer(
        tiny_model("llama"), train_args(SFTConfig, **{**RUN, **how, "max_steps": 5}), train_dataset=rows,
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    without.train()
    for got, want in zip(skipping.model.parameters(), without.model.parameters(), strict=True):
        torch.testing.assert_close(got, want)
    resumed = sft(on_non_finite="skip_step", max_steps=6, output_dir=skipping.args.output_dir, **how)
    resumed.train(resume_from_checkpoint=str(checkpoints_in(Path(skipping.args.output_dir))[0]))
    assert resumed.finite.skipped == 1


def test_skip_step_stops_after_too_many_in_a_row():
    trainer = sft(on_non_finite="skip_step", max_steps=40)
    Plant(trainer, "gradient", 3, several=40)
    with pytest.warns(UserWarning, match="is left out"):
        message = stopped(trainer)
    assert f"{MOST_IN_A_ROW} steps in a row were left out" in message
    assert trainer.state.global_step <= 3 + MOST_IN_A_ROW
    assert "The weights are finite still." in message


def test_a_weight_that_no_row_uses_is_not_saved():
    """The loss does not show a NaN in the embedding of a token that no row has."""
    trainer = sft()
    unused = sorted(set(range(64)) - {i for row in trainer.train_dataset["input_ids"] for i in row})[0]
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[unused] = torch.nan
    message = stopped(trainer)
    assert "After step 2 the weights are not finite" in message and "embed_tokens.weight" in message
    assert not checkpoints_in(Path(trainer.args.output_dir))
    assert "No checkpoint with finite weights" in message


def test_the_optimizer_state_is_looked_at_before_it_is_saved():
    trainer = sft()

    class Spoil(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            if state.global_step == 1:
                next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] = torch.inf

    trainer.add_callback(Spoil())
    trainer.args.learning_rate = 0.0
    assert re.match("After step 2 the (weights and the )?optimizer state", stopped(trainer))


@pytest.mark.parametrize("packing", [False, True])
def test_the_rows_named_are_those_of_the_micro_batch(packing):
    trainer = sft(packing=packing, max_length=32, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    seen: list[dict] = []
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, *args: (seen.append(inputs), step(model, inputs, *args))[1]
    compute = trainer.compute_loss

    def spoil(*args, **kwargs):
        return compute(*args, **kwargs) * (torch.nan if len(seen) == 4 else 1.0)  # the second micro-batch of step 2

    trainer.compute_loss = spoil
    message = stopped(trainer)
    (index,) = map(int, re.search(r"as the trainer holds it: ([\d, ]+)\.", message)[1].split(", "))
    ids = trainer.train_dataset[index]["input_ids"]
    assert seen[3]["input_ids"].flatten()[: len(ids)].tolist() == ids


def test_an_infinite_gradient_under_a_scaler_is_no_error():
    """fp16 finds its scale by gradients that overflow; a loss that is NaN is none of that."""
    for place in ("gradient", "loss"):
        accelerator = SimpleNamespace(
            mixed_precision="fp16", device=torch.device("cpu"), gather=lambda x: x, distributed_type=DistributedType.NO
        )
        guard = FiniteGuard(accelerator)
        args = SimpleNamespace(gradient_accumulation_steps=1, output_dir="nowhere")
        guard.record_loss(torch.tensor(torch.nan if place == "loss" else 1.0), {})
        guard.record_norm(torch.tensor(torch.inf))
        guard.on_pre_optimizer_step(args, SimpleNamespace(global_step=0), None)
        numbers = guard._pending[0].copy.get()
        assert bool(torch.isfinite(numbers).all()) == (place == "gradient")


def test_a_spike_of_the_loss_is_told_with_its_rows():
    trainer = sft(max_steps=30, learning_rate=0.0, lr_scheduler_type="constant", save_strategy="no")
    compute = trainer.compute_loss

    def spiked(*args, **kwargs):
        return compute(*args, **kwargs) * (100.0 if trainer.state.global_step == 25 else 1.0)

    trainer.compute_loss = spiked
    with pytest.warns(UserWarning, match=r"In step 26 the loss is .*robust z-score \d+\)\. Rows of .*: \d+, "):
        trainer.train()


def test_noise_is_no_spike():
    spikes, random = LossSpikes(), Random(0)
    assert not any(spikes.add(random.gauss(2.0, 0.1)) for _ in range(2000))
    assert not any(LossSpikes().add(loss) for loss in [2.0] * 30 + [2.1])
    score, median = spikes.add(4.0) or (0, 0)
    assert score > 15 and median == pytest.approx(2.0, abs=0.05)


class Reads(TorchDispatchMode):
    """Fails where a value of a tensor is asked for, which on a GPU waits for all that is queued."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item", "masked_select", "unique")
        assert func.__name__.partition(".")[0] not in waits, func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_between_logs(monkeypatch):
    """What the guard does in a step asks for no value. It reads the copy of the step before, and nothing else."""
    trainer = sft(max_steps=6, save_strategy="no")
    guard, read = trainer.finite, []
    judge, check = guard._judge, guard.check
    for name in (
        "record_loss",
        "record_norm",
        "record_teacher",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_step_end",
    ):
        called = getattr(guard, name)

        def unread(*args, called=called, **kwargs):
            with Reads():
                return called(*args, **kwargs)

        monkeypatch.setattr(guard, name, unread)

    def read_late(step):
        read.append((step.number, trainer.state.global_step))
        with _disable_current_modes():
            judge(step)

    def read_at_the_end(*args, **kwargs):
        assert trainer.state.global_step == 6
        with _disable_current_modes():
            check(*args, **kwargs)

    monkeypatch.setattr(guard, "_judge", read_late)
    monkeypatch.setattr(guard, "check", read_at_the_end)
    trainer.train()
    assert read == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 6)]


def test_another_policy_is_refused():
    with pytest.raises(ValueError, match="on_non_finite must be one of stop, skip_step, got 'ignore'"):
        sft(on_non_finite="ignore")
    with pytest.raises(ValueError, match="on_non_finite: expected one of stop, skip_step, got 'ignore'"):
        train_args(LigerConfig, on_non_finite="ignore")
    with pytest.raises(ValueError, match="on_non_finite: skip_step leaves the optimizer's step out"):
        train_args(LigerConfig, on_non_finite="skip_step", optim="lomo")
    trainer = sft(on_non_finite="skip_step")
    trainer.args.optim = "lomo"
    with pytest.raises(ConfigError, match="optim=lomo updates weights in its backward"):
        trainer.finite.on_train_begin(trainer.args, trainer.state, None)
