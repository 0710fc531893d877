"""Checkpoints on the disk: which are there, which are whole, how one is put in place and an old one removed.

A checkpoint is written into another folder, with a manifest, and renamed when all of it is on the disk. So
checkpoint-N is there as a whole or not at all, and what happens to it later is noticed. Imports no torch.
"""

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CorruptError
from .files import STATE, sha256, sync_folder, write_atomically

STAGING = "_saving"  # in a run's folder; transformers pushes nothing to the hub that begins with _ or checkpoint-
TRAINER_STATE = "LigerTrainer"  # our own among the states in trainer_state.json
WITH_MANIFEST = "manifest"  # there: the step whose checkpoint has a manifest, so that its loss is noticed
_WEIGHTS = (
    "*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "*.index.json", "pytorch_model_fsdp_*", "global_step*",
)  # fmt: skip
_TO_RESUME = {  # what Trainer writes besides the weights, unless it was told to save only the model
    "optimizer.pt": ("optimizer.pt", "optimizer*.bin", "optimizer_*", "global_step*"),
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Return the checkpoint-N directories of a run, oldest first."""
    found = [
        path for path in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()
    ]
    return sorted(found, key=step_of)


def holds_checkpoints(folder: Path) -> bool:
    """Whether a folder is none but has some, so that who names it to go on from means the newest of them."""
    return bool(checkpoints_in(folder)) and not (folder / STATE).is_file()


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.partition("-")[2])


@dataclass(frozen=True)
class Choice:
    """The newest whole checkpoint of a run, and what is wrong with each newer one, by name."""

    checkpoint: Path
    passed_over: dict[str, str]


def newest_whole(run_dir: Path, contents: bool = True) -> Choice | None:
    """Return the newest checkpoint that is whole, or None where there is no checkpoint at all.

    Args:
        contents: whether to read every file and compare its SHA-256, besides its size.

    Raises:
        CorruptError: there are checkpoints, and none is whole.
    """
    passed_over: dict[str, str] = {}
    for checkpoint in reversed(checkpoints_in(run_dir)):
        reason = damage(checkpoint, contents)
        if reason is None:
            return Choice(checkpoint, passed_over)
        passed_over[checkpoint.name] = reason
    if not passed_over:
        return None
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed_over.items())
    raise CorruptError(
        f"no checkpoint in {run_dir} is whole:{reasons}\nTo train from the beginning and remove them: "
        "overwrite_output_dir=true, without resume_from_checkpoint."
    )


def refuse_damaged(checkpoint: Path, contents: bool = False) -> None:
    """Raise CorruptError where a checkpoint is not whole; it names the newest other one that is."""
    reason = damage(checkpoint, contents)
    if reason is None:
        return
    try:
        choice = newest_whole(checkpoint.parent, contents)
    except CorruptError:
        choice = None
    whole = f"The newest whole one: {choice.checkpoint}" if choice else "No other checkpoint is whole"
    raise CorruptError(f"{checkpoint} is damaged: {reason}. {whole}.")


def damage(checkpoint: Path, contents: bool = False) -> str | None:
    """Return what is wrong with a checkpoint; None if nothing is.

    With a manifest every file must be there in its size, and, with `contents`, in its SHA-256. Without one, as of
    SFTTrainer, the files that Trainer always writes must be there. A safetensors file says how long it must be,
    torch's files are zip archives that end in a directory, and an index names its shards.
    """
    return next(_damages(checkpoint, contents), None)


def _damages(checkpoint: Path, contents: bool) -> Iterator[str]:
    if not checkpoint.is_dir():
        yield "there is no such folder"
    if has_manifest(checkpoint):  # what is not in it came later, and may be of any form
        yield from differences(checkpoint, contents)
    else:
        yield from _missing(checkpoint)
        yield from _unreadable(checkpoint)


def has_manifest(checkpoint: Path) -> bool:
    """Whether a checkpoint says what its files must be."""
    return (checkpoint / MANIFEST).is_file()


def weights_alone(checkpoint: Path) -> bool:
    """Whether a checkpoint has nothing but weights to go on with, as after `save_only_model`."""
    return not any(_has(checkpoint, patterns) for patterns in _TO_RESUME.values())


def _has(checkpoint: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(checkpoint.glob(pattern), None) for pattern in patterns)


def _missing(checkpoint: Path) -> Iterator[str]:
    if not (checkpoint / STATE).is_file():
        yield f"{STATE} is missing"
    elif _had_manifest(checkpoint):
        yield f"{MANIFEST} is missing, which it was saved with"
    if not _has(checkpoint, _WEIGHTS):
        yield "it holds no weights"
    if not weights_alone(checkpoint):
        yield from (f"{name} is missing" for name, others in _TO_RESUME.items() if not _has(checkpoint, others))
    ranks = {int(path.stem.rpartition("_")[2]) for path in checkpoint.glob("rng_state_*.pth")}
    yield from (f"rng_state_{rank}.pth is missing" for rank in range(max(ranks, default=0)) if rank not in ranks)


def _had_manifest(checkpoint: Path) -> bool:
    try:
        state: Any = _state(checkpoint)
        return state["stateful_callbacks"][TRAINER_STATE][WITH_MANIFEST] == state["global_step"]
    except (KeyError, TypeError):
        return False


def _unreadable(checkpoint: Path) -> Iterator[str]:
    for path in sorted(checkpoint.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            yield f"{path.name} cannot be read: {error}"
            continue
        if path.name.endswith(".index.json"):
            shards = sorted(set(content.get("weight_map", {}).values()))
            yield from (f"{name} is missing" for name in shards if not (checkpoint / name).is_file())
    for path in sorted(checkpoint.glob("*.safetensors")):
        yield from _safetensors_damage(path)
    for path in sorted([*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")]):
        if not zipfile.is_zipfile(path):
            yield f"{path.name} is cut off or no file of torch"


def _safetensors_damage(path: Path) -> Iterator[str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            yield f"{path.name} is cut off: {size} bytes"
            return
        try:
            tensors = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            yield f"{path.name} has no safetensors header"
            return
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        yield f"{path.name} has {size} bytes instead of {expected}"


def best_checkpoint(checkpoint: Path) -> str | None:
    """Return the path of the best checkpoint that a checkpoint knows of: next to it, or else where it was."""
    state = _state(checkpoint) or {}
    if state.get("best_model_checkpoint") is None:
        return None
    known = Path(state["best_model_checkpoint"])
    for found in (checkpoint.with_name(known.name), known):
        # What has its name may be another training's, as in the folder that a run was copied from. It is the one if
        # all that it has logged stands in this checkpoint too.
        logged = (_state(found) or {}).get("log_history")
        if logged is not None and json.dumps(logged) == json.dumps(state["log_history"][: len(logged)]):
            return str(found)
    return None


def _state(checkpoint: Path) -> dict[str, Any] | None:
    try:
        return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def put_in_place(staged: Path, target: Path) -> None:
    """Give a checkpoint that is written its manifest and its name. One of that name is removed after that.

    Raises:
        OSError: it cannot be written.
        CorruptError: it is not on the disk as it was written; the one of that name is untouched.
    """
    write_manifest(staged)
    if target.exists() or target.is_symlink():  # a run that went back to an earlier checkpoint comes by once more
        _verify(staged)
        os.replace(target, staged.with_name(f"replaced-{target.name}"))
    os.replace(staged, target)
    sync_folder(target.parent)


def set_aside(checkpoint: Path) -> Path:
    """Give a checkpoint that must not be resumed from a name that is none of a checkpoint; return its new path."""
    aside, number = checkpoint.with_name(f"_not-finite-{checkpoint.name}"), 1  # _: not pushed to the hub
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"_not-finite-{checkpoint.name}-{number}")
    return checkpoint.rename(aside)


def clear_staging(run_dir: Path) -> None:
    """Remove what a killed process left unfinished. A checkpoint that lacked only its name gets it."""
    staging = run_dir / STAGING
    for staged in checkpoints_in(staging):
        if has_manifest(staged) and not (run_dir / staged.name).exists() and damage(staged, contents=True) is None:
            os.replace(staged, run_dir / staged.name)
    shutil.rmtree(staging, ignore_errors=True)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove checkpoints until `limit` are left: never the newest nor the best, and none before the newest is verified.

    Those of later steps go first: they are of a future that the run has gone back from.

    Raises:
        CorruptError: the newest is not on the disk as it was written; nothing is removed.
    """
    if limit is None or limit <= 0:
        return
    kept = {newest.resolve()} | ({Path(best).resolve()} if best and Path(best).is_dir() else set())
    others = [path for path in checkpoints_in(newest.parent) if path.resolve() not in kept]
    others.sort(key=lambda path: (step_of(path) < step_of(newest), step_of(path)))
    surplus = others[: max(len(others) - max(limit - len(kept), 0), 0)]
    if surplus:
        _verify(newest)
    staging = newest.parent / STAGING
    for path in surplus:
        # its name first: one that is half removed must not look like a checkpoint
        staging.mkdir(exist_ok=True)
        doomed = staging / f"removed-{path.name}"
        os.replace(path, doomed)
        doomed.unlink() if doomed.is_symlink() else shutil.rmtree(doomed)


def _verify(checkpoint: Path) -> None:
    reason = damage(checkpoint, contents=True)
    if reason is not None:
        raise CorruptError(f"{checkpoint} was saved, but {reason}. Earlier checkpoints are kept. Check the disk.")


# The manifest of a folder: size and SHA-256 of every file, so that a lost, cut off or changed one is noticed.
MANIFEST = "manifest.json"
_THREADS = 4  # hashing lets other threads run


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a folder, once they and it are on the disk.

    Raises:
        OSError: a file cannot be written or read.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = list(pool.map(_settled, paths))
    files = dict(zip((path.relative_to(folder).as_posix() for path in paths), entries, strict=True))
    content = {"files": files, "sha256": _sha256_of(files)}
    for inner in {path.parent for path in paths} - {folder}:
        sync_folder(inner)
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1))


def renew_manifest(folder: Path) -> None:
    """Write a manifest again where files have been written since, as callbacks do into a checkpoint that is saved.

    What somebody has removed stays in it, and is missed.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file() or any("is missing" in difference for difference in differences(folder, contents=False)):
        return
    written = manifest.stat().st_mtime_ns
    if any(path.stat().st_mtime_ns >= written for path in folder.rglob("*") if path.is_file() and path != manifest):
        write_manifest(folder)


def differences(folder: Path, contents: bool) -> Iterator[str]:
    """Yield how a folder differs from its manifest. Files that came later do not matter.

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
    if not contents:
        return
    names = [name for name in files if (folder / name).is_file()]
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(sha256, [folder / name for name in names])
        for name, now in zip(names, hashes, strict=True):
            if now != files[name]["sha256"]:
                yield f"{name} is not what was written: its SHA-256 is {now[:12]}..., not {files[name]['sha256'][:12]}"


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
