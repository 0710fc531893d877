"""The optimizer in one launch under DistributedDataParallel: the same steps as torch's."""

import pytest
import torch
from processes import outcome_of

TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("gpus", [False, pytest.param(True, marks=TWO_GPUS)], ids=["CPUs", "GPUs"])
def test_steps_are_those_of_torch(gpus):
    ours, torchs = outcome_of(2, "engines/optimizer_ranks.py", gpus=gpus)
    assert ours["kind"] == "OneLaunchAdamW" and torchs["kind"] == "AdamW"
    assert ours["in"] == torchs["in"] == "DistributedDataParallel"
    assert ours["norms"] == pytest.approx(torchs["norms"], rel=1e-5)
    assert len(ours["norms"]) == 3 and min(ours["norms"]) > 0.05  # gradients are clipped
    for name, weight in torchs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=2e-5, atol=2e-6)
