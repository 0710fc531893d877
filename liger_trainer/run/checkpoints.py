"""Find the checkpoints of a run, check that they are complete, and resume from one. Imports no torch."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ..common.files import CONFIG, METRICS, STATE, checkpoints_in
from ..config.settings import COMMAND_LINE
from ..errors import ConfigError, CorruptError

BEFORE = "measured_before.json"  # in a checkpoint of a run: its measurement before the first step
_WEIGHTS = (
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.bin",
    "*.index.json",
    "pytorch_model_fsdp_*",
    "global_step*",
)


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, judging by names, sizes and headers; None if nothing is.

    Reads no weights: a safetensors file says how long it must be, torch's files are zip archives that end in a
    directory, and an index names its shards.
    """
    return next(_damages(checkpoint), None)


def _damages(checkpoint: Path) -> Iterator[str]:
    if not (checkpoint / STATE).is_file():
        yield f"{STATE} is missing, which is written last"
    if not any(next(checkpoint.glob(pattern), None) for pattern in _WEIGHTS):
        yield "it holds no weights"
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


def resumption(
    run_dir: Path, checkpoint: str | None, overrides: list[str], force: bool = False
) -> tuple[str, list[str]]:
    """Return the configuration and the settings that continue the run in `run_dir`.

    Args:
        run_dir: the output_dir of the run.
        checkpoint: name of the checkpoint to resume from; None is the newest.
        overrides: settings that replace those of the run.
        force: whether to resume though data or models have changed.

    Raises:
        ConfigError: no such run or checkpoint, or the run is finished and `overrides` ask for nothing more.
        CorruptError: the checkpoint is damaged; the newest whole one is named.
    """
    config = run_dir / CONFIG
    if not config.is_file():
        raise ConfigError(f"{run_dir} holds no {CONFIG}; expected the output_dir of a run.")
    if (run_dir / METRICS).is_file():
        if not overrides:
            advice = f"to train on, say for how long: liger-trainer resume {run_dir} max_steps=..."
            raise ConfigError(f"the run in {run_dir} is finished ({METRICS} is there); {advice}")
        overrides = ["overwrite_output_dir=true", *overrides]
    chosen = _chosen(run_dir, checkpoint)
    forced = ["force_resume=true"] if force else []
    return str(config), [f"output_dir={run_dir}", *overrides, f"resume_from_checkpoint={chosen}", *forced]


def _chosen(run_dir: Path, name: str | None) -> Path:
    found = checkpoints_in(run_dir)
    names = ", ".join(path.name for path in found)
    if not found:
        raise ConfigError(f"no checkpoint in {run_dir}; was the run started with save_strategy: no?")
    if name is not None and name not in [path.name for path in found]:
        raise ConfigError(f"{COMMAND_LINE}: --checkpoint: expected one of {names}, got {name!r}.")
    chosen = found[-1] if name is None else run_dir / name
    reason = damage(chosen)
    if reason is None:
        return chosen
    whole = [path.name for path in found if path != chosen and damage(path) is None]
    again = f"To go on from the newest whole one: liger-trainer resume {run_dir} --checkpoint {{}}"
    advice = again.format(whole[-1]) if whole else "No other checkpoint is whole."
    raise CorruptError(f"{chosen} is damaged: {reason}. {advice}")
