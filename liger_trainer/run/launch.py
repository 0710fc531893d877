"""Start a run again through accelerate's launcher, for several processes."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.value_rules import did_you_mean
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.run_config import RunConfig

LAUNCHED = "LIGER_TRAINER_LAUNCHED"


def launcher_arguments(config: "RunConfig") -> list[str]:
    """Return the configuration's arguments for `accelerate launch`: `num_processes: 2` is `--num_processes 2`.

    Raises:
        ConfigError: `accelerate_config` is neither a file nor one of TRL's.
    """
    arguments = []
    for key, spec in config.schema.keys.items():
        if spec.section != "launch" or config[key] is None:
            continue
        if key == "accelerate_config":
            arguments += ["--config_file", str(_accelerate_config(config))]
        else:
            arguments += [f"--{key}", str(config[key])]
    return arguments


def _accelerate_config(config: "RunConfig") -> Path:
    name = config["accelerate_config"]
    if Path(name).expanduser().is_file():
        return Path(name).expanduser()
    trl = importlib.util.find_spec("trl")  # does not import it
    folder = Path(trl.origin).parent / "accelerate_configs" if trl and trl.origin else Path()
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        hint = did_you_mean(name, names)
        raise config.error("accelerate_config", f"expected a file or one of {', '.join(names)}, got {name!r}.{hint}")
    return folder / f"{name}.yaml"


def is_launched() -> bool:
    """Whether this process was started by a launcher: by ours, by torchrun, which sets RANK, or by accelerate."""
    return any(name in os.environ for name in (LAUNCHED, "RANK", "ACCELERATE_MIXED_PRECISION"))


def launch(launcher: list[str], arguments: list[str]) -> None:
    """Become `accelerate launch LAUNCHER -m liger_trainer ARGUMENTS`, and do not return.

    The exit code is the launcher's: 1 for whatever ended one of its processes.

    Raises:
        ConfigError: this process was started by a launcher itself.
    """
    if is_launched():
        raise ConfigError(f"arguments after --: this process was started by a launcher already; got {launcher}.")
    os.environ[LAUNCHED] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "-m", "liger_trainer", *arguments]
    os.execv(sys.executable, command)
