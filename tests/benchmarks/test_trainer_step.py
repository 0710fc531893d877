"""The benchmark of training steps through the trainers: rows, trace, gate, table, and runs of tiny models."""

import json
import multiprocessing
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmark_workers import Misbehaving
from quick_cases import slow_but

from benchmarks import processes, trainer_step
from benchmarks.processes import Process
from benchmarks.shapes import random_model
from benchmarks.trainer_cases import CASES, END, ON_POLICY, PLAN, TINY_PLAN, length_of, make_rows
from benchmarks.trainer_cases import LOSS_TOLERANCE as LOSS
from benchmarks.trainer_cases import NORM_TOLERANCE as NORM
from benchmarks.trainer_providers import PROVIDERS, variant
from benchmarks.trainer_step import Row, judge, main, markdown, parse
from benchmarks.trainer_worker import Measured, TrainerWorker, covered, read_trace

CASE = {case.name: case for case in CASES}
PLAIN = CASE["sft-qwen3-0.6b"]
TRL, LIGER, COMPILED, UNSLOTH, *_, OURS = PROVIDERS["SFT"]


def measured(**changes) -> Measured:
    base = Measured(
        losses=[10.0, 9.0, 8.0], norms=[2.0, 2.0, 2.0], rows=[(64, 7), (64, 8), (64, 9)], ms=[20.0, 30.0, 40.0],
        seconds=0.09, tokens=900, padded_tokens=1800, busy_ms=25.0, kernels=1234.0, traced_ms=30.0, reserved_mib=900.0,
        weights_mib=300.0,
    )  # fmt: skip
    return replace(base, **changes)


def judged(reference: Measured | None = None, **changes) -> Row:
    row = Row(PLAIN, OURS, measured(**changes))
    judge(row, Row(PLAIN, TRL, reference or measured()))
    return row


# Rows


@pytest.mark.parametrize("name", ["sft-qwen3-0.6b", "sft-qwen3-0.6b-packed", "sft-qwen3-0.6b-padded"])
def test_rows_suffice_and_are_the_same_every_time(name):
    case = CASE[name]
    rows = make_rows(case, PLAN, tiny=False)
    assert rows == make_rows(case, PLAN, tiny=False)
    assert min(map(min, rows)) > END
    if case.layout == "packed":
        assert sum(map(len, rows)) > case.rows * case.length * PLAN.steps
    else:
        assert len(rows) == case.rows * PLAN.steps
        traced = case.rows * PLAN.traced
        assert rows[-traced:] == rows[-2 * traced : -traced] != rows[-3 * traced : -2 * traced]


# The trace


def test_time_in_which_several_things_run_counts_once():
    rng = random.Random()
    spans = [(start, start + rng.randrange(9)) for start in rng.choices(range(100), k=20)]
    assert covered(spans) == len({tick for start, end in spans for tick in range(start, end)})


def test_a_trace_is_read_a_step_and_without_what_is_not_of_the_device(tmp_path):
    path = tmp_path / "trace.json"
    times = [("kernel", 0, 1000), ("kernel", 500, 1500), ("gpu_memcpy", 3000, 1000), ("gpu_memset", 4000, 500)]
    others = [("gpu_user_annotation", 0, 90_000), ("cuda_runtime", 0, 70_000)]
    events = [{"ph": "X", "cat": cat, "ts": start, "dur": us} for cat, start, us in times + others]
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    assert read_trace(path, steps=2) == (3.5 / 2, 1)
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(RuntimeError, match="no kernel"):
        read_trace(path, steps=2)


# The gate


def test_the_gate_lets_rounding_pass():
    row = judged(losses=[10.0, 9.0 + 9 * LOSS, 8.0], norms=[2.0 * (1 - 0.9 * NORM), 9.0, 9.0])
    assert row.failure is None
    assert row.loss_gap == pytest.approx(0.9 * LOSS) and row.norm_gap == pytest.approx(0.9 * NORM)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"losses": [10.0, 9.0, 8.0 + 11 * LOSS]}, "its loss is up to 1.1%"),
        ({"losses": [10.0, 9.0 - 11 * LOSS, 8.0]}, "its loss is up to 1.1%"),
        ({"losses": [10.0, float("nan"), 8.0]}, "its loss is up to nan%"),
        ({"norms": [2.0 * (1 + 1.1 * NORM), 2.0, 2.0]}, "first gradient norm is 2.2%"),
        ({"norms": [float("nan"), 2.0, 2.0]}, "first gradient norm is nan%"),
        ({"rows": [(64, 7), (64, 9), (64, 8)]}, "other rows"),
        ({"rows": [(64, 7), (63, 8), (64, 9)]}, "other rows"),
    ],
    ids=["above", "below", "nan", "norm", "nan norm", "order", "tokens"],
)
def test_a_row_that_trains_another_way_has_no_times(changes, reason):
    row = judged(**changes)
    assert row.failure and reason in row.failure
    data, page = row.data(), markdown(header(), [row])
    assert data["losses"] and not {"ms", "seconds", "busy_ms", "reserved_mib"} & set(data)
    assert row.failure in page and "30.0" not in page and "900" not in page


def test_nothing_is_compared_with_a_loss_that_does_not_fall():
    stuck = measured(losses=[10.0, 9.99, 10.0])
    row = judged(stuck, losses=stuck.losses)
    assert row.failure and "10.0000 to 10.0000" in row.failure
    plain = Row(PLAIN, TRL, failure="out of memory")
    row = Row(PLAIN, OURS, measured())
    judge(row, plain)
    assert row.failure == "nothing to compare with: TRL SFTTrainer failed"


# The page


def header() -> dict:
    return {
        "device": "a GPU", "date": "", "commit": "", "packages": {}, "command": "the command", "timed": 20, "warmup": 6,
        "traced": 4, "mean": 300, "dtype": "bf16", "loss_tolerance": LOSS, "norm_tolerance": NORM,
    }  # fmt: skip


def test_the_table_has_ratios_the_best_of_each_column_and_reasons():
    slow = measured(ms=[40.0, 60.0, 80.0], seconds=0.18, traced_ms=60.0, reserved_mib=800.0)
    gaps = {"loss_gap": 0.0012, "norm_gap": 0.0}
    rows = [Row(PLAIN, TRL, slow, **gaps), Row(PLAIN, OURS, measured(), **gaps)]
    page = markdown(header(), [rows[0], Row(PLAIN, LIGER, failure="out of memory"), rows[1]])
    trl = "| 60.0 (50.0 to 70.0) | 2.00 | 25.0 | 1,234 | 2.40 | 5,000 (10,000) | **800** | 500 | 10.000 |"
    ours = "| **30.0** (25.0 to 35.0) | 1.00 | 25.0 | 1,234 | 1.20 | **10,000** (20,000) | 900 | 600 | 10.000 |"
    assert f"| TRL SFTTrainer {trl} 1.2e-03, 0.0e+00 |" in page and f"| LigerTrainer {ours} 1.2e-03, 0.0e+00 |" in page
    assert "| TRL SFTTrainer + Liger-Kernel | out of memory |" in page
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


# The command line


def test_rows_one_by_one():
    words = ["sft-qwen3-0.6b:ours", "lora-llama-3.2-1b:trl,trl_liger,ours:memory=balanced", "kd-qwen3-0.6b:ours,trl*"]
    words += ["sft-llama-3-8b-8bit:ours,trl_liger:optim=adamw_torch_8bit", "kd-qwen3-0.6b:ours:fp16=no"]
    options = parse(["--rows", *words, "--tiny"])
    chosen = [(case.name, [provider.name for provider in providers]) for case, providers in options.rows]
    assert chosen == [
        ("sft-qwen3-0.6b", ["trl", "ours"]), ("lora-llama-3.2-1b", ["trl", "trl_liger", "ours:memory=balanced"]),
        ("kd-qwen3-0.6b", ["trl", "trl_liger", "ours"]),
        ("sft-llama-3-8b-8bit", ["trl_liger", "ours", "trl_liger:optim=adamw_torch_8bit"]),
        ("kd-qwen3-0.6b", ["trl", "ours:fp16=false"]),
    ]  # fmt: skip
    changed = options.rows[-2][1][-1]
    assert changed.options == {"use_liger_kernel": True, "optim": "adamw_torch_8bit"} and not changed.is_ours
    assert changed.title == "TRL SFTTrainer + Liger-Kernel, optim=adamw_torch_8bit" and changed.trainer == "sft"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "nonsense:ours"], "expected CASE:PROVIDER"),
        (["--rows", "sft-qwen3-0.6b"], "expected CASE:PROVIDER"),
        (["--rows", "sft-qwen3-0.6b:nonsense"], "no provider is called 'nonsense'"),
        (["--rows", "sft-qwen3-0.6b:nonsense:packing=true"], "no provider is called 'nonsense'"),
        (["--rows", "sft-qwen3-0.6b:ours", "--cases", "*"], "leave --cases"),
        (["--cases", "nonsense"], "no case is called 'nonsense'"),
        (["--providers", "nonsense"], "no provider is called 'nonsense'"),
        (["--rows", "sft-qwen3-0.6b:ours:nonsense=1"], "expected key=value with a key of LigerConfig"),
        (["--rows", "sft-qwen3-0.6b:ours:packing"], "expected key=value"),
    ],
)
def test_names_that_do_not_exist_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_absent_packages_and_late_rows_cost_nothing(monkeypatch):
    monkeypatch.setattr("benchmarks.trainer_providers.PathFinder", SimpleNamespace(find_spec=lambda *_: None))
    rows = [Row(PLAIN, UNSLOTH), Row(CASE["qlora-qwen3-0.6b"], OURS), Row(PLAIN, OURS)]
    plain = [Row(row.case, TRL) for row in rows]
    reasons = [row.failure for row in trainer_step.measure([*rows, *plain], parse(["--time-limit", "-1"]))]
    late, absent = "not run: -1 s were over", "bitsandbytes: not installed"
    assert reasons == [absent, late, late, absent, late, "unsloth: not installed"]  # it compiles, so it is last


@pytest.mark.parametrize(
    "words", [["--rows", "lora-llama-3-8b:ours"], ["--cases", "lora-llama-3-8b", "--providers", "trl_liger,ours"]]
)
def test_the_row_whose_losses_the_others_must_have_comes_first(words):
    names = [provider.name for _, provider in trainer_step.pairs(parse(words))]
    assert names[0] == "trl_liger" and names.count("trl_liger") == names.count("ours") == 1


def test_rows_that_compile_come_last_and_without_holding_up_others():
    rows = [Row(case, provider) for case in (PLAIN, CASE["sft-llama-3.2-1b"]) for provider in (TRL, COMPILED, OURS)]
    order = list(trainer_step.measure(rows, parse(["--time-limit", "-1"])))
    assert [row.provider.name for row in order] == ["trl", "ours", "trl", "ours", "trl_compiled", "trl_compiled"]


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_failure_of_its_own():
    dying, hanging = (Process(Misbehaving, name, True) for name in ("dying", "hanging"))
    assert dying.call("answer") == ("dying", None)
    dying.start("die", 7)
    assert dying.result() == (None, "its process ended with exit code 7")
    assert dying.call("answer") == (None, "its process ended with exit code 7")
    assert hanging.call("answer") == ("hanging", None)
    hanging.start("sleep", 60)
    assert hanging.result(seconds=0.1) == (None, "took more than 0 s")
    dying.close()
    hanging.close()


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
    processes.serve(theirs, Failing, "trl", True)
    answer, failure = ours.recv()
    assert answer is None and "out of memory" in failure and at_release == [None]


# Runs


def run_here(case, provider) -> Row:
    return Row(case, provider, TrainerWorker(provider.name, tiny=True).run(case, provider))


QUICK = ("sft-qwen3-0.6b-packed", "kd-qwen3-0.6b", "dpo-qwen3-0.6b")


COMPARABLE = [c.name for c in CASES if not (c.four_bit or "bnb" in c.optim or c.method == ON_POLICY)]  # it samples


@pytest.mark.parametrize("name", slow_but(COMPARABLE, *QUICK))
def test_trainers_agree_on_tiny_models(name):
    """In fp32 they agree fifty times better than the gate asks for."""
    case = CASE[name]
    rows = [run_here(case, p) for p in PROVIDERS[case.kind] if p.name in ("trl", "ours", "ours_layers")]
    for row in rows:
        judge(row, rows[0])
        assert row.failure is None and row.measured
        if not case.lora_dropout:  # each draws its own
            assert row.loss_gap < LOSS / 50 and row.norm_gap < 1e-5
        steps = TINY_PLAN.warmup + TINY_PLAN.timed
        assert len(row.measured.losses) == len(row.measured.norms) == len(row.measured.rows) == steps
        assert len(row.measured.ms) == TINY_PLAN.timed
        assert row.measured.seconds == pytest.approx(sum(row.measured.ms) / 1e3, rel=0.05)
        tokens = case.rows * length_of(case, True) * TINY_PLAN.timed
        if case.method == "DPO":
            assert row.measured.tokens == 2 * (tokens + case.rows * TINY_PLAN.timed), "two answers, and their ends"
        elif case.layout == "full":
            assert row.measured.tokens == row.measured.padded_tokens == tokens
        elif case.layout == "packed":
            assert 0.9 * tokens < row.measured.tokens == row.measured.padded_tokens <= tokens
        else:
            assert row.measured.tokens < row.measured.padded_tokens <= tokens


def test_options_of_a_variant_reach_the_trainer_and_the_gate_sees_them():
    trl = run_here(PLAIN, TRL)
    slower = run_here(PLAIN, variant({"learning_rate": 1e-4})["SFT"])
    judge(slower, trl)
    assert slower.norm_gap == pytest.approx(0, abs=1e-5), "the first gradients are the same"
    assert slower.failure and "its loss is up to" in slower.failure


@pytest.mark.slow
def test_two_rows_of_the_command(tmp_path):
    arguments = ["--tiny", "--cases", "sft-llama-3.2-1b", "--output", str(tmp_path)]
    assert main(arguments) == 0
    written = json.loads((tmp_path / "trainer-step-tiny.json").read_text())
    assert [row["provider"] for row in written["results"]] == ["trl", "ours"]
    assert all(row["failure"] is None and len(row["ms"]) == TINY_PLAN.timed for row in written["results"])
    assert written["results"][1]["notes"].startswith("llama: ") and str(tmp_path) not in written["header"]["command"]
    assert "| LigerTrainer | " in (tmp_path / "trainer-step-tiny.md").read_text()


@pytest.mark.gpu
def test_a_gpu_is_traced_and_its_memory_read():
    row = run_here(PLAIN, OURS)
    assert row.measured and row.measured.busy_ms and row.measured.reserved_mib
    assert row.measured.kernels and row.measured.kernels > 50
    assert row.measured.traced_ms > 0.9 * row.measured.busy_ms
    assert 0 < row.measured.weights_mib < row.measured.reserved_mib
    assert row.measured.reserved_mib < torch.cuda.get_device_properties(0).total_memory / 2**20


def test_scores_of_a_random_gemma_4_are_scaled_as_others_are():
    """Ones in the norm of q, which the model has in the place of a scale, would saturate the softmax."""
    model = random_model("Gemma-4-E2B", True, "cpu")
    norms = [weight for name, weight in model.named_parameters() if name.endswith("q_norm.weight")]
    assert norms and all(torch.equal(weight, torch.full_like(weight, len(weight) ** -0.5)) for weight in norms)
