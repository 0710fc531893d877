"""The benchmark of better students: its arithmetic, its page, and trainings that end by time."""

import json
import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import TrainerControl

from benchmarks import students
from benchmarks.students import (
    BASE,
    CONFIG,
    OF_TEACHER,
    TEACHER_CONFIG,
    WARMUP,
    WAYS,
    ByTime,
    Setup,
    learning_rate_at,
    page,
    read,
)


def run_of(exact_match: float, neighbours: int = 9) -> dict:
    held_out = {"exact_match": exact_match, f"{OF_TEACHER}exact_match": 0.9, "forward_kl": 1.0, "agreement_at_1": 0.5}
    return {"held_out": held_out, "parameters": 81000000, "steps": 10, "tokens": 5000, "neighbours": neighbours}


def test_the_page_has_means_intervals_differences_and_failures():
    """Seeds that differ much hide no difference that all of them show."""
    runs = {
        BASE: {"0": run_of(0.09), "1": run_of(0.14), "2": run_of(0.23), "3": run_of(0.7)},
        "on_policy": {"2": run_of(0.33), "1": run_of(0.26), "0": run_of(0.19)},
        "mixed": {"0": run_of(0.5, neighbours=3)},  # another share of the device
    }
    conditions = {"train_seconds": 70.0, "train_steps": None, "teacher_seconds": 60.0, "base": "demo:small"}
    text = page({"conditions": conditions, "runs": runs, "before": {}, "failures": {"cache-1": "no luck"}})
    assert "| the teacher | 0.900 |" in text and "- cache-1: no luck" in text
    assert "| on-policy: reverse KL | 0.260 ± 0.174 |" in text
    assert "| +0.107 ± 0.029, better | +0.000 ± 0.000, not told apart |" in text
    assert re.search(r"half of the batches on-policy: JSD, less: fine-tuned on the answers \|  \|", text)
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2 and all(len({row.count("|") for row in block.splitlines()}) == 1 for block in tables)


def test_a_training_follows_the_clock_and_ends_by_it(monkeypatch):
    assert [learning_rate_at(x) for x in (0.0, WARMUP / 4, WARMUP, 1.0, 1.2)] == pytest.approx([0, 0.25, 1, 0, 0])
    now, waited = [100.0], []
    monkeypatch.setattr("benchmarks.students.time.monotonic", lambda: now[0])
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


def test_the_settings_of_every_way_are_valid_and_differ(tmp_path):
    setup = Setup(tmp_path, str(tmp_path / "teacher"), 1.0)
    for folder in ("teacher", "rows/tasks", "rows/answers"):
        (tmp_path / folder).mkdir(parents=True)
    for way in WAYS:  # a second run begins with what the first has left
        (tmp_path / "runs" / f"{way}-1-first").mkdir(parents=True)
    runs = {way: setup.runs(way, 1) for way in WAYS}
    found = {way: [read(CONFIG, settings) for _, settings in each] for way, each in runs.items()}
    assert {way for way, each in runs.items() if len(each) > 1} == {"tuned_first", "distilled_first"}
    assert all(each[0].drops_layers() and each[0]["model_name_or_path"] == setup.teacher for each in found.values())
    assert all(str(each[1]["model_name_or_path"]).endswith("-1-first") and not each[1].drops_layers()
               for each in found.values() if len(each) > 1)  # fmt: skip
    assert [config["max_completion_length"] for config in found["on_policy"]] == [40]
    alike = {
        tuple(word for _, each in runs[way] for word in each if not re.search("output_dir|-first", word))
        for way in WAYS
    }
    assert len(alike) == len(WAYS)
    assert read(TEACHER_CONFIG, setup.training("tasks", tmp_path, 0, of_teacher=False)).recipe == "sft"


def test_a_training_by_steps_has_that_many(tmp_path):
    clock, control, shares = Setup(tmp_path, "teacher", 9.0, steps=8).clock(0.5, 2, list, 0.0), TrainerControl(), []
    assert type(Setup(tmp_path, "teacher", 9.0).clock(0.5, 2, list, 0.0)) is ByTime
    while not control.should_training_stop:
        clock.on_step_begin(None, None, control)
        clock.on_step_end(None, None, control)
        shares.append(clock.share())
    assert shares == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.slow
def test_students_train_side_by_side_and_a_second_call_goes_on(tmp_path, capfd):
    pytest.importorskip("sympy")
    if find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed")
    tiny_model("llama_tied", num_hidden_layers=8).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    words = ["--base", str(tmp_path / "base"), "--output", str(tmp_path), "--folder", str(tmp_path / "work"), "--tiny",
             "--seeds", "0", "--train-seconds", "1", "--teacher-seconds", "1", "use_cpu=true"]  # fmt: skip
    ways = [BASE, "answers", "cache", "tuned_first"]
    students.main([*words, "--ways", *ways])
    (file,) = tmp_path.glob("students-*.json")
    first = json.loads(file.read_text())
    assert first["runs"].keys() == {*ways} and not first["failures"]
    assert all(1 <= runs["0"]["seconds"] < 40 and runs["0"]["neighbours"] == 3 for runs in first["runs"].values())
    assert all({"exact_match", "teacher_exact_match", "forward_kl"} <= runs["0"]["held_out"].keys()
               for runs in first["runs"].values())  # fmt: skip

    students.main([*words, "--ways", BASE, "on_policy", "--seconds", "20"])
    second = json.loads(file.read_text())
    assert second["runs"] == first["runs"] and len(second["calls"]) == 2
    assert "trainings: no time is left" in capfd.readouterr().err, "0.9 of 1 s, and of 45 s to measure, do not fit"
    with pytest.raises(SystemExit, match="choose another --output"):
        students.main([*words, "--train-seconds", "5"])
