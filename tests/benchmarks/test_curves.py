"""The benchmark of curves: its distances, and what its page says of them."""

import math

import pytest

from benchmarks.curves import CASES, WAYS, distance, page, spread, trainings


def run(*losses: float, norm: float = 2.0):
    return {"losses": list(losses), "norms": [norm] * len(losses)}


def test_distances_are_means_over_steps_and_pairs():
    assert distance([1.0, 2.0], [1.5, 1.0]) == 0.75
    assert spread([[0.0, 0.0], [1.0, 1.0], [3.0, 3.0]]) == pytest.approx(2.0)
    assert math.isnan(spread([[1.0]]))


def test_ways_are_named_beside_trls():
    assert list(trainings(["kd", "lora"], ["ours"])) == ["kd, TRL", "kd, ours", "lora, TRL", "lora, ours"]
    assert [way for _, way in trainings(["full"], WAYS).values()] == list(CASES["full"].ways)


def test_a_curve_outside_of_the_spread_is_said():
    runs = {
        "TRL": {"0": run(3.0, 2.0), "1": run(3.2, 2.2)},
        "ours": {"0": run(3.01, 2.01, norm=2.02), "1": run(3.2, 2.2)},
        "ours, memory: lean": {"0": run(3.5, 2.5), "1": run(3.2, 2.2)},
    }
    content = {
        "device": "GPU", "date": "today", "commit": "abc", "packages": {"torch": "2"}, "command": "it",
        "plan": {"steps": 2, "rows": 8, "length": 16, "learning_rate": 1e-4}, "runs": {"full": runs},
        "failures": {"kd, ours, seed 0": "out of memory"},
    }  # fmt: skip
    text = page(content)
    assert f"## {CASES['full'].title}" in text and "Packed" not in text and "out of memory" in text
    ours, lean = (next(line for line in text.splitlines() if line.startswith(f"| {name} |")) for name in list(runs)[1:])
    assert "5.0e-03, 1.0e-02 | 1.0e-02 | 2.0e-01 | yes" in ours
    assert "2.5e-01, 5.0e-01 | 0.0e+00 | 2.0e-01 | **no**" in lean
