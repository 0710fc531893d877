"""Where a run happens: versions and devices, as `env` prints them and metrics.json records them."""

import importlib.metadata
import platform
from typing import Any

import torch

from .. import __version__
from ..kernels.runtime import INSTALLED

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
