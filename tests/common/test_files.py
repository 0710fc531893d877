"""Files and folders are replaced as a whole or not at all; lines are printed by the first process only."""

import hashlib
import os

import pytest

from liger_trainer.common.console import announce
from liger_trainer.common.files import sha256, staged_folder, write_atomically


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


@pytest.mark.parametrize(("rank", "printed"), [(None, "liger-trainer: hi\n"), ("0", "liger-trainer: hi\n"), ("1", "")])
def test_the_first_process_speaks(monkeypatch, capsys, rank, printed):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    announce("hi")
    assert capsys.readouterr().out == printed
