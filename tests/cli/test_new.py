"""`new`: what it writes for each purpose and method is a valid configuration with the answers in it."""

import io
import itertools
import sys

import pytest
from commands import call, done, without_report
from stand_ins import StandIns

from liger_trainer.cli.configs import Method, Purpose, billions
from liger_trainer.config.run_config import load_run_config


@pytest.fixture
def new(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return lambda *words: call(capsys, "new", *words)


@pytest.mark.parametrize(("purpose", "method"), list(itertools.product(Purpose, Method)))
def test_what_flags_answer(new, purpose, method):
    words = ["--model", "some/model-8B", "--method", method, "--data", "rows: mine.jsonl", "--purpose", purpose]
    teacher = ["--teacher", "some/teacher"] if purpose == "distill" else []
    out, _ = done(new("deep/a.yaml", *words, *teacher))
    assert "liger-trainer run deep/a.yaml" in out
    config = load_run_config("deep/a.yaml")
    assert config.recipe == purpose and config["model_name_or_path"] == "some/model-8B"
    assert config["dataset_name"] == "rows: mine.jsonl"
    assert config["use_peft"] == (method != "full") and config["load_in_4bit"] == (method == "qlora")
    assert config["learning_rate"] == (1e-5 if method == "full" else 1e-4)
    if teacher:
        assert config["teacher_model_name_or_path"] == "some/teacher"


@pytest.mark.parametrize("purpose", ["sft", "distill"])
def test_questions_on_a_terminal(new, purpose, monkeypatch):
    answers = iter(
        ["both", purpose, "demo:smollm2-135m-instruct", *(["other"] if purpose == "distill" else ["lora"]), "b"]
    )
    monkeypatch.setattr("typer.prompt", lambda question, default: next(answers))
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    out, _ = done(new())
    assert "Expected one of sft, distill." in out and next(answers, None) is None
    config = load_run_config("my.yaml")
    assert config.recipe == purpose and config["learning_rate"] == (2e-4 if purpose == "sft" else 2e-5)
    assert config["dataset_name"] == "b"


def test_what_it_writes_trains(new, tmp_path_factory, tmp_path, capsys, monkeypatch):
    """On a tiny model, with everything else as it was written."""
    stand_ins, model = StandIns(tmp_path_factory.mktemp("stand-ins")), "demo:smollm2-135m-instruct"
    without_report(monkeypatch)
    assert new("--purpose", "distill", "--model", model, "--teacher", model, "--data", "demo:python_docstrings")[0] == 0
    changes = stand_ins.changes(load_run_config("my.yaml"), tmp_path)
    done(call(capsys, "run", "my.yaml", *changes, "output_dir=out"))
    assert (tmp_path / "out" / "metrics.json").is_file()


@pytest.mark.parametrize(
    ("name", "size"),
    [("a/Qwen3-0.6B", 0.6), ("SmolLM2-135M-Instruct", 0.135), ("a/Llama-3.1-8B-it", 8.0), ("phi-4-mini", 0.0)],
)
def test_the_size_that_a_name_tells(name, size):
    assert billions(name) == size
