"""End work that takes too long or too much memory, such as a chat template that never ends."""

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
