"""One run to a folder: a second process is refused, and the lock of one that died is free."""

import errno
import fcntl
import os
import signal
import socket
import time

import pytest
from held_folders import held_by_a_child

from liger_trainer.common.files import folder_lock, refuse_if_held
from liger_trainer.errors import ConfigError


def without_flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    folder = tmp_path / "out"
    with folder_lock(folder):
        pass
    assert not folder.exists()  # nothing was put into it
    with held_by_a_child(folder) as child:
        for attempt in (lambda: folder_lock(folder).__enter__(), lambda: refuse_if_held(folder)):
            with pytest.raises(ConfigError, match=f"out is in use by process {child} on {socket.gethostname()}, since"):
                attempt()
    refuse_if_held(folder)
    with folder_lock(folder), folder_lock(folder):
        refuse_if_held(folder)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", without_flock)
    with pytest.warns(UserWarning, match="has no locks"), folder_lock(tmp_path):
        refuse_if_held(tmp_path)


def test_the_folder_stays_with_what_is_in_it(tmp_path):
    with folder_lock(tmp_path / "out"):
        (tmp_path / "out" / "model").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_a_child_does_not_hold_the_lock_of_its_parent_on(tmp_path):
    ready, say = os.pipe()
    parent = os.fork()
    if parent == 0:
        with folder_lock(tmp_path):
            worker = os.fork()
            if worker != 0:
                os.write(say, b"%d\n" % worker)
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(ready, 20))
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        with folder_lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
