"""lora_experts: the numbers of experts taken one by one, and what it neither saves nor makes."""

import functools

import pytest
import torch
from elementwise_checks import check_op, outputs_and_grads
from expert_checks import experts, inputs, leaves_of
from kernel_checks import PATHS, TRITON_DEVICE, assert_within_plain_error, under_autocast
from quick_cases import slow_but

from liger_trainer.kernels import _gated, _packed_gate
from liger_trainer.kernels import lora_experts as op_file
from liger_trainer.kernels._packed_gate import Gate
from liger_trainer.kernels.lora_experts import StackedProjection, lora_experts, lora_experts_reference

check = functools.partial(check_op, experts(lora_experts), experts(lora_experts_reference))
SILU = Gate()
on_triton = pytest.mark.skipif("triton" not in PATHS, reason="the plain form saves what autograd asks for")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(op_file, "ROWS", 16)
    monkeypatch.setattr(op_file, "COLUMNS", 16)
    monkeypatch.setattr(op_file, "COMBINED", 4)
    monkeypatch.setattr(_packed_gate, "BLOCK", 8)


@pytest.fixture
def kernels(monkeypatch):
    for module in (_gated, op_file):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


GATES = {
    "silu": SILU,
    "tanh": Gate("gelu_tanh", "up first"),
    "gelu": Gate("gelu"),
    "limited": Gate(limit=0.7),
    "gpt-oss": Gate(layout="interleaved", limit=0.7, alpha=1.702, shift=1.0),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_gates(place, gate, bias):
    tensors = inputs(21, like(place), bias=bias)
    check(tensors, leaves_of(tensors), gate=GATES[gate])


CASES = {
    "one token": dict(tokens=1),
    "no token": dict(tokens=0),
    "one expert": dict(tokens=9, count=1, top=1),
    "an expert without tokens": dict(tokens=20, skip=2),
    "the last expert without tokens": dict(tokens=20, skip=4),
    "more rows than a tile": dict(tokens=40, count=2, top=1),
    "many experts": dict(tokens=4, count=19, top=4),
    "odd sizes": dict(tokens=13, width=7, inner=9, ranks=(1, 5)),
    "adapters on gate and up alone": dict(tokens=13, ranks=(3, 0)),
    "adapters on down alone": dict(tokens=13, ranks=(0, 3)),
    "no adapters": dict(tokens=13, ranks=(0, 0)),
}


@pytest.mark.parametrize(
    "case",
    slow_but(
        CASES, "no token", "an expert without tokens", "more rows than a tile", "odd sizes", "adapters on down alone"
    ),
)
def test_cases(fp32, case):
    options = dict(CASES[case])
    tensors = inputs(options.pop("tokens"), like(fp32), **options, bias=True)
    check(tensors, leaves_of(tensors), gate=SILU)


@pytest.mark.parametrize(
    "leaves",
    [["up_b"], ["x", "down_a"], ["weights", "up_b"],
     *(pytest.param([leaf], marks=pytest.mark.slow) for leaf in ("x", "weights", "up_a", "down_a", "down_b"))],
    ids="-".join,
)  # fmt: skip
def test_frozen(fp32, leaves):
    check(inputs(11, like(fp32), bias=True), leaves, gate=SILU)


def test_adapters_wider_than_the_base(place):
    if place.dtype in (torch.float32, torch.float64):
        pytest.skip("there is nothing wider")
    tensors = inputs(12, like(place), wide=torch.float32)
    got = check(tensors, leaves_of(tensors), gate=SILU)
    assert got["out0"].dtype == place.dtype and got["d_down_a"].dtype == torch.float32


@on_triton
def test_autocast_leaves_the_dtype_of_the_experts(kernels):
    """As transformers' grouped product."""
    tensors = inputs(12, {"dtype": torch.float32, "device": TRITON_DEVICE})
    run = under_autocast(experts(lora_experts), torch.float16)
    got = outputs_and_grads(run, tensors, leaves_of(tensors), torch.float32, gate=SILU)
    double = {k: x.double() if x is not None and x.is_floating_point() else x for k, x in tensors.items()}
    want, plain = (
        outputs_and_grads(experts(lora_experts_reference), each, leaves_of(tensors), torch.float32, gate=SILU)
        for each in (double, tensors)
    )
    for name in want:
        assert_within_plain_error(name, got[name], plain[name], want[name], torch.float32)


@on_triton
def test_saves_gate_and_up_and_no_merged_weight(kernels):
    tensors, saved = inputs(12, {"dtype": torch.float32, "device": TRITON_DEVICE}), []
    for name in leaves_of(tensors):
        tensors[name].requires_grad_()
    given = {x.data_ptr() for x in tensors.values() if x is not None}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        experts(lora_experts)(**tensors, gate=SILU)
    wide = [tuple(x.shape) for x in saved if x.data_ptr() not in given and x.is_floating_point()]
    assert wide == [(24, 32), (24, 3), (24, 4)]  # gate and up; two matrices of the rank


@on_triton
def test_a_kept_graph_runs_again(kernels):
    tensors = inputs(12, {"dtype": torch.float32, "device": TRITON_DEVICE})
    leaves = [tensors[name].requires_grad_() for name in leaves_of(tensors)]
    loss = experts(lora_experts)(**tensors, gate=SILU).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), first, rtol=0, atol=0)


@on_triton
def test_a_weight_that_is_unpacked_is_unpacked_for_each_pass(kernels):
    tensors, calls = inputs(6, {"dtype": torch.float32, "device": TRITON_DEVICE}), []
    up, down = tensors["up_weight"], tensors["down_weight"]
    layers = [
        StackedProjection(lambda: (calls.append("up"), up)[1], None, tensors["up_a"], tensors["up_b"]),
        StackedProjection(lambda: (calls.append("down"), down)[1], None, tensors["down_a"], tensors["down_b"]),
    ]
    x = tensors["x"].requires_grad_()
    y = lora_experts(x, tensors["index"], tensors["weights"], *layers)
    assert calls == ["up", "down"]
    y.sum().backward()
    assert calls == ["up", "down", "down", "up"]
    want = experts(lora_experts_reference)(**tensors, gate=SILU)
    torch.testing.assert_close(y, want)


def test_a_choice_of_no_expert_adds_nothing(fp32):
    """As in transformers, where experts on other ranks are such."""
    tensors = inputs(13, like(fp32), bias=True)
    tensors["index"][::3, 1] = 5
    got = check(tensors, leaves_of(tensors), gate=SILU)
    assert not got["d_weights"][::3, 1].any()
    tensors["index"], tensors["weights"] = tensors["index"][::3, :1], tensors["weights"][::3, :1]
    alone = experts(lora_experts)(**{**tensors, "x": tensors["x"][::3]}, gate=SILU)
    torch.testing.assert_close(got["out0"][::3], alone)


REFUSED = {
    "a trained base": (dict(), lambda t: t["up_weight"].requires_grad_(), "freeze them"),
    "one of a and b": (dict(), lambda t: t.update(up_b=None), "one of a and b without"),
    "an adapter of another width": (dict(), lambda t: t.update(up_a=t["up_a"][..., :4]), "must be a .E, R, K."),
    "another width": (dict(), lambda t: t.update(x=t["x"][:, :4]), "the columns of its input"),
    "weights of another shape": (dict(), lambda t: t.update(weights=t["weights"][:, :1]), "index and weights"),
    "an unknown gate": (dict(gate=Gate("relu2")), lambda t: None, "must be one of silu"),
    "alpha without silu": (dict(gate=Gate("gelu", alpha=2.0)), lambda t: None, "alpha is silu's"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    options, change, message = REFUSED[case]
    tensors = inputs(6, {"dtype": torch.float32, "device": "cpu"})
    change(tensors)
    with pytest.raises(ValueError, match=message):
        experts(lora_experts)(**tensors, **{"gate": SILU, **options})
