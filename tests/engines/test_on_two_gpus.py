"""The engines on two GPUs, through NCCL and `accelerate launch` with TRL's own files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from engines.twenty_steps import save_models
from processes import HERE, free_port, outcome_of
from test_sharded_models import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.xdist_group("two GPUs"),
]


@pytest.fixture(scope="module")
def gradients():
    return outcome_of(2, "../engines/test_sharded_models.py", "quick", "slow", gpus=True)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradients_of_a_sharded_model(gradients, case):
    result = gradients[case]
    plain = 0.5e-5 if case[0] == "no" else result["plain"]["error"]
    assert result["ours"]["error"] < 2 * plain < 0.2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    save_models(directory)
    return directory


def launched(directory, engine, processes, *arms):
    config = Path(trl.__file__).parent / "accelerate_configs" / f"{engine}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--main_process_port", free_port()]  # several may run at a time
    command += ["--num_processes", str(processes), str(HERE / "engines" / "twenty_steps.py"), str(directory), engine]
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(processes)))
    done = subprocess.run([*command, *arms], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads((directory / f"{engine}.json").read_text())


def assert_same_steps(got, want, rounded=False):
    """rounded: FSDP2 has rounded the wanted losses to bf16. Norms part a little as the weights do."""
    assert got["loss"] == pytest.approx(want["loss"], rel=5e-3 if rounded else 1e-3)
    assert got["grad_norm"][0] == pytest.approx(want["grad_norm"][0], rel=1e-2)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-2)


def test_ddp_steps_are_those_of_one_gpu(models):
    arms = ("liger tied", "liger tied bf16", "kd lora")  # gradients are cast, written into the buckets, few
    two, one = launched(models, "multi_gpu", 2, *arms), launched(models, "single_gpu", 1, *arms)
    for name, run in one.items():
        assert_same_steps(two[name], run)
        assert two[name]["graphs"]["student"].startswith("CUDA graphs: 4 layers of the student")


def test_fsdp2_steps_are_those_of_sfttrainer_and_of_one_gpu(models):
    arms = ("liger", "liger tied", "liger lora", "kd", "kd lora")
    two = launched(models, "fsdp2", 2, "sft", "sft tied", "sft lora", *arms)
    one = launched(models, "single_gpu", 1, *arms)
    assert all("FSDP" in run["engine"] for run in two.values())
    for kind in ("", " tied", " lora"):
        assert_same_steps(two[f"liger{kind}"], two[f"sft{kind}"], rounded=True)
    for name, run in one.items():
        assert_same_steps(two[name], run)


def test_steps_with_heads_on_their_ranks_are_those_of_one_gpu(models):
    two = launched(models, "fsdp2", 2, "liger parallel", "liger lora parallel", "kd parallel")
    one = launched(models, "single_gpu", 1, "liger", "liger lora", "kd")
    for name, run in one.items():
        assert_same_steps(two[f"{name} parallel"], run)


def test_fsdp1_steps_are_those_of_sfttrainer(models):
    runs = launched(models, "fsdp1", 2, "sft", "sft tied", "liger", "liger tied")
    assert_same_steps(runs["liger"], runs["sft"])
    assert_same_steps(runs["liger tied"], runs["sft tied"])


def test_fsdp2_layers_in_graphs_take_the_steps_of_fsdp2_as_it_is(models):
    arms = [f"{kind}{mode}" for kind in ("liger", "kd lora") for mode in ("", " plain")]
    two = launched(models, "fsdp2", 2, *arms)
    for plain in arms[1::2]:
        got, want = two[plain.removesuffix(" plain")], two[plain]
        assert all("FSDP2 kept their whole weights" in report for report in got["graphs"].values())
        assert all(
            report.startswith("CUDA graphs: 4 layers") for name, report in got["graphs"].items() if name == "student"
        )
        assert not want["graphs"]
        assert_same_steps(got, want)
