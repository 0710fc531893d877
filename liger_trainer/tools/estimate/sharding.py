"""What one of several processes holds: DDP's buckets, and its shares under ZeRO and FSDP."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...run.launch import launcher_arguments
from .memory_tracker import Peak
from .simulate import StepMemory

if TYPE_CHECKING:
    from ...config.run_config import RunConfig

WEIGHTS = ("student weights", "adapter weights", "teacher weights")
GATHERED = 2  # layers with all their weights at one time: one computes, the next is being gathered


@dataclass(frozen=True)
class Sharding:
    """The number of processes, the parts that they share, and whether DDP keeps buckets of gradients."""

    name: str = "one process"
    processes: int = 1
    shared: tuple[str, ...] = ()
    gathers: bool = False
    buckets: bool = False

    def per_process(self, memory: StepMemory) -> dict[str, Peak]:
        """Return the peaks of one process."""
        return {phase: self._share(phase, peak, memory) for phase, peak in memory.peaks.items()}

    def _share(self, phase: str, peak: Peak, memory: StepMemory) -> Peak:
        parts = Counter({p: n // self.processes if p in self.shared else n for p, n in peak.parts.items()})
        if self.gathers:
            parts["gathered layers"] = GATHERED * memory.layer_bytes
            if (
                phase == "loss" or memory.tied
            ):  # as the embedding, it is kept from the first layer's pass to its backward
                parts["gathered head"] = memory.head_bytes
            del parts["autocast copies"]  # a layer is gathered in the format that it computes in
        if self.buckets:
            parts["gradient buckets"] = memory.trained_bytes
        return Peak(parts.total(), parts)


def sharding_of(config: "RunConfig") -> Sharding:
    """Read num_processes, accelerate_config, fsdp and deepspeed.

    Raises:
        ConfigError: `accelerate_config` is neither a file nor one of TRL's, or a file cannot be read.
    """
    file = _accelerate_file(config)
    processes = config["num_processes"] or file.get("num_processes") or 1
    if config["deepspeed"]:
        return _zero((_deepspeed(config).get("zero_optimization") or {}).get("stage", 0), processes)
    kind = str(file.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        return _zero(int((file.get("deepspeed_config") or {}).get("zero_stage", 0)), processes)
    if kind == "FSDP" or config["fsdp"]:
        return Sharding("FSDP", processes, (*WEIGHTS, "gradients", "optimizer state"), gathers=processes > 1)
    return Sharding("DDP", processes, buckets=True) if processes > 1 else Sharding()


def _zero(stage: int, processes: int) -> Sharding:
    shared = ("optimizer state", "gradients", *WEIGHTS)[: {0: 0, 1: 1, 2: 2}.get(stage, 5)]
    return Sharding(f"ZeRO-{stage}", processes, shared, gathers=stage == 3 and processes > 1)


def _accelerate_file(config: "RunConfig") -> dict[str, Any]:
    arguments = launcher_arguments(config)
    if "--config_file" not in arguments:
        return {}
    return _mapping(config, "accelerate_config", arguments[arguments.index("--config_file") + 1])


def _deepspeed(config: "RunConfig") -> dict[str, Any]:
    setting = config["deepspeed"]
    return setting if isinstance(setting, dict) else _mapping(config, "deepspeed", setting)


def _mapping(config: "RunConfig", key: str, path: str) -> dict[str, Any]:
    """Read a file of YAML, or of JSON, which is YAML too."""
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise config.error(key, f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise config.error(key, f"{path}: expected keys with values, got a {type(content).__name__}.")
    return content
