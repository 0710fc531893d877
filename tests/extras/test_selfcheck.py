"""`selfcheck` passes what is right, and fails what is wrong by 1 %, raises, or is no number."""

import dataclasses
import json
import pkgutil

import pytest
import torch
from commands import end_of

from liger_trainer import kernels
from liger_trainer.extras import selfcheck
from liger_trainer.extras.selfcheck_cases import Check
from liger_trainer.kernels.rms_norm import rms_norm

CPU = torch.device("cpu")
CHECKS = selfcheck.all_checks()
BY_NAME = {check.name: check for check in CHECKS}


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 1.01


def result_of(check: Check, dtype: torch.dtype = torch.float32) -> selfcheck.CheckResult:
    return next(selfcheck.run_checks(CPU, [dtype], [check]))


def test_every_op_has_a_check():
    modules = {module.name for module in pkgutil.iter_modules(kernels.__path__) if not module.name.startswith("_")}
    # a drawn token is right or wrong: 1 % of it says nothing
    ops = modules - {"divergence_kinds", "draw_tokens", "eight_bits", "layers", "runtime", "types", "weight_gradients"}
    assert {name.partition(",")[0] for name in BY_NAME} == ops


def test_every_op_is_right_here_and_1_percent_would_be_seen_in_each_tensor():
    results = list(selfcheck.run_checks(CPU, [torch.float32, torch.bfloat16]))
    assert len(results) == 2 * (len(CHECKS) + len(selfcheck.MODELS))
    wrong = [(r.name, r.dtype, r.failure, r.worst) for r in results if not r.passes]
    assert not wrong
    assert all(r.sees_one_percent for r in results)
    # what comes out of sorting bf16 logits is too rough for one tensor alone
    blind = [(r.dtype, r.name) for r in results for c in r.comparisons if not c.sees_one_percent]
    assert set(blind) <= {("bfloat16", "linear_uld")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("rms_norm", torch.float32),
        ("linear_cross_entropy", torch.bfloat16),
        ("linear_divergence, jsd", torch.float32),
        ("lora_mlp", torch.bfloat16),
    ],
)
def test_an_output_or_one_gradient_off_by_1_percent_fails(name, dtype):
    check = BY_NAME[name]
    leaf = check.leaves[-1]

    def off(**tensors):
        made = check.op(**tensors)
        return tuple(x * 1.01 for x in made) if isinstance(made, tuple) else made * 1.01

    def off_in_a_gradient(**tensors):
        return check.op(**{**tensors, leaf: _WrongGradient.apply(tensors[leaf])})

    assert not result_of(dataclasses.replace(check, op=off), dtype).passes
    wrong = result_of(dataclasses.replace(check, op=off_in_a_gradient), dtype)
    assert [c.tensor for c in wrong.comparisons if not c.passes] == [f"d_{leaf}"]


def test_a_part_that_is_wrong_fails():
    """An error of a few rows, which hardly shows in the length of the whole."""
    check = BY_NAME["swiglu"]

    def a_wrong_tile(gate, up):
        y = check.op(gate=gate, up=up)
        return torch.cat([y[:-1], y[-1:] * 1.1]) if isinstance(y, torch.Tensor) else y

    assert not result_of(dataclasses.replace(check, op=a_wrong_tile)).passes


def test_what_raises_or_is_no_number_fails():
    def raises(**tensors):
        raise RuntimeError("no such instruction\nand more")

    result = result_of(dataclasses.replace(BY_NAME["rms_norm"], op=raises))
    assert (result.passes, result.failure) == (False, "RuntimeError: no such instruction")
    nan = dataclasses.replace(BY_NAME["relu2"], op=lambda x: x * torch.nan)
    assert not result_of(nan).passes


def test_a_wrong_patch_fails(monkeypatch):
    from liger_trainer.patching.patcher import patch

    def wrong(model):
        patch(model)
        model.model.norm.weight.data.mul_(1.01)

    monkeypatch.setattr(selfcheck, "patch", wrong)
    results = list(selfcheck.run_checks(CPU, [torch.float32], []))
    assert len(results) == len(selfcheck.MODELS) and not any(r.passes for r in results)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(selfcheck, "all_checks", lambda: CHECKS[:2])
    monkeypatch.setattr(selfcheck, "MODELS", {})


def test_the_command(few, capsys):
    assert end_of("selfcheck", "--device", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passes"] and found["device"] == "cpu" and "torch" in found["versions"]
    assert [(c["name"], c["dtype"]) for c in found["checks"]] == [
        ("rms_norm", "float32"), ("layer_norm", "float32"), ("rms_norm", "bfloat16"), ("layer_norm", "bfloat16")
    ]  # fmt: skip
    assert end_of("selfcheck", "--dtype", "float32", "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert "Everything is right." in said
    block = said.partition("To paste into an issue:")[2]
    assert block.strip().startswith(
        "```text\nliger-trainer selfcheck: 2 of 2 checks pass, in float32\ndevice       cpu\n"
    )
    assert f"torch {torch.__version__}" in said and not [line for line in block if line.startswith("fails")]


def test_the_command_fails_where_an_op_is_wrong(few, capsys, monkeypatch):
    wrong = dataclasses.replace(CHECKS[0], op=lambda x, weight: rms_norm(x, weight, 1e-6) * 1.01)
    monkeypatch.setattr(selfcheck, "all_checks", lambda: (wrong, CHECKS[1]))
    assert end_of("selfcheck", "--dtype", "float32", "--device", "cpu") == 1
    said = capsys.readouterr().out
    assert "Wrong: rms_norm in float32. out0 is off by 1.00e-02" in said.replace("\n", " ")
    assert "checks pass" in said and "\nfails        rms_norm, float32: out0 is off by 1.00e-02" in said


def test_the_table_shows_whole_numbers_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    compared = selfcheck.Comparison("d_weight", 2.44e-7, 8.81e-7, 0.0, 1.0, 1e-8, True)
    name = max((check.name for check in CHECKS), key=len)
    monkeypatch.setattr(selfcheck, "_print_summary", lambda *args: None)
    selfcheck.print_checks({}, [selfcheck.CheckResult(name, "bfloat16", (compared,) * 12)])
    table = capsys.readouterr().out.partition("\n\n")[0]
    assert all(word in table for word in ("bfloat16", "d_weight", "2.4e-07", "8.8e-07", "ok")) and "…" not in table
