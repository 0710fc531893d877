"""A training of two processes goes on on one and on four with the same losses; what it saves is a plain model."""

import pytest
import torch
from engines.other_counts import ENGINES, SAVED, STEPS
from processes import run_on


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    run_on(2, "engines/other_counts.py", folder)
    return folder


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)])
def resumed(request, folder):
    run_on(request.param, "engines/other_counts.py", folder, "resume")
    return torch.load(folder / f"resumed-{request.param}.pt")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_goes_on_with_the_same_losses(folder, resumed, engine):
    want, got = torch.load(folder / "begun-2.pt")[engine], resumed[engine]
    assert want["losses"][STEPS] < want["losses"][1] - 0.1
    for step in range(SAVED + 1, STEPS + 1):
        assert got["losses"][step] == pytest.approx(want["losses"][step], rel=1e-5), step


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_saved_model_loads_in_transformers(folder, engine):
    assert torch.load(folder / "begun-2.pt")[engine]["saved"] == 0


def test_sharded_checkpoints_have_a_file_for_each_process(folder):
    files = torch.load(folder / "begun-2.pt")
    assert {"pytorch_model_fsdp_0", "optimizer_0"} <= set(files["fsdp2, sharded checkpoints"]["files"])
