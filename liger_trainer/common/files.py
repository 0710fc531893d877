"""Names of the files of a run, and writing that leaves no half-written file or folder behind."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError

CONFIG, METRICS, STATE, REPORT = "config.yaml", "metrics.json", "trainer_state.json", "report.html"
DEFAULTS = "# Defaults in effect:"  # a line of the config.yaml that a run writes


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that, whenever the process or the machine stops, the old content or the new one is there.

    A link of this name is replaced; what it leads to is untouched.

    Raises:
        OSError: it cannot be written; the old file is untouched.
    """
    staged = path.with_name(f".{path.name}.tmp")
    staged.unlink(missing_ok=True)  # a killed process may have left one, and it may be a link
    try:
        with staged.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    sync_folder(path.parent)


def refuse_links(folder: Path) -> None:
    """Refuse to write into the folder of a run in which a link leads elsewhere: it may have come with an archive.

    A checkpoint may be a link, since nothing is written into a finished one.

    Raises:
        ConfigError: names the link and what it leads to.
    """
    inside = folder.resolve()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() and not path.name.startswith("checkpoint-") and not path.resolve().is_relative_to(inside):
            raise ConfigError(
                f"{path} is a link to {path.resolve()}: what is written here would be written there. Remove the link, "
                "or choose another folder."
            )


def sync_folder(path: Path) -> None:
    """Make a rename in the folder outlast a power cut. Does nothing on Windows, where folders cannot be opened."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(folder)


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` that takes its name at the end; after an error nothing is left of it.

    By then `target` must be absent or empty.
    """
    target = target.expanduser().resolve()
    staged = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)  # a killed process may have left one
    staged.mkdir(parents=True)
    try:
        yield staged
        os.replace(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def sha256(content: bytes | Path) -> str:
    """Return the SHA-256 of bytes, or of the content of a file, in hexadecimal."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
