"""`new`: what it writes for each purpose and method is a valid configuration with the answers in it."""

import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from commands import call, done, refused, without_report
from datasets import Dataset
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
        ["both", purpose, "./gone", "demo:smollm2-135m-instruct", *(["other"] if purpose == "distill" else ["lora"])]
        + ["demo:no", "b"]
    )
    monkeypatch.setattr("typer.prompt", lambda question, default: next(answers))
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    out, _ = done(new())
    assert "Expected one of sft, distill." in out and "no such file or folder: ./gone" in out
    assert "No demo is called 'demo:no'" in out and next(answers, None) is None
    config = load_run_config("my.yaml")
    assert config.recipe == purpose and config["learning_rate"] == (2e-4 if purpose == "sft" else 2e-5)
    assert config["dataset_name"] == "b"


@pytest.mark.parametrize(
    ("rows", "words", "settings"),
    [
        (50, 20, (False, 1, 3)),  # not packed: all of them are less than one sequence
        (3000, 20, (False, 8, 1)),
        (3000, 2000, (True, 8, 1)),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_few_rows_are_trained_on_for_longer(new, suffix, rows, words, settings):
    texts = {"text": [" ".join([f"{number:04}"] * words) for number in range(rows)]}
    if suffix == "json":
        Path("rows.json").write_text(json.dumps([{"text": text} for text in texts["text"]]))
    else:
        getattr(Dataset.from_dict(texts), f"to_{suffix}".replace("jsonl", "json"))(f"rows.{suffix}")
    done(new("--purpose", "sft", "--model", "a/b", "--method", "lora", "--data", f"rows.{suffix}"))
    config = load_run_config("my.yaml")
    keys = ("packing", "gradient_accumulation_steps", "num_train_epochs")
    assert tuple(config[key] for key in keys) == settings
    kept = rows * (1 - config["holdout_fraction"]) if config.given("holdout_fraction") else rows
    assert (kept < rows) == (rows == 50)
    sequences = kept if not settings[0] else rows * words * 5 // 4 // 4096
    steps = sequences / (2 * settings[1]) * settings[2]
    told = int(re.search(r"make about ([\d,]+) steps", Path("my.yaml").read_text())[1].replace(",", ""))
    assert steps >= 60 and told == pytest.approx(steps, rel=0.05)


def test_a_folder_of_rows_is_counted_whole(new):
    Path("rows").mkdir()
    for name in "ab":
        Path(f"rows/{name}.jsonl").write_text('{"text": "word"}\n' * 30)
    done(new("--purpose", "sft", "--model", "a/b", "--method", "lora", "--data", "rows"))
    assert "60 rows make about 90 steps" in Path("my.yaml").read_text()


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ("./not-there", "trl-lib/Capybara", "model_name_or_path: no such"),
        ("a/b", "none.jsonl", "dataset_name: no such"),
        ("demo:smollm", "a/b", "model_name_or_path: No demo is called 'demo:smollm'. Choose from: demo:smollm2-135m"),
        ("a/b", "demo:python", "dataset_name: No demo is called 'demo:python'. Choose from: demo:python_docstrings"),
        ("a/b", "rows.py", "dataset_name: rows.py: expected a file ending in .json, "),
    ],
)
def test_files_that_are_not_there_are_refused(new, model, data, said):
    Path("rows.py").touch()
    error = refused(new("--purpose", "sft", "--model", model, "--method", "lora", "--data", data), 2, said)
    assert "Nothing was written" in error and not Path("my.yaml").exists()


def test_commands_of_a_path_with_spaces_can_be_pasted(new):
    out, _ = done(new("my runs #1/a b.yaml", "--purpose", "sft", "--model", "a/b", "--method", "lora", "--data", "c/d"))
    for text in (out, Path("my runs #1/a b.yaml").read_text()):
        assert "liger-trainer run 'my runs #1/a b.yaml'" in text


def test_a_model_that_teaches_itself_teaches_half_of_its_layers(new):
    """Whole, the student would be its teacher from the first step on."""
    done(new("--purpose", "distill", "--model", "a/b", "--teacher", "a/b", "--data", "c/d"))
    config = load_run_config("my.yaml")
    assert (config["keep_every_nth_layer"], config["learning_rate"]) == (2, 1e-4)
    done(new("other.yaml", "--purpose", "distill", "--model", "a/b", "--teacher", "a/c", "--data", "c/d"))
    assert load_run_config("other.yaml")["keep_every_nth_layer"] is None


@pytest.mark.parametrize("place", ["", "text_config"])
def test_rows_are_no_longer_than_the_model_reads(new, place):
    Path("model").mkdir()
    sizes = {"max_position_embeddings": 512}
    Path("model/config.json").write_text(json.dumps({place: sizes} if place else sizes))
    done(new("--purpose", "sft", "--model", "model", "--method", "lora", "--data", "a/b"))
    assert load_run_config("my.yaml")["max_length"] == 512


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
