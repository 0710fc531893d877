"""Which engine `accelerate_config` names: known before anything is launched, so that conflicts are said then."""

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..common.options import Fact, OptionValues
from ..common.value_rules import did_you_mean

LAUNCHED = "LIGER_TRAINER_LAUNCHED"  # id of the launching process, a colon, and the folder of its ranks
DDP = {"ddp": "multi_gpu"}
"""The name that users know, and TRL's."""


def is_launched() -> bool:
    """Whether this process was started by a launcher: by ours, by torchrun, which sets RANK, or by accelerate."""
    return any(name in os.environ for name in (LAUNCHED, "RANK", "ACCELERATE_MIXED_PRECISION"))


def accelerate_names() -> dict[str, Path]:
    """Return the files of accelerate that TRL brings along, by name."""
    trl = importlib.util.find_spec("trl")  # does not import it
    folder = Path(trl.origin).parent / "accelerate_configs" if trl and trl.origin else Path()
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return files | {ours: files[theirs] for ours, theirs in DDP.items() if theirs in files}


def accelerate_file(name: str) -> Path | None:
    """Return the file that a value of `accelerate_config` means, None where it is neither a file nor a name."""
    path = Path(name).expanduser()
    return path if path.is_file() else accelerate_names().get(name)


@cache
def engine_of(name: str) -> str | None:
    """Return ddp, fsdp1, fsdp2, zero0 to zero3, or None for one process and for what cannot be read."""
    file = accelerate_file(name)
    try:
        content: Any = yaml.safe_load(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError, yaml.YAMLError):
        return None  # said where the file is used
    if not isinstance(content, dict):
        return None
    kind = str(content.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        return f"fsdp{(content.get('fsdp_config') or {}).get('fsdp_version', 1)}"
    if kind == "DEEPSPEED":
        return f"zero{(content.get('deepspeed_config') or {}).get('zero_stage', 2)}"
    return "ddp" if kind.startswith("MULTI_") else None


def launches(*engines: str) -> Fact:
    """The condition that `accelerate_config` will launch one of these; what a launcher chose is in its environment."""

    def holds(options: OptionValues) -> bool:
        name = options["accelerate_config"]
        return isinstance(name, str) and not is_launched() and engine_of(name) in engines

    return Fact(("accelerate_config",), holds)


# The trackers of `report_to`: which there are, and whether what they need is installed. Imports none of them.


# name in transformers: the packages it needs, each as the modules of which one must be there
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "azure_ml": (("azureml",),),
    "clearml": (("clearml",),),
    "codecarbon": (("codecarbon",),),
    "comet_ml": (("comet_ml",),),
    "dagshub": (("dagshub",), ("mlflow",)),
    "dvclive": (("dvclive",),),
    "flyte": (("flytekit",),),
    "kubeflow": (),  # its environment tells it where to report
    "mlflow": (("mlflow",),),
    "neptune": (("neptune",),),
    "swanlab": (("swanlab",),),
    "tensorboard": (("tensorboard", "tensorboardX"),),
    "trackio": (("trackio",),),
    "wandb": (("wandb",),),
}
ALONE = ("all", "none")  # every one that is installed, and no tracker


def asked_for(report_to: str | Sequence[str] | None) -> list[str]:
    """The names in a value of `report_to`; `all` and `none`, which transformers takes alone, are no names."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    return [] if len(names) == 1 and names[0] in ALONE else names


def unknown(report_to: Any) -> str | None:
    """What is wrong with a value of `report_to`, in words: a name that is none of a tracker."""
    for name in asked_for(report_to):
        if name in ALONE:
            return f"{name!r} stands alone; beside other trackers it means nothing."
        if name not in PACKAGES:
            return f"expected {', '.join(PACKAGES)}, all or none, got {name!r}.{did_you_mean(name, PACKAGES)}"
    return None


def not_installed(report_to: Any) -> str | None:
    """Say which tracker that is asked for is not installed; None if all are."""
    for name in asked_for(report_to):
        for modules in PACKAGES[name]:
            if not any(importlib.util.find_spec(module) for module in modules):
                advice = f"pip install {modules[0].replace('_', '-')}, or report_to=none"
                return f"{name} needs {modules[0]}, which is not installed: {advice}."
    return None
