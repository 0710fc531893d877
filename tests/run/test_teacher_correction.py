"""`teacher_correction` through the command: the teacher is fine-tuned first, once, and then teaches."""

import json
from pathlib import Path

import pytest
from commands import call, settings
from parts import enter, killed, metrics, run, two_models, weights, write_completions

from liger_trainer.common.checkpoints import checkpoints_in
from liger_trainer.config.run_config import load_run_config

STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
CORRECTION = {"max_steps": 3, "learning_rate": 5e-3}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
TEACHER = {"teacher_model_name_or_path": "teacher"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    enter(tmp_path, models, monkeypatch)
    write_completions()
    return tmp_path


def write(name: str = "run.yaml", **changes) -> None:
    Path(name).write_text(settings(**{**STEPS, **changes}))


def test_it_is_a_fine_tuning_and_then_a_distillation(folder, capsys, monkeypatch):
    """Teacher and student have the weights of the same two trainings by `sft` and `distill`, bit for bit."""
    write(**TEACHER, teacher_correction=CORRECTION)
    write("sft.yaml", **CORRECTION, model_name_or_path="teacher", output_dir="by_hand")
    write("kd.yaml", teacher_model_name_or_path="by_hand", output_dir="student_by_hand")
    printed = run(capsys, "run", "run.yaml")
    run(capsys, "run", "sft.yaml")
    run(capsys, "run", "kd.yaml")
    assert weights("out/teacher") == weights("by_hand") != weights("teacher")
    assert weights("out") == weights("student_by_hand")
    corrected = metrics("out/teacher")
    assert corrected["after"]["loss"] < corrected["before"]["loss"]
    assert metrics("out")["after"]["teacher_perplexity"] == pytest.approx(corrected["after"]["perplexity"], rel=1e-4)
    assert "run.yaml, correction of the teacher" in printed and "run.yaml, distillation" in printed
    assert "| teacher corrected | fine-tuned for 3 steps first |" in Path("out/README.md").read_text()
    monkeypatch.setattr("liger_trainer.run.reports.html.draw", lambda runs, labels: [])
    run(capsys, "report", "out")
    assert "2 runs compared" in Path("out/report.html").read_text()
    found = json.loads(call(capsys, "eval", "out", "--json")[1])["evaluations"]
    assert found[0]["metrics"]["forward_kl"] == pytest.approx(metrics("out")["after"]["forward_kl"], rel=1e-5)


@pytest.mark.parametrize(("part", "step"), [("teacher", 3), pytest.param("out", 1, marks=pytest.mark.slow)])
def test_a_killed_run_is_finished_by_resume_alone(folder, capsys, part, step):
    write(**TEACHER, teacher_correction={**CORRECTION, "max_steps": 4})
    killed("run", "run.yaml", stage=part, step=step)
    before = (Path("out/teacher/metrics.json").stat().st_mtime_ns, weights("out/teacher")) if part == "out" else None
    assert [path.name for path in checkpoints_in(Path("out/teacher"))][:1] == ["checkpoint-2"]
    run(capsys, "resume", "out")
    if before is not None:  # it is not trained again
        assert before == (Path("out/teacher/metrics.json").stat().st_mtime_ns, weights("out/teacher"))
    assert metrics("out/teacher")["training"]["resumed_at"] == (2 if part == "teacher" else 0)
    assert metrics("out")["training"]["resumed_at"] == 0
    whole = metrics("out/teacher")["after"]["perplexity"]
    assert metrics("out")["after"]["teacher_perplexity"] == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_adapters_of_a_teacher_are_merged_and_both_stages_have_it(folder, capsys):
    second = {"lmbda": 1.0, "max_completion_length": 4, "learning_rate": 1e-3}
    correction = {**CORRECTION, **LORA}
    write(**TEACHER, teacher_correction=correction, recipe="distill_two_stage", second_stage=second, max_steps=1,
          keep_layers=[0], save_strategy="no")  # fmt: skip
    run(capsys, "run", "run.yaml")
    assert not Path("out/teacher/adapter_config.json").exists()
    assert json.loads(Path("out/teacher/config.json").read_text())["num_hidden_layers"] == 2
    corrected = metrics("out/teacher")
    assert corrected["training"]["trainable_parameters"] < corrected["training"]["parameters"] / 2
    assert corrected["after"]["perplexity"] != corrected["before"]["perplexity"]
    taught = [metrics(path)["after"]["teacher_perplexity"] for path in ("out/stage-1", "out")]
    assert taught == pytest.approx([corrected["after"]["perplexity"]] * 2, rel=1e-4)


@pytest.mark.slow
def test_a_run_that_overwrites_begins_with_the_teacher(folder, capsys):
    two = {"recipe": "distill_two_stage", "second_stage": {"beta": 1.0}, "max_steps": 2}
    write(**TEACHER, teacher_correction={**CORRECTION, "max_steps": 2}, **two)
    run(capsys, "run", "run.yaml")
    killed("run", "run.yaml", "overwrite_output_dir=true", stage="teacher", step=1)
    assert not list(Path("out").rglob("metrics.json")) and not list(Path("out").rglob("checkpoint-*"))
    run(capsys, "resume", "out")
    assert metrics("out")["training"]["steps"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_correction": {"max_steps": 3}}, "teacher_correction.learning_rate: missing"),
        ({"teacher_correction": {"learning_rate": 1e-3}}, "teacher_correction.max_steps: missing"),
        ({"teacher_correction": {**CORRECTION, "beta": 1.0}}, "teacher_correction.beta: belongs to `recipe: distill`"),
        ({"teacher_correction": {**CORRECTION, "max_step": 1}}, "teacher_correction.max_step: unknown key. Did you"),
        ({"teacher_correction": {**CORRECTION, "model_revision": "a"}}, "teacher_correction.model_revision: is that"),
        ({"teacher_correction": {**CORRECTION, "lora_r": 4}}, "teacher_correction.lora_r: has no effect without"),
        ({"teacher_correction": CORRECTION, "recipe": "sft"}, "teacher_correction: has no effect with `recipe: sft`"),
        (
            {"teacher_correction": CORRECTION, "teacher": "cache", "teacher_cache_dir": "c"},
            "teacher_correction: fine-tunes the one model of `teacher: model`",
        ),
        ({"teacher_correction": CORRECTION, "teacher_model_name_or_path": "./none"}, "no such directory: ./none"),
    ],
)
def test_mistakes_show_before_anything_runs(folder, capsys, changes, message):
    write(**{**({} if changes.get("recipe") == "sft" else TEACHER), **changes})
    code, _, err = call(capsys, "run", "run.yaml")
    assert code == 2 and message in err
    assert not Path("out").exists()


def test_what_the_student_will_be_quantised_to_is_not_the_teachers(folder):
    write(**TEACHER, teacher_correction=CORRECTION, qat="int8")
    assert [stage["qat"] for stage in load_run_config("run.yaml").each] == [None, "int8"]


def test_commands_know_the_correction(folder, capsys):
    write(**TEACHER, teacher_correction=CORRECTION, keep_layers=[0])
    found = json.loads(call(capsys, "estimate", "run.yaml", "--json")[1])["stages"]
    assert [(stage["recipe"], stage["steps"]) for stage in found] == [("sft", 3), ("distill", 4)]
    assert found[0]["parameters"] > found[1]["parameters"]
    out = run(capsys, "preview", "run.yaml", "--rows", "1")
    assert "1: correction of the teacher" in out and "2: distillation" in out
