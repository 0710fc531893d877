"""A folder that another process trains in."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from liger_trainer.common.files import folder_lock


@contextmanager
def held_by_a_child(folder: Path) -> Iterator[int]:
    """Another process that holds the lock until it is killed; yields its id."""
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        with folder_lock(folder):
            os.write(say, b".")
            time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
