"""The signals that end a run, and handling them for a while."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
"""Ctrl-C, the signals by which schedulers end a job, and those by which Slurm announces that (`--signal=USR1@300`)."""


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
