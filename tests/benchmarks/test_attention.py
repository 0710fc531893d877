"""The benchmark of attention on a CPU: what it checks, times and sweeps, on small tensors by Triton's interpreter."""

import pytest
import torch

from benchmarks import attention

pytest.importorskip("triton", reason="Triton is not installed")
SMALL = {
    "D64 W128 sinks 64/8": (16, 4, 2, 16, True, True), "D128 full 16/8": (16, 2, 2, None, False, True),
    "D512 full 8/1": (260, 2, 1, None, False, True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch, kernels):
    monkeypatch.setattr(attention, "CASES", SMALL)
    monkeypatch.setattr(attention, "S", 64)
    monkeypatch.setattr(attention, "ENDS", [0, 5, 5, 30, 31, 50, 64])
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(attention, "DTYPE", torch.float16)
    monkeypatch.setattr(attention.da, "tiles_of", lambda kind, *_: attention.da.Tiles(32, 32, 4, 1))
    attention.da._launch.cache_clear()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", SMALL)
def test_ours_is_right(case, packed):
    found = attention.check(case, packed)
    assert found["ok"] and {"o", "dq", "dk", "dv"} <= set(found["errors"])


def test_a_wrong_output_is_seen(monkeypatch):
    right = attention.da.document_attention
    monkeypatch.setattr(attention.da, "document_attention", lambda *args, **how: 1.02 * right(*args, **how))
    assert not attention.check("D128 full 16/8", False)["ok"]


@pytest.mark.parametrize("case", SMALL)
def test_providers_compute_the_same(case):
    names = ("ours", "eager") if SMALL[case][4] else ("ours", "sdpa")
    ours, theirs = (attention.step_of(name, case)() for name in names)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).float().norm() < 1e-2 * b.float().norm()


@pytest.mark.parametrize("case", SMALL)
def test_each_kernel_is_launched_with_given_tiles(case):
    for kind in attention.kinds_of(case):
        for tiles, packed in (((16, 16, 4, 1), False), (None, True)):
            attention.launches_of(case, kind, tiles, packed)()
