"""The optimizer in one launch under DistributedDataParallel: the same steps as torch's."""

import pytest
import torch
from processes import run_on


@pytest.mark.parametrize(
    "gpus",
    [
        False,
        pytest.param(
            True,
            marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
        ),
    ],
    ids=["CPUs", "GPUs"],
)
def test_steps_are_those_of_torch(tmp_path, gpus):
    run_on(2, "engines/optimizer_ranks.py", tmp_path / "results.pt", gpus=gpus)
    ours, torchs = torch.load(tmp_path / "results.pt").values()
    assert ours["kind"] == "OneLaunchAdamW" and torchs["kind"] == "AdamW"
    assert ours["in"] == torchs["in"] == "DistributedDataParallel"
    assert ours["norms"] == pytest.approx(torchs["norms"], rel=1e-5)
    assert len(ours["norms"]) == 3 and min(ours["norms"]) > 0.05  # gradients are clipped
    for name, weight in torchs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=2e-5, atol=2e-6)
