"""One run to a folder: a second process is refused, and the lock of one that died is taken over."""

import errno
import fcntl
import json
import os
import signal
import socket
import threading
import time

import pytest
from held_folders import held_by_a_child

from liger_trainer.common import files as locks
from liger_trainer.common.files import LOCK, folder_lock, refuse_if_held
from liger_trainer.errors import ConfigError


def without_flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("flock", [fcntl.flock, without_flock])
def test_a_second_process_is_refused_and_a_dead_one_taken_over(tmp_path, monkeypatch, flock):
    monkeypatch.setattr(fcntl, "flock", flock)
    folder, notes = tmp_path / "out", []
    with folder_lock(folder, notes.append):
        pass
    assert not folder.exists() and not notes  # nothing was put into it
    with held_by_a_child(folder) as child:
        for attempt in (lambda: folder_lock(folder, notes.append).__enter__(), lambda: refuse_if_held(folder)):
            with pytest.raises(ConfigError, match=f"out is in use by process {child} on {socket.gethostname()}, since"):
                attempt()
        assert not notes
    refuse_if_held(folder)
    with folder_lock(folder, notes.append), folder_lock(folder, notes.append):
        refuse_if_held(folder)
    assert len(notes) == 1 and f"locked by process {child} on " in notes[0] and "taken over" in notes[0]


def test_the_folder_stays_with_what_is_in_it(tmp_path):
    with folder_lock(tmp_path / "out", print):
        (tmp_path / "out" / "model").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_a_child_does_not_hold_the_lock_of_its_parent_on(tmp_path):
    ready, say = os.pipe()
    parent = os.fork()
    if parent == 0:
        with folder_lock(tmp_path, print):
            worker = os.fork()
            if worker != 0:
                os.write(say, b"%d\n" % worker)
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(ready, 20))
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        with folder_lock(tmp_path, print):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("alive", [True, False])
def test_a_holder_on_another_host_is_watched(tmp_path, monkeypatch, alive):
    """Where each host has locks of its own, the file's time decides."""
    monkeypatch.setattr(locks, "BEAT", 0.1)
    monkeypatch.setattr(locks, "WATCH", 0.5)
    file, over, notes = tmp_path / LOCK, threading.Event(), []
    file.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1", "since": "yesterday"}))
    descriptor = os.open(file, os.O_RDWR)
    if alive:
        threading.Thread(target=locks._beat, args=(descriptor, over), daemon=True).start()
    try:
        if alive:
            with pytest.raises(ConfigError, match="in use by process 1 on elsewhere, since yesterday"):
                folder_lock(tmp_path, notes.append).__enter__()
        else:
            with folder_lock(tmp_path, notes.append):
                assert "taken over" in notes[1]
        assert "waiting up to" in notes[0]
    finally:
        over.set()
        os.close(descriptor)
