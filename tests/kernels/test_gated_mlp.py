"""gated_mlp: the numbers of linears and gated_linear, of which it keeps neither gate(x) nor up(x)."""

import functools

import pytest
import torch
from elementwise_checks import check_op, outputs_and_grads
from gated_checks import like, normal
from kernel_checks import PATHS, assert_within_plain_error, under_autocast

from liger_trainer.kernels import _gated
from liger_trainer.kernels.gated_linear import gated_linear
from liger_trainer.kernels.gated_mlp import gated_mlp, gated_mlp_reference
from liger_trainer.kernels.linears import linears

pytestmark = pytest.mark.usefixtures("short_blocks")
on_triton = pytest.mark.skipif("triton" not in PATHS, reason="the plain form saves and computes what autograd asks for")
NAMES = ("gate", "up", "down")


def by(op):
    """`op` as a function of x, gate, gate_bias, ..., down_bias; without up gate is packed."""

    def run(x, activation="silu", **tensors):
        names = [name for name in NAMES if name in tensors]
        biases = [tensors.get(f"{name}_bias") for name in names]
        return op(x, [tensors[name] for name in names], biases, activation=activation)

    return run


def apart(x, weights, biases, activation):
    """The same by two ops."""
    gate, *up = linears(x, weights[:-1], biases[:-1])
    return gated_linear(gate, up[0] if up else None, weights[-1], biases[-1], activation=activation)


check = functools.partial(check_op, by(gated_mlp), by(gated_mlp_reference))


def inputs(*shape: int, like: dict, inner: int = 21, packed: bool = False, bias: bool = True) -> dict:
    width = shape[-1]
    rows = {"gate": 2 * inner, "down": 11} if packed else {"gate": inner, "up": inner, "down": 11}
    tensors = {"x": normal(*shape, like=like, seed=9)}
    for seed, (name, count) in enumerate(rows.items()):
        columns = inner if name == "down" else width
        tensors[name] = normal(count, columns, like=like, seed=seed, spread=columns**-0.5)
        if bias:
            tensors[f"{name}_bias"] = normal(count, like=like, seed=seed + 5)
    return tensors


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(_gated, "use_triton", lambda x: True)


@pytest.mark.parametrize(
    "activation, packed, bias", [("silu", False, True), ("silu", True, True), ("gelu", True, False)]
)
def test_every_gradient(place, activation, packed, bias):
    tensors = inputs(2, 5, 16, like=like(place), packed=packed, bias=bias)
    check(tensors, list(tensors), activation=activation)


@pytest.mark.parametrize("shape", [(19,), (2, 0, 8)], ids=str)
def test_shapes(fp32, shape):
    tensors = inputs(*shape, like=like(fp32))
    check(tensors, list(tensors))


@pytest.mark.parametrize(
    "leaves", [["x"], ["gate"], ["up_bias"], ["down"], ["down_bias"], ["x", "up"], ["gate_bias", "down"]], ids="-".join
)
def test_frozen(fp32, leaves):
    check(inputs(5, 16, like=like(fp32)), leaves)


@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
def test_autocast(fp32, packed):
    """fp32 weights and x, computed in fp16."""
    tensors = inputs(5, 16, like=like(fp32), packed=packed)
    double = {name: x.double() for name, x in tensors.items()}
    op, reference = (under_autocast(by(f), torch.float16) for f in (gated_mlp, gated_mlp_reference))
    got, plain = (outputs_and_grads(f, tensors, list(tensors), torch.float16) for f in (op, reference))
    truth = outputs_and_grads(by(gated_mlp_reference), double, list(tensors), torch.float16)
    for name in truth:
        assert got[name].dtype == plain[name].dtype
        assert_within_plain_error(name, got[name].half(), plain[name].half(), truth[name], torch.float16)


@on_triton
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_bit_for_bit_the_two_ops_and_saves_nothing_but_what_it_was_given(kernels, dtype):
    tensors, saved = inputs(2, 5, 16, like={}), []
    for x in tensors.values():
        x.requires_grad_()
    run = (lambda f: under_autocast(by(f), dtype)) if dtype else by
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        run(gated_mlp)(**tensors)
    new = [x for x in saved if x.data_ptr() not in {x.data_ptr() for x in tensors.values()}]
    assert [(x.shape, x.dtype) for x in new] == ([] if dtype is None else [((2, 5, 16), dtype)])
    got, want = (outputs_and_grads(run(f), tensors, list(tensors), torch.float32) for f in (gated_mlp, apart))
    assert all(torch.equal(got[name], want[name]) for name in want)


@on_triton
def test_a_retained_graph_runs_again(kernels):
    tensors = inputs(5, 16, like={})
    leaves = [x.requires_grad_() for x in tensors.values()]
    y = by(gated_mlp)(**tensors)
    first = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, torch.ones_like(y)), first, rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"gate": (9, 7)}, r"with K = 8, .* \(9, 7\), \(9, 8\), \(11, 9\)"),
        ({"down": (11, 10)}, r"they are \(9, 8\), \(9, 8\), \(11, 10\)"),
        ({"down_bias": (9,)}, r"one per row of its weight \(11, 9\): it is \(9,\)"),
    ],
)
def test_shape_errors(wrong, message):
    tensors = inputs(4, 8, like={}, inner=9) | {name: normal(*shape) for name, shape in wrong.items()}
    with pytest.raises(ValueError, match=message):
        by(gated_mlp)(**tensors)


def test_other_errors():
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    with pytest.raises(ValueError, match="one of silu, gelu_tanh, gelu, relu2, got 'swish'"):
        gated_mlp(x, [w, w, w], activation="swish")
    with pytest.raises(ValueError, match="3 weights, 1 biases"):
        gated_mlp(x, [w, w, w], [None])
