"""What is seen of a run: lines that stay, bars on a terminal; at its end a verdict and next commands."""

import contextlib
import io
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import end_of, metrics, save_models, settings, texts, without_report, write_rows
from transformers import AutoModelForCausalLM, TrainerState, TrainingArguments

from liger_trainer.run import progress as progress_module
from liger_trainer.run.metric_rows import verdict
from liger_trainer.run.progress import RunProgress, SpeedMetrics
from liger_trainer.run.recipe import next_commands

STEPS = 6


def printed_of(folder, *overrides):
    """Run my.yaml in a folder; return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        without_report(patch)
        assert end_of("run", "my.yaml", *overrides) == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A distillation with two evaluations in between: stdout, stderr and metrics.json."""
    folder = tmp_path_factory.mktemp("progress")
    save_models(folder, "student", "teacher")
    write_rows(folder / "rows.jsonl", texts(30))
    changes = {"max_steps": STEPS, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "disable_tqdm": False}
    more = {"teacher_model_name_or_path": "teacher", "keep_layers": [0], "num_sample_completions": 3}
    (folder / "my.yaml").write_text(settings(**changes, **more, max_new_tokens=20))
    out, err = printed_of(folder)
    return SimpleNamespace(folder=folder, out=out, err=err, metrics=metrics(folder / "out"))


def test_a_line_for_each_log(run):
    lines = re.findall(r"^step (\d)/6  loss (\S+)  forward_kl (\S+)  (.*)$", run.out, re.M)
    logs = [log for log in run.metrics["log_history"] if "loss" in log]
    assert [int(step) for step, *_ in lines] == [2, 4, 6] == [log["step"] for log in logs]
    for (_, loss, kl, rest), log in zip(lines, logs, strict=True):
        assert math.isclose(float(loss), log["loss"], rel_tol=1e-3)
        assert math.isclose(float(kl), log["forward_kl"], rel_tol=1e-3)
        assert f"{log['tokens_per_second']:,.0f} tokens/s" in rest and f"lr {log['learning_rate']:.3g}" in rest
    assert ["ETA" in rest for *_, rest in lines] == [True, True, False]


def test_a_line_for_each_evaluation_and_what_is_measured(run):
    held_out = re.findall(r"^step (\d)/6  held out:  loss (\S+) ", run.out, re.M)
    logs = [log for log in run.metrics["log_history"] if "eval_loss" in log and 0 < log["step"]]
    between = {log["step"]: log["eval_loss"] for log in logs}
    assert [int(step) for step, _ in held_out] == [3, 6]
    assert all(math.isclose(float(loss), between[int(step)], rel_tol=1e-3) for step, loss in held_out)
    before = "Before training, held-out rows: forward KL"
    order = ("before training:", before, "step 2/6", "step 6/6", "after training:")
    places = [run.out.index(text) for text in order]
    assert places == sorted(places)
    assert f"forward KL (nats/token) {run.metrics['before']['forward_kl']:.3f}" in run.out
    assert "it/s" not in run.err and "it/s" not in run.out  # no bars where there is no terminal


def test_the_end_of_a_run(run):
    models = run.metrics["models"]
    saved = {name: AutoModelForCausalLM.from_pretrained(run.folder / name) for name in ("out", "teacher")}
    assert models["student"]["parameters"] == saved["out"].num_parameters()
    assert models["teacher"]["parameters"] == saved["teacher"].num_parameters() > models["student"]["parameters"]
    share = models["student"]["parameters"] / models["teacher"]["parameters"]
    assert f"It has {share:.0%} of its teacher's parameters" in run.out
    *_, title, first, second, third = run.out.rstrip().splitlines()
    assert title == "Next:"
    assert "liger-trainer chat out" in first and "liger-trainer eval out" in second
    assert "liger-trainer run out/config.yaml output_dir=out-2" in third


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["per_device_train_batch_size=8", "gradient_accumulation_steps=8"],
            "there are 24 rows, and a step takes up to 64 of them. For more steps: num_train_epochs=10",
        ),
        (["packing=true", "max_length=64"], "sequences that rows are packed into"),
        (["max_steps=2"], None),  # who asks for two steps knows it
        (["per_device_train_batch_size=1"], None),
    ],
)
def test_few_steps_are_announced_before_training(run, overrides, said):
    out, _ = printed_of(run.folder, "~max_steps", "num_train_epochs=1", "output_dir=few", "overwrite_output_dir=true",
                        "eval_strategy=no", "num_sample_completions=0", *overrides)  # fmt: skip
    assert ("in which the model will hardly change: " in out) == (said is not None)
    if said is not None:
        assert said in out and out.index(said) < out.index("before training: measuring")


def test_a_long_measurement_goes_on_saying_something(capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: clock.now)
    progress, state = RunProgress(False, SpeedMetrics()), SimpleNamespace(is_world_process_zero=True)
    for _ in range(50):
        progress.on_prediction_step(None, state, None, eval_dataloader=[0] * 50)
        clock.now += 1.0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["before training: measuring the held-out rows, batches: 50", "before training: batch 21 of 50",
                     "before training: batch 42 of 50"]  # fmt: skip


def test_the_time_left_is_not_that_of_the_first_step(monkeypatch):
    """A first step of a minute, then seconds, one of them in a busy moment; evaluations count by their share."""
    clock, logs = SimpleNamespace(now=10.0), []
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: clock.now)
    args, state, pace = TrainingArguments(use_cpu=True), TrainerState(), SpeedMetrics()
    pace.on_train_begin(args, state, None)
    for seconds in (60.0, 1.0, 1.0, 30.0, 1.0, 1.0):
        pace.on_step_begin(args, state, None)
        clock.now += seconds
        state.global_step += 1
        pace.on_step_end(args, state, None)
        state.log_history.append({})
        pace.on_log(args, state, None, logs={"loss": 1.0, "num_tokens": 8.0 * state.global_step})
        logs.append(pace.seconds_a_step())
        if state.global_step == 3:
            pace.on_evaluate(args, state, None)
            clock.now += 6.0
    assert logs[:3] == [None, 1.0, 1.0]
    assert logs[3:] == [1.0 + 6 / 4, 1.0 + 6 / 5, 1.0 + 6 / 6]


def test_an_attempt_that_did_not_fit_is_not_in_the_pace(monkeypatch):
    """auto_find_batch_size begins training again; the first log tells the speed of what then happened."""
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: clock.now)
    args, state, pace = TrainingArguments(use_cpu=True), TrainerState(), SpeedMetrics()
    for seconds in (100.0, 2.0):
        pace.on_train_begin(args, state, None)
        pace.on_step_begin(args, state, None)
        clock.now += seconds
    pace.on_step_end(args, state, None)
    state.log_history.append({})
    logs = {"loss": 1.0, "num_tokens": 8.0}
    pace.on_log(args, state, None, logs=logs)
    assert logs["tokens_per_second"] == 4.0


def test_bars_say_what_they_are(capsys, monkeypatch):
    state = SimpleNamespace(is_world_process_zero=True, max_steps=4, global_step=0)
    progress, loader = RunProgress(True, SpeedMetrics()), [0] * 3
    progress.on_prediction_step(None, state, None, eval_dataloader=loader)
    progress.on_evaluate(None, state, None, metrics={})
    progress.on_train_begin(None, state, None)
    state.global_step = 2
    progress.on_step_end(None, state, None)
    progress.on_prediction_step(None, state, None, eval_dataloader=loader)
    progress.on_evaluate(None, state, None, metrics={"eval_loss": 2.5, "eval_runtime": 1.0})
    progress.on_train_end(None, state, None)
    progress.on_prediction_step(None, state, None, eval_dataloader=loader)
    progress.on_evaluate(None, state, None, metrics={})
    printed = capsys.readouterr()
    bars = ("before training", "training", "evaluating", "after training")
    places = [printed.err.find(f"{name}:") for name in bars]
    assert -1 < places[0] and places == sorted(places)
    assert printed.out == "step 2/4  held out:  loss 2.5  in 1.0 s\n"


@pytest.mark.parametrize(
    ("recipe", "before", "after", "tone", "text"),
    [
        ("sft", {"loss": 2.0}, {"loss": 1.5}, "good", "The model got better on rows that it was not"),
        ("sft", {"loss": 2.0}, {"loss": 2.1}, "bad", "got worse"),
        ("sft", {"loss": 2.0}, {"loss": 1.995}, "", "hardly changed"),
        ("sft", {"loss": 2.0}, {"loss": math.nan}, "bad", "is NaN"),
        ("distill", {"forward_kl": 1.0, "loss": 1.0}, {"forward_kl": 0.5, "loss": 9.0}, "good", "0.500 (−50.0%)"),
        ("distill", {"forward_kl": 1.0}, {"forward_kl": 1.0}, "", "The student hardly changed"),
        ("distill", {"agreement_at_1": 0.5}, {"agreement_at_1": 0.4}, "bad", "agreement@1 from 0.500 to 0.400"),
        ("distill", {"loss/alm": 0.5, "student_perplexity": 9.0}, {"loss/alm": 0.4, "student_perplexity": 11.0}, "good",
         "ALM from 0.500 to 0.400"),
        ("sft", {"exact_match": 0.0, "loss": 2.0}, {"exact_match": 0.5, "loss": 9.0}, "good", "exact match from 0.000"),
        ("sft", {"exact_match": 0.0, "loss": 2.0}, {"exact_match": 0.0, "loss": 1.0}, "good", "loss from 2.000 to 1"),
    ],
)  # fmt: skip
def test_the_verdict(recipe, before, after, tone, text):
    found = verdict(recipe, before, after, {})
    assert found is not None and found.tone == tone and text in found.text
    assert verdict(recipe, {}, after, {}) is None


def test_a_verdict_by_few_rows_says_so():
    found = [verdict("sft", {"loss": 2.0}, {"loss": 1.0}, {}, rows) for rows in (2, 20, None)]
    assert [verdict is not None and "which are few" in verdict.text for verdict in found] == [True, False, False]
    assert found[0] is not None and "It is judged by 2 rows, which are few." in found[0].text


def test_a_student_is_compared_with_its_teacher():
    def text(of_teacher: int) -> str:
        models = {"student": {"parameters": 50}, "teacher": {"parameters": of_teacher}}
        judged = verdict("sft", {"loss": 2.0}, {"loss": 1.0}, models)
        assert judged is not None
        return judged.text

    assert "50% of its teacher's parameters (50 of 100)" in text(100)
    assert "as large as its teacher" in text(50)
    assert "teacher" not in text(0)  # ZeRO-3 leaves empty tensors in each process


def test_next_commands_of_the_folder_at_hand_and_of_adapters(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert any(f"output_dir=../{tmp_path.name}-2" in command for command in next_commands(Path("."), adapter=False))
    assert f"liger-trainer merge . ../{tmp_path.name}-merged" in next_commands(Path("."), adapter=True)
    assert f"liger-trainer merge {tmp_path}/a {tmp_path}/a-merged" in next_commands(tmp_path / "a", adapter=True)
