"""benchmarks/compiled.py: which results it refuses, and a tiny run of it."""

import json

import pytest

from benchmarks import compiled as benchmark
from benchmarks.processes import FLOOR, main

GATE = {"loss": 1e-3, "gradient norm": 1e-3, "gradients": 1e-2}
HEADER = {"device": "CPU", "date": "", "commit": "", "packages": {}, "tokens": 32, "rounds": 1}


@pytest.mark.parametrize("name", GATE)
def test_benchmark_refuses_more_than_twice_the_error_of_the_plain_model(name):
    plain = benchmark.Result("Llama-3.2-1B", "plain", GATE, [20.0, 30.0, 40.0], 300.0)

    def wrong(errors, failure=None):
        return benchmark.BENCHMARK.beyond_bound(
            [plain, benchmark.Result(plain.case, "ours_compiled", errors, failure=failure)]
        )

    assert not wrong(GATE) and wrong(GATE, "RuntimeError: no")
    (reason,) = wrong({**GATE, name: 2.5 * GATE[name] + FLOOR})
    assert name in reason and wrong({**GATE, name: float("nan")})
    assert "| transformers | 30.0 | 300 | 1.0e-03 |" in benchmark.BENCHMARK.markdown(HEADER, [plain], [])
    refused = benchmark.BENCHMARK.markdown(HEADER, [plain], [reason])
    assert reason in refused and "30.0" not in refused


@pytest.mark.slow
def test_tiny_benchmark(tmp_path):
    names = ["plain", "ours", "ours_compiled"]
    arguments = ["--tiny", "--shapes", "Qwen3-0.6B", "--rounds", "1", "--providers", *names]
    assert main(benchmark.BENCHMARK, [*arguments, "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "compiled.json").read_text())["results"]
    assert [row["provider"] for row in rows] == names and all(len(row["ms"]) == benchmark.STEPS for row in rows)
    assert (tmp_path / "compiled.md").read_text().count("liger-trainer") == 2
