"""What `liger-trainer resume` goes on with. Imports no torch."""

import json
import shlex
import sys
from pathlib import Path

from ..common.checkpoints import checkpoints_in, newest_whole, refuse_damaged
from ..common.files import CONFIG, METRICS
from ..config.overrides import parse_overrides, setting
from ..config.places import API_KEY, needs_trust
from ..config.settings import COMMAND_LINE
from ..config.stages import SECOND_STAGE, folders
from ..config.yaml_reader import read_settings
from ..errors import ConfigError

BEFORE = "measured_before.json"  # in a checkpoint of a run: its measurement before the first step


def resumption(
    run_dir: Path, checkpoint: str | None, overrides: list[str], force: bool = False
) -> tuple[str, list[str]]:
    """Return the configuration and the settings that continue the run in `run_dir`.

    Names, sizes and headers are checked now, and every byte when the run has been loaded: the newest checkpoint that is
    whole is chosen then. A run that was stopped before its first checkpoint starts anew.

    Args:
        run_dir: the output_dir of the run.
        checkpoint: name of the checkpoint to resume from; None is the newest that is whole.
        overrides: settings that replace those of the run.
        force: whether to resume though data or models have changed.

    Raises:
        ConfigError: no such run or checkpoint, or the run is finished and `overrides` ask for nothing more; or its
            configuration has code of a model run, which a folder does not decide.
        CorruptError: the checkpoint that was asked for is damaged, or all are.
    """
    run_dir = whole_run(run_dir)
    config = run_dir / CONFIG
    if not config.is_file():
        raise ConfigError(
            f"{run_dir} holds no {CONFIG}, which is written when training starts; expected the output_dir of a run."
        )
    if (run_dir / METRICS).is_file():
        if not overrides:
            command = f"liger-trainer resume {shlex.quote(str(run_dir))} {_longer(config)}"
            raise ConfigError(
                f"the run in {run_dir} is finished ({METRICS} is there); to train on, say for how long: {command}"
            )
        overrides = ["overwrite_output_dir=true", *overrides]
    named = parse_overrides(overrides).values
    brought = read_settings(config.read_text(encoding="utf-8"), str(config)).values
    for finding in needs_trust({key: given for key, given in brought.items() if key not in named}):
        if finding.key != API_KEY:  # the run has sent it there
            raise ConfigError(str(finding))
    settings = [setting("output_dir", run_dir), *overrides]
    at = in_progress(run_dir)
    if checkpoint is None and newest_whole(at, contents=False) is None:
        begun = at != [*earlier(run_dir), run_dir][0]
        part = f"what is trained in {at.name}" if begun else "the run"
        print(f"liger-trainer: no checkpoint in {at}: {part} starts from the beginning.", file=sys.stderr)
        return str(config), [*settings, "resume_from_checkpoint=true"] if begun else settings
    chosen = "resume_from_checkpoint=true"
    if checkpoint is not None:
        chosen = setting("resume_from_checkpoint", _checked(at, checkpoint))
    return str(config), [*settings, chosen, *(["force_resume=true"] if force else [])]


def _longer(config: Path) -> str:
    """Return the setting that has a finished run go on: of two stages the second has steps of its own."""
    setting = read_settings(config.read_text(encoding="utf-8"), str(config)).values.get(SECOND_STAGE)
    if setting is None or not setting.value:
        return "max_steps=..."
    keys = {key: value for key, value in setting.value.items() if key != "max_steps"}
    block = ", ".join([*(f"{key}: {json.dumps(value)}" for key, value in keys.items()), "max_steps: ..."])
    return shlex.quote(f"{SECOND_STAGE}={{{block}}}")


def earlier(run_dir: Path) -> list[Path]:
    """Return the folders of the trainings before the last one of the run in `run_dir`; see `config.stages`."""
    config = run_dir / CONFIG
    if not config.is_file():
        return []
    settings = read_settings(config.read_text(encoding="utf-8"), str(config)).values
    return [run_dir / name for name in folders({key: setting.value for key, setting in settings.items()})]


def whole_run(run_dir: Path) -> Path:
    """Return the folder of the run of which `run_dir` is a part, or `run_dir`, if it is the whole."""
    place = run_dir.expanduser().absolute()
    return place.parent if place in earlier(place.parent) else run_dir


def in_progress(run_dir: Path) -> Path:
    """Return the folder of the first training that has not finished; of a finished run, `run_dir`."""
    return next((folder for folder in earlier(run_dir) if not (folder / METRICS).is_file()), run_dir)


def _checked(run_dir: Path, name: str) -> Path:
    names = [path.name for path in checkpoints_in(run_dir)]
    if name not in names:
        expected = f"expected one of {', '.join(names)}" if names else f"there is none in {run_dir}"
        raise ConfigError(f"{COMMAND_LINE}: --checkpoint: {expected}, got {name!r}.")
    refuse_damaged(run_dir / name)
    return run_dir / name
