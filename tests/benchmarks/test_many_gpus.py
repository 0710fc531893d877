"""The benchmark of several GPUs: arithmetic, predictions, launches, page, and tiny runs in two processes on a CPU."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run_on
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks import many_gpus
from benchmarks.many_gpus import GpuRow, main, markdown, parse, set_predictions
from benchmarks.many_gpus_cases import CASES, HEADS, Weights, Work, providers_of
from benchmarks.many_gpus_launch import command, environment, merged
from benchmarks.many_gpus_predict import Assumed, Prediction, fits, predict
from benchmarks.many_gpus_rank import GO, TASK, Task, spare_every_second
from benchmarks.shapes import config_of
from benchmarks.trainer_worker import Measured

CASE = {case.name: case for case in CASES}
SFT, LORA, KD = (CASE[name] for name in ("sft-llama-3-8b", "lora-qwen3-1.7b", "kd-qwen3-1.7b-8b"))
GB = Assumed(peak_tflops=1000.0, share=0.5, gbs=100.0)


def predicted(case=SFT, gpus=1, **changes) -> Prediction:
    base = Prediction(
        case.name, gpus, peak_mib=1000.0, phase="loss", parts_mib={}, held_mib={}, tokens=8192, flops=4e14,
        executed=5e14, moved=2e10,
    )  # fmt: skip
    return replace(base, **changes)


def measured(seconds: float, **changes) -> Measured:
    base = Measured(
        losses=[10.0, 9.0], norms=[2.0, 2.0], rows=[(64, 7), (64, 8)], ms=[100.0, 110.0, 120.0], seconds=seconds,
        tokens=1000, padded_tokens=1000, allocated_mib=800.0, reserved_mib=900.0,
    )  # fmt: skip
    return replace(base, **changes)


# Arithmetic


@pytest.mark.parametrize("shape", ["Qwen3-1.7B", "Llama-3-8B"])
def test_operations_of_a_forward_are_those_that_torch_counts(shape):
    """Tied and untied. Torch counts attention without its causal half taken off too, and no weights of norms."""
    config, rows, length = config_of(shape, True, num_hidden_layers=2), 2, 32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(rows, length, dtype=torch.int64), use_cache=False)
    got = rows * length * Weights.of(config, length).forward
    assert 0 <= got / counter.get_total_flops() - 1 < 0.006


def test_work_of_a_token():
    full, adapted, taught = (Work.of(case, 8192, False, trained=10**7) for case in (SFT, LORA, KD))
    embeddings = 128256 * 4096
    torchtitan = 6 * (8_030_261_248 - embeddings) + 12 * 32 * 32 * 128 * 8192
    assert full.flops == pytest.approx(torchtitan, rel=1e-5)
    layers = 8_030_261_248 - 2 * embeddings - 4096
    assert full.recomputed == (2 * layers + 4 * 32 * 32 * 128 * 8192) / 2, "of every second layer"
    assert Work.of(replace(SFT, selective=False), 8192, False, 1).recomputed == 2 * full.recomputed
    assert full.gathered == 8_030_261_248 + layers and full.reduced == 10**7
    student, teacher = (Weights.of(config_of(shape, False), 8192) for shape in ("Qwen3-1.7B", "Qwen3-8B"))
    assert adapted.flops == 3 * student.forward - 2 * (student.layers + student.head) + 6 * 10**7
    assert taught.flops == 3 * student.forward + teacher.forward
    assert taught.gathered - adapted.gathered == teacher.all


# Predictions


def test_a_prediction_as_times():
    prediction = predicted(gpus=8)
    assert prediction.ms(GB) == (1000.0, 200.0) and prediction.steps(GB) == (1000.0, 1200.0)
    assert [fits(mib) for mib in (70_000, 100_000, 150_000)] == ["H100, H200", "H200", "none of these"]


def test_predictions_share_out():
    one, two = predict(LORA, [1, 2], tiny=True)
    for part in ("student weights", "adapter weights", "gradients", "optimizer state"):
        assert two.held_mib[part] == pytest.approx(one.held_mib[part] / 2, rel=1e-3)
    assert one.moved == 0 and two.moved > 0 and one.flops == one.executed == two.flops


# Launches and what they bring back


def test_commands_of_launches(tmp_path):
    ours = providers_of(SFT)["ours"]
    one, eight, tiny = (Task(SFT, ours, gpus, tiny) for gpus, tiny in ((1, False), (8, False), (2, True)))
    words = command(eight, tmp_path)
    assert words[2] == "accelerate.commands.launch" and words[words.index("--num_processes") + 1] == "8"
    assert words[words.index("--config_file") + 1].endswith("fsdp2.yaml")
    assert command(one, tmp_path)[1:] == ["-m", "benchmarks.many_gpus_rank", str(tmp_path)]
    assert command(tiny, tmp_path)[2] == "torch.distributed.run"
    assert (
        environment(eight)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        and environment(tiny)["CUDA_VISIBLE_DEVICES"] == ""
    )
    assert environment(eight)["NCCL_NVLS_ENABLE"] == "0"


def test_ranks_are_one_measurement():
    a = measured(1.0, losses=[10.0, 9.0], ms=[1.0, 5.0, 3.0], rows=[(64, 7), (64, 8)])
    b = measured(2.0, losses=[12.0, 9.0], ms=[2.0, 4.0, 3.0], rows=[(64, 5), (64, 9)], allocated_mib=850.0)
    both = merged([a, b])
    assert (both.losses, both.ms, both.seconds, both.tokens) == ([11.0, 9.0], [2.0, 5.0, 3.0], 2.0, 2000)
    assert both.allocated_mib == 850.0 and both.reserved_mib == 900.0
    assert both.rows != merged([b, a]).rows, "rows on other ranks are other rows"


def test_every_second_layer_is_checkpointed():
    model = AutoModelForCausalLM.from_config(config_of("Qwen3-0.6B", True, num_hidden_layers=4))
    with pytest.raises(RuntimeError, match="expected layers with gradient checkpointing, got 0"):
        spare_every_second(model)
    model.gradient_checkpointing_enable()
    spare_every_second(model)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True, False]


# The page and the command line


def test_the_table_has_efficiency_memory_beside_the_estimate_and_reasons():
    trl, ours = providers_of(SFT)["trl"], providers_of(SFT)["ours"]
    rows = [
        GpuRow(SFT, ours, measured(1.0), loss_gap=0.001, norm_gap=0.0, gpus=1),
        GpuRow(SFT, trl, gpus=2),
        GpuRow(SFT, ours, measured(0.625), loss_gap=0.001, norm_gap=0.0, gpus=2),
    ]
    for row in rows:
        row.predicted = predicted(gpus=row.gpus, peak_mib=880.0)
    rows[1].failure = "out of memory"
    header = {
        "device": "a GPU", "date": "", "commit": "", "packages": {}, "command": "", "timed": 10, "warmup": 4,
        "dtype": "bf16", "loss_tolerance": 0.01, "norm_tolerance": 0.02, "peak_tflops": 1e-3,
    }  # fmt: skip
    page = markdown(header, rows)
    flops = 4e14 / 8192
    assert f"| 1,000 | 1.00 of 1 | {1000 * flops / 1e9:.1%} | 800 | 880 | +10.0% | 900 | 1.0e-03, 0.0e+00 |" in page
    assert "| 2 | LigerTrainer | 110.0 (105.0 to 115.0) | 800 | 0.80 of 1 |" in page
    assert "| 2 | TRL SFTTrainer | out of memory |" in page and "5,762" in page
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


def test_what_is_predicted_not_to_fit_is_not_run():
    rows = [GpuRow(SFT, provider, gpus=1) for provider in providers_of(SFT).values()]
    set_predictions(rows, [predicted()], 999.0)
    assert {row.failure for row in rows} == {"not run: estimate says 1,000 MiB, the GPU has 999"}
    left = many_gpus.measure(rows, parse(["--predict"]), lambda *_: pytest.fail("it was started"))
    assert {*left} == {*rows}


def test_choices(capsys):
    options = parse(["--predict", "--layers", "4", "--teacher-layers", "2", "--cases", "kd-llama*,sft-qwen*"])
    assert [(case.layers, case.teacher_layers) for case in options.cases] == [(4, 2), (4, None)]
    assert options.gpus == [1, 2, 4, 8]
    assert parse(["--predict", "--layers", "99", "--teacher-layers", "99"]).cases == [c for c in CASES if c.default]
    names = [(row.gpus, row.provider.name) for row in many_gpus.make_rows(options) if row.case.teacher]
    assert (1, HEADS) not in names and names.count((8, HEADS)) == names.count((1, "trl")) == 1
    for arguments, message in ((["--cases", "nonsense"], "no case is called"), (["--gpus", "2"], "2 wanted, 0 there")):
        if "--gpus" in arguments and torch.cuda.is_available():
            continue
        with pytest.raises(SystemExit) as stopped:
            parse(arguments)
        assert stopped.value.code == 2 and message in capsys.readouterr().err


# Runs


def test_two_processes_hold_what_estimate_predicts(tmp_path):
    """Weights, gradients and state of the student, and the teacher's weights: half of each, by FSDP2 itself."""
    task = Task(KD, providers_of(KD)["ours"], gpus=2, tiny=True)
    (tmp_path / TASK).write_bytes(pickle.dumps(task))
    (tmp_path / GO).touch()
    run_on(2, "engines/many_gpus_ranks.py", tmp_path)
    first, second = (json.loads(Path(tmp_path, f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["measured"]["norms"] == second["measured"]["norms"]
    assert first["measured"]["rows"] != second["measured"]["rows"], "each rank has rows of its own"
    held = predict(KD, [2], tiny=True)[0].held_mib
    for rank in (first, second):
        assert set(rank["shares"]) == set(held)
        for part, mib in held.items():
            assert rank["shares"][part] == pytest.approx(mib, rel=0.05), part  # tiny tensors are rounded up to 512 B


@pytest.mark.slow
def test_rows_of_the_command(tmp_path):
    arguments = ["--tiny", "--gpus", "1", "2", "--cases", "sft-llama-3-8b,kd-llama-3-8b-70b", "--output", str(tmp_path)]
    assert main([*arguments, "--providers", "ours*"]) == 0
    rows = json.loads((tmp_path / "many-gpus-tiny.json").read_text())["results"]
    assert len(rows) == 10 and all(row["failure"] is None and row["loss_gap"] < 1e-4 for row in rows)
    assert "| 2 | LigerTrainer | " in (tmp_path / "many-gpus-tiny.md").read_text()


@pytest.mark.slow
def test_a_launch_that_fails_says_why(tmp_path):
    """`vocab_parallel=always` is refused for tied embeddings: the row says so, and the others run."""
    arguments = ["--tiny", "--gpus", "2", "--cases", "sft-qwen3-1.7b", "--output", str(tmp_path)]
    assert main([*arguments, "--providers", HEADS]) == 1
    rows = json.loads((tmp_path / "many-gpus-tiny.json").read_text())["results"]
    assert rows[0]["failure"] is None and "ConfigError: vocab_parallel: always, but" in rows[1]["failure"]
