"""The benchmark of better students: its arithmetic, trainings by time, and what a failure or a time limit leaves."""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import WORDS, tiny_model, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl

from benchmarks import student_chart, student_page, students
from benchmarks.crew import run_together
from benchmarks.student_page import STUDENT_T, half_width, interval, page, paired, verdict
from benchmarks.student_speeds import is_spanish
from benchmarks.student_ways import (
    BASE,
    CONFIG,
    SIZES,
    STUDENTS,
    WARMUP,
    WAYS,
    ByTime,
    Setup,
    learning_rate_at,
    output_of,
    settings_of,
)
from liger_trainer.config.run_config import load_run_config

FORK = torch.multiprocessing.get_context("fork")


def t_density(x: float, freedom: int) -> float:
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    return scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)


@pytest.mark.parametrize("freedom", range(1, len(STUDENT_T) + 1))
def test_the_quantiles_leave_one_fortieth_above(freedom):
    end, steps = STUDENT_T[freedom - 1], 20000
    weights = [1 if i in (0, steps) else 4 if i % 2 else 2 for i in range(steps + 1)]
    below = sum(w * t_density(end * i / steps, freedom) for i, w in enumerate(weights)) * end / steps / 3  # Simpson
    assert 0.5 + below == pytest.approx(0.975, abs=2e-6)


def test_the_interval_is_students(tmp_path):
    values = [1.0, 2.0, 4.0]
    assert half_width(values) == pytest.approx(4.3027 * math.sqrt(7 / 3) / math.sqrt(3), rel=1e-6)
    assert interval(values, 2) == "2.33 ± 3.79" and interval([1.5], 1, "+") == "+1.5" and interval([], 1) == ""
    assert half_width([1.0]) is None and half_width([2.0, 2.0]) == 0


def test_its_coverage_is_95_percent():
    draws = torch.randn(20000, 3, generator=torch.Generator().manual_seed(3)).double().tolist()
    covered = [abs(statistics.mean(each)) <= (half_width(each) or 0.0) for each in draws]
    assert sum(covered) / len(covered) == pytest.approx(0.95, abs=0.006)


def run_of(forward_kl: float, **more) -> dict:
    held_out = {
        "forward_kl": forward_kl, "reverse_kl": 1.0, "agreement_at_1": 0.5, "student_perplexity": 20.0,
    }  # fmt: skip
    return {
        "held_out": held_out, "parameters": 81000000, "steps": [10], "tokens": 5000, "seconds": 1.0, "device": "GPU",
        "peak_memory_mib": 9.0, "versions": {}, "beside": 16, "measuring": 1.0, **more,
    }  # fmt: skip


def test_differences_are_paired_by_seed():
    """Seeds that differ much hide no difference that all of them show."""
    runs = {
        BASE: {"0": run_of(0.9), "1": run_of(1.4), "2": run_of(2.3), "3": run_of(7.0)},
        "on_policy": {"2": run_of(2.21), "1": run_of(1.3), "0": run_of(0.79)},
    }
    differences = paired(runs, "on_policy", BASE, "forward_kl")
    assert sorted(differences) == pytest.approx([-0.11, -0.1, -0.09])
    assert verdict(differences, -1) == "better" and verdict(differences, 1) == "worse"
    assert verdict([-0.1, 0.1, 0.05], 1) == "not told apart" and verdict([0.1], 1) == ""
    assert paired(runs, "corrected", BASE, "forward_kl") == []
    runs["on_policy"]["1"]["beside"] = 3  # another share of the device
    assert len(paired(runs, "on_policy", BASE, "forward_kl")) == 2


FOLLOWED = {"share": 0.5, "answers": ["es un\n texto"]}


def content_of(runs: dict) -> dict:
    return {
        "conditions": {"train_seconds": 70.0}, "runs": runs,
        "before": {
            "prompted": {"share": 0.6, "answers": []}, "quantised_int4": {"forward_kl": 2.0, "agreement_at_1": 0.25},
        },
        "speed": {
            "distilled_0.5": {"tokens_per_second": 77.7, "p25": 70.0, "p75": 80.0},
        },
        "failures": {"both, seed 1": "OutOfMemoryError: no"},
    }  # fmt: skip


def test_the_page_has_means_intervals_differences_and_failures():
    runs = {way: {str(seed): run_of(1.0 + 0.1 * seed, followed=FOLLOWED) for seed in range(3)} for way in WAYS}
    runs["on_policy"] = {str(seed): run_of(1.2 + 0.1 * seed, steps=[6]) for seed in range(3)}
    text = page(content_of(runs))
    assert "| one stage: forward KL on the docstrings | 1.100 ± 0.248 |" in text
    assert "+0.200 ± 0.000, worse" in text and "| 6 | 5,000 | 3 |" in text
    assert text.count("| 77.7 (70.0 to 80.0) |") == 2 and "- both, seed 1: OutOfMemoryError: no" in text
    assert "| teacher, asked | 0.60 |" in text and "| student, not asked | 0.50 ± 0.00 |" in text
    assert text.count("- es un texto") == 1 and "| int4 | 2.000 | 0.250 | 1.100 ± 0.248 |" in text
    assert "| 0.45 ± 0.12 |" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert all(len({line.count("|") for line in block.splitlines()}) == 1 for block in tables), "rows of one width"
    assert page(content_of({})) and page(content_of({BASE: runs[BASE]})), "what is there so far"


def test_the_learning_rate_rises_and_falls_with_time():
    assert [learning_rate_at(x) for x in (0.0, WARMUP, 1.0, 1.2)] == pytest.approx([0, 1, 0, 0])
    assert learning_rate_at(WARMUP / 4) == pytest.approx(0.25)
    assert learning_rate_at((1 + WARMUP) / 2) == pytest.approx(0.5)


def test_a_training_follows_the_clock_and_ends_by_it(monkeypatch):
    now, waited = [100.0], []
    monkeypatch.setattr("benchmarks.student_ways.time.monotonic", lambda: now[0])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 7.0)
    clock, control = ByTime(10.0, lambda: waited.append(now[0])), TrainerControl()
    call: Any = (None, None, control)
    clock.on_train_begin(*call, lr_scheduler=schedule)
    now[0] = 150.0  # the measurement before training
    for at in (150.0, 151.0, 154.0, 159.9, 160.0):
        assert not control.should_training_stop
        clock.on_step_begin(*call)
        now[0] = at
        clock.on_step_end(*call)
        schedule.step()
        assert schedule.get_last_lr() == [pytest.approx(2 * learning_rate_at((at - 150) / 10))]
    assert control.should_training_stop and waited == [150.0]


def parameters_of(layers: int, width: float) -> int:
    sizes: dict[str, Any] = {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    }
    config = LlamaConfig(
        **sizes, intermediate_size=round(1536 * width), num_hidden_layers=layers, tie_word_embeddings=True
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).num_parameters()


@pytest.mark.parametrize("name", ["0.8", "0.5", "0.25"])
def test_students_have_the_share_of_parameters_that_they_are_called_after(name):
    kept = STUDENTS[name].kept(30)
    assert kept[0] == 0 and kept[-1] == 29 and kept == sorted(set(kept))
    assert parameters_of(len(kept), STUDENTS[name].width) / parameters_of(30, 1.0) == pytest.approx(
        float(name), abs=0.011
    )


def test_depth_and_width_have_as_many_parameters_as_depth_alone():
    both = STUDENTS["both"]
    assert parameters_of(len(both.kept(30)), both.width) == pytest.approx(parameters_of(15, 1.0), rel=2e-4)


def test_the_settings_of_every_way_are_valid_and_differ(tmp_path):
    setup = Setup(tmp_path, "demo:smollm2-135m-instruct", 30, 1.0)
    for name in ("both", "0.25"):
        (tmp_path / "students" / name).mkdir(parents=True)
    for way in WAYS:
        config = load_run_config(CONFIG, settings_of(way, 1, setup), exact=True)
        assert config.recipe in ("sft", "distill")
    assert len(
        {tuple(settings_of(way, 1, setup)[len(setup.common("")) + 2 :]) + (WAYS[way].rows,) for way in WAYS}
    ) == len(WAYS)


def test_spanish_is_recognised():
    assert is_spanish("El modulo `str.split` es un modulo de la función que permite")
    assert not is_spanish("In Python, `os.path.join` is a built-in function that combines two paths.")
    assert not is_spanish("")


def fails() -> None:
    raise ValueError("no luck\nat all")


def test_a_task_that_fails_or_is_late_stops_no_other(tmp_path):
    ended, start = {}, FORK.Barrier(5)
    tasks = {
        "works": (waits, (start, 1.5)), "fails": (fails, ()), "dies": (os._exit, (3,)), "late": (time.sleep, (60,)),
    }  # fmt: skip
    began = time.monotonic()
    run_together(tasks, FORK, tmp_path, began + 3, lambda name, *answer: ended.update({name: answer}), start)
    assert time.monotonic() - began < 8
    assert ended == {
        "works": (1.5, None), "fails": (None, "ValueError: no luck"),
        "dies": (None, "its process ended with exit code 3"), "late": (None, "out of time"),
    }  # fmt: skip
    assert "no luck\nat all" in (tmp_path / "fails.log").read_text()


def waits(start, answer: float) -> float:
    try:
        start.wait(60)
    except Exception:
        return answer  # it was broken, by the one that failed
    return -1.0


def row(number: int) -> dict:
    asked, answered = " ".join(WORDS[number % 40 :][:3]), " ".join(WORDS[number % 37 :][: 4 + number % 3])
    return {
        "prompt": [{"role": "user", "content": asked}], "completion": [{"role": "assistant", "content": answered}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    tiny_model("llama_tied", num_hidden_layers=8).save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    (folder / "rows").mkdir()
    for split, first, count in (("train", 0, 60), ("test", 7, 8)):
        text = "".join(json.dumps(row(first + i)) + "\n" for i in range(count))
        (folder / "rows" / f"{split}.jsonl").write_text(text)
    return folder


def arguments(teacher: Path, output: Path, *more: str) -> list[str]:
    where = ["--teacher", f"{teacher / 'teacher'}", "--dataset", f"{teacher / 'rows'}", "--output", str(output)]
    return ["--tiny", *where, "--no-speeds", *more, "use_cpu=true"]


def in_this_process(tasks, context, folder, deadline, done: Callable, start=None) -> None:
    for name, (function, words) in tasks.items():
        words = tuple(None if word is start else word for word in words)
        try:
            done(name, json.loads(json.dumps(function(*words))), None)
        except Exception as error:
            done(name, None, repr(error))


@pytest.mark.slow
def test_trainings_end_by_time_and_a_second_call_goes_on(teacher, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(students, "run_together", in_this_process)
    monkeypatch.setattr(students, "context_for", lambda preload: torch.multiprocessing.get_context("spawn"))
    call = arguments(teacher, tmp_path, "--train-seconds", "0.4")
    students.main([*call, "--ways", "on_policy", "--seeds", "0"])
    (file,) = tmp_path.glob("students-*.json")
    first = json.loads(file.read_text())["runs"]["on_policy"]["0"]
    assert 0.4 <= first["seconds"] < 6 and len(first["steps"]) == 1 and first["beside"] == 0
    assert first["held_out"].keys() == student_page.METRICS.keys()

    broken = students.ways.STUDENTS["both"]
    monkeypatch.setitem(students.ways.STUDENTS, "half", broken)  # it was not made, so that its trainings fail
    monkeypatch.setattr(students.preparation, "make_student", fails)
    students.main([*call, "--ways", "on_policy", "tuned_0.5", BASE, "--seeds", "0"])
    content = json.loads(file.read_text())
    assert content["runs"]["on_policy"] == {"0": first}, "what is there is not done again"
    assert content["runs"].keys() == {"on_policy", "tuned_0.5"} and f"{BASE}, seed 0" in content["failures"]
    assert len(content["calls"]) == 2 and "## Not measured" in file.with_suffix(".md").read_text()

    with pytest.raises(SystemExit, match="choose another --output"):
        students.main([*call, "--train-seconds", "5"])
    capsys.readouterr()


def test_the_chart_has_sizes_whose_speed_is_known(tmp_path):
    speed = {"teacher": {"tokens_per_second": 40.0}, "distilled_0.8": {"tokens_per_second": 55.0}}
    runs = {f"{line}_{size}": {"0": run_of(1.0), "1": run_of(2.0)} for line in ("distilled", "tuned") for size in SIZES}
    content = {"speed": speed, "runs": runs}
    ((tokens, kl, half, size),) = student_chart.points(content, "tuned", "forward_kl")
    assert (tokens, kl, size) == (55.0, 1.5, "0.8") and half == half_width([1.0, 2.0])
    path = tmp_path / "chart.svg"
    assert not student_chart.draw(content, path) and not path.exists()
    speed["distilled_0.5"] = {"tokens_per_second": 100.0}
    assert student_chart.draw(content, path)
    drawn = path.read_text()
    assert "fine-tuned" in drawn and "agreement@1" in drawn and drawn.count(">0.5<") >= 4


def test_seeds_train_one_after_the_other_or_together(tmp_path):
    record = students.Record(tmp_path / "students-cpu.json", {})
    record.content["runs"] = {BASE: {"1": run_of(1.0)}}
    options = argparse.Namespace(ways=["drawn", BASE], seeds=[1, 2], together=False, seconds=1.0, logs=tmp_path)
    benchmark = students.Benchmark(options, Setup(tmp_path, "teacher", 30, 1.0), record)
    apart = [[("drawn", 1)], [(BASE, 2), ("drawn", 2)]]
    assert benchmark._waves() == apart
    options.together = True
    assert benchmark._waves() == [[*apart[0], *apart[1]]]


@pytest.mark.parametrize("seconds", ["20", "100"])
def test_a_deadline_that_is_over_starts_no_wave(teacher, tmp_path, monkeypatch, capsys, seconds):
    """Neither one that leaves no time to measure what was trained."""
    monkeypatch.setattr(students, "run_together", in_this_process)
    monkeypatch.setattr(students, "context_for", lambda preload: torch.multiprocessing.get_context("spawn"))
    students.main([*arguments(teacher, tmp_path), "--ways", BASE, "--seeds", "4", "--seconds", seconds])
    assert "seed 4: no time is left" in capsys.readouterr().err  # 0.9 of 60 s, and of as many to measure, do not fit


def test_a_command_is_shown_without_its_folders():
    words = ["--output", "a", "--seeds", "1", "--logs=b", "--logs", "c", "--tiny"]
    assert students.without_output(words) == ["--seeds", "1", "--tiny"]


def test_speeds_of_writing(teacher, tmp_path):
    setup = Setup(tmp_path, str(teacher / "teacher"), 8, 1.0, overrides=("use_cpu=true",), prompts=2)
    students.preparation.export_rows(setup, str(teacher / "rows"))
    speeds = students.speeds.writing_speeds({"one": setup.teacher, "two": setup.teacher}, setup, rounds=2)
    assert speeds.keys() == {"one", "two"}
    assert all(0 < speed["p25"] <= speed["tokens_per_second"] <= speed["p75"] for speed in speeds.values())


@pytest.mark.slow
def test_processes_of_a_fork_server_train_side_by_side(teacher, tmp_path):
    ways = ["--ways", BASE, "privileged", "drawn", "distilled_0.25", "--seeds", "0", "--train-seconds", "1"]
    students.main([*arguments(teacher, tmp_path, *ways), "--seconds", "200"])
    (file,) = tmp_path.glob("students-*.json")
    content = json.loads(file.read_text())
    assert content["runs"].keys() == {BASE, "privileged", "drawn", "distilled_0.25"} and not content["failures"]
    assert {run["0"]["beside"] for run in content["runs"].values()} == {3}


def test_the_folder_of_a_run_is_named_after_way_and_seed(tmp_path):
    assert output_of(BASE, 3, Setup(tmp_path, "t", 2, 1.0)) == tmp_path / "runs" / f"{BASE}-3"
