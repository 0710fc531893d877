"""Checkpoints of the trainers: there as a whole or not at all, and damage is found before training goes on from it."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines.damaged_checkpoints import ENGINES
from held_folders import held_by_a_child
from peft import PrefixTuningConfig, PromptEncoderConfig
from processes import run_on
from tiny import completions, tiny_model
from trainings import OnStep, logged, sft, trained
from transformers import TrainerCallback
from trl import SFTTrainer

from liger_trainer import LigerDistillConfig, LigerDistillTrainer
from liger_trainer.common import checkpoints
from liger_trainer.common.checkpoints import (
    MANIFEST,
    STAGING,
    TRAINER_STATE,
    checkpoints_in,
    damage,
    write_manifest,
)
from liger_trainer.common.files import STATE
from liger_trainer.errors import ConfigError, CorruptError


def make(folder: Path, steps: int = 4, **options) -> Any:
    args = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "output_dir": str(folder), **options}
    return sft(eval_data=completions(4, seed=1), **args)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_in(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Four checkpoints of a training that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    trained(make(folder))
    return folder


@pytest.fixture
def out(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = [lambda path: path.write_bytes(path.read_bytes()[:-1]), flip, lambda path: path.write_bytes(b""), Path.unlink]


def test_every_file_is_in_the_manifest_and_nothing_else_is_left(whole):
    assert names(whole) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    assert not (whole / STAGING).exists()
    for checkpoint in checkpoints_in(whole):
        listed = json.loads((checkpoint / MANIFEST).read_text())["files"]
        assert sorted([*listed, MANIFEST]) == sorted(path.name for path in checkpoint.iterdir())
        assert damage(checkpoint, contents=True) is None


@pytest.mark.parametrize("harm", DAMAGES)
def test_damage_to_any_file_is_found(out, harm):
    checkpoint = out / "checkpoint-4"
    for path in sorted(checkpoint.iterdir()):
        before = path.read_bytes()
        harm(path)
        assert path.name in (damage(checkpoint, contents=True) or ""), path.name
        path.write_bytes(before)
    assert damage(checkpoint, contents=True) is None


def test_the_newest_whole_checkpoint_is_taken_and_a_damaged_one_refused(out, whole):
    (out / "checkpoint-4" / "optimizer.pt").unlink()
    flip(out / "checkpoint-3" / "model.safetensors")
    with pytest.warns(UserWarning, match="checkpoint-4 is damaged and is not used: optimizer.pt is") as caught:
        trainer = make(out)
        trainer.train(True)
    assert "checkpoint-3 is damaged and is not used: model.safetensors is" in str([w.message for w in caught])
    assert trainer.resumed_from == out / "checkpoint-2"
    assert weights(out / "checkpoint-4") == weights(whole / "checkpoint-4")
    trainer = make(out / "other", steps=5)
    trainer.train(str(out))  # the newest in that folder
    assert trainer.resumed_from == out / "checkpoint-4"
    flip(out / "checkpoint-4" / "model.safetensors")
    with pytest.raises(CorruptError, match="checkpoint-4 is damaged: model.safetensors is .*whole one: .*checkpoint-3"):
        make(out).train(str(out / "checkpoint-4"))


def test_where_none_is_whole_all_reasons_are_said(out):
    for checkpoint in checkpoints_in(out):
        (checkpoint / "scheduler.pt").unlink()
    with pytest.raises(CorruptError, match=r"(?s)checkpoint-4: scheduler.pt is missing\n.*checkpoint-1: scheduler.pt"):
        make(out).train(True)
    with pytest.raises(ConfigError, match="no checkpoint in"):
        make(out / "empty").train(True)


class WritesInto(TrainerCallback):
    """Writes into checkpoints when they are saved: the model again, and a file of its own."""

    def on_save(self, args, state, control, model, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        model.config.notes = "mine"
        model.save_pretrained(folder)
        (folder / "mine.bin").write_text("no file of torch")


def test_what_callbacks_write_into_a_checkpoint_is_part_of_it(tmp_path):
    make(tmp_path, callbacks=[WritesInto()], save_total_limit=2).train()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    (tmp_path / "checkpoint-4" / "later.pt").write_text("no file of torch, and no part of it")
    trainer = make(tmp_path, steps=5)
    trainer.train(True)
    assert trainer.resumed_from == tmp_path / "checkpoint-4"
    flip(tmp_path / "checkpoint-4" / "mine.bin")
    assert "mine.bin is not what was written" in (damage(tmp_path / "checkpoint-4", contents=True) or "")


def forget_kinds(checkpoint: Path) -> None:
    """Make it one of an earlier version."""
    content = json.loads((checkpoint / STATE).read_text())
    del content["stateful_callbacks"][TRAINER_STATE]["kinds"]
    (checkpoint / STATE).write_text(json.dumps(content))
    write_manifest(checkpoint)


def test_moments_of_another_rule_are_refused_whatever_they_are_called(out, tmp_path):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match="optim: .*checkpoint-4 holds .* another kind, adam, than this lion"):
        make(out, steps=5, optim="lion_32bit").train(True)
    forget_kinds(out / "checkpoint-4")
    with pytest.raises(ConfigError, match="checkpoint-4 does not fit this Lion: it has no state1"):
        make(out, steps=5, optim="lion_32bit").train(True)
    make(tmp_path, optim="rmsprop_bnb").train()
    with pytest.raises(ConfigError, match="optim: .*checkpoint-4 holds .* rmsprop, than this lion"):
        make(tmp_path, steps=5, optim="lion_32bit").train(True)
    make(tmp_path, steps=5, optim="rmsprop_bnb").train(True)


def test_a_schedule_s_state_of_another_kind_is_refused(out, tmp_path):
    plateau: Any = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(ConfigError, match="lr_scheduler_type: .*-4 holds .* LambdaLR, than this ReduceLROnPlateau"):
        make(out, steps=5, **plateau).train(True)
    trained(make(out, steps=5, lr_scheduler_type="cosine")).train(True)
    make(tmp_path, **plateau).train()
    with pytest.raises(ConfigError, match="lr_scheduler_type: .* ReduceLROnPlateau, than this LambdaLR"):
        make(tmp_path, steps=5).train(True)
    trained(make(tmp_path, steps=5, **plateau)).train(True)


def test_another_optimizer_goes_on_from_weights_alone(tmp_path):
    make(tmp_path, save_only_model=True).train()
    trained(make(tmp_path, steps=5, optim="sgd")).train(True)


@pytest.mark.parametrize("optim, unknown", [("sgd", "momentum"), ("adafactor", "beta1"), ("rmsprop", "alpha")])
def test_an_optimizer_s_state_of_another_kind_is_refused(out, optim, unknown):
    with pytest.raises(ConfigError, match="optim: .*checkpoint-4 holds the state of another kind, adam"):
        make(out, steps=5, optim=optim).train(True)
    forget_kinds(out / "checkpoint-4")
    with pytest.raises(ConfigError, match=f"optim: .*checkpoint-4 does not fit this .*: it has no .*{unknown}"):
        make(out, steps=5, optim=optim).train(True)
    saving = {"optim": optim, "save_steps": 2}
    make(out / unknown, steps=2, **saving).train()
    trained(make(out / unknown, steps=3, **saving)).train(True)


def test_an_optimizer_s_state_of_other_weights_is_refused_and_one_of_another_form_taken(out):
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    with pytest.raises(ConfigError, match="checkpoint-4 does not fit this AdamW: .* doesn't match the size"):
        make(out, steps=5, model=model).train(True)
    trained(make(out, steps=5, optim="adamw_torch"))  # another form of the same


def test_checkpoints_of_another_trainer_and_of_the_model_alone_are_taken_with_a_note(tmp_path):
    make(tmp_path, cls=SFTTrainer, steps=2).train()
    with pytest.warns(UserWarning, match="checkpoint-2 has no manifest"):
        make(tmp_path, steps=3).train(True)
    (tmp_path / "checkpoint-2" / "scheduler.pt").unlink()
    with pytest.raises(CorruptError, match=r"scheduler.pt is missing"):
        make(tmp_path).train(str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-3" / MANIFEST).unlink()
    assert "manifest.json is missing, which it was saved with" in str(damage(tmp_path / "checkpoint-3"))
    make(tmp_path / "model", steps=2, save_only_model=True).train()
    with pytest.warns(UserWarning, match="holds only the model: optimizer and schedule start again"):
        make(tmp_path / "model", steps=3, save_only_model=True).train(True)


def full(*_):
    raise OSError(28, "No space left on device")


def test_what_is_not_whole_has_no_name_and_costs_no_older_one(tmp_path, whole):
    """A training ends while files of the third checkpoint are written, as by a full disk."""
    trainer = make(tmp_path, save_total_limit=1)
    trainer.add_callback(OnStep(lambda: trainer.state.global_step == 3 and setattr(trainer, "_save_rng_state", full)))
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2"] and not (tmp_path / STAGING / "checkpoint-3").exists()
    make(tmp_path, save_total_limit=1).train(True)
    assert names(tmp_path) == ["checkpoint-4"]
    assert weights(tmp_path / "checkpoint-4") == weights(whole / "checkpoint-4")


def test_older_ones_stay_until_the_new_one_is_read_back(tmp_path, monkeypatch):
    write = checkpoints.write_manifest

    def broken(folder):
        write(folder)
        if folder.name == "checkpoint-3":
            flip(folder / "optimizer.pt")

    monkeypatch.setattr(checkpoints, "write_manifest", broken)
    with pytest.raises(CorruptError, match=r"checkpoint-3 was saved, but optimizer.pt is not what was written"):
        make(tmp_path, save_total_limit=2).train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


FIRST_IS_BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2,
    "metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 1e-2,
}  # fmt: skip


def test_the_best_checkpoint_is_known_by_its_name_kept_and_loaded(tmp_path):
    teacher = {"cls": LigerDistillTrainer, "config": LigerDistillConfig, "teacher_model": tiny_model(seed=3)}
    trainer, seen = make(tmp_path, **teacher, **{**FIRST_IS_BEST, "save_total_limit": 1}), []

    class Seen(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append(Path(str(args.output_dir), f"checkpoint-{state.global_step}", MANIFEST).is_file())

    trainer.add_callback(Seen())
    trainer.train()  # the loss falls, so that the first checkpoint is the best by this measure
    best = tmp_path / "checkpoint-1"
    assert trainer.state.best_model_checkpoint == str(best) and names(tmp_path) == ["checkpoint-1"]
    assert json.loads((best / STATE).read_text())["best_model_checkpoint"] == str(best)
    trainer.save_model(str(tmp_path))
    assert weights(tmp_path) == weights(best) and seen == [True] * 4


def test_a_best_checkpoint_that_is_damaged_is_not_loaded(tmp_path):
    trainer = make(tmp_path, steps=2, **FIRST_IS_BEST)
    best = tmp_path / "checkpoint-1/model.safetensors"
    trainer.add_callback(OnStep(lambda: trainer.state.global_step == 2 and flip(best)))
    with pytest.raises(CorruptError, match="checkpoint-1 is damaged: model.safetensors is not what was written"):
        trainer.train()


@pytest.fixture(scope="module")
def two_trainings(tmp_path_factory) -> Path:
    """Two trainings with other learning rates, whose first checkpoints are the best of theirs."""
    folder = tmp_path_factory.mktemp("best")
    for name, rate in (("a", 1e-2), ("other", 1e-3)):
        make(folder / name, steps=3, **{**FIRST_IS_BEST, "learning_rate": rate}).train()
    return folder


def point_to_best(checkpoint: Path, best: str) -> None:
    state = json.loads((checkpoint / STATE).read_text())
    (checkpoint / STATE).write_text(json.dumps({**state, "best_model_checkpoint": best}))
    write_manifest(checkpoint)


@pytest.mark.parametrize("place", ["moved", "relative", "copied", "resumed elsewhere"])
def test_the_best_checkpoint_is_found_where_it_is_now(tmp_path, monkeypatch, two_trainings, place):
    first = weights(two_trainings / "a" / "checkpoint-1")
    run = Path(shutil.copytree(two_trainings / "a", tmp_path / "a"))
    point_to_best(run / "checkpoint-3", "a/checkpoint-1" if place == "relative" else str(run / "checkpoint-1"))
    resume: Any = True
    if place == "moved":
        run = run.rename(tmp_path / "b")
    elif place == "relative":
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    elif place == "copied":  # and the folder that it was copied from holds another training's
        run = Path(shutil.copytree(run, tmp_path / "b"))
        shutil.rmtree(tmp_path / "a")
        shutil.copytree(two_trainings / "other", tmp_path / "a")
    else:
        resume, run = str(run / "checkpoint-3"), tmp_path / "b"
    for steps in (4, 5):
        trainer = make(run, steps=steps, **FIRST_IS_BEST)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(tmp_path / f"saved-{steps}"))
        assert weights(tmp_path / f"saved-{steps}") == first, steps
        resume = True
    assert names(run) == [*(["checkpoint-1"] if place != "resumed elsewhere" else []), "checkpoint-5"]


def test_where_the_best_checkpoint_is_lost_the_best_of_what_comes_is_taken(tmp_path, two_trainings):
    run = Path(shutil.copytree(two_trainings / "a", tmp_path / "a"))
    shutil.rmtree(run / "checkpoint-1")
    shutil.copytree(two_trainings / "other" / "checkpoint-1", run / "checkpoint-1")
    point_to_best(run / "checkpoint-3", str(run / "checkpoint-1"))
    trainer = make(run, steps=5, **FIRST_IS_BEST)
    with pytest.warns(UserWarning, match="the best will be chosen among the checkpoints from now on"):
        trainer.train(True)
    assert trainer.state.best_model_checkpoint == str(run / "checkpoint-4") and "checkpoint-4" in names(run)


@pytest.mark.parametrize("lost", [[], ["model.norm.weight"]])
def test_a_tied_head_is_not_called_missing(tmp_path, monkeypatch, lost):
    """Its matrix is in the file once, by the name of the embeddings."""
    said: list[str] = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", said.append)
    trainer = sft(tiny_model("llama_tied"), output_dir=str(tmp_path))
    with trainer.checkpoint_guard._reading(tmp_path):
        told = trainer.model.load_state_dict(
            {k: v for k, v in trainer.model.state_dict().items() if k not in ["lm_head.weight", *lost]}, strict=False
        )
        trainer._issue_warnings_after_load(told)
    assert [line for line in said if "missing keys" in line] == said and len(said) == len(lost)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_files_have_under_other_names_are_read_back(tmp_path, monkeypatch, sharded):
    """Experts are stacked in memory, and apart in the files. Trainer would go on from the weights at hand."""
    if sharded:
        save = transformers.PreTrainedModel.save_pretrained
        small = functools.partialmethod(save, max_shard_size="50KB")
        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", small)
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 1e-2}
    whole = trained(make(tmp_path / "out", model=tiny_model("mixtral"), **every_step))
    if not sharded:
        assert b"experts.0.w1.weight" in weights(tmp_path / "out" / "checkpoint-1")
    resumed = make(tmp_path / "out", model=tiny_model("mixtral"), **every_step)
    trained(resumed, str(tmp_path / "out" / "checkpoint-2"))
    got, want = ({log["step"]: log["loss"] for log in t.state.log_history if "loss" in log} for t in (resumed, whole))
    assert got == pytest.approx(want, rel=1e-6) and len(got) == 4
    best = min(logged(whole, "eval_loss"))
    for trainer in (whole, resumed):
        assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


ENCODER = {"num_virtual_tokens": 3, "encoder_hidden_size": 8, "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    "adapters",
    [
        *(PromptEncoderConfig(**ENCODER, encoder_reparameterization_type=kind) for kind in ("LSTM", "MLP")),
        PrefixTuningConfig(**ENCODER, prefix_projection=True),
    ],
)
def test_what_makes_prompts_is_in_checkpoints(tmp_path, adapters):
    options = {"peft_config": adapters, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    whole = trained(make(tmp_path, steps=3, learning_rate=1e-2, **options))
    shutil.rmtree(tmp_path / "checkpoint-3")
    torch.manual_seed(7)  # another encoder
    resumed = trained(make(tmp_path, steps=3, learning_rate=1e-2, **options), True)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for name in ("prompt_encoder.safetensors", MANIFEST):
        (tmp_path / "checkpoint-3" / name).unlink()
    write_manifest(tmp_path / "checkpoint-3")
    with pytest.raises(ConfigError, match="has no prompt_encoder.safetensors: an earlier version"):
        make(tmp_path, steps=4, **options).train(True)


def test_a_checkpoint_is_pushed_under_its_name_when_it_is_whole(tmp_path, monkeypatch):
    pushed = []

    def push(self, folder):
        pushed.append((folder, damage(Path(folder), contents=True)))

    monkeypatch.setattr(SFTTrainer, "init_hf_repo", lambda *_, **__: None)
    monkeypatch.setattr(SFTTrainer, "_push_from_checkpoint", push)
    make(tmp_path, steps=2, push_to_hub=True, hub_strategy="checkpoint").train()
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), None) for step in (1, 2)]


def test_a_run_that_is_done_makes_no_further_step_and_one_that_went_back_replaces_what_it_comes_by(out, whole):
    trainer = make(out)
    trainer.train(True)
    trainer.save_model(str(out))
    assert trainer.state.global_step == 4 and weights(out) == weights(whole / "checkpoint-4")
    make(out, save_total_limit=2).train(str(out / "checkpoint-1"))
    assert names(out) == ["checkpoint-3", "checkpoint-4"]
    assert weights(out / "checkpoint-4") == weights(whole / "checkpoint-4")
    make(out, steps=2, save_total_limit=1).train()  # the steps that it went back from go first
    assert names(out) == ["checkpoint-2"]


def test_no_second_process_trains_in_the_folder(out):
    with held_by_a_child(out) as child, pytest.raises(ConfigError, match=f"in use by process {child}"):
        make(out).train(True)
    make(out).train(True)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_on(2, "engines/damaged_checkpoints.py", folder)
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_save_one_checkpoint_and_go_on_from_the_same(two_processes, engine):
    folder = two_processes / engine
    for rank in (0, 1):
        assert "checkpoint-2 is damaged" in (folder / f"refused{rank}").read_text()
        assert (folder / f"resumed{rank}").read_text() == "checkpoint-1"
    # The first process finds the difference; without its word the other would wait for it.
    refused = [(folder / f"other_rows{rank}").read_text() for rank in (0, 1)]
    assert refused[0] == refused[1] and "train dataset: sha256" in refused[0]
    files = json.loads((folder / "out" / "checkpoint-3" / MANIFEST).read_text())["files"]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(files)
    assert engine == "ddp" or {f"optimizer_0/__{rank}_0.distcp" for rank in (0, 1)} <= set(files)
    assert not (folder / "out" / STAGING).exists()
