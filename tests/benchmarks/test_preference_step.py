"""The benchmark of preferences and RL: it runs, and its gates refuse what is wrong."""

import json

import pytest
import torch

from benchmarks import preference_step
from benchmarks.preference_losses import PROVIDERS, Case, make_tensors
from benchmarks.preference_step import LossRow, StepRow, gradients_of, judge, judge_step, main

SMALL = [Case(loss, 24, 99, frozen, 4, 16) for loss in ("DPO", "GRPO") for frozen in (False, True)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_providers_agree_in_fp32(case):
    tensors = make_tensors(case, torch.device("cpu"), torch.float32)
    want = gradients_of(PROVIDERS["stored"][1](case), tensors, case)
    assert want["hidden"].abs().amax() > 1e-4
    for name in ("ours", "trl"):
        for key, got in gradients_of(PROVIDERS[name][1](case), tensors, case).items():
            torch.testing.assert_close(
                got, want[key], rtol=1e-4, atol=1e-6, msg=lambda m, n=name, k=key: f"{n} {k} {m}"
            )


def test_losses_run_and_are_written(tmp_path, capsys):
    assert main(["--tiny", "--parts", "losses", "--output", str(tmp_path)]) == 0
    assert "DPO, H 24, V 99, frozen head, 4 x 16 | ours |" in capsys.readouterr().out
    (data,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    rows = [row for row in data["losses"] if row["provider"] != "liger"]
    assert len(rows) == 12 and all(row["ms"] and row["failure"] is None for row in rows)


@pytest.mark.parametrize("error, refused", [(5e-3, False), (6e-3, True), (float("nan"), True)])
def test_the_gate_of_the_losses(error, refused):
    rows = {
        "stored": LossRow("a case", "stored", {"hidden": 1e-3}),
        "ours": LossRow("a case", "ours", {"hidden": error}),
    }
    judge(rows)
    assert (rows["ours"].failure is not None) == refused


def test_a_wrong_provider_is_refused(monkeypatch):
    def wrong(case):
        right = PROVIDERS["ours"][1](case)
        return lambda tensors: right(tensors) * 1.05

    monkeypatch.setattr(preference_step, "PROVIDERS", {**PROVIDERS, "ours": ("ours", wrong)})
    rows = preference_step.measure_losses(SMALL[0], torch.device("cpu"), 1, float("inf"))
    ours = next(row for row in rows if row.provider == "ours")
    assert "refused" in ours.failure and ours.ms is None


def test_the_gate_of_the_steps():
    plain = StepRow("DPO", "TRL", False, losses=[0.7, 0.6], norms=[2.0, 1.0])
    for losses, norms, refused in (
        ([0.7, 0.6], [2.0, 1.01], False), ([0.7, 0.5], [2.0, 1.0], True), ([0.7, 0.6], [2.2, 1.0], True),
    ):  # fmt: skip
        row = StepRow("DPO", "TRL, enable()", False, losses=losses, norms=norms)
        judge_step(row, plain)
        assert (row.failure is not None) == refused
