"""`recipe: distill_two_stage` through the command: what it trains, what it writes, and how it is gone on with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import call, settings, write_rows
from parts import enter, killed, metrics, run, two_models, weights, write_completions
from safetensors.torch import load_file
from tiny import WORDS
from transformers import AutoModelForCausalLM

from liger_trainer.common.checkpoints import checkpoints_in

COMMON: dict[str, Any] = {
    "teacher_model_name_or_path": "teacher", "max_steps": 4, "save_strategy": "steps", "save_steps": 2,
}  # fmt: skip
SECOND = {"learning_rate": 1e-3, "lmbda": 0.5, "beta": 1.0, "max_completion_length": 6}
TWO_STAGES = settings(**COMMON, recipe="distill_two_stage", second_stage=SECOND)
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    """A folder with models, rows and run.yaml."""
    enter(tmp_path, models, monkeypatch)
    write_completions()
    Path("run.yaml").write_text(TWO_STAGES)
    return tmp_path


def test_it_is_two_distillations_one_after_the_other(folder, capsys):
    """Each stage has the weights of the same training by `recipe: distill`, bit for bit."""
    printed = run(capsys, "run", "run.yaml")
    Path("first.yaml").write_text(settings(**COMMON, recipe="distill"))
    Path("second.yaml").write_text(settings(**{**COMMON, **SECOND}, recipe="distill"))
    run(capsys, "run", "first.yaml", "output_dir=first")
    run(capsys, "run", "second.yaml", "output_dir=second", "model_name_or_path=first")
    assert weights("out/stage-1") == weights("first") != weights("second") == weights("out")

    first, second = metrics("out/stage-1"), metrics("out")
    assert first["after"]["forward_kl"] < first["before"]["forward_kl"]
    assert second["before"]["forward_kl"] == first["after"]["forward_kl"]
    assert any("on_policy_share" in entry for entry in second["log_history"])
    assert not any("on_policy_share" in entry for entry in first["log_history"])
    assert "run.yaml, stage 1 of 2" in printed and "run.yaml, stage 2 of 2" in printed
    assert yaml.safe_load(Path("out/config.yaml").read_text())["second_stage"] == SECOND
    AutoModelForCausalLM.from_pretrained("out")

    card = Path("out/README.md").read_text()
    assert "| first stage | forward_kl |" in card and "| loss | reverse_kl |" in card
    assert f"| {first['before']['forward_kl']:.3f} | {second['after']['forward_kl']:.3f} |" in card

    code, _, err = call(capsys, "run", "run.yaml")
    assert code == 2 and "holds a finished run" in err
    code, _, err = call(capsys, "resume", "out")
    assert code == 2 and "the run in out is finished" in err and "resume out 'second_stage={" in err
    run(capsys, "run", "run.yaml", "overwrite_output_dir=true", "max_steps=1", "save_strategy=no")
    assert metrics("out")["training"]["steps"] == 1 and not checkpoints_in(Path("out"))


def test_the_report_and_eval_know_both_stages(folder, capsys, monkeypatch):
    run(capsys, "run", "run.yaml", "max_steps=1", "save_strategy=no")
    monkeypatch.setattr("liger_trainer.run.reports.html.draw", lambda runs, labels: [])  # curves take seconds
    run(capsys, "report", "out")
    page = Path("out/report.html").read_text()
    assert "2 runs compared" in page and "stage-1" in page and "learning_rate" in page
    found = json.loads(call(capsys, "eval", "out", "out/stage-1", "--json")[1])["evaluations"]
    assert [e["metrics"]["forward_kl"] for e in found] == pytest.approx(
        [metrics(path)["after"]["forward_kl"] for path in ("out", "out/stage-1")]
    )


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    return {}


@pytest.mark.parametrize(
    ("stage", "step", "left"),
    [
        pytest.param("stage-1", 1, [], marks=pytest.mark.slow),  # before the first checkpoint: from the beginning
        pytest.param("stage-1", 3, ["stage-1/checkpoint-2"], marks=pytest.mark.slow),
        ("out", 1, ["stage-1/checkpoint-2", "stage-1/checkpoint-4"]),  # the first stage is not trained again
        pytest.param(
            "out", 3, ["stage-1/checkpoint-2", "stage-1/checkpoint-4", "checkpoint-2"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_run_is_finished_by_resume_alone(folder, capsys, undisturbed, stage, step, left):
    if not undisturbed:
        run(capsys, "run", "run.yaml", "output_dir=whole")
        undisturbed.update(weights("whole"))
    killed("run", "run.yaml", stage=stage, step=step)
    out = Path("out")
    assert [str(p.relative_to(out)) for p in (*checkpoints_in(out / "stage-1"), *checkpoints_in(out))] == left
    before = (out / "stage-1" / "metrics.json").stat().st_mtime_ns if stage == "out" else None
    run(capsys, "resume", "out/stage-1" if step == 3 and stage == "stage-1" else "out")
    assert weights(out) == undisturbed
    assert before in (None, (out / "stage-1" / "metrics.json").stat().st_mtime_ns)
    assert metrics(out)["training"]["resumed_at"] == (2 if (stage, step) == ("out", 3) else 0)
    assert metrics(out / "stage-1")["training"]["resumed_at"] == (2 if (stage, step) == ("stage-1", 3) else 0)


@pytest.mark.slow
def test_adapters_are_trained_on(folder, capsys):
    """The second stage trains the adapters of the first, beside the base that teaches in both."""
    lora = {**COMMON, **LORA, "teacher_model_name_or_path": None, "teacher": "self", "losses": [{"type": "ce"}]}
    lora["losses"] = [{"type": "ce"}, {"type": "forward_kl", "weight": 0.5}]
    second = {"learning_rate": 1e-2, "lmbda": 1.0, "max_completion_length": 6, "losses": [{"type": "reverse_kl"}]}
    Path("run.yaml").write_text(settings(**lora, recipe="distill_two_stage", second_stage=second))
    run(capsys, "run", "run.yaml")
    first, last = load_file("out/stage-1/adapter_model.safetensors"), load_file("out/adapter_model.safetensors")
    assert first.keys() == last.keys() and not any(torch.equal(first[name], last[name]) for name in first)
    assert metrics("out")["before"]["ce_loss"] == pytest.approx(metrics("out/stage-1")["after"]["ce_loss"])
    assert metrics("out")["training"]["trainable_parameters"] == sum(x.numel() for x in last.values())
    assert json.loads(Path("out/adapter_config.json").read_text())["base_model_name_or_path"] == "student"
    found = json.loads(call(capsys, "eval", "out", "--json")[1])["evaluations"]
    assert found[0]["metrics"]["ce_loss"] == pytest.approx(metrics("out")["after"]["ce_loss"], rel=1e-5)


def test_a_student_of_fewer_layers_is_made_once(folder, capsys):
    changes = {**COMMON, **LORA, "keep_layers": [1], "max_steps": 1, "save_strategy": "no"}
    Path("run.yaml").write_text(settings(**changes, recipe="distill_two_stage", second_stage=SECOND))
    run(capsys, "run", "run.yaml")
    assert AutoModelForCausalLM.from_pretrained("out").config.num_hidden_layers == 1
    assert metrics("out")["before"]["forward_kl"] == pytest.approx(metrics("out/stage-1")["after"]["forward_kl"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"second_stage": {"lmda": 0.5}}, "second_stage.lmda: unknown key. Did you mean lmbda?"),
        ({"second_stage": {"lmbda": 2}}, "second_stage.lmbda: expected a number of at most 1, got 2."),
        ({"second_stage": {"losses": [{"type": "kl"}]}}, "second_stage.losses: [0].type: expected one of"),
        ({"second_stage": {"use_peft": True}}, "second_stage.use_peft: is that of the whole run"),
        ({"second_stage": {"output_dir": "b"}}, "second_stage.output_dir: is that of the whole run"),
        ({"second_stage": SECOND, "packing": True}, "second_stage.packing: completions are sampled for rows one by"),
        ({"second_stage": {"teacher_model_name_or_path": "./no"}}, "no such directory: ./no"),
        ({"second_stage": {"dataset_name": "no.jsonl"}}, "no.jsonl"),
        ({"second_stage": None}, "second_stage: missing; `recipe: distill_two_stage` needs it."),
        ({"second_stage": SECOND, "recipe": "distill"}, "second_stage: has no effect without `recipe: distill_two"),
        ({"second_stage": SECOND, "dataset_text_field": "completion", "dataset_name": "text.jsonl"}, "no prompt"),
    ],
)
def test_the_second_stage_is_checked_before_the_first_runs(folder, capsys, monkeypatch, changes, message):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    write_rows(Path("text.jsonl"), [{"completion": " ".join(WORDS[i : i + 5])} for i in range(9)])
    Path("run.yaml").write_text(settings(**{**COMMON, "recipe": "distill_two_stage", **changes}))
    code, _, err = call(capsys, "run", "run.yaml")
    assert code in (2, 4) and message in err
    assert not Path("out").exists()


def test_commands_know_both_stages(folder, capsys):
    found = json.loads(call(capsys, "estimate", "run.yaml", "--json")[1])["stages"]
    assert [stage["length"] for stage in found] == [8, 32]  # completions are sampled up to max_length
    out = run(capsys, "preview", "run.yaml", "--rows", "1", "second_stage={max_length: 7, lmbda: 1.0}")
    assert "1: stage 1 of 2" in out and "7 tokens" in out.partition("2: stage 2 of 2")[2]
    assert "recipe distill_two_stage" in run(capsys, "validate", "run.yaml")
    assert "second_stage: {learning_rate: 0.001," in run(capsys, "config", "run.yaml")
