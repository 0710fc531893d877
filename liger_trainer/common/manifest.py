"""The manifest of a folder: size and SHA-256 of every file, so that a lost, cut off or changed one is noticed."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .files import sha256, sync_folder, write_atomically

MANIFEST = "manifest.json"
_THREADS = 4  # hashing lets other threads run


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a folder, once they and it are on the disk.

    Raises:
        OSError: a file cannot be written or read.
    """
    paths = _files(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = list(pool.map(_settled, paths))
    files = dict(zip((path.relative_to(folder).as_posix() for path in paths), entries, strict=True))
    content = {"files": files, "sha256": _sha256_of(files)}
    for inner in {path.parent for path in paths} - {folder}:
        sync_folder(inner)
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1))


def differences(folder: Path, contents: bool) -> Iterator[str]:
    """Yield how a folder differs from its manifest. Files that came later are none of its business.

    Args:
        contents: whether to read every file and compare its SHA-256, besides its size.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        intact = manifest["sha256"] == _sha256_of(files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
        return
    if not intact:
        yield f"{MANIFEST} is not what was written"
        return
    for name, entry in files.items():
        if not (folder / name).is_file():
            yield f"{name} is missing"
        elif (size := (folder / name).stat().st_size) != entry["size"]:
            yield f"{name} has {size} bytes instead of {entry['size']}"
    if contents:
        yield from _changed(folder, files)


def _changed(folder: Path, files: dict[str, Any]) -> Iterator[str]:
    names = [name for name in files if (folder / name).is_file()]
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(sha256, [folder / name for name in names])
        for name, now in zip(names, hashes, strict=True):
            if now != files[name]["sha256"]:
                yield f"{name} is not what was written: its SHA-256 is {now[:12]}..., not {files[name]['sha256'][:12]}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _settled(path: Path) -> dict[str, Any]:
    """Return the entry of a file that is on the disk. Whoever reads it next reads the disk, not the memory."""
    entry = {"size": path.stat().st_size, "sha256": sha256(path)}
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return entry


def _sha256_of(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
