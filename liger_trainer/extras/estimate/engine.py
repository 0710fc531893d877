"""`accelerate_config: auto`: which engine divides a training over several processes.

DDP is the faster one, so it is taken where `estimate` says that the training fits on each GPU, else FSDP2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.conflicts import CHOSEN, DDP_NAME, FSDP2_NAME
from ...config.run_config import load_run_config
from ...errors import ConfigError
from .estimator import MIB, Gpu, highest, present_gpu, simulated
from .simulate import StepMemory
from .step_spec import sharding_of

if TYPE_CHECKING:
    from ...config.run_config import RunConfig

FITS, TOO_LARGE = "fits", "too large"


@dataclass(frozen=True)
class Choice:
    """What `auto` stands for.

    Attributes:
        config: the configuration with the engine and the number of processes in it.
        settings: what it has besides the one that was given, as on the command line.
        why: a line for people.
    """

    config: "RunConfig"
    settings: tuple[str, ...] = ()
    why: str = ""


def choose(config: "RunConfig", gpu: Gpu | None = None) -> Choice:
    """Return what `accelerate_config: auto` stands for on this machine; any other configuration as it is.

    Args:
        gpu: what each process trains on; None asks the machine, unless `use_cpu` says otherwise.

    Raises:
        ConfigError: the training does not fit by DDP, and its settings do not go with FSDP2.
    """
    if config["accelerate_config"] != CHOSEN:
        return Choice(config)
    processes = config["num_processes"] or _gpus_here(config)
    if processes == 1:
        return Choice(config)
    gpu = gpu or (None if config["use_cpu"] else present_gpu())
    if gpu is None:
        why = "DDP over gloo: there is no GPU whose memory could be compared, and FSDP2 needs one."
        return _named(config, DDP_NAME, processes, why)
    needs, has = Needs(config, gpu.bf16), f"of the {gpu.usable_mib:,} MiB that can be used on each {gpu.name}"
    try:
        takes = needs(DDP_NAME, processes)
        reason = f"DDP would take {takes:,.0f} {has}"
    except ConfigError as error:
        takes, reason = None, f"whether DDP fits is not known ({error})"
    if takes is not None and takes <= gpu.usable_mib:
        return _named(config, DDP_NAME, processes, f"DDP, which takes {takes:,.0f} {has}.")
    try:
        choice = _named(config, FSDP2_NAME, processes, f"FSDP2: {reason}.")
    except ConfigError as error:
        raise config.error("accelerate_config", f"{CHOSEN} takes FSDP2, since {reason}, but: {error}") from None
    if takes is not None and (shared := needs(FSDP2_NAME, processes)) > gpu.usable_mib:
        more = f" It takes {shared:,.0f} MiB itself, which does not fit: `liger-trainer estimate` says what takes less."
        return Choice(choice.config, choice.settings, choice.why + more)
    return choice


def choices(config: "RunConfig", counts: Iterable[int], gpus: Iterable[Gpu]) -> list[dict[int, str]]:
    """Return, for each GPU, what `auto` does with so many of them: an engine, or FITS on one; TOO_LARGE: by none."""
    needs = Needs(config, True)
    return [{count: _engine(needs, count, gpu) for count in counts} for gpu in gpus]


def _engine(needs: "Needs", processes: int, gpu: Gpu) -> str:
    if needs(DDP_NAME, processes) <= gpu.usable_mib:
        return DDP_NAME if processes > 1 else FITS
    try:
        fits = processes > 1 and needs(FSDP2_NAME, processes) <= gpu.usable_mib
    except ConfigError:  # settings that FSDP2 does not go with
        fits = False
    return FSDP2_NAME if fits else TOO_LARGE


class Needs:
    """MiB that a training takes at its highest on each GPU, by engine and number of processes."""

    def __init__(self, config: "RunConfig", bf16: bool) -> None:
        self.config, self.bf16 = config, bf16
        # By whether FSDP2 divides it: the step is the same on two GPUs and on eight, and by DDP on one.
        self.simulated: dict[bool, StepMemory] = {}

    def __call__(self, engine: str, processes: int) -> float:
        """Raises ConfigError as `estimate` does, or where the engine does not go with the configuration."""
        divided = _divided(self.config, engine, processes)
        key = engine == FSDP2_NAME and processes > 1
        if key not in self.simulated:
            self.simulated[key] = simulated(divided, self.bf16)
        return highest(self.simulated[key], sharding_of(divided))[1].bytes / MIB


def _settings(engine: str, processes: int) -> tuple[str, str]:
    return f"accelerate_config={engine}", f"num_processes={processes}"


def _divided(config: "RunConfig", engine: str, processes: int) -> "RunConfig":
    # checked like any other, so that what does not go with the engine is said before anything is launched
    return load_run_config(config.source, [*config.overrides, *_settings(engine, processes)])


def _named(config: "RunConfig", engine: str, processes: int, why: str) -> Choice:
    return Choice(_divided(config, engine, processes), _settings(engine, processes), why)


def _gpus_here(config: "RunConfig") -> int:
    import torch

    count = 0 if config["use_cpu"] else torch.accelerator.device_count()
    ids = config["gpu_ids"]
    return max(1, count if ids in (None, "all") else min(count, len(str(ids).split(","))))
