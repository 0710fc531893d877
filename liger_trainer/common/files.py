"""The files of a run: names, writing that leaves nothing half-written behind, errors of the disk, the folder's lock."""

import errno
import hashlib
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StorageError

CONFIG, METRICS, STATE, REPORT = "config.yaml", "metrics.json", "trainer_state.json", "report.html"
BEFORE = "measured_before.json"  # in a checkpoint of a run: its measurement before the first step
DEFAULTS = "# Defaults in effect:"  # a line of the config.yaml that a run writes


PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
LINES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".json", *LINES, ".csv", ".tsv", ".txt")  # which may be packed
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow", ".feather")
EXPECTED = f"a file ending in {', '.join(SUFFIXES)}, or, but for the last three, in {', '.join(PACKED)} after that"
_ENDINGS = (*SUFFIXES, *PACKED, ".jinja", ".gguf", ".safetensors")


def kind_of_file(path: Path) -> str:
    """Return how a file's name ends, in small letters: `.jsonl` for rows.jsonl, rows.JSONL.gz and rows.jsonl.txt."""
    inner = Path(path.stem).suffix.lower()
    return inner if path.suffix.lower() in (*PACKED, ".txt") and inner in TEXT_SUFFIXES else path.suffix.lower()


def is_path(name: str) -> bool:
    """Whether a name can only be a path: a hub id is "name" or "owner/name", and `demo:` and URLs have a colon."""
    # A pattern may match no file here and still be meant for the hub.
    if any(sign in name for sign in ":*?["):
        return False
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(_ENDINGS)


def hint_of_folder(config: str, name: str) -> str:
    """Say what to do about a missing file, and where it is if that is next to the configuration; or nothing."""
    if "://" in name:
        return ". Download it first."
    if any(sign in name for sign in "*?["):
        return ": no file has a name like that."
    near = Path(config).parent / Path(name).expanduser()
    if Path(config).parent == Path() or not near.exists():
        return ""
    return f". There is {near}, but names are looked for from the folder in which the command runs."


def as_name(model: Any) -> Any:
    """Return the name of a model that is given as a `Path`; whatever else is given as it is."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def refuse_missing(what: str, name: object) -> None:
    """Raise where a model's name can only be a path, and nothing is there.

    Raises:
        ConfigError: so it is; `what` names the argument.
    """
    if isinstance(name, (str, os.PathLike)) and is_path(os.fspath(name)) and not os.path.exists(name):
        raise ConfigError(f"{what}: no such folder: {os.fspath(name)}")


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
    """Yield an empty folder next to `target` that takes its name at the end; after an error nothing is left of it.

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


# A disk that is full, read-only or over its quota, whoever notices it, is one error that says what to do.
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


# One run per folder: the file system's own lock (`flock`), which ends with its process, however that ends. The file
# names its holder.
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".liger-trainer.lock"
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_HELD: dict[Path, int] = {}  # the open files of the locks of this process


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is not there. A process may hold it several times.

    Where the file system has no locks, a warning says that another run in the folder would not be noticed.

    Raises:
        ConfigError: another process holds it, which is named; or a link in the folder leads out of it.
    """
    folder = folder.expanduser().resolve()
    if folder in _HELD:  # a run holds it around its trainer, which would take it too
        yield
        return
    refuse_links(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    file = _HELD[folder] = _take(folder)
    try:
        yield
    finally:
        del _HELD[folder]
        with suppress(OSError):  # Windows removes no open file
            (folder / LOCK).unlink()  # while it is locked: whoever waits for this file sees that it is gone
        os.close(file)
        if made:
            with suppress(OSError):  # there is something in it, as after most runs
                folder.rmdir()


def refuse_if_held(folder: Path) -> None:
    """Raise ConfigError where another process holds the lock of a folder; take nothing."""
    folder = folder.expanduser().resolve()
    try:
        file = os.open(folder / LOCK, os.O_RDWR)
    except OSError:  # there is none, or the folder cannot be written to, which is for others to say
        return
    try:
        if folder not in _HELD:
            _lock(folder, file)
    finally:
        os.close(file)


def _take(folder: Path) -> int:
    """Return the open, locked file."""
    path = folder / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _lock(folder, file):
                warnings.warn(
                    f"The file system of {folder} has no locks: a second run in it would not be noticed.", stacklevel=2
                )
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                now = datetime.now().astimezone().isoformat(timespec="seconds")
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}, since {now}".encode())
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its holder released it in between


def _lock(folder: Path, file: int) -> bool:
    """Take the file system's own lock; return False where it has none."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(file, 4096).decode(errors="replace") or "a process that has just started"
        raise ConfigError(
            f"{folder} is in use by {holder}. Two runs in one folder would remove each other's checkpoints. Wait for "
            "that one, stop it, or choose another output_dir."
        ) from None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return False
    return True


def _forget() -> None:
    """Let go of the parent's locks: a child that outlives it, such as a data loader's worker, must not hold them on."""
    for file in _HELD.values():
        os.close(file)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
