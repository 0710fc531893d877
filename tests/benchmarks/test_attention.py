"""The benchmark of attention: its plain torch by blocks, and the peers, on small tensors."""

from typing import Any

import pytest
import torch

from benchmarks import op_cases, op_providers
from benchmarks.op_cases import ATTENTION, OpCase
from liger_trainer.kernels.document_attention import document_attention_reference

CASES = [
    OpCase("plain", ATTENTION, 16, 24, torch.float32, heads=(4, 2), document=24),
    OpCase("window", ATTENTION, 16, 24, torch.float32, heads=(4, 2), document=24, window=7),
    OpCase("sinks", ATTENTION, 16, 24, torch.float32, heads=(4, 2), document=12, window=7, sinks=True),
]


def steps(case: OpCase, function: Any) -> list[torch.Tensor]:
    operands = case.make_operands(torch.device("cpu"))
    output = function(**operands.tensors)
    return [output, *torch.autograd.grad(output, [operands.tensors[x] for x in case.leaves], operands.upstream[0])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_truth_by_blocks_is_the_reference(case, monkeypatch):
    monkeypatch.setattr(op_cases, "BLOCK", 5)

    def reference(q, k, v, ends, sinks=None):
        return document_attention_reference(q, k, v, ends, window=case.window, sinks=sinks)

    for found, expected in zip(steps(case, case.plain), steps(case, reference), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("peer", ["sdpa", "flex"])
def test_peers_compute_the_same(case, peer, monkeypatch):
    monkeypatch.setattr(op_providers, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    build = {provider.name: provider.build for provider in op_providers.PROVIDERS}[peer]
    if peer == "sdpa" and case.sinks:
        with pytest.raises(NotImplementedError, match="sinks"):
            build(case)
        return
    tensors = {name: x.detach() for name, x in case.make_operands(torch.device("cpu")).tensors.items()}
    torch.testing.assert_close(build(case)(**tensors), case.plain(**tensors), rtol=1e-4, atol=1e-4)


def test_pairs_outside_of_a_window_are_no_work():
    whole, window = (case.flops("forward") / (4 * 4 * 16) for case in CASES[:2])
    assert (whole, window) == (24 * 25 / 2, 7 * 8 / 2 + 17 * 7)
