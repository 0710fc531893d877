"""What `liger-trainer resume` goes on with. Imports no torch."""

import shlex
import sys
from pathlib import Path

from ..common.checkpoints import checkpoints_in, newest_whole, refuse_damaged
from ..common.files import CONFIG, METRICS
from ..config.check import API_KEY, needs_trust
from ..config.settings import COMMAND_LINE
from ..config.yaml_reader import parse_overrides, read_settings, setting
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
    config = run_dir / CONFIG
    if not config.is_file():
        raise ConfigError(
            f"{run_dir} holds no {CONFIG}, which is written when training starts; expected the output_dir of a run."
        )
    if (run_dir / METRICS).is_file():
        if not overrides:
            command = f"liger-trainer resume {shlex.quote(str(run_dir))} max_steps=..."
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
    if checkpoint is None and newest_whole(run_dir, contents=False) is None:
        print(f"liger-trainer: no checkpoint in {run_dir}: the run starts from the beginning.", file=sys.stderr)
        return str(config), settings
    chosen = "resume_from_checkpoint=true"
    if checkpoint is not None:
        chosen = setting("resume_from_checkpoint", _checked(run_dir, checkpoint))
    return str(config), [*settings, chosen, *(["force_resume=true"] if force else [])]


def _checked(run_dir: Path, name: str) -> Path:
    names = [path.name for path in checkpoints_in(run_dir)]
    if name not in names:
        expected = f"expected one of {', '.join(names)}" if names else f"there is none in {run_dir}"
        raise ConfigError(f"{COMMAND_LINE}: --checkpoint: {expected}, got {name!r}.")
    refuse_damaged(run_dir / name)
    return run_dir / name
