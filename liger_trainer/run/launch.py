"""How and where a run starts: again in its folder, in several processes through accelerate's launcher, on which device.

The processes of a launcher end together. Imports no torch until it is needed.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from .. import __version__
from ..common.checkpoints import checkpoints_in
from ..common.files import CONFIG, METRICS
from ..common.signals import handling
from ..config.check import API_KEY, needs_trust
from ..config.conflicts import CHOSEN, LAUNCHED, accelerate_file, is_launched, unknown_engine
from ..config.yaml_reader import COMMAND_LINE, parse_overrides, read_settings, setting
from ..errors import ConfigError, Interrupted, LigerTrainerError
from ..secrets import redact

if TYPE_CHECKING:
    from ..config.run_config import RunConfig


def resumption(
    run_dir: Path, checkpoint: str | None, overrides: list[str], force: bool = False
) -> tuple[str, list[str]]:
    """Return the configuration and the settings that continue the run in `run_dir`.

    The run looks whether its checkpoints are whole, before it loads anything. One that was stopped before its first
    checkpoint starts from the beginning.

    Args:
        run_dir: the output_dir of the run.
        checkpoint: name of the checkpoint to resume from; None is the newest that is whole.
        overrides: settings that replace those of the run.
        force: whether to resume though data or models have changed.

    Raises:
        ConfigError: no such run or checkpoint, or the run is finished and `overrides` ask for nothing more; or its
            configuration has code of a model run, which a folder does not decide.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such directory; expected the output_dir of a run.")
    config = run_dir / CONFIG
    if not config.is_file():
        raise ConfigError(
            f"{run_dir} holds no {CONFIG}, which is written when training starts; expected the output_dir of a run."
        )
    if (run_dir / METRICS).is_file():
        if not overrides:
            command = f"liger-trainer resume {shlex.quote(str(run_dir))} max_steps=..."
            raise ConfigError(f"the run in {run_dir} is finished ({METRICS} is there); to train longer: {command}")
        # It holds results, which a run replaces only when it is told to.
        overrides = ["overwrite_output_dir=true", *overrides]
    named = parse_overrides(overrides).values
    brought = read_settings(config.read_text(encoding="utf-8"), str(config)).values
    # The configuration came with the folder, perhaps from somebody else.
    for finding in needs_trust({key: given for key, given in brought.items() if key not in named}):
        if finding.key != API_KEY:  # the run has sent it there
            raise ConfigError(str(finding))
    settings = [setting("output_dir", run_dir), *overrides]
    # Whether they are whole the run looks when it starts, before it loads anything.
    names = [path.name for path in checkpoints_in(run_dir)]
    if checkpoint is None and not names:
        print(f"liger-trainer: no checkpoint in {run_dir}: the run starts from the beginning.", file=sys.stderr)
        return str(config), settings
    if checkpoint is not None and checkpoint not in names:
        expected = f"expected one of {', '.join(names)}" if names else f"there is none in {run_dir}"
        raise ConfigError(f"{COMMAND_LINE}: --checkpoint: {expected}, got {checkpoint!r}.")
    chosen = "resume_from_checkpoint=true"
    if checkpoint is not None:
        chosen = setting("resume_from_checkpoint", run_dir / checkpoint)
    return str(config), [*settings, chosen, *(["force_resume=true"] if force else [])]


EXIT_CODE = "exit_code"
ARGUMENTS = "LIGER_TRAINER_ARGUMENTS"  # an environment variable
WATCH_EVERY = 1.0  # seconds


def launcher_arguments(config: "RunConfig") -> list[str]:
    """Return the configuration's arguments for `accelerate launch`: `num_processes: 2` is `--num_processes 2`.

    `accelerate_config: auto`, which is left where one process trains, says nothing.

    Raises:
        ConfigError: `accelerate_config` is neither a file nor a name of one.
    """
    arguments = []
    for key, spec in config.schema.keys.items():
        if spec.section != "launch" or config[key] is None or (key, config[key]) == ("accelerate_config", CHOSEN):
            continue
        if key == "accelerate_config":
            if (problem := unknown_engine(config[key])) is not None:
                raise config.error(key, problem)
            arguments += ["--config_file", str(accelerate_file(config[key]))]
        else:
            arguments += [f"--{key}", str(config[key])]
    return arguments


def _as_asked(launcher: list[str], use_cpu: bool) -> list[str]:
    """Return the arguments with which accelerate starts as many processes as they say, by itself one without GPUs.

    Raises:
        ConfigError: more processes on this machine than GPUs, or `--cpu`, with which accelerate starts one.
    """
    import torch
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    # accelerate reads its defaults from a file of the user, so both have to be asked.
    given = launch_command_parser().parse_args([*launcher, "liger_trainer"])
    file = given.config_file or default_config_file
    defaults = load_config_from_file(file) if Path(file).is_file() else None
    processes, machines, gpu_ids = (
        getattr(given, name) or getattr(defaults, name, None) for name in ("num_processes", "num_machines", "gpu_ids")
    )
    # num_processes counts the processes of all machines.
    here = (processes or 1) // (machines or 1)
    if here < 2 or given.mpirun_hostfile:
        return launcher
    if given.cpu:
        raise ConfigError(f"--cpu: accelerate starts one process with it, not {here}. Set use_cpu: true instead.")
    on_cpu = use_cpu or getattr(defaults, "use_cpu", False)
    gpus = 0 if on_cpu else torch.accelerator.device_count()
    # gpu_ids "0,1" restricts the processes to these.
    gpus = min(gpus, len(str(gpu_ids).split(","))) if gpu_ids not in (None, "all") else gpus
    if 0 < gpus < here:
        raise ConfigError(
            f"num_processes: expected at most {gpus}, one for each GPU that this machine has or gpu_ids names, got "
            f"{here}. With use_cpu: true any number trains on its processor."
        )
    engine = given.use_fsdp or given.use_deepspeed or given.use_megatron_lm or given.tpu or given.multi_gpu
    if engine or getattr(defaults, "distributed_type", "NO") in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        return launcher
    return [*launcher, "--multi_gpu"]  # without GPUs too, for DDP over gloo


def launch(launcher: list[str], arguments: list[str], use_cpu: bool = False) -> NoReturn:
    """Run `accelerate launch LAUNCHER -m liger_trainer ARGUMENTS` and pass signals on to its processes, the ranks.

    Signals go only to the ranks: torchrun's agent would kill them 30 seconds after one, though they still save.

    Args:
        use_cpu: the processes train on the CPU, though the machine may have GPUs.

    Raises:
        ConfigError: this process was started by a launcher itself, or there are fewer GPUs than processes.
        SystemExit: always, with the exit code of the first rank that ended with an error, or the launcher's.
    """
    if is_launched():
        raise ConfigError(f"arguments after --: this process was started by a launcher already; got {launcher}.")
    launcher = _as_asked(launcher, use_cpu)
    import torch

    # Where there is no GPU, accelerate makes no group of its processes unless the CPU is asked for: each would train by
    # itself, in the same folder.
    on_cpu = {} if torch.accelerator.device_count() else {"ACCELERATE_USE_CPU": "true"}
    # accelerate prints the command when a run fails, and `ps` shows it: secrets go by the environment.
    shown = [redact(word) for word in arguments]
    secret = {} if shown == arguments else {ARGUMENTS: json.dumps(arguments)}
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "-m", "liger_trainer", *shown]
    with TemporaryDirectory(prefix="liger-trainer-") as folder:
        ranks = Ranks(Path(folder))
        environment = {**os.environ, **on_cpu, **secret, LAUNCHED: f"{os.getpid()}:{folder}"}
        with handling(lambda number, frame: ranks.send(number)):
            ranks.launcher = subprocess.Popen(command, env=environment, start_new_session=True)  # without our terminal
            # The launcher ends when one rank has; others may still be saving.
            code = ranks.wait()
    sys.exit(code)


def given_by_launcher() -> list[str] | None:
    """Return the arguments of a process of `launch` whose command line hides a secret; None for any other."""
    return json.loads(os.environ.pop(ARGUMENTS, "null"))


class Ranks:
    """The processes that train on this machine: each leaves a file with its id in a folder that all know."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launcher = folder, None
        self.launcher: subprocess.Popen | None

    def processes(self) -> list[psutil.Process]:
        """Return the ranks that live."""
        found = []
        for path in self.folder.glob("rank-*"):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(path.name.partition("-")[2])))
        return found

    def send(self, number: int) -> None:
        """Send a signal to the ranks; while none has started, to the launcher, which then ends."""
        ranks = self.processes()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        # None has begun: there is nothing to save, and nothing that would notice the signal.
        if not ranks:
            (self.folder / EXIT_CODE).write_text(str(128 + signal.SIGINT))
            if self.launcher is not None:
                self.launcher.terminate()

    def wait(self) -> int:
        """Wait for the launcher and for ranks that outlive it; return the exit code of the run."""
        assert self.launcher is not None
        code = self.launcher.wait()
        psutil.wait_procs(self.processes())  # they save, and a scheduler ends them with this process
        noted = self.folder / EXIT_CODE
        # A negative code is the number of the signal that ended the launcher.
        return int(noted.read_text()) if noted.is_file() else code if code >= 0 else 128 - code


@contextmanager
def as_rank() -> Iterator[None]:
    """In a process of a launcher: stop with a checkpoint when the launcher dies, and tell ours how this one ends."""
    if not is_launched():
        yield
        return
    pid, _, folder = os.environ.get(LAUNCHED, "").partition(":")
    if folder:
        with suppress(FileNotFoundError):  # the launcher has gone already
            Path(folder, f"rank-{os.getpid()}").touch()
    # Killed with SIGKILL, neither launcher could tell its ranks, and they would train on.
    _stop_without([os.getppid(), *([int(pid)] if pid else [])])
    try:
        yield
    except LigerTrainerError as error:
        _note(folder, error.exit_code)
        if folder and isinstance(error, Interrupted):
            error.exit_code = 0  # all ranks agreed: accelerate need not report a failure
        raise
    except KeyboardInterrupt:
        _note(folder, 128 + signal.SIGINT)
        raise


def _note(folder: str, code: int) -> None:
    """Note the exit code for our launcher. The first one counts: the launcher ends the other ranks for it."""
    if folder:
        with suppress(FileExistsError, FileNotFoundError), open(Path(folder, EXIT_CODE), "x") as file:
            file.write(str(code))


def _stop_without(pids: list[int]) -> None:
    """Send this process SIGTERM when one of `pids` has ended: nobody would end it otherwise."""
    try:
        # A number may be given to another process later, so their start times are remembered too.
        watched = [psutil.Process(pid) for pid in pids]
    except psutil.NoSuchProcess:
        watched = None

    def lives(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    def watch() -> None:
        while watched is not None and all(map(lives, watched)):
            time.sleep(WATCH_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="liger-trainer-parent").start()


# Where a run happens: versions and devices, as `env` prints them and metrics.json records them.
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "datasets", "accelerate")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    installed = {"python": platform.python_version(), "liger-trainer": __version__}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # triton, with a CPU build of torch
    return installed


def device_facts() -> dict[str, Any]:
    """Return the accelerators as torch sees them."""
    import torch

    from ..kernels.runtime import INSTALLED

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append({
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
        })  # fmt: skip
    return {
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "bf16": bool(gpus) and torch.cuda.is_bf16_supported(),
        "cpu_threads": torch.get_num_threads(),
        "kernels": "torch, on the CPU" if not gpus else "Triton" if INSTALLED else "nothing: Triton is not installed",
    }
