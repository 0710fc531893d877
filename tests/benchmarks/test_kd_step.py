"""The benchmark of a distillation step: it runs, and its gate refuses what errs more than it may."""

import json

import pytest

from benchmarks import kd_step
from benchmarks.processes import Result, main

PLAIN = {"loss": 1e-3, "gradient norm": 1e-3, "gradients": 1e-2}
HEADER = {"device": "CPU", "date": "", "commit": "", "packages": {}, "tokens": 16, "rounds": 1}


def results(ours: dict[str, float], failure: str | None = None) -> list[Result]:
    return [
        Result("case", "plain", PLAIN, [20.0, 30.0, 40.0], 900.0, loss_mib=300.0),
        Result("case", "liger", failure="OutOfMemoryError: too large"),
        Result("case", "ours", ours, [10.0, 20.0, 60.0], 600.0, failure=failure, loss_mib=100.0),
    ]


@pytest.mark.parametrize("name", PLAIN)
def test_gate_refuses_more_than_twice_the_error_of_the_plain_models(name):
    assert not kd_step.BENCHMARK.beyond_bound(results(PLAIN))
    (wrong,) = kd_step.BENCHMARK.beyond_bound(results({**PLAIN, name: 2.5 * PLAIN[name] + 1e-3}))
    assert name in wrong
    assert kd_step.BENCHMARK.beyond_bound(results({**PLAIN, name: float("nan")}))
    assert kd_step.BENCHMARK.beyond_bound(results(PLAIN, failure="RuntimeError: no"))


def test_table_has_ratios_to_ours_and_failures():
    text = kd_step.BENCHMARK.markdown(HEADER, results(PLAIN), [])
    assert "| transformers, torch loss | 30.0 | 1.50 | 900 | 300 | 3.00 | 1.0e-03 | 1.0e-02 |" in text
    assert "| Liger-Kernel, its chunked loss | OutOfMemoryError: too large |" in text
    refused = kd_step.BENCHMARK.markdown(HEADER, results(PLAIN), ["the loss is off"])
    assert "the loss is off" in refused and "30.0" not in refused


@pytest.mark.slow
def test_tiny_run(tmp_path):
    arguments = ["--tiny", "--providers", "ours", "trl", "--rounds", "1", "--output", str(tmp_path)]
    assert main(kd_step.BENCHMARK, arguments) == 0
    data = json.loads((tmp_path / "kd-step.json").read_text())
    assert {r["provider"] for r in data["results"]} == {"plain", "trl", "ours"}
    assert all(len(r["ms"]) == kd_step.STEPS for r in data["results"])
