"""The engines on two GPUs, through NCCL and `accelerate launch` with TRL's own files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
from engines.sharded_models import cases
from processes import HERE, run_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.xdist_group("two GPUs"),
]


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded") / "results.pt"
    run_on(2, "engines/sharded_models.py", path, gpus=True)
    return torch.load(path)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradients_of_a_sharded_model(gradients, case):
    result = gradients[case]
    limit = 1e-5 if case[0] == "no" else 2 * result["plain"]["error"]
    assert result["ours"]["error"] < limit and result["plain"]["error"] < 0.1


def launched(path, engine, processes, *arms):
    config = Path(trl.__file__).parent / "accelerate_configs" / f"{engine}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", str(processes), str(HERE / "engines" / "twenty_steps.py"), str(path), *arms]
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(path.read_text())


def test_twenty_steps_are_those_of_sfttrainer_and_of_one_gpu(tmp_path):
    two = launched(tmp_path / "two.json", "fsdp2", 2, "sft", "liger", "sft lora", "liger lora", "kd", "kd lora")
    one = launched(tmp_path / "one.json", "single_gpu", 1, "liger", "liger lora", "kd", "kd lora")
    assert all("FSDP" in run["engine"] for run in two.values())
    assert not any("FSDP" in run["engine"] for run in one.values())
    pairs = [(two["liger"], two["sft"]), (two["liger lora"], two["sft lora"])]
    pairs += [(two[name], run) for name, run in one.items()]
    for got, want in pairs:
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-2)
