"""The command line in this process, and what it trains on: tiny models, and rows in a file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import WORDS, tiny_model, tiny_tokenizer

from liger_trainer.cli.app import main

_SETTINGS = {
    "model_name_or_path": "student", "dataset_name": "rows.jsonl", "output_dir": "out", "max_steps": 3,
    "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "gradient_checkpointing": False,
    "save_strategy": "no", "max_length": 32, "holdout_fraction": 0.2, "num_sample_completions": 0, "use_cpu": True,
    "disable_tqdm": True,
}  # fmt: skip


def settings(**changes: Any) -> str:
    """The configuration of a short run on the CPU."""
    return yaml.safe_dump({**_SETTINGS, **changes}, sort_keys=False)


def end_of(*words: object) -> int:
    """The exit code of `liger-trainer WORD ...`."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return int(stopped.value.code or 0)


def call(capture: Any, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `liger-trainer WORD ...`; `capture` is capsys or capfd."""
    code = end_of(*words)
    printed = capture.readouterr()
    return code, printed.out, printed.err


def done(ended: tuple[int, str, str]) -> tuple[str, str]:
    """Stdout and stderr of a command that has ended well."""
    code, out, err = ended
    assert code == 0, f"{out}{err}"
    return out, err


def refused(ended: tuple[int, str, str], code: int, *words: str) -> str:
    """Stderr in one line of a command that has ended with this code, these words and no stack trace."""
    found, _, err = ended
    said = " ".join(err.split())
    assert found == code and "Traceback" not in err, err
    assert [word for word in words if word not in said] == [], said
    return said


def without_report(patch: pytest.MonkeyPatch) -> None:
    """Runs write no report: to draw it takes longer than to train. test_report.py has it."""
    patch.setattr("liger_trainer.run.recipe._report", lambda output_dir: None)


def metrics(folder: Path) -> dict:
    """What a run has written, which is JSON without NaN."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads((folder / "metrics.json").read_text(), parse_constant=no_constant)


def lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def save_models(folder: Path, *names: str, **options: Any) -> None:
    """Save models with tied embeddings, each of another seed, and their tokenizer."""
    for seed, name in enumerate(names):
        tiny_model("llama_tied", seed=seed, **options).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)


def texts(count: int) -> list[dict[str, str]]:
    return [{"text": " ".join(WORDS[i : i + 5])} for i in range(count)]


def write_rows(file: Path, rows: Iterable[dict]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(lines(rows))
