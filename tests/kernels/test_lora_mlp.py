"""lora_mlp: the numbers of three LoRA layers with the activation between them, and what it neither saves nor makes."""

import functools
from dataclasses import replace

import pytest
import torch
from elementwise_checks import check_op, outputs_and_grads
from gated_checks import normal
from kernel_checks import PATHS, TRITON_DEVICE, assert_within_plain_error, under_autocast
from lora_checks import leaves_of, mlp, named, projection

from liger_trainer.kernels import _gated
from liger_trainer.kernels import lora_mlp as module
from liger_trainer.kernels.lora_mlp import lora_mlp, lora_mlp_reference

check = functools.partial(check_op, mlp(lora_mlp), mlp(lora_mlp_reference))
ALL = {"gate": (4,), "up": (3,), "down": (5,)}
on_triton = pytest.mark.skipif("triton" not in PATHS, reason="the plain form saves and computes what autograd asks for")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(_gated, name, (16, 1))


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(_gated, "use_triton", lambda x: True)


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


def inputs(*shape: int, like: dict, inner: int = 21, ranks=ALL, packed: bool = False, **options) -> dict:
    tensors = {"x": normal(*shape, like=like, seed=9)}
    rows = {"gate": 2 * inner, "down": shape[-1]} if packed else {"gate": inner, "up": inner, "down": shape[-1]}
    for seed, (name, count) in enumerate(rows.items()):
        columns = inner if name == "down" else shape[-1]
        tensors |= named(name, projection(count, columns, ranks.get(name, ()), like, seed=20 * seed, **options))
    return tensors


@pytest.mark.parametrize("activation", _gated.ACTIVATIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
def test_activations(place, activation, packed):
    tensors = inputs(5, 16, like=like(place), packed=packed)
    check(tensors, leaves_of(tensors), activation=activation)


@pytest.mark.parametrize(
    "ranks",
    [{"gate": (4,)}, {"down": (4,)}, {"gate": (2,), "up": (2,)}, {"up": (1,), "down": (2, 3)}, {"gate": (2, 3)}, {}],
    ids=lambda ranks: "-".join(ranks) or "none",
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_layers_without_adapters(fp32, ranks, bias):
    tensors = inputs(5, 16, like=like(fp32), ranks=ranks, bias=bias)
    check(tensors, leaves_of(tensors))


@pytest.mark.parametrize("shape", [(1, 8), (19,), (2, 3, 8), (2, 2, 3, 8), (0, 8), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
def test_shapes(fp32, shape, packed):
    tensors = inputs(*shape, like=like(fp32), packed=packed)
    check(tensors, leaves_of(tensors))


@pytest.mark.parametrize(
    "leaves", [["x"], ["gate_a0"], ["up_b0"], ["down_a0"], ["down_b0"], ["x", "up_a0"], ["gate_b0", "down_a0"]],
    ids="-".join,
)  # fmt: skip
def test_frozen(fp32, leaves):
    check(inputs(5, 16, like=like(fp32)), leaves)


def test_adapters_wider_than_the_base(place):
    if place.dtype in (torch.float32, torch.float64):
        pytest.skip("there is nothing wider")
    tensors = inputs(6, 16, like=like(place), adapters=torch.float32)
    got = check(tensors, leaves_of(tensors))
    assert got["out0"].dtype == place.dtype and got["d_down_a0"].dtype == torch.float32


@on_triton
@pytest.mark.parametrize("inside", [torch.float32, torch.float16], ids=str)
def test_autocast(kernels, inside):
    tensors = inputs(5, 16, like={"device": TRITON_DEVICE})
    tensors["x"] = tensors["x"].to(inside)
    double = {k: x if x is None else x.double() for k, x in tensors.items()}
    leaves = leaves_of(tensors)
    op, reference = (under_autocast(mlp(f), torch.float16) for f in (lora_mlp, lora_mlp_reference))
    got, plain = (outputs_and_grads(f, tensors, leaves, torch.float16) for f in (op, reference))
    truth = outputs_and_grads(mlp(lora_mlp_reference), double, leaves, torch.float16)
    for name in truth:
        assert got[name].dtype == plain[name].dtype
        assert_within_plain_error(name, got[name].half(), plain[name].half(), truth[name], torch.float16)


@on_triton
@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
def test_saves_gate_and_up_and_not_their_product(kernels, packed):
    tensors, saved = inputs(5, 16, like={"device": TRITON_DEVICE}, packed=packed), []
    for name in leaves_of(tensors):
        tensors[name].requires_grad_()
    given = {x.data_ptr() for x in tensors.values()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        mlp(lora_mlp)(**tensors)
    new = [tuple(x.shape) for x in saved if x.data_ptr() not in given]
    assert new == ([(5, 42), (5, 1, 4), (5, 1, 5)] if packed else [(5, 21), (5, 21), (5, 1, 7), (5, 1, 5), (7, 16)])


@on_triton
@pytest.mark.parametrize("leaves", [["x", "down_a0"], ["x"]], ids="-".join)
def test_gradients_lie_over_what_they_come_from(kernels, monkeypatch, leaves):
    """act(gate) * up over its gradient, where down's A is trained; the gradients of gate and up over these."""
    calls = []

    def record(dh, gate, up, dgate, dup, activation, h=None):
        calls.append((dh, gate, up, dgate, dup, h))
        _gated.backward(dh, gate, up, dgate, dup, activation, h)

    monkeypatch.setattr(module, "backward", record)
    check(inputs(5, 16, like={"device": TRITON_DEVICE}), leaves)
    ((dh, gate, up, dgate, dup, h),) = calls
    assert dgate.data_ptr() == gate.data_ptr() and dup.data_ptr() == up.data_ptr()
    assert h is (dh if "down_a0" in leaves else None)


@on_triton
def test_a_retained_graph_runs_again(kernels):
    tensors = inputs(5, 16, like={"device": TRITON_DEVICE})
    leaves = [tensors[name].requires_grad_() for name in leaves_of(tensors)]
    y = mlp(lora_mlp)(**tensors)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    second = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    last = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close([*second, *last], [*first, *first], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, dy)


@on_triton
@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["no dropout", "dropout"])
def test_remake_saves_neither_gate_nor_up_and_is_bit_for_bit_the_same(kernels, packed, dropout):
    tensors, saved, results = inputs(6, 16, like={"device": TRITON_DEVICE}, packed=packed), [], []

    def run(remake):
        def dropping(x, gate, up, down, activation):
            parts = [
                p and replace(p, adapters=tuple(a._replace(dropout=dropout) for a in p.adapters))
                for p in (gate, up, down)
            ]
            return lora_mlp(x, *parts, activation=activation, remake=remake)

        torch.manual_seed(0)
        return outputs_and_grads(mlp(dropping), tensors, leaves_of(tensors), torch.float32)

    for remake in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
            results.append(run(remake))
        wide = [x for x in saved if x.shape[0] == 6 and x.shape[-1] in (21, 42)]
        assert len(wide) == (0 if remake else 1 if packed else 2)
        saved.clear()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("leaves", [["x"], ["gate_a0", "down_b0"]], ids="-".join)
def test_remake_with_frozen_leaves(fp32, leaves):
    check_op(
        mlp(functools.partial(lora_mlp, remake=True)), mlp(lora_mlp_reference), inputs(5, 16, like=like(fp32)), leaves
    )


def test_compiles_whole(fp32):
    tensors = inputs(5, 16, like=like(fp32), packed=True)
    compiled = torch.compile(mlp(lora_mlp), fullgraph=True, backend="aot_eager")
    check_op(compiled, mlp(lora_mlp_reference), tensors, leaves_of(tensors))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"gate_weight": (9, 7)}, r"gate must be \(O, K\) with K = 8, .* \(9, 7\)"),
        ({"up_weight": (7, 8)}, r"as many rows as down has columns, .* \(9, 8\), \(7, 8\), \(8, 9\)"),
        ({"down_weight": (8, 10)}, r"as many rows as down has columns, .* \(9, 8\), \(9, 8\), \(8, 10\)"),
        ({"down_bias": (9,)}, r"The bias of down must be one per row, \(8,\): it is \(9,\)"),
    ],
)
def test_shape_errors(wrong, message):
    tensors = inputs(4, 8, like={}, inner=9, ranks={}, bias=False)
    with pytest.raises(ValueError, match=message):
        mlp(lora_mlp)(**(tensors | {name: normal(*shape) for name, shape in wrong.items()}))


def test_packed_shape_error():
    tensors = inputs(4, 8, like={}, inner=9, ranks={}, packed=True) | {"gate_weight": normal(17, 8), "gate_bias": None}
    with pytest.raises(ValueError, match=r"packed twice as many: they are \(17, 8\), \(8, 9\)"):
        mlp(lora_mlp)(**tensors)


def test_trained_base_and_unknown_activation_are_refused():
    tensors = inputs(4, 8, like={})
    with pytest.raises(ValueError, match="one of silu, gelu_tanh, gelu, relu2, got 'swish'"):
        mlp(lora_mlp)(**tensors, activation="swish")
    tensors["up_weight"].requires_grad_()
    with pytest.raises(ValueError, match="no gradient of up and its bias"):
        mlp(lora_mlp)(**tensors)
