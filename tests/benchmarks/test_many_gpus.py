"""The benchmark of several GPUs: its arithmetic, its command line, and tiny runs in two processes on a CPU."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks import many_gpus
from benchmarks.many_gpus import CASES, flops_of_token, main, merged, predict
from benchmarks.trainer_cases import length_of
from benchmarks.trainer_worker import Measured

CASE = {case.name: case for case in CASES}
SFT, KD = CASE["sft-llama-3-8b"], CASE["kd-qwen3-1.7b-8b"]


@pytest.mark.parametrize("case", [SFT, KD], ids=lambda case: case.name)
def test_operations_are_those_that_torch_counts(case):
    """Untied and tied. Torch counts attention without its causal half taken off too, and no weights of norms."""
    rows, length = 2, length_of(case, True)
    forward = {}
    for teacher in (False, True) if case.teacher else (False,):
        model = AutoModelForCausalLM.from_config(case.config(True, teacher), attn_implementation="eager")
        with FlopCounterMode(display=False) as counter:
            model(input_ids=torch.zeros(rows, length, dtype=torch.int64), use_cache=False)
        forward[teacher] = counter.get_total_flops() / rows / length
    counted = 3 * forward[False] + forward.get(True, 0)
    assert 0 <= flops_of_token(case, True, trained=0) / counted - 1 < 0.006


def test_ranks_are_one_measurement():
    common = {"norms": [2.0, 2.0], "tokens": 1000, "padded_tokens": 1000, "reserved_mib": 900.0}
    a = Measured([10.0, 9.0], rows=[(64, 7), (64, 8)], ms=[1.0, 5.0, 3.0], seconds=1.0, allocated_mib=800.0, **common)
    b = Measured([12.0, 9.0], rows=[(64, 5), (64, 9)], ms=[2.0, 4.0, 3.0], seconds=2.0, allocated_mib=850.0, **common)
    both = merged([a, b])
    assert (both.losses, both.ms, both.seconds, both.tokens) == ([11.0, 9.0], [2.0, 5.0, 3.0], 2.0, 2000)
    assert (both.allocated_mib, both.reserved_mib, both.busy_ms) == (850.0, 900.0, None)
    assert both.rows != merged([b, a]).rows, "rows on other ranks are other rows"


@pytest.mark.parametrize(
    ("words", "message"), [(["--tiny", "--cases", "no"], "no case is called"), (["--gpus", "3"], "choose from")]
)
def test_what_does_not_exist_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_gpus_that_are_not_there_are_refused(capsys):
    assert main(["--gpus", "2"]) == 2 and "2 wanted, 0 there" in capsys.readouterr().err


def run_tiny(folder, *words, code=0):
    assert main(["--tiny", "--output", str(folder), *words]) == code
    rows = json.loads((folder / "many-gpus-tiny.json").read_text())["results"]
    return {(row["gpus"] * row["micro_batches"], row["gpus"], row["provider"]): row for row in rows}, (
        folder / "many-gpus-tiny.md"
    ).read_text()


def test_two_processes_train_as_trls_and_hold_what_estimate_predicts(tmp_path, monkeypatch):
    """Weights, gradients and state of the student, and the teacher's weights: half of each, by FSDP2 itself."""
    monkeypatch.setattr(many_gpus, "context_for", lambda *modules: torch.multiprocessing.get_context("fork"))
    rows, page = run_tiny(tmp_path, "--gpus", "2", "--cases", KD.name)
    ours = rows[2, 2, "ours"]
    assert ours["failure"] is None and ours["loss_gap"] < 1e-4 and "| 2 | LigerDistillTrainer | " in page
    predicted = predict(KD, 2, tiny=True)
    assert ours["shares"].keys() == predicted.held_mib.keys()
    for part, mib in predicted.held_mib.items():
        assert ours["shares"][part] == pytest.approx(mib, rel=0.05), part  # tiny tensors are rounded up to 512 B


@pytest.mark.slow
def test_rows_of_the_command(tmp_path):
    rows, page = run_tiny(tmp_path, "--gpus", "1", "2", "--cases", "sft-llama-3-8b,lora-*")
    assert len(rows) == 10 and all(row["failure"] is None and row["loss_gap"] < 1e-4 for row in rows.values())
    assert " of 1 |" in page


@pytest.mark.slow
def test_a_row_that_fails_says_why(tmp_path):
    """`vocab_parallel=always` is refused for tied embeddings: the row says so, and the others run."""
    words = ["--gpus", "2", "--cases", "sft-qwen3-1.7b", "--ours", "vocab_parallel=always"]
    rows, _ = run_tiny(tmp_path, *words, code=1)
    assert rows[2, 2, "ours"]["failure"] is None
    assert "ConfigError: vocab_parallel: always, but" in rows[2, 2, "ours:vocab_parallel=always"]["failure"]
