"""The benchmark's own promises, at tiny shapes on a CPU: what it measures, what its gate refuses, what it reports."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import run
from benchmarks.cases import CASES, SMOKE_CASES, Case, make_inputs
from benchmarks.measure import Roofline, Spread, Stopwatch, interleave
from benchmarks.providers import ALL, PROVIDERS, Provider, eager, ours
from benchmarks.reference import Errors, evaluate, plain_loss, relative_l2
from liger_trainer.kernels import _triton

CPU = torch.device("cpu")
TINY = Case("ce-tiny", "ce", hidden_size=16, vocab_size=64, tokens=24, dtype=torch.float32)


@pytest.fixture(autouse=True)
def torch_path(monkeypatch):
    """As a smoke run does without Triton's interpreter, which the tests of the kernels switch on: fast."""
    monkeypatch.setattr(_triton, "INTERPRETED", False)


def provider(name, build, ours=False):
    return Provider(name, name, build, ALL, ALL, ours=ours)


def smoke(tmp_path, *arguments, expect=0):
    assert run.main(["--smoke", "--output", str(tmp_path), *arguments]) == expect
    return json.loads((tmp_path / "losses-smoke.json").read_text())


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
