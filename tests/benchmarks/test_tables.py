"""The benchmark's own promises, at tiny shapes on a CPU: what it measures, what its gate refuses, what it reports."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import op_cases, op_measure, op_providers, op_run, plots, run
from benchmarks.cases import CASES, SMOKE_CASES, Case, make_inputs
from benchmarks.measure import Roofline, Spread, Stopwatch, interleave
from benchmarks.providers import ALL, PROVIDERS, Provider, eager, ours
from benchmarks.reference import Errors, evaluate, plain_loss, relative_l2

CPU = torch.device("cpu")
TINY = Case("ce-tiny", "ce", hidden_size=16, vocab_size=64, tokens=24, dtype=torch.float32)


def provider(name, build, ours=False):
    return Provider(name, name, build, ALL, ALL, ours=ours)


def smoke(tmp_path, *arguments, expect=0, name="losses"):
    assert run.main(["--smoke", "--output", str(tmp_path), *arguments]) == expect
    return json.loads((tmp_path / f"{name}-smoke.json").read_text())


def smoke_ops(tmp_path, *arguments, expect=0):
    return smoke(tmp_path, "--suite", "ops", "--rounds", "2", *arguments, expect=expect, name="ops")


def test_smoke_run_passes_the_gate_and_reports_every_case(tmp_path, capsys):
    data = smoke(tmp_path, "--providers", "ours*,eager", "--rounds", "2")
    assert [case["name"] for case in data["cases"]] == [case.name for case in SMOKE_CASES]
    assert data["gate"] == []
    assert data["header"]["packages"]["torch"] == torch.__version__
    for case in data["cases"]:
        names = {result["name"] for result in case["providers"]}
        assert {"ours", "eager"} <= names and ("ours_fp32" in names) == (case["kind"] != "ce")
        for result in case["providers"]:
            assert not result["failure"]
            assert result["ms"]["count"] == 2 and result["ms"]["p25"] <= result["ms"]["p75"]
            assert result["tflops"] * result["ms"]["median"] * 1e9 == pytest.approx(case["flops"])
            assert (result["errors"]["weight"] is None) == case["frozen_head"]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "losses-smoke.md").read_text() + "\n"
    assert "## Fused linear cross-entropy" in printed and "## Fused linear divergence" in printed


def test_trl_agrees_with_the_truth(tmp_path):
    pytest.importorskip("trl.kernels.chunked_divergence")
    data = smoke(tmp_path, "--providers", "trl", "--rounds", "1")
    peers = [result for case in data["cases"] for result in case["providers"] if result["name"] == "trl"]
    assert len(peers) == len(SMOKE_CASES)
    assert [(result["failure"], result["beyond_bound"]) for result in peers] == [("", [])] * len(peers)


@pytest.mark.parametrize("wrong", ["loss", "hidden", "weight"])
def test_gate_refuses_one_percent_and_hides_every_time(wrong, tmp_path, capsys, monkeypatch):
    def build(case):
        def loss_of(x):
            scaled = {name: 1.01 if name == wrong else 1.0 for name in ("loss", "hidden", "weight")}
            hidden = x.hidden * scaled["hidden"] + (x.hidden * (1 - scaled["hidden"])).detach()
            weight = x.weight * scaled["weight"] + (x.weight * (1 - scaled["weight"])).detach()
            loss = plain_loss(case, x._replace(hidden=hidden, weight=weight))
            return loss + (loss * (scaled["loss"] - 1)).detach()

        return loss_of

    planted = (provider("ours", build, ours=True), provider("eager", eager))
    monkeypatch.setattr(run, "PROVIDERS", planted)
    monkeypatch.setattr(run, "SMOKE_CASES", SMOKE_CASES[:2])  # fp32 and bf16
    data = smoke(tmp_path, expect=1)
    assert any(f"ours: {wrong} error" in reason for reason in data["gate"])
    assert all("ms" not in result for case in data["cases"] for result in case["providers"])
    printed = capsys.readouterr().out
    assert "gate refused" in printed and "quartiles)" not in printed.split("gate refused")[1]


def test_a_peer_that_fails_is_reported_and_the_rest_is_measured(tmp_path, capsys, monkeypatch):
    def absent(case):
        raise ImportError("No module named 'peer'")

    def too_large(case):
        def loss_of(x):
            raise torch.OutOfMemoryError("tried to allocate 48 GiB\nand more")

        return loss_of

    def clobbering(case):
        def loss_of(x):
            loss = plain_loss(case, x)
            x.labels[0] += 1
            return loss

        return loss_of

    peers = (
        provider("absent", absent),
        provider("large", too_large),
        provider("clobber", clobbering),
        *PROVIDERS[:1],
    )
    monkeypatch.setattr(run, "PROVIDERS", peers)
    data = smoke(tmp_path, "--providers", "*", "--cases", "ce-32x384")
    rows = {result["name"]: result for result in data["cases"][0]["providers"]}
    assert rows["absent"]["failure"] == "not available: No module named 'peer'"
    assert rows["large"]["failure"] == "out of memory"
    assert rows["clobber"]["failure"] == "wrote into its inputs"
    assert rows["ours"]["ms"]["count"] == 3
    assert "No module named 'peer'" in capsys.readouterr().out


def test_a_failure_of_ours_is_refused(tmp_path, monkeypatch):
    def failing(case):
        raise RuntimeError("no kernel for this shape")

    monkeypatch.setattr(run, "PROVIDERS", (provider("ours", failing, ours=True), provider("eager", eager)))
    data = smoke(tmp_path, "--providers", "eager", "--cases", "ce-32x384", expect=1)
    assert data["gate"] == ["ce-32x384: ours: RuntimeError: no kernel for this shape"]


def test_cases_beyond_the_time_limit_are_reported_as_not_run(tmp_path, capsys):
    data = smoke(tmp_path, "--time-limit", "0")
    assert [case["not_run"] for case in data["cases"]] == ["time limit of 0 s reached"] * len(SMOKE_CASES)
    assert data["header"]["command"] == "python -m benchmarks.run --smoke --time-limit 0"
    assert capsys.readouterr().out.count("Not run: time limit") == len(SMOKE_CASES)


@pytest.mark.parametrize("arguments", [["--cases", "ce-1x1"], ["--providers", "ours,nobody"]])
def test_names_that_match_nothing_are_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(["--smoke", *arguments])
    assert stop.value.code == 2
    assert "is called" in capsys.readouterr().err


def test_grad_output_reaches_the_gradient_and_not_the_loss():
    case = replace(TINY, grad_output=0.25)
    x = make_inputs(case, CPU)
    scaled, plain = evaluate(case, x, torch.float64), evaluate(TINY, x, torch.float64)
    torch.testing.assert_close(scaled.loss, plain.loss)
    torch.testing.assert_close(scaled.hidden, plain.hidden * 0.25)
    measured = run.take_gradients(case, ours(case), x)
    assert relative_l2(measured.hidden, scaled.hidden) < 1e-5


@pytest.mark.parametrize("kind", ALL)
def test_truth_is_the_definition(kind):
    """Chunked sums against probabilities written out, both in fp64, labels masked."""
    case = replace(TINY, kind=kind, teacher_hidden_size=12, ignored=0.5)
    x = make_inputs(case, CPU)
    truth = evaluate(case, x, torch.float64, rows=7)
    hidden, weight = (t.detach().double().requires_grad_() for t in (x.hidden, x.weight))
    valid = x.labels != -100
    assert valid.sum() == 12
    q = (hidden @ weight.T).softmax(-1)[valid]
    if kind == "ce":
        per_token = -q.gather(1, x.labels[valid, None]).log()
    else:
        _, _, teacher_hidden, teacher_weight = x.heads
        p = (teacher_hidden.double() @ teacher_weight.double().T).softmax(-1)[valid]
        m = (p + q) / 2
        per_token = {
            "forward_kl": p * (p / q).log(),
            "reverse_kl": q * (q / p).log(),
            "jsd": (p * (p / m).log() + q * (q / m).log()) / 2,
        }[kind].sum(-1)
    loss = per_token.mean()
    d_hidden, d_weight = torch.autograd.grad(loss, [hidden, weight])
    torch.testing.assert_close(truth.loss, loss.detach())
    torch.testing.assert_close(truth.hidden, d_hidden)
    torch.testing.assert_close(truth.weight, d_weight)


def test_inputs_are_repeatable_and_structured_ones_give_a_loss_of_about_five():
    case = replace(TINY, data="structured", tokens=2048, hidden_size=256, vocab_size=4096)
    x, again = make_inputs(case, CPU), make_inputs(case, CPU)
    assert x.fingerprint() == again.fingerprint() != make_inputs(case, CPU, seed=1).fingerprint()
    assert plain_loss(case, x).item() == pytest.approx(5.0, abs=0.5)


def test_floors_count_the_products_that_supervised_tokens_need():
    by_name = {case.name: case for case in CASES}
    floor = Roofline(gemm_tflops=780, gemm_shape="", copy_gbs=0).floor_ms
    assert floor(by_name["ce-4096x128256"]) == pytest.approx(33.1, abs=0.05)
    assert floor(by_name["ce-4096x128256-ignored60"]) == pytest.approx(13.2, abs=0.05)
    assert floor(by_name["ce-4096x128256-frozen"]) == pytest.approx(22.1, abs=0.05)
    assert floor(by_name["fkl-2048from4096x128256"]) == pytest.approx(27.6, abs=0.05)


def test_interleaving_runs_every_call_once_a_round_in_changing_order():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = interleave(calls, Stopwatch(CPU), rounds=8)
    rounds = [tuple(order[i : i + 3]) for i in range(0, 24, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds) and len(set(rounds)) > 1
    assert {name: len(values) for name, values in times.items()} == {"a": 8, "b": 8, "c": 8}


def test_spread_and_errors():
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)
    bound = Errors(1e-3, 1e-3, None)
    assert Errors(1e-3, 5e-4, None).exceeding(bound) == []
    assert Errors(float("nan"), 2e-3, None).exceeding(bound) == [
        "loss error nan exceeds 1.00e-03",
        "hidden error 2.00e-03 exceeds 1.00e-03",
    ]
    with pytest.raises(ValueError, match="expected a tensor of shape"):
        relative_l2(torch.zeros(2), torch.zeros(3))


def test_ops_smoke_run_measures_every_op_of_ours(tmp_path, capsys):
    data = smoke_ops(tmp_path)
    assert data["gate"] == []
    assert {case["op"] for case in data["cases"]} == set(op_providers.OURS)
    ops = {op.name: op for op in op_cases.OPS}
    for case in data["cases"]:
        results = {result["name"]: result for result in case["providers"]}
        assert {"ours", "eager"} <= results.keys()
        for result in results.values():
            assert not result["failure"]
            assert {f"d_{name}" for name in ops[case["op"]].leaves} | {"out0"} <= result["errors"].keys()
            forward, backward, both = (result[name]["us"]["median"] for name in ("forward", "backward", "both"))
            assert both == pytest.approx(forward + backward)
            assert result["forward"]["gbs"] * forward * 1e3 == pytest.approx(case["bytes"]["forward"])
        if "ours_inplace" in results:
            assert results["ours_inplace"]["writes_into"] == ["logits"]
    host = [case["op"] for case in data["cases"] if case["providers"][0]["host"]]
    assert host == ["rms_norm"]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "ops-smoke.md").read_text() + "\n"
    assert "## Time of the kernels" in printed and "## Cost of calling" in printed


def plant(monkeypatch, *providers):
    kinds = tuple(op.name for op in op_cases.OPS)
    planted = [Provider(name, name, build, kinds, kinds, ours=name == "ours") for name, build in providers]
    monkeypatch.setattr(op_providers, "PROVIDERS", planted)


@pytest.mark.parametrize("wrong", ["out0", "d_x", "d_weight"])
def test_ops_gate_refuses_one_percent_of_an_output_or_gradient(wrong, tmp_path, monkeypatch):
    def build(case):
        def op(x, weight):
            y = case.op.plain(
                x * (1.01 if wrong == "d_x" else 1.0) - 0.01 * x.detach() * (wrong == "d_x"),
                weight * (1.01 if wrong == "d_weight" else 1.0) - 0.01 * weight.detach() * (wrong == "d_weight"),
            )
            return y + 0.01 * y.detach() * (wrong == "out0")

        return op

    plant(monkeypatch, ("ours", build))
    data = smoke_ops(tmp_path, "--cases", "rms_norm-40*", "--providers", "ours", expect=1)
    assert [reason.split(" error")[0] for reason in data["gate"]] == [
        f"{name}: ours: {wrong}" for name in ("rms_norm-40", "rms_norm-40-bf16")
    ]
    assert all("forward" not in result for case in data["cases"] for result in case["providers"])


def test_an_op_of_ours_that_cannot_be_imported_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(op_providers.OURS, "swiglu", lambda: op_providers.kernel("no_such_op"))
    data = smoke_ops(tmp_path, "--cases", "swiglu-40", expect=1)
    assert len(data["gate"]) == 1 and "swiglu-40: ours: not available" in data["gate"][0]


def test_an_op_that_writes_over_its_operands_does_not_reach_the_next_one(tmp_path, monkeypatch):
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

    plant(monkeypatch, ("clobber", lambda case: Clobbering.apply), ("ours", lambda case: case.op.plain))
    data = smoke_ops(tmp_path, "--cases", "swiglu-40", "--providers", "*")
    clobber, ours = data["cases"][0]["providers"]
    assert clobber["writes_into"] == ["gate", "d_out0"] and not clobber["beyond_bound"]
    assert ours["writes_into"] == [] and ours["forward"]["us"]["count"] == 2


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

    case = op_cases.OpCase("relu2", op_cases.RELU2, 8, 4, torch.float32)
    step = op_measure.Step(Waiting.apply, op_cases.make_operands(case, CPU), ["x"])
    waits = op_measure.passes_that_wait(step)
    assert waits == [where] and modes[-1] == "default"
    results = [op_run.OpResult(provider(name, eager, ours=name == "ours"), waits=waits) for name in ("ours", "peer")]
    reason = f"relu2: ours: the host waits for the device in the {where}"
    assert op_run.OpCaseResult(case, results=results).violations == [reason]


@pytest.mark.parametrize("op", [op for op in op_cases.OPS if op.is_loss], ids=lambda op: op.name)
def test_truth_of_a_loss_is_the_same_in_parts(op, monkeypatch):
    case = op_cases.OpCase("loss", op, 12, 10, torch.float64, grad_output=0.5)
    operands = op_cases.make_operands(case, CPU)
    whole = op_run.evaluate(case, operands, torch.float64)
    monkeypatch.setattr(op_run, "ROWS_AT_ONCE", 3 * case.width)
    parts = op_run.evaluate(case, operands, torch.float64)
    assert whole.keys() == parts.keys()
    for name, x in whole.items():
        torch.testing.assert_close(parts[name], x)


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
        case = op_cases.OpCase("tiny", op, h, n, torch.float32, heads=(2, 1))
        operands = op_cases.make_operands(case, CPU)
        moved = op_cases.bytes_moved(case, op_run.sizes_of(operands))
        assert (moved["forward"], moved["backward"]) == tuple(4 * x for x in elements), op.name
    assert op_cases.OpCase("products", op_cases.GATED_LINEAR, h, n, hidden_size=v).flops("both") == 6 * n * h * v


def test_transposed_operands_keep_their_strides_and_copies_differ():
    case = next(case for case in op_cases.SMOKE_CASES if case.transposed)
    first, second = (op_cases.make_operands(case, CPU, seed) for seed in (0, 1))
    for name in ("q", "k"):
        assert first.tensors[name].transpose(1, 2).is_contiguous() and not first.tensors[name].is_contiguous()
    assert op_measure.bits(first) == op_measure.bits(op_cases.make_operands(case, CPU, 0)) != op_measure.bits(second)


def test_sweeps_are_cases_by_name_and_become_plots(tmp_path, capsys, monkeypatch):
    sweep = [case for case in CASES if case.name.startswith(("ce-tokens-", "ce-vocab-"))]
    assert {case.tokens for case in sweep} == {1024 * 2**i for i in range(6)}
    assert {case.vocab_size for case in sweep} >= {4096, 262144} and not any(case.default for case in sweep)
    tiny = tuple(replace(TINY, name=f"ce-tokens-{n}", tokens=n, default=False) for n in (8, 16))
    monkeypatch.setattr(run, "SMOKE_CASES", tiny)
    arguments = ("--cases", "ce-tokens-*", "--providers", "eager", "--rounds", "1", "--name", "sweep")
    data = smoke(tmp_path, *arguments, name="sweep")
    lines = plots.series(data["cases"], "tokens")
    assert [point[0] for point in lines["ours"]] == [8, 16] and lines["eager"][0][2] is None
    pytest.importorskip("matplotlib")
    capsys.readouterr()
    assert run.main(["--plots", str(tmp_path / "sweep-smoke.json")]) == 0
    (drawn,) = capsys.readouterr().out.split()
    assert "torch eager" in (tmp_path / drawn).read_text()
