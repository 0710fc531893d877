"""The benchmark of several GPUs: its arithmetic, its command line, and tiny runs in two processes on a CPU."""

import argparse
import json

import pytest
import torch

from benchmarks import many_gpus
from benchmarks.many_gpus import (
    CASES,
    GpuRow,
    main,
    markdown,
    merged,
    rows_of,
)
from benchmarks.trainer_providers import PROVIDERS
from benchmarks.trainer_worker import Measured

CASE = {case.name: case for case in CASES}
SFT, KD = CASE["sft-llama-3-8b"], CASE["kd-qwen3-1.7b-8b"]


def test_ranks_are_one_measurement():
    common = {"norms": [2.0, 2.0], "tokens": 1000, "padded_tokens": 1000, "reserved_mib": 900.0}
    a = Measured([10.0, 9.0], rows=[(64, 7), (64, 8)], ms=[1.0, 5.0, 3.0], seconds=1.0, allocated_mib=800.0, **common)
    b = Measured([12.0, 9.0], rows=[(64, 5), (64, 9)], ms=[2.0, 4.0, 3.0], seconds=2.0, allocated_mib=850.0, **common)
    both = merged([a, b])
    assert (both.losses, both.ms, both.seconds, both.tokens) == ([11.0, 9.0], [2.0, 5.0, 3.0], 2.0, 2000)
    assert (both.allocated_mib, both.reserved_mib, both.busy_ms) == (850.0, 900.0, None)
    assert both.rows != merged([b, a]).rows, "rows on other ranks are other rows"


def test_what_does_not_exist_is_refused(capsys):
    for words, message in ((["--tiny", "--cases", "no"], "no case is called"), (["--gpus", "3"], "choose from")):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert torch.cuda.is_available() or main(["--gpus", "2"]) == 2 and "2 wanted, 0 th" in capsys.readouterr().err


def result(case, provider, gpus, ms):
    """What a row writes, as if it had been measured."""
    row = GpuRow(CASE[case], next(p for p in PROVIDERS[CASE[case].kind] if p.name == provider), gpus=gpus)
    row.loss_gap, row.norm_gap, row.predicted = 1e-4, 1e-3, (20_000.0, 0.0)
    tokens = 8192 * gpus
    row.measured = Measured(
        [10.0, 9.0, 8.0], [2.0, 2.0, 2.0], rows=[(tokens, 5)] * 3, ms=[ms] * 3, seconds=3 * ms / 1e3,
        tokens=3 * tokens, padded_tokens=3 * tokens, reserved_mib=30_000.0, allocated_mib=25_000.0,
    )  # fmt: skip
    return row


DDP = "ddp-sft-qwen3-0.6b"
HEADER = {
    "device": "NVIDIA H100 80GB HBM3", "date": "2026-11-26", "commit": "abc", "packages": {"torch": "2.11.0"},
    "dtype": "bf16", "warmup": 4, "timed": 10, "traced": 2, "loss_tolerance": 0.01, "norm_tolerance": 0.02,
}  # fmt: skip


def test_a_page_has_ratios_efficiency_and_what_failed():
    two, failed = result(DDP, "ours", 2, 80.0), result(DDP, "trl", 1, 100.0)
    failed.failure = "refused: for a test"
    rows = [result(DDP, "trl", 2, 160.0), two, failed, result(DDP, "ours", 1, 76.0), result(SFT.name, "trl", 2, 1000.0)]
    page = markdown({**HEADER, "command": "python -m benchmarks.many_gpus"}, rows)
    ours = "| 2 | LigerTrainer | 80.0 (80.0 to 80.0) | 102,400 | 2.00 | 0.950 of 1 | 25,000 | 20,000 | -20.0%"
    assert f"{ours} | 30,000 | 1.0e-04, 1.0e-03 |" in page and "| 1 | TRL SFTTrainer | refused: for a test |" in page
    assert page.index(f"`{DDP}`") < page.index(f"`{SFT.name}`")


def test_peers_run_on_several_gpus_only():
    chosen = [next(p for p in PROVIDERS["SFT"] if p.name == name) for name in ("trl", "trl_liger", "ours")]
    rows = rows_of(argparse.Namespace(rows=[(SFT, chosen)], gpus=[1, 2]))
    found = [(row.gpus, row.provider.name) for row in rows]
    assert found == [(2, "trl"), (2, "trl_liger"), (2, "ours"), (1, "trl"), (1, "ours")]


def run_tiny(folder, *words, code=0):
    assert main(["--tiny", "--output", str(folder), *words]) == code
    rows = json.loads((folder / "many-gpus-tiny.json").read_text())["results"]
    return {(row["gpus"], row["provider"]): row for row in rows}, (folder / "many-gpus-tiny.md").read_text()


def test_two_processes_train_as_trls(tmp_path, monkeypatch):
    monkeypatch.setattr(many_gpus, "context_for", lambda *modules: torch.multiprocessing.get_context("fork"))
    rows, page = run_tiny(tmp_path, "--gpus", "2", "--cases", KD.name)
    ours = rows[2, "ours"]
    assert ours["failure"] is None and ours["loss_gap"] < 1e-4 and "| 2 | LigerDistillTrainer | " in page


@pytest.mark.slow
def test_rows_of_the_command(tmp_path):
    for case in ("sft-llama-3-8b", "lora-qwen3-1.7b"):
        rows, page = run_tiny(tmp_path, "--gpus", "1", "2", "--cases", case)
        assert len(rows) == 4 and all(row["failure"] is None and row["norm_gap"] < 1e-5 for row in rows.values())
        assert max(row["loss_gap"] for row in rows.values()) < 1e-3  # the rate of adapters is large
        assert " of 1 |" in page


@pytest.mark.slow
def test_a_row_that_fails_says_why(tmp_path):
    """`vocab_parallel=always` is refused for tied embeddings: the row says so, and the others run."""
    words = ["--gpus", "2", "--rows", "sft-qwen3-1.7b:ours,ours:vocab_parallel=always"]
    rows, _ = run_tiny(tmp_path, *words, code=1)
    assert rows[2, "ours"]["failure"] is None
    assert "ConfigError: vocab_parallel: always, but" in rows[2, "ours:vocab_parallel=always"]["failure"]
