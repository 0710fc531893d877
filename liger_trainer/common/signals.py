"""What ends a run, its worker processes and work that takes too long: signals, which are handled for a while."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from multiprocess.process import parent_process
from multiprocess.util import register_after_fork

WATCH_EVERY = 1.0  # seconds
# Ctrl-C, the signals by which schedulers end a job, and those by which Slurm announces that (`--signal=USR1@300`).
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


@contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle SIGNALS, except those that are ignored (nohup), and put the earlier handlers back at the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number, earlier in before.items() if earlier is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def interrupt(number: int, frame: Any) -> None:
    """Take any signal for Ctrl-C: nothing is trained yet, or everything is."""
    raise KeyboardInterrupt


@cache
def end_workers_with_this_process() -> None:
    """Have the processes of `dataset_num_proc` end within a second when this one is killed, instead of never.

    Workers of torch's data loaders look after their parent themselves.
    """
    register_after_fork(_end_with_parent, _end_with_parent)  # this `multiprocess` is what `datasets` forks with


def _end_with_parent(_: Any) -> None:
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(WATCH_EVERY)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="liger-trainer-parent").start()


# End work that takes too long or too much memory, such as a chat template that never ends.
try:
    import resource
except ImportError:  # Windows
    resource = None

_LOOKS = 0.1  # seconds between two looks


class LimitExceeded(Exception):
    """The message says which limit, as in "took more than 10 s"."""


@contextmanager
def limited(seconds: float, mib: float) -> Iterator[None]:
    """Within it, Python code that takes more time or memory is ended by LimitExceeded.

    A timer interrupts the main thread to look. In another thread, and where there is no such timer (Windows), nothing
    is limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    start, memory = time.monotonic(), peak_memory_mib()

    def look(number, frame):
        if time.monotonic() - start > seconds:
            raise LimitExceeded(f"took more than {seconds:g} s")
        if peak_memory_mib() - memory > mib:
            raise LimitExceeded(f"took more than {mib:g} MiB of memory")

    handler = signal.signal(signal.SIGALRM, look)
    rest, interval = signal.setitimer(signal.ITIMER_REAL, _LOOKS, _LOOKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if rest:  # somebody else's alarm goes off when it would have
            signal.setitimer(signal.ITIMER_REAL, max(rest - (time.monotonic() - start), 0.001), interval)


def peak_memory_mib() -> float:
    """Return the most memory that this process has held; NaN on Windows, which does not say."""
    if resource is None:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes on macOS, KiB elsewhere
