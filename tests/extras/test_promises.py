"""What built-in configurations promise to need, compared with `estimate` on the published shapes of their models.

A sample runs always, all of them with `-m slow`: seconds each.
"""

import pytest
import torch
from real_shapes import PARAMETERS, SHAPES, save_shapes
from transformers import AutoConfig

from liger_trainer.common.weights import auto_class
from liger_trainer.config.run_config import load_run_config
from liger_trainer.config.schema import Hardware, built_in_configs, needs_of
from liger_trainer.extras.estimate.estimator import estimate, gpu_named

NAMES = list(built_in_configs())
SAMPLE = {"qwen3/distill_cached_0.6b"}  # whose capture takes more than its training
TOO_MUCH, ROUNDED = 1.15, 1  # times and GB that a promise may be above the estimate: it shall not turn people away
DEMO, TUNED_DEMO = "demo:smollm2-135m-instruct", "outputs/smollm2/sft_task"
PROCESS_MIB = 1200  # of Python and torch, which a run on a CPU has beside its tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return save_shapes(tmp_path_factory.mktemp("shapes"))


def highest_mib(name: str, folders: dict[str, str], *settings: str) -> float:
    """The highest point of a configuration's commands: its trainings, and the capture of its cache."""
    named = load_run_config(name, exact=True)
    keys = ("model_name_or_path", "teacher_model_name_or_path")
    shapes = [f"{key}={folders[named[key]]}" for key in keys if named.values.get(key) in folders]
    shapes += [f"{key}={DEMO}" for key in keys if named.values.get(key) == TUNED_DEMO]
    found = estimate(load_run_config(name, [*shapes, *settings], exact=True), None)
    return max(found.peak_mib, found.capture_mib or 0)


def memory(gb: float) -> int:
    return gpu_named(f"{gb}GB").usable_mib


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_the_memory_that_a_configuration_names_is_what_it_takes(name, folders):
    needs = needs_of(built_in_configs()[name].read_text(encoding="utf-8"))
    assert needs is not None
    if needs.gpus:
        peak = highest_mib(name, folders)
        assert memory((needs.memory_gb - ROUNDED) / TOO_MUCH) < peak <= memory(needs.memory_gb)
    else:
        assert highest_mib(name, folders, "bf16=false") + PROCESS_MIB <= needs.memory_gb * 1024


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_shapes_are_the_published_ones(name, folders):
    config = AutoConfig.from_pretrained(folders[name])
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_every_model_of_the_catalogue_has_a_shape():
    configs = [load_run_config(name) for name in NAMES]
    named = {
        config.values.get(key) for config in configs for key in ("model_name_or_path", "teacher_model_name_or_path")
    }
    assert named - {None, DEMO, TUNED_DEMO} == SHAPES.keys()


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ("# Needs 1 GPU, about 23 GB; MIT", Hardware(1, 23)),
        ("# Needs 8 GPUs, about 58 GB each; Apache-2.0", Hardware(8, 58)),
        ("# Needs 1 GPU, about 21 GB, 5 GB of disk; Apache-2.0", Hardware(1, 21)),
        ("# Needs two CPU cores, 4 GB and a few minutes; no hub, no account", Hardware(0, 4)),
        ("# How much memory it needs: liger-trainer estimate my.yaml --gpu NAME", None),
        ("# Needs a GPU of 23 GB", None),
    ],
)
def test_the_form_of_a_promise(line, needs):
    assert needs_of(f"# Fine-tune it\n{line}\n# liger-trainer run it\n") == needs
