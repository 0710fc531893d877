"""Files and folders are replaced as a whole or not at all, and nothing is written through a link."""

import hashlib
import os

import pytest

from liger_trainer.common.files import LOCK, folder_lock, refuse_links, sha256, staged_folder, write_atomically
from liger_trainer.errors import ConfigError
from liger_trainer.extras.report.html import write_report
from liger_trainer.extras.report.tables import RunRecord


@pytest.mark.parametrize("content", ["nats: ∞\n", b"\x00\xff"])
def test_a_file_is_replaced(tmp_path, content):
    file = tmp_path / "file"
    for before in (None, b"before"):
        if before is not None:
            file.write_bytes(before)
        write_atomically(file, content)
        assert file.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [file]
    assert sha256(file) == sha256(file.read_bytes()) == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch, step):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    file = tmp_path / "file"
    file.write_text("before")
    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "after")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "deep" / "target"
    with pytest.raises(KeyboardInterrupt), staged_folder(target) as staged:
        (staged / "half").touch()
        raise KeyboardInterrupt
    assert list(target.parent.iterdir()) == []
    staged.mkdir()
    (staged / "of_a_killed_process").touch()
    target.mkdir()  # empty: it is taken
    with staged_folder(target) as staged:
        (staged / "file").touch()
        assert list(target.iterdir()) == []
    assert [path.name for path in target.iterdir()] == ["file"] and list(target.parent.iterdir()) == [target]
    with pytest.raises(OSError), staged_folder(target):
        pass
    assert [path.name for path in target.iterdir()] == ["file"]


@pytest.mark.parametrize("link", ["file", ".file.tmp"])
def test_a_link_is_replaced_and_what_it_leads_to_is_untouched(tmp_path, link):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / link).symlink_to(elsewhere)
    write_atomically(tmp_path / "file", "new")
    assert elsewhere.read_text() == "mine" and (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()


def locked(folder):
    with folder_lock(folder):
        pass


def reported(folder):
    write_report([RunRecord(path=folder, finished=False, steps=0)], folder / "report.html")


@pytest.mark.parametrize("write", [refuse_links, locked, reported])
@pytest.mark.parametrize("name", [LOCK, "plots", "model.safetensors"])
def test_a_folder_with_a_link_that_leads_out_is_refused(tmp_path, write, name):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    run.mkdir()
    elsewhere.mkdir() if name == "plots" else elsewhere.write_text("mine")
    (run / name).symlink_to("../elsewhere")
    with pytest.raises(ConfigError, match=f"{name} is a link to {elsewhere}"):
        write(run)
    assert list(elsewhere.iterdir()) == [] if name == "plots" else elsewhere.read_text() == "mine"
    assert [path.name for path in run.iterdir()] == [name]


def test_links_to_checkpoints_and_within_the_folder_stay(tmp_path):
    run = tmp_path / "run"
    (run / "folder").mkdir(parents=True)
    (run / "within").symlink_to("folder")
    (run / "checkpoint-3").symlink_to(tmp_path)
    locked(run)
    refuse_links(tmp_path / "nowhere")
