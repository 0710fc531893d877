"""What reaches a terminal or a log: lines from the first of several processes, without secrets or control codes."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..errors import StorageError
from ..secrets import redact

_COLOUR = r"\x1b\[[\d;]*m"
_CURSOR = r"\x1b\[(?:\d*[AK]|\?25[hl])"  # of progress bars: a line up, clear a line, hide and show the cursor
_CONTROL = re.compile(rf"({_COLOUR})|({_CURSOR})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
T = TypeVar("T")
_GONE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def is_main_process() -> bool:
    """Whether this is the first process, by the RANK that launchers set."""
    return os.environ.get("RANK", "0") == "0"


def announce(line: str) -> None:
    """Print one line, in the first process only."""
    if is_main_process():
        print(f"liger-trainer: {line}", flush=True)


def visible(text: str) -> str:
    """Return text of a row or of a model with its control codes shown as \\x1b: a terminal would act on them."""
    return _CONTROL.sub(lambda found: _shown(found[0]), text)


def _shown(codes: str) -> str:
    return codes.replace(codes[0], f"\\x{ord(codes[0]):02x}", 1)


class _GuardedStream:
    """A stream to which nothing is written that is secret, or that a terminal acts on but colours and progress bars.

    It outlasts its file: what a full disk or a reader that has gone does not take is dropped, and `lost` says why.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        clean = _CONTROL.sub(self._allowed, redact(text))
        try:
            self._try(self._stream.write, clean)
        except UnicodeEncodeError as error:  # the terminal's encoding lacks a character
            self._try(self._stream.write, clean.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _allowed(self, found: re.Match[str]) -> str:
        ours = found[1] or (found[2] and self._stream.isatty())
        return found[0] if ours else _shown(found[0])

    def _try(self, action: Callable, *args: Any) -> None:
        try:
            action(*args)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Point the file at nothing: what the buffer still holds, and what other processes print, goes there too."""
        self.lost = error
        with suppress(OSError, ValueError):  # it may have no number, as in tests
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_closed_streams() -> None:
    """Give a program that was started without a stream (`>&-`) one that leads nowhere, for Python has None there.

    The first file that it opens would take the stream's number, and other libraries would print into it.
    """
    names = ("stdin", "stdout", "stderr")
    closed = [number for number, name in enumerate(names) if getattr(sys, name) is None]
    for number in closed:
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number, which is this one
    for number in closed:
        setattr(sys, names[number], open(os.devnull, "r+" if number else "r"))  # noqa: SIM115  until the process ends


@contextmanager
def guarded_output() -> Iterator[None]:
    """Within it nothing that is printed or logged holds a secret or moves a terminal's cursor, and a program goes on
    whose output can no longer be written. An error that nobody expected is printed that way too.

    Raises:
        SystemExit: with 1 for such an error; with StorageError's code for a program that succeeded, but for its output.
    """
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    guards = [_GuardedStream(stream) for stream in streams]
    sys.stdout, sys.stderr = guards  # type: ignore[assignment]
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    except SystemExit as stopped:
        for guard in guards:
            guard.flush()
        lost = guards[0].lost
        # A reader that has gone, as `head` does, took all that it wanted.
        if not stopped.code and lost is not None and lost.errno != errno.EPIPE:
            print(f"liger-trainer: what was printed could not be written: {lost.strerror}.", file=sys.stderr)
            raise SystemExit(StorageError.exit_code) from None
        raise
    finally:
        for guard in guards:
            guard.flush()
        sys.stdout, sys.stderr = streams


def on_first_rank(is_first: bool, decide: Callable[[], T]) -> T:
    """Return what `decide` returns in the first process, in all of them; what it raises there, all raise.

    Else those that go on would wait for the one that does not.
    """
    from accelerate.utils import broadcast_object_list  # torch with it; commands that need none start without

    result: list[object] = [None, None]
    if is_first:
        try:
            result = [decide(), None]
        except Exception as error:
            result = [None, error]
    answer, error = broadcast_object_list(result)
    if isinstance(error, Exception):
        raise error
    return answer  # type: ignore[return-value]
