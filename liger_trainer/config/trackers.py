"""The trackers of `report_to`: which there are, and whether what they need is installed. Imports none of them."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from ..common.value_rules import did_you_mean

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
