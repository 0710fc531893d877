"""Reports: what a page must hold and must not load, of finished, unfinished and compared runs, and its errors."""

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import pytest
import torch
from commands import end_of, save_models, write_rows
from finished_runs import config_text, content, log_history
from tiny import WORDS
from transformers import TrainerControl, TrainerState, TrainingArguments

from liger_trainer.extras.report import drawing
from liger_trainer.extras.report import html as html_report
from liger_trainer.extras.report.drawing import CHARTS, SERIES, charts_of, lines_of, points
from liger_trainer.extras.report.tables import (
    before_and_after,
    data_facts,
    differences,
    facts,
    memory,
    names,
    read_run,
    settings,
    side_by_side,
)
from liger_trainer.run import progress as callbacks
from liger_trainer.run import recipe as saving
from liger_trainer.run.metric_rows import SFT_ROWS, change, duration, figure, parameters, shown_rows
from liger_trainer.run.progress import SpeedMetrics, gpu_utilization

SECTIONS = ["metrics", "curves", "samples", "data", "configuration", "layers", "cost", "environment"]
VOID = {"meta", "link", "br", "use", "img", "input"}
SETTINGS = commands.settings(
    teacher_model_name_or_path="teacher", max_length=16, num_sample_completions=1, max_new_tokens=3,
    eval_strategy="steps", eval_steps=2,
)  # fmt: skip


@pytest.fixture
def unfinished(tmp_path):
    """A run that was stopped after checkpoint-7 of 20 steps."""
    for step in (5, 7):
        folder = tmp_path / "stopped" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        logs = [entry for entry in log_history(20)[:-1] if entry["step"] <= step]
        state = {"global_step": step, "max_steps": 20, "log_history": logs}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        (folder / "measured_before.json").write_text(json.dumps({"metrics": {"forward_kl": 1.1}, "texts": []}))
    (tmp_path / "stopped" / "config.yaml").write_text(config_text())
    return tmp_path / "stopped"


def report_of(folder: Path) -> tuple["Page", str]:
    """The page of a run, and its text in one line."""
    assert end_of("report", folder) == 0
    page = Page(folder / "report.html")
    return page, " ".join(page.text.split())


@pytest.fixture
def no_curves(monkeypatch):
    """Drawing takes most of the time of a report."""
    monkeypatch.setattr(html_report, "draw", lambda *arguments: [])


@pytest.fixture
def one_curve(monkeypatch):
    draw_one = drawing._drawing
    monkeypatch.setattr(
        drawing, "_drawing", lambda chart, *rest: draw_one(chart, *rest) if chart == CHARTS[0] else None
    )
    monkeypatch.setattr(html_report, "draw", lambda *arguments: list(filter(None, drawing.draw(*arguments))))


class Page(HTMLParser):
    """A page's text, tags, ids and references; complains about tags that do not match."""

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "xlink:href", "srcset", "data", "action"):
                self.links.append(value)
            elif value and "url(" in value:
                self.links += re.findall(r"url\(([^)]*)\)", value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data + " "


def check_stands_alone(page: Page) -> None:
    assert "script" not in page.tags and "iframe" not in page.tags
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert len(set(page.ids)) == len(page.ids)
    for link in page.links:
        assert link == "data:," or link.removeprefix("#") in page.ids, link


def test_a_report_holds_everything_and_loads_nothing(make):
    folder = make("first", max_steps=20)
    assert end_of("report", folder, "--output", folder / "deeper" / "mine.html") == 0
    page = Page(folder / "deeper" / "mine.html")
    check_stands_alone(page)
    text = " ".join(page.text.split())
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    for told in (
        "first", "finished", "mine.yaml", "2026-11-22 10:00:00 UTC", "model small",
        "0.153", "from 1.100", "−86.1%", "12,345,678", "+100.0%", "3 min 20 s", "2,048", "135 M", "62",  # key figures
        "What is <b>bold</b> & <script>alert(1)</script>?", "the reference", "gibberish", "what the teacher says",
        "better by 1.0", "learning_rate", "0.0002", "mine.yaml:7", "command line", "# lora_r: 16",
        "abababab", "RMSNorm", "33", "OddMLP", "its gate is unknown", "28 layers of the student",
        "2.13.0", "H100, 79.6 GiB", "Linux-x",
        "7 of 48 held-out rows are training rows too", "3 of 1,000 training rows repeat",
        "30 of 1,000 training rows are longer than max_length; 100 supervised tokens (10.0%)",
        "2 training rows have no supervised token left",
    ):  # fmt: skip
        assert told in text, told
    for chart in ("Loss", "Forward KL (nats/token)", "Agreement@1 with the teacher", "Student's perplexity logarithmic",
                  "Gradient norm", "Learning rate", "Tokens per second", "odd metric"):  # fmt: skip
        assert f"<figcaption>{chart.replace(' logarithmic', '')}".replace("'", "&#39;") in page.source, chart
    assert page.source.count("<figcaption>") == page.source.count("<svg") == 8
    assert "prefers-color-scheme: dark" in page.source and "@media print" in page.source

    pictures = {path.stem: path.read_bytes() for path in (folder / "deeper" / "mine_plots").glob("*.png")}
    assert {"loss", "student_perplexity", "odd_metric"} <= pictures.keys()
    assert "kd_loss" not in pictures  # it is all of the loss
    assert not pictures.keys() & {"step", "epoch", "num_tokens", "runtime", "train_loss", "total_flos"}
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values()) and not (folder / "plots").exists()
    for svg in re.findall(r"<svg.*?</svg>", page.source, re.DOTALL):  # colours and font are those of the page
        assert "var(--s1)" in svg and "var(--muted)" in svg and "font-family" not in svg and "http" not in svg
        # black is of shapes that are never painted: the clip paths
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", svg)) <= {"#000000"}


def test_the_verdict_and_the_compression_stand_on_top(make, no_curves):
    models = {"student": {"parameters": 30_000_000, "dtype": "float32"},
              "teacher": {"parameters": 120_000_000, "dtype": "float32"}}  # fmt: skip
    source = report_of(make("first", metrics={"models": models}))[0].source
    verdict = re.search(r'<p class="verdict good">(.*?)</p>', source)
    assert verdict is not None
    assert source.index(verdict[0]) < source.index('class="notes"') < source.index('class="cards"')
    assert "forward KL from 1.100 to 0.153" in verdict[1] and "25% of its teacher&#39;s parameters" in verdict[1]
    assert re.search(r"Compression</div><div class=\"value\">4 <small>times.*30 M of the teacher&#39;s 120 M", source)
    assert "GPU utilisation" not in source
    logs = [{"step": step, "loss": 1.0, "gpu_utilization": busy} for step, busy in ((1, 90.0), (2, 95.0))]
    assert "GPU utilisation 92 % mean of the logs" in report_of(make("timed", metrics={"log_history": logs}))[1]


def test_several_runs_are_compared(make, tmp_path, monkeypatch, capsys, one_curve):
    monkeypatch.chdir(tmp_path)
    one, two = make("one"), make("two", scale=2.0, metrics={"data": {"sha256": "cd"}}, learning_rate=1e-3, lora_r=8)
    assert end_of("report", one, two) == 0
    assert capsys.readouterr().out == "Wrote report.html\n"
    page = Page(tmp_path / "report.html")
    check_stands_alone(page)
    text = " ".join(page.text.split())
    assert "2 runs compared" in text and "The runs do not have the same rows" in text
    assert 'class="verdict' not in page.source  # measured on other rows
    assert "after: one better by 1.0" in text and "after: two better by 2.0" in text
    assert text.count("what the teacher says") == text.count("gibberish") == 1  # the same in both
    assert (tmp_path / "plots" / "loss.png").is_file()

    runs = [read_run(one), read_run(two)]
    changed = {row.label: [cell.text for cell in row.cells] for row in differences(runs, ["one", "two"]).rows}
    assert changed == {"learning_rate": ["0.0002", "0.001"], "lora_r": ["16", "8"]}
    tones = [cell.tone for row in side_by_side(runs, ["one", "two"]).rows for cell in row.cells]
    assert set(tones) == {""}  # measured on other rows
    alike = [run.model_copy(update={"data": runs[0].data}) for run in runs]
    best = {row.label: [cell.tone for cell in row.cells] for row in side_by_side(alike, ["one", "two"]).rows}
    assert best["forward KL (nats/token)"] == ["best", ""] and best["agreement@1"] == ["best", ""]
    assert best["student perplexity"] == ["", ""]  # equal
    assert best["loss (nats/token)"] == ["", ""]  # of another mixture of losses in each distillation
    lines = lines_of(CHARTS[0], runs, ["one", "two"])
    assert [(line.label, line.color) for line in lines] == [
        ("one", SERIES[0]), ("one", SERIES[0]), ("two", SERIES[1]), ("two", SERIES[1])
    ]  # fmt: skip
    assert "Dashed: the held-out rows. Dotted: the teacher." in text
    assert page.source.count('<span class="swatch" style="background: var(--s2)') > 1


@pytest.mark.parametrize(
    ("kl", "verdict"),
    [
        ((0.2, 0.1, 0.3), "two has the lowest forward KL on the held-out rows: 0.100 (one 0.200, three 0.300)."),
        ((0.2, None, 0.3), "one has the lowest forward KL on the held-out rows: 0.200 (three 0.300)."),
        ((0.2, 0.2, 0.2), None),
        ((0.2, math.nan, math.nan), None),
    ],
)
def test_the_best_of_several_runs_stands_on_top(make, no_curves, kl, verdict):
    measured = [{} if value is None else {"forward_kl": value} for value in kl]
    folders = [make(name, metrics={"after": m}) for name, m in zip(("one", "two", "three"), measured, strict=True)]
    page = folders[0] / "all.html"
    assert end_of("report", *folders, "--output", page) == 0
    assert re.findall(r'<p class="verdict ">(.*?)</p>', page.read_text()) == ([verdict] if verdict else [])


@pytest.mark.parametrize(
    "other",
    [
        {"data": {"sha256": "ab" * 32, "learned": "the answers of each chat"}},
        {"rows": {"eval": {"supervised_tokens": 90}}},  # such as with a shorter max_length
    ],
)
def test_means_over_other_tokens_are_not_ranked(make, no_curves, other):
    first = {"data": {"sha256": "ab" * 32, "learned": "every message, the user's too"},
             "rows": {"eval": {"supervised_tokens": 100}}}  # fmt: skip
    one, two = make("one", metrics=first), make("two", scale=0.5, metrics={**first, **other})
    assert end_of("report", one, two, "--output", one / "all.html") == 0
    page = Page(one / "all.html")
    assert "The runs learn different parts of the same rows" in " ".join(page.text.split())
    assert 'class="verdict' not in page.source and 'class="best"' not in page.source


def test_runs_of_one_name_are_told_apart(make):
    runs = [read_run(make("a/out")), read_run(make("b/out"))]
    assert names(runs) == ["a/out", "b/out"] and names(runs[:1]) == ["out"]


def test_an_unfinished_run_tells_what_there_is(unfinished, one_curve):
    page, text = report_of(unfinished)
    check_stands_alone(page)
    assert "unfinished: step 7 of 20" in text and "Not finished" in text
    assert [name for name in page.ids if name in SECTIONS] == ["metrics", "curves", "configuration"]
    run = read_run(unfinished)
    assert not run.finished and run.steps == 7 and max(entry["step"] for entry in run.log_history) == 7
    table = before_and_after(run)
    assert table.columns[2] == "at step 5"
    assert [cell.text for cell in table.rows[0].cells] == ["1.100", figure(math.exp(-0.5) + 0.1), "−35.8%"]
    assert read_run(unfinished / "checkpoint-5").steps == 5  # a checkpoint alone, such as a plain Trainer leaves


def test_nothing_skipped_is_no_row_of_the_data(make):
    run = read_run(make("one"))
    run.data["rows_skipped_for"] = {}
    assert "rows skipped for" not in data_facts(run) and "train rows" in data_facts(run)


def test_a_finished_and_an_unfinished_run(make, unfinished, tmp_path, no_curves):
    """What one of them does not tell has no column, and is no difference."""
    one = make("one")
    assert end_of("report", one, unfinished, "--output", tmp_path / "both.html") == 0
    page = Page(tmp_path / "both.html")
    text = " ".join(page.text.split())
    assert "stopped: Not finished" in text and "do not compare" not in text and "stopped (step 5)" in text
    runs = [read_run(one), read_run(unfinished)]
    assert facts(runs, ["one", "stopped"], data_facts).columns == ["", "one"]
    assert {row.label: [cell.text for cell in row.cells] for row in settings(runs[1]).rows} == {
        "learning_rate": ["0.0002", "config.yaml"],
        "model_name_or_path": ["small", "config.yaml"],
        "output_dir": ["out", "config.yaml"],
    }


@pytest.mark.parametrize(("kd_loss", "shown"), [(1.50001, False), (1.4, True)])
def test_the_distillation_loss_has_a_row_where_the_loss_is_more(logged, kd_loss, shown):
    before, after = {"forward_kl": 2.0, "loss": 2.50001, "kd_loss": 2.5}, {"forward_kl": 1.0, "loss": 1.5}
    run = logged([], before=before, after={**after, "kd_loss": kd_loss})
    assert ("distillation loss" in [row.label for row in before_and_after(run).rows]) == shown


def test_accepted_drafts_are_shown_where_they_are_counted():
    counted, others = ([row.metric for row in shown_rows(SFT_ROWS, [{"loss", name}])] for name in ("mtp_accepted", "x"))
    assert counted == ["loss", "mtp_accepted"] and others == ["loss"]
    assert callbacks._figures({"loss": 1.0, "mtp_accepted": 0.25}, callbacks.HELD_OUT) == ["loss 1", "accepted 0.25"]


def test_a_run_of_a_version_that_recorded_less(make):
    less = ["rows", "patched", "settings", "environment", "finished_at", "completions"]
    folder = make("old")
    kept = {key: value for key, value in content().items() if key not in less}
    (folder / "metrics.json").write_text(json.dumps({**kept, "log_history": [], "skipped_rows": {"train": 0}}))
    (folder / "config.yaml").unlink()
    page, _ = report_of(folder)
    assert [name for name in page.ids if name in SECTIONS] == "metrics data configuration cost environment".split()


def test_numbers_that_are_none(make, no_curves):
    logs = [{"step": step, "loss": 1.0 if step < 3 else "nan"} for step in range(5)]
    resumed = {**content()["training"], "resumed_at": 14}
    after = {"forward_kl": "nan", "loss": "inf"}
    folder = make("lost", metrics={"after": after, "log_history": logs, "training": resumed})
    _, text = report_of(folder)
    assert "forward KL (nats/token) 1.100 NaN" in text and "loss (nats/token) 1.200 infinite" in text
    assert "6 steps since step 14" in text
    assert points(read_run(folder), "loss") == ([0, 1, 2], [1.0] * 3)


def test_a_file_that_is_no_report_is_replaced_by_force(make, tmp_path, no_curves):
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    folder = make("first")
    for force in (["--force"], []):  # the second time it is a report
        assert end_of("report", folder, "--output", mine, *force) == 0


def test_files_that_are_damaged(make, unfinished, capsys):
    metrics, state = make("first") / "metrics.json", unfinished / "checkpoint-7" / "trainer_state.json"
    text = metrics.read_text()
    for file, damaged, message in (
        (metrics, text[:500], "metrics.json cannot be read"),
        (metrics, "[]", "expected a JSON object, got list"),
        (metrics, text.replace('"log_history": [', '"log_history": 3, "rest": [', 1), "metrics.json: log_history"),
        (metrics, text.replace('"loss": 1.2', '"loss": "low"'), "before.loss"),
        (metrics, text.replace('"training": {', '"training": 1, "rest": {', 1), "metrics.json: training"),
        (state, "{", "checkpoint-7/trainer_state.json cannot be read"),
        (state, '{"log_history": 1}', "expected the state of a Trainer"),
    ):
        file.write_text(damaged)
        folder = metrics.parent if file == metrics else unfinished
        commands.refused(commands.call(capsys, "report", folder), 6, message)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figure(0.15341), "0.153"), (figure(0.0), "0.000"), (figure(-1.5, 1), "−1.5"), (figure(3.2e-7), "3.2e−07"),
        (figure(12345678.4, 2), "12,345,678"), (figure(9999.994, 2), "9,999.99"), (figure(math.inf), "infinite"),
        (figure(2.5e12), "2.5e+12"), (figure(None), ""),
        (change(2.0, 1.0), "−50.0%"), (change(-2.0, -1.0), "+50.0%"), (change(0.0, 1.0), ""), (change(1, math.nan), ""),
        (change(1.0, 40.0), "40×"), (change(None, 1.0), ""),
        (duration(4.25), "4.2 s"), (duration(59.94), "59.9 s"), (duration(3599.6), "1 h 0 min"),
        (duration(61), "1 min 1 s"),
        (memory(10239), "10,239 MiB"), (memory(10240), "10.0 GiB"),
        (parameters(134515008), "135 M"), (parameters(8_030_261_248), "8.03 B"), (parameters(512), "512"),
    ],
)  # fmt: skip
def test_numbers_as_text(shown, expected):
    assert shown == expected


def test_the_pace_leaves_out_what_is_no_training(monkeypatch, tmp_path):
    """Two steps of a second each, then an evaluation of ten and a save of five: 30 tokens a second, not 4."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: clock.now)
    args, state, control = TrainingArguments(str(tmp_path), use_cpu=True), TrainerState(), TrainerControl()
    pace, logs = SpeedMetrics(), []

    def log(**values):
        state.log_history.append(dict(values))
        logs.append(values)
        pace.on_log(args, state, control, logs=values)

    def step(seconds):
        pace.on_step_begin(args, state, control)
        clock.now += seconds
        pace.on_step_end(args, state, control)

    pace.on_evaluate(args, state, control)  # before the first step
    for tokens in (60.0, 120.0, 150.0):
        step(1.0)
        step(0.5)
        clock.now += 10.0
        pace.on_evaluate(args, state, control)  # between two logs
        step(0.5)
        log(loss=1.0, num_tokens=tokens)
        log(eval_loss=1.0, eval_num_tokens=tokens)
        clock.now += 5.0
        pace.on_save(args, state, control)
    assert [entry.get("tokens_per_second") for entry in logs] == [30.0, None, 30.0, None, 15.0, None]
    assert all(entry["peak_memory_mib"] > 10 for entry in logs if "loss" in entry)
    assert [set(entry) for entry in state.log_history] == [set(entry) for entry in logs]  # trackers get them too


def test_the_use_of_the_gpu_is_logged_where_it_can_be_read(monkeypatch):
    on_gpu: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    on_cpu: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    monkeypatch.setattr(callbacks.torch.cuda, "utilization", lambda: 87)
    assert (gpu_utilization(on_gpu), gpu_utilization(on_cpu)) == (87.0, None)

    def missing():
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(callbacks.torch.cuda, "utilization", missing)
    assert gpu_utilization(on_gpu) is None
    monkeypatch.setattr(callbacks, "gpu_utilization", lambda args: 87.0)
    state, logs = SimpleNamespace(log_history=[{}], global_step=1), {"loss": 1.0, "num_tokens": 8.0}
    SpeedMetrics().on_log(on_cpu, state, None, logs=logs)
    assert logs["gpu_utilization"] == state.log_history[-1]["gpu_utilization"] == 87.0


@pytest.mark.gpu
def test_reading_the_use_of_the_gpu_does_not_wait_for_it():
    """A reading is between 0 and 100, and is there while queued work still runs."""
    pytest.importorskip("pynvml")
    args: Any = SimpleNamespace(device=torch.device("cuda"))
    gpu_utilization(args)  # loads NVML
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(400):
        square @ square
    done = torch.cuda.Event()
    done.record()
    busy = gpu_utilization(args)
    assert busy is not None and 0 <= busy <= 100
    assert not done.query()


def test_a_run_ends_with_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, "student", "teacher")
    rows = [{"prompt": WORDS[i], "completion": " " + " ".join(WORDS[i : i + 2 + i])} for i in range(20)]
    write_rows(tmp_path / "rows.jsonl", [*rows, rows[0]])
    (tmp_path / "run.yaml").write_text(SETTINGS)
    saved = []
    draw_all = html_report.draw
    drawn = ("loss", "peak_memory_mib")  # what the trainers log, and what the callbacks add; drawing takes long
    monkeypatch.setattr(drawing, "charts_of", lambda runs: [x for x in charts_of(runs) if x.name in drawn])
    monkeypatch.setattr(html_report, "draw", lambda *args: saved.append(os.listdir("out")) or draw_all(*args))
    code, out, err = commands.call(capsys, "run", "run.yaml", "max_steps=3", "hub_token=secret-token")
    assert code == 0, err
    assert {"metrics.json", "config.yaml", "model.safetensors"} <= set(saved[0])  # before anything is drawn

    page = Page(tmp_path / "out" / "report.html")
    check_stands_alone(page)
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    text = " ".join(page.text.split())
    for told in ("run.yaml:3", "command line", "rows.jsonl", "Time of each part", "Student: llama", "Teacher: llama"):
        assert told in text, told
    assert {path.name for path in (tmp_path / "out" / "plots").iterdir()} == {f"{chart}.png" for chart in drawn}

    told = commands.metrics(tmp_path / "out")
    assert told["settings"]["max_steps"] == {"value": 3, "set_by": "command line"}
    assert told["environment"]["platform"] and told["finished_at"]
    assert "secret-token" not in json.dumps(told) + page.source
    assert told["patched"]["student"]["swapped"]["RMSNorm"] > 0 and set(told["patched"]) == {"student", "teacher"}
    assert told["data"]["train_rows_repeated"] + told["data"]["test_rows_seen_in_training"] == 1
    train = told["rows"]["train"]
    assert train["rows"] == 17 and train["rows_truncated"] > 0 and train["supervised_tokens_lost"] > 0
    assert "rows truncated" in out and "train rows repeated" in out and "report.html are in out" in out
    logged = [entry for entry in told["log_history"] if "loss" in entry]
    assert len(logged) == 3 and all(entry["tokens_per_second"] > 0 for entry in logged)
    assert logged[-1]["peak_memory_mib"] <= told["training"]["peak_memory_mib"]


def test_a_report_that_fails_does_not_fail_the_run(make, monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(html_report, "draw", broken)
    folder = make("first")
    saving._report(folder)
    told = f"no report was written: RuntimeError: no fonts; to write it again: liger-trainer report {folder}"
    assert told in capsys.readouterr().err and not (folder / "report.html").exists()
