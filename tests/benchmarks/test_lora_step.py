"""The benchmark of a LoRA step: it runs, and its gate refuses what errs more than it may."""

import json

import pytest

from benchmarks import lora_step
from benchmarks.lora_step import Case, Result
from benchmarks.processes import FLOOR, main


def results(case: Case, ours: dict[str, float], failure: str | None = None) -> list[Result]:
    plain = {"loss": 1e-3, "gradients": 1e-2}
    return [
        Result(case, "peft", plain, [20.0, 30.0, 40.0], 300.0),
        Result(case, "liger", failure="OutOfMemoryError: too large"),
        Result(case, "ours", ours, [10.0, 20.0, 60.0], 200.0, failure=failure),
    ]


CASE = Case("Llama-3.2-1B", "bf16 adapters")
HEADER = {"device": "CPU", "date": "", "commit": "", "packages": {}, "batch": 4, "length": 32, "rounds": 1}


@pytest.mark.parametrize("name", ["loss", "gradients"])
def test_gate_refuses_more_than_twice_the_error_of_peft(name):
    errors = {"loss": 1e-3, "gradients": 1e-2}
    assert not lora_step.BENCHMARK.beyond_bound(results(CASE, errors))
    (wrong,) = lora_step.BENCHMARK.beyond_bound(results(CASE, {**errors, name: 2.5 * errors[name] + FLOOR}))
    assert name in wrong and "bf16 adapters" in wrong
    assert lora_step.BENCHMARK.beyond_bound(results(CASE, {**errors, name: float("nan")}))
    assert lora_step.BENCHMARK.beyond_bound(results(CASE, errors, failure="RuntimeError: no"))


def test_table_has_ratios_of_ours_and_failures():
    rows = results(CASE, {"loss": 1e-3, "gradients": 1e-2})
    text = lora_step.BENCHMARK.markdown(HEADER, rows, [])
    assert "| PEFT | 30.0 | 300 | 1.50 | 1.50 | 1.0e-03 | 1.0e-02 |" in text
    assert "| PEFT + Liger-Kernel | OutOfMemoryError: too large |" in text
    refused = lora_step.BENCHMARK.markdown(HEADER, rows, ["the loss is off"])
    assert "the loss is off" in refused and "30.0" not in refused


@pytest.mark.slow
def test_tiny_run(tmp_path):
    arguments = ["--tiny", "--providers", "ours", "peft", "--shapes", "Qwen3-1.7B", "--rounds", "1"]
    assert main(lora_step.BENCHMARK, [*arguments, "--output", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "lora-step.json").read_text())
    assert len(data["results"]) == 8 and all(len(r["ms"]) == lora_step.STEPS for r in data["results"])
    assert (tmp_path / "lora-step.md").read_text().count("PEFT + liger-trainer") == 4
