"""A disk that is full or read-only: one message, exit code 8, and what was there before is as it was."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from caches import config as cache_config
from commands import call, done, refused, save_models, settings, texts, without_report, write_rows
from safetensors.torch import save_file
from tiny import completions, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from liger_trainer.common.checkpoints import checkpoints_in, damage
from liger_trainer.common.files import sha256, writing_to
from liger_trainer.errors import StorageError
from liger_trainer.trainers.capture import capture

SETTINGS = settings(output_dir="disk/out", save_strategy="steps", save_steps=1)
MIB = 2**20


def mounted(disk: Path, *options: str) -> None:
    disk.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(disk)], capture_output=True)
    if done.returncode:
        pytest.skip("no rights to mount a small disk")


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk of 4 MiB at disk/, beside a model, rows and a configuration."""
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, "student", hidden_size=64, intermediate_size=96)
    write_rows(Path("rows.jsonl"), texts(20))
    Path("run.yaml").write_text(SETTINGS)
    disk = tmp_path / "disk"
    mounted(disk, "size=4m")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def no_report(monkeypatch):
    without_report(monkeypatch)


def leave(disk: Path, size: int) -> None:
    """Fill the disk until so many bytes are free."""
    (disk / "filler").write_bytes(bytes(max(0, shutil.disk_usage(disk).free - size)))


def hashes(folder: Path) -> dict[str, str]:
    return {str(path): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_training_on_a_full_disk_keeps_the_checkpoints_before(disk, capsys, no_report):
    done(call(capsys, "run", "run.yaml", "max_steps=1", "save_steps=1"))
    (disk / "out" / "metrics.json").unlink()  # as after an interruption
    size = sum(path.stat().st_size for path in (disk / "out" / "checkpoint-1").iterdir())
    before = hashes(disk / "out" / "checkpoint-1")
    for share in (0.02, 0.5, 1.2):  # weights, optimizer, the model at the end
        leave(disk, int(size * share))
        said = refused(call(capsys, "resume", "disk/out", "--checkpoint", "checkpoint-1", "max_steps=3"), 8)
        told = r"liger-trainer: \S*disk/out\S* cannot be written: .*[\d,]+ bytes are free in .* resume disk/out$"
        assert re.search(told, said), said
        assert hashes(disk / "out" / "checkpoint-1") == before
        (disk / "filler").unlink()
        for checkpoint in checkpoints_in(disk / "out")[1:]:
            shutil.rmtree(checkpoint)
    assert damage(disk / "out" / "checkpoint-1") is None
    done(call(capsys, "resume", "disk/out", "max_steps=2"))


def test_metrics_and_report_on_a_full_disk(disk, capsys, monkeypatch):
    """They come last: the model is there, and the old report stays as it was."""
    from liger_trainer.run import recipe

    monkeypatch.setattr("liger_trainer.extras.report.html.draw", lambda *arguments: [])
    finish = recipe.finish

    def full(*args):
        leave(disk, 0)
        finish(*args)

    monkeypatch.setattr("liger_trainer.run.recipe.finish", full)
    once = ("run", "run.yaml", "save_strategy=no", "max_steps=1")
    refused(call(capsys, *once), 8, "cannot be written: No space left on device")
    assert (disk / "out" / "model.safetensors").is_file() and not (disk / "out" / "metrics.json").exists()
    (disk / "filler").unlink()
    monkeypatch.setattr("liger_trainer.run.recipe.finish", finish)
    done(call(capsys, *once, "overwrite_output_dir=true"))
    before = hashes(disk / "out")
    leave(disk, 8192)
    refused(call(capsys, "report", "disk/out"), 8, "report.html cannot be written: No space left")
    assert hashes(disk / "out") == before


def test_merging_onto_a_full_disk_leaves_nothing(disk, capsys, no_report):
    lora = ("use_peft=true", "lora_target_modules=[q_proj,v_proj]", "output_dir=adapter")
    done(call(capsys, "run", "run.yaml", *lora, "save_strategy=no", "max_steps=1"))
    leave(disk, 100_000)
    refused(
        call(capsys, "merge", "adapter", "disk/merged"), 8, "disk/merged cannot be written: No space left on device"
    )
    assert sorted(os.listdir(disk)) == ["filler"]


def test_a_capture_on_a_full_disk_goes_on_with_space(disk, monkeypatch):
    monkeypatch.setattr("liger_trainer.trainers.capture.MIB", 64)  # many shards
    args = cache_config(disk / "cache")
    arguments = (tiny_model("llama"), args, tiny_tokenizer(), completions(60))
    leave(disk, 40_000)
    with pytest.raises(StorageError, match=r"cannot be written: No space left.*The same command goes on"):
        capture(*arguments)
    kept = {name: digest for name, digest in hashes(disk / "cache").items() if "shard" in name}
    assert kept
    (disk / "filler").unlink()
    assert capture(*arguments).finished
    assert kept.items() <= hashes(disk / "cache").items()


WRITERS = {
    "a file": lambda path: path.write_bytes(bytes(MIB)),
    "safetensors": lambda path: save_file({"a": torch.zeros(MIB)}, path),
    "torch.save": lambda path: torch.save({"a": torch.zeros(MIB)}, path),
    "tokenizers": lambda path: Tokenizer(WordLevel({str(i): i for i in range(MIB // 16)}, "0")).save(str(path)),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("option", "reason"), [("rw", "No space left on device|torch failed"), ("ro", "Read-only file")]
)
def test_each_writer_is_understood(tmp_path, writer, option, reason):
    mounted(tmp_path / "disk", "size=64k", option)
    try:
        with pytest.raises(StorageError, match=f"disk\\S* cannot be written: ({reason})") as raised:
            with writing_to(tmp_path / "disk", "Do this."):
                WRITERS[writer](tmp_path / "disk" / "file")
        assert str(raised.value).endswith("Do this.") and raised.value.__cause__ is not None
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file", "x"), RuntimeError("shape mismatch"), ValueError("12 vs 13")]
)
def test_other_errors_stay_what_they_are(tmp_path, error):
    with pytest.raises(type(error)) as raised, writing_to(tmp_path):
        raise error
    assert raised.value is error
