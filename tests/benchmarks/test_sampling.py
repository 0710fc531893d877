"""The benchmark of sampling: who is measured, what a bound is, and that a failure stops nobody else."""

import json

import pytest
from tiny import tiny_model

from benchmarks import sampling
from benchmarks.sampling import MODELS, Workload, bound, main


def test_all_that_run_without_a_gpu(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setitem(sampling.PROVIDERS, "continuous", ("broken", fails))
    words = ["--tiny", "--rounds", "2", "--output", str(tmp_path), "--models", "Qwen3-0.6B"]
    assert main(words) == 0
    written = json.loads((tmp_path / "sampling-tiny.json").read_text())
    rows = {row["provider"]: row for row in written["results"]}
    assert list(rows) == ["ours", "ours_lora", "generate", "continuous"] and set(MODELS) > {"Qwen3-0.6B"}
    assert "no such thing" in rows.pop("continuous")["failure"]
    for row in rows.values():
        assert row["failure"] is None and len(row["seconds"]) == 2
        long, short = (sum(row[name]) / 2 for name in ("seconds", "seconds_of_few"))
        assert row["tokens_per_second"] == pytest.approx(3 * 9 / long)
        assert row["step_ms"] == pytest.approx(1e3 * (long - short) / (9 - 8))
    assert "| Qwen3-0.6B, CUDA graphs, LoRA |" in (tmp_path / "sampling-tiny.md").read_text()
    with pytest.raises(SystemExit):
        main(["--models", "Qwen9"])


def test_a_provider_of_ours_that_writes_too_little_is_a_failure(monkeypatch):
    monkeypatch.setitem(sampling.PROVIDERS, "ours", ("short", lambda *_: lambda *_: [[1] * 9, [1], [1] * 9]))
    assert main(["--tiny", "--models", "Qwen3-0.6B", "--providers", "ours"]) == 1


def test_the_bound_reads_weights_once_and_what_is_kept():
    """An embedding of its own is read a row at a time, the head as a whole."""
    model = tiny_model("llama")
    work, layers = Workload(2, 10, 4), 2
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    text = model.config
    kept = 2 * 13 * layers * 2 * text.num_key_value_heads * text.head_dim * 4
    assert bound(model, work, 2, 1.0) == pytest.approx(weights + kept)
