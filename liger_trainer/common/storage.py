"""A disk that is full, read-only or over its quota, whoever notices it, is one error with what to do."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageError

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # of safetensors and tokenizers, written in Rust
_OF_TORCH = re.compile(r"PytorchStreamWriter|inline_container\.cc.*(unexpected pos|open file failed)", re.DOTALL)


@contextmanager
def writing_to(path: Path, advice: str = "") -> Iterator[None]:
    """Within it, what the disk refuses is a StorageError that names the file or `path`, the free space and `advice`.

    OSErrors know the reason but not always the file, safetensors and tokenizers put the reason into their text, and
    torch.save says only that writing failed.

    Raises:
        StorageError: the disk is full, read-only or over its quota, or it fails; or there are no rights to write.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        _refuse(error, path, advice)
        raise
    except Exception as error:
        # By its name, as safetensors need not be imported yet; tokenizers raises a bare Exception.
        if type(error).__name__ in ("SafetensorError", "Exception"):
            _refuse(error, path, advice)
        raise


def _refuse(error: Exception, path: Path, advice: str) -> None:
    reason = _reason(error)
    if reason is None:
        return
    name = getattr(error, "filename", None) or path
    raise StorageError(
        f"{name} cannot be written: {reason}. {free_space(path)}. What was saved before is untouched. "
        f"Free some space or get the right to write there, or choose another place.{advice and f' {advice}'}"
    ) from error


def _reason(error: Exception) -> str | None:
    """Return why the disk refuses, or None if the error is about something else."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _OS_ERROR.search(text)):
        number = int(found[1])
    if number in REFUSALS:
        return os.strerror(number)
    if number is not None:
        return None
    for refusal in REFUSALS:  # torch's messages have it when a file is opened, or shared memory is
        if os.strerror(refusal) in text:
            return os.strerror(refusal)
    return f"torch failed while it wrote ({text.splitlines()[0]})" if _OF_TORCH.search(text) else None


def free_space(path: Path) -> str:
    """Say how many bytes are free where `path` is, or would be."""
    nearest = next(above for above in (path.absolute(), *path.absolute().parents) if above.exists())
    try:
        return f"{shutil.disk_usage(nearest).free:,} bytes are free in {nearest}"
    except OSError as error:
        return f"The free space in {nearest} cannot be read ({error.strerror})"
