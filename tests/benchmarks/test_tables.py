"""The promises of `benchmarks.run` at tiny shapes on a CPU: what is measured, refused and reported."""

import json
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from benchmarks import loss_providers, op_cases, op_providers, passes, reference, run
from benchmarks.loss_cases import CASES, SMOKE_CASES, Case
from benchmarks.losses import LossStep, LossSuite
from benchmarks.measure import Roofline
from benchmarks.op_cases import OpCase
from benchmarks.reference import evaluate, relative_l2
from benchmarks.suite import CaseResult, Provider, Result
from liger_trainer.kernels.document_attention import document_attention_reference

CPU = torch.device("cpu")
TINY = Case("ce-tiny", "ce", hidden_size=16, vocab_size=64, tokens=24, dtype=torch.float32)
OPS = tuple(op.name for op in op_cases.OPS)


def provider(name, build, kinds=(*loss_providers.ALL, *OPS)):
    return Provider(name, name, build, kinds, kinds, ours=name == "ours")


def plant(monkeypatch, *providers):
    """Have both suites measure only these providers."""
    for module in (loss_providers, op_providers):
        monkeypatch.setattr(module, "PROVIDERS", providers)


@pytest.fixture
def smoke(tmp_path):
    """Run at tiny shapes and return the JSON that was written."""

    def measure(*arguments, suite="losses", expect=0):
        words = ["--smoke", "--suite", suite, "--rounds", "2", "--output", str(tmp_path), *arguments]
        assert run.main(words) == expect
        return json.loads((tmp_path / f"{suite}-smoke.json").read_text())

    return measure


def test_the_losses_pass_the_gate_and_every_case_is_reported(smoke, tmp_path, capsys):
    data = smoke("--providers", "ours*,eager,trl")
    assert [case["name"] for case in data["cases"]] == [case.name for case in SMOKE_CASES]
    assert data["gate"] == []
    assert data["header"]["packages"]["torch"] == version("torch")
    for case in data["cases"]:
        names = {result["name"] for result in case["providers"]}
        assert {"ours", "eager", "trl"} <= names and ("ours_fp32" in names) == (case["kind"] != "ce")
        for result in case["providers"]:
            assert not result["failure"] and result["beyond_bound"] == []
            ms = result["passes"]["step"]["times"]
            assert ms["count"] == 2 and ms["p25"] <= ms["p75"]
            assert ("weight" in result["errors"]) != case["frozen_head"]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "losses-smoke.md").read_text() + "\n"
    assert "## Fused linear cross-entropy" in printed and "## Fused linear divergence" in printed


def test_the_ops_pass_the_gate_and_every_op_of_ours_is_measured(smoke, tmp_path, capsys):
    data = smoke(suite="ops")
    assert data["gate"] == []
    assert {case["kind"] for case in data["cases"]} == set(op_providers.OURS)
    leaves = {op.name: op.leaves for op in op_cases.OPS}
    for case in data["cases"]:
        results = {result["name"]: result for result in case["providers"]}
        assert {"ours", "eager"} <= results.keys()
        for result in results.values():
            assert not result["failure"]
            assert {f"d_{name}" for name in leaves[case["kind"]]} | {"out0"} <= result["errors"].keys()
            times = {name: timing["times"]["median"] for name, timing in result["passes"].items()}
            assert times["both"] == pytest.approx(times["forward"] + times["backward"])
        if "ours_inplace" in results:
            assert results["ours_inplace"]["writes_into"] == ["logits"]
    assert [case["kind"] for case in data["cases"] if case["providers"][0]["host"]] == ["rms_norm"]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "ops-smoke.md").read_text() + "\n"
    assert "## Time of the kernels" in printed and "## Cost of calling" in printed


class OnePercent(torch.autograd.Function):
    """Scale the value, or only its gradient."""

    @staticmethod
    def forward(ctx, x, value, gradient):
        ctx.scale = gradient
        return x * value

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None, None


GATES = {
    "losses": ("ce-32x384,ce-32x384-bf16", {"loss": "loss", "hidden": "hidden", "weight": "weight"}),
    "ops": ("rms_norm-40*", {"out0": "out0", "x": "d_x", "weight": "d_weight"}),
}


@pytest.mark.parametrize(
    ("suite", "wrong"), [(suite, wrong) for suite, (_, values) in GATES.items() for wrong in values]
)
def test_the_gate_refuses_one_percent_and_hides_every_time(suite, wrong, smoke, capsys, monkeypatch):
    def build(case):
        def function(**tensors):
            if wrong in tensors:
                tensors[wrong] = OnePercent.apply(tensors[wrong], 1.0, 1.01)
            y = case.plain(**tensors)
            return y if wrong in tensors else OnePercent.apply(y, 1.01, 1.0)

        return function

    cases, values = GATES[suite]
    plant(monkeypatch, provider("ours", build), provider("eager", lambda case: case.plain))
    data = smoke("--cases", cases, "--providers", "*", suite=suite, expect=1)
    names = [case["name"] for case in data["cases"]]
    assert len(names) == 2, "fp32 and bf16"
    assert [x.split(" error")[0] for x in data["gate"]] == [f"{name}: ours: {values[wrong]}" for name in names]
    assert not any(result.keys() & {"passes", "memory"} for case in data["cases"] for result in case["providers"])
    printed = capsys.readouterr().out
    assert "gate refused" in printed and "quartiles)" not in printed.split("gate refused")[1]


def test_a_peer_that_fails_is_reported_and_the_rest_is_measured(smoke, capsys, monkeypatch):
    def absent(case):
        raise ImportError("No module named 'peer'")

    def too_large(case):
        def function(**tensors):
            raise torch.OutOfMemoryError("tried to allocate 48 GiB\nand more")

        return function

    def clobbering(case):
        def function(**tensors):
            loss = case.plain(**tensors)
            tensors["labels"][0] += 1
            return loss

        return function

    peers = [provider("absent", absent), provider("large", too_large), provider("clobber", clobbering)]
    plant(monkeypatch, *peers, loss_providers.PROVIDERS[0])
    data = smoke("--providers", "*", "--cases", "ce-32x384")
    rows = {result["name"]: result for result in data["cases"][0]["providers"]}
    assert rows["absent"]["failure"] == "not available: No module named 'peer'"
    assert rows["large"]["failure"] == "out of memory"
    assert rows["clobber"]["failure"] == "wrote into its inputs"
    assert rows["ours"]["passes"]["step"]["times"]["count"] == 2
    assert "No module named 'peer'" in capsys.readouterr().out


def test_a_failure_of_ours_is_refused(smoke, monkeypatch):
    monkeypatch.setitem(op_providers.OURS, "swiglu", lambda: op_providers.kernel("no_such_op"))
    data = smoke("--cases", "swiglu-40", suite="ops", expect=1)
    assert len(data["gate"]) == 1 and "swiglu-40: ours: not available" in data["gate"][0]


def test_cases_beyond_the_time_limit_are_reported_as_not_run(smoke, capsys):
    data = smoke("--time-limit", "0")
    assert [case["not_run"] for case in data["cases"]] == ["time limit of 0 s reached"] * len(SMOKE_CASES)
    assert data["header"]["command"].startswith("python -m benchmarks.run --smoke")
    assert "--output" not in data["header"]["command"]
    assert capsys.readouterr().out.count("Not run: time limit") == len(SMOKE_CASES)


@pytest.mark.parametrize("arguments", [["--cases", "ce-1x1"], ["--providers", "ours,nobody"]])
def test_names_that_match_nothing_are_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(["--smoke", *arguments])
    assert stop.value.code == 2
    assert "is called" in capsys.readouterr().err


def test_grad_output_reaches_the_gradient_and_not_the_loss():
    case = replace(TINY, grad_output=0.25)
    operands = case.make_operands(CPU)
    scaled, plain = (evaluate(x, x.make_operands(CPU), torch.float64) for x in (case, TINY))
    torch.testing.assert_close(scaled["loss"], plain["loss"])
    torch.testing.assert_close(scaled["hidden"], plain["hidden"] * 0.25)
    measured = LossStep(loss_providers.ours(case), operands, case).values()
    assert relative_l2(measured["hidden"], scaled["hidden"]) < 1e-5


@pytest.mark.parametrize("kind", loss_providers.ALL)
def test_the_truth_of_a_fused_loss_is_the_definition(kind, monkeypatch):
    """Chunked sums against probabilities written out, both in fp64, labels masked."""
    case = replace(TINY, kind=kind, teacher_hidden_size=12, ignored=0.5)
    monkeypatch.setattr(reference, "ELEMENTS_AT_ONCE", 7 * case.width)
    operands = case.make_operands(CPU)
    truth, x = evaluate(case, operands, torch.float64), operands.tensors
    hidden, weight = (x[name].detach().double().requires_grad_() for name in ("hidden", "weight"))
    valid = x["labels"] != -100
    assert valid.sum() == 12
    q = (hidden @ weight.T).softmax(-1)[valid]
    if kind == "ce":
        per_token = -q.gather(1, x["labels"][valid, None]).log()
    else:
        p = (x["teacher_hidden"].double() @ x["teacher_weight"].double().T).softmax(-1)[valid]
        m = (p + q) / 2
        per_token = {
            "forward_kl": p * (p / q).log(),
            "reverse_kl": q * (q / p).log(),
            "jsd": (p * (p / m).log() + q * (q / m).log()) / 2,
        }[kind].sum(-1)
    loss = per_token.mean()
    d_hidden, d_weight = torch.autograd.grad(loss, [hidden, weight])
    torch.testing.assert_close(truth, {"loss": loss.detach(), "hidden": d_hidden, "weight": d_weight})


@pytest.mark.parametrize(
    ("name", "ms"),
    [
        ("ce-4096x128256", 33.1),
        ("ce-4096x128256-ignored60", 13.2),
        ("ce-4096x128256-frozen", 22.1),
        ("fkl-2048from4096x128256", 27.6),
    ],
)
def test_floors_count_the_products_that_supervised_tokens_need(name, ms):
    (case,) = (case for case in CASES if case.name == name)
    roofline = Roofline(gemm_tflops=780, gemm_shape="", copy_gbs=0)
    assert LossSuite().floors(CaseResult(case), roofline)["step"] == pytest.approx(ms, abs=0.05)


def by_name(function):
    """An autograd function that takes its operands by name, which torch 2.11's do not."""
    return lambda **operands: function.apply(*operands.values())


def test_an_op_that_writes_over_its_operands_does_not_reach_the_next_one(smoke, monkeypatch):
    class Clobbering(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate.clone(), up.clone())
            out = op_cases.swiglu(gate, up)
            gate.data.zero_()
            return out

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                gate, up = (x.requires_grad_() for x in ctx.saved_tensors)
                grads = torch.autograd.grad(op_cases.swiglu(gate, up), (gate, up), grad.clone())
            grad.zero_()
            return grads

    plant(monkeypatch, provider("clobber", lambda case: by_name(Clobbering)), provider("ours", lambda case: case.plain))
    data = smoke("--cases", "swiglu-40", "--providers", "*", suite="ops")
    clobber, ours = data["cases"][0]["providers"]
    assert clobber["writes_into"] == ["gate", "d_out0"] and not clobber["beyond_bound"]
    assert ours["writes_into"] == [] and ours["passes"]["forward"]["times"]["count"] == 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_op_of_ours_that_waits_for_the_device_is_refused(where, monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return Waiting.pass_through(x, "forward")

        @staticmethod
        def backward(ctx, grad):
            return Waiting.pass_through(grad, "backward")

        @staticmethod
        def pass_through(x, name):
            if modes[-1] == "error" and name == where:
                raise RuntimeError("called a synchronizing CUDA operation")
            return x.clone()

    case = OpCase("relu2", op_cases.RELU2, 8, 4, torch.float32)
    waits = passes.passes_that_wait(passes.Step(by_name(Waiting), case.make_operands(CPU), case))
    assert waits == [where] and modes[-1] == "default"
    results = [Result(provider(name, None), waits=waits) for name in ("ours", "peer")]
    reason = f"relu2: ours: the host waits for the device in the {where}"
    assert CaseResult(case, results=results).violations == [reason]


def test_traffic_is_what_any_implementation_must_move():
    n, h, v, heads, d = 8, 40, 64, 3, op_cases.HEAD_DIM
    expected = {
        op_cases.RMS_NORM: (2 * n * h + h, 3 * n * h + 2 * h),
        op_cases.ADD_RMS_NORM: (4 * n * h + h, 4 * n * h + 2 * h),
        op_cases.SWIGLU: (3 * n * h, 5 * n * h),
        op_cases.ROPE: ((2 * heads + 2) * n * d, (2 * heads + 2) * n * d),
        op_cases.QK_NORM_ROPE: ((2 * heads + 2) * n * d + 2 * d, (3 * heads + 2) * n * d + 4 * d),
        op_cases.JSD: (2 * n * h, 3 * n * h),
    }
    for op, elements in expected.items():
        case = OpCase("tiny", op, h, n, torch.float32, heads=(2, 1))
        moved = op_cases.bytes_moved(case, case.make_operands(CPU))
        assert (moved["forward"], moved["backward"]) == tuple(4 * x for x in elements), op.name
    assert OpCase("products", op_cases.GATED_LINEAR, h, n, hidden_size=v).flops("both") == 6 * n * h * v


def test_attention_counts_the_pairs_within_documents():
    rows = OpCase("rows", op_cases.ATTENTION, 8, 24, torch.float32, heads=(4, 2), document=6)
    assert op_cases.lengths_of(rows) == [6] * 4
    assert rows.flops("forward") == 4 * (4 * 21) * 4 * 8 and rows.flops("backward") == 2.5 * rows.flops("forward")
    mixed = replace(rows, tokens=3000, document=0)
    lengths = op_cases.lengths_of(mixed)
    assert sum(lengths) == 3000 and min(lengths) > 0 and 100 < 3000 / len(lengths) < 600
    want = mixed.make_operands(CPU).tensors
    plain, reference = op_cases.one_by_one(**want), document_attention_reference(**want)
    torch.testing.assert_close(plain, reference, rtol=1e-4, atol=1e-5)
