"""The benchmarks of whole models: they run, and their gate refuses what errs more than it may."""

import json
import multiprocessing
import weakref

import pytest
import torch

from benchmarks import compiled, kd_step, lora_step, moe_step, processes, vision_step
from benchmarks.processes import FLOOR, Benchmark, Result, main

KD = {"loss": 1e-3, "gradient norm": 1e-3, "gradients": 1e-2}
LORA = {"loss": 1e-3, "gradients": 1e-2}
HEADER = {"device": "CPU", "date": "", "commit": "", "packages": {}, "rounds": 1}
BENCHMARKS = pytest.mark.parametrize(
    ("benchmark", "case", "errors"),
    [
        pytest.param(compiled.BENCHMARK, "a case", KD, id="compiled"),
        pytest.param(kd_step.BENCHMARK, "a case", KD, id="kd"),
        pytest.param(lora_step.BENCHMARK, lora_step.Case("Llama-3.2-1B", "bf16 adapters"), LORA, id="lora"),
        pytest.param(vision_step.BENCHMARK, vision_step.SHAPES[0], LORA, id="vision"),
        pytest.param(moe_step.BENCHMARK, lora_step.Case(moe_step.SHAPE, "bf16 adapters"), LORA, id="moe"),
    ],
)


def results(benchmark: Benchmark, case, errors, ours, failure=None) -> list[Result]:
    return [
        Result(case, benchmark.reference, errors, [20.0, 30.0, 40.0], 900.0, loss_mib=300.0),
        Result(case, "liger", failure="out of memory"),
        Result(case, "ours", ours, [10.0, 20.0, 60.0], 600.0, failure=failure, loss_mib=100.0),
    ]


@BENCHMARKS
def test_the_gate_refuses_more_than_twice_the_error_of_the_reference(benchmark, case, errors):
    def wrong(ours, failure=None):
        return benchmark.beyond_bound(results(benchmark, case, errors, ours, failure))

    assert not wrong(errors)
    for name, error in errors.items():
        (reason,) = wrong({**errors, name: 2.5 * error + FLOOR})
        assert name in reason and str(case) in reason
        assert wrong({**errors, name: float("nan")})
    assert wrong(errors, failure="RuntimeError: no")


@pytest.mark.parametrize(
    ("benchmark", "row"),
    [
        (compiled.BENCHMARK, "| transformers | 30.0 | 900 | 1.0e-03 | 1.0e-03 | 1.0e-02 |"),
        (kd_step.BENCHMARK, "| transformers, torch loss | 30.0 | 1.50 | 900 | 300 | 3.00 | 1.0e-03 | 1.0e-02 |"),
        (lora_step.BENCHMARK, "| PEFT | 30.0 | 900 | 1.50 | 1.50 | 1.0e-03 | 1.0e-02 |"),
    ],
    ids=["compiled", "kd", "lora"],
)
def test_the_table_has_ratios_to_ours_and_failures(benchmark, row):
    rows = results(benchmark, "a case", KD, KD)
    header = {**HEADER, **benchmark.batch(True)}
    text = benchmark.markdown(header, rows, [])
    assert row in text and f"| {benchmark.providers['liger']} | out of memory |" in text
    refused = benchmark.markdown(header, rows, ["the loss is off"])
    assert "the loss is off" in refused and "30.0" not in refused


def test_a_run_that_is_stopped_keeps_the_shapes_before(monkeypatch, tmp_path):
    measured = results(vision_step.BENCHMARK, vision_step.SHAPES[0], LORA, LORA)

    def run(benchmark, shape, *others):
        if shape != vision_step.SHAPES[0]:
            raise KeyboardInterrupt
        return measured

    monkeypatch.setattr(Benchmark, "run", run)
    monkeypatch.setattr(processes.Provider, "__init__", lambda *arguments: None)
    monkeypatch.setattr(processes.Provider, "close", lambda provider: None)
    with pytest.raises(KeyboardInterrupt):
        main(vision_step.BENCHMARK, ["--tiny", "--output", str(tmp_path)])
    kept = json.loads((tmp_path / "vision-step.json").read_text())["results"]
    assert [row["case"] for row in kept] == [vision_step.SHAPES[0]] * len(measured)


def test_a_provider_that_fails_frees_its_tensors_before_it_answers(monkeypatch):
    class Failing:
        def __init__(self, provider, tiny):
            pass

        def measure(self):
            activations = torch.empty(8)
            alive.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")

    alive: list[weakref.ref] = []
    at_release = []
    monkeypatch.setattr(processes, "release_memory", lambda: at_release.append(alive[0]()))
    ours, theirs = multiprocessing.Pipe()
    for request in (("measure", ()), None):
        ours.send(request)
    processes.serve(theirs, Failing, "stock", True)
    answer, failure = ours.recv()
    assert answer is None and "out of memory" in failure and at_release == [None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "arguments", "providers", "steps"),
    [
        (
            compiled.BENCHMARK,
            ["--providers", "ours", "ours_compiled", "--shapes", "Qwen3-0.6B"],
            {"plain", "ours", "ours_compiled"},
            compiled.STEPS,
        ),
        (kd_step.BENCHMARK, ["--providers", "ours", "trl"], {"plain", "trl", "ours"}, kd_step.STEPS),
        (lora_step.BENCHMARK, ["--providers", "ours", "--shapes", "Qwen3-1.7B"], {"peft", "ours"}, lora_step.STEPS),
        (vision_step.BENCHMARK, ["--providers", "ours"], {"stock", "ours"}, vision_step.STEPS),
    ],
    ids=["compiled", "kd", "lora", "vision"],
)
def test_a_tiny_run(benchmark, arguments, providers, steps, tmp_path):
    assert main(benchmark, ["--tiny", "--rounds", "1", "--output", str(tmp_path), *arguments]) == 0
    rows = json.loads((tmp_path / f"{benchmark.name}.json").read_text())["results"]
    assert {row["provider"] for row in rows} == providers
    assert all(len(row["ms"]) == steps for row in rows)
    page = (tmp_path / f"{benchmark.name}.md").read_text()
    assert page.count("liger-trainer") == sum(row["provider"].startswith("ours") for row in rows)
