"""gated_linear: the same numbers as activation and linear layer apart, and what it neither saves nor computes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import check_op, outputs_and_grads
from gated_checks import LAYOUTS, like, normal, packed, pair, strided_pair
from kernel_checks import PATHS, assert_within_plain_error, under_autocast

from liger_trainer.kernels import _gated
from liger_trainer.kernels import gated_linear as module
from liger_trainer.kernels.gated_linear import gated_linear, gated_linear_reference
from liger_trainer.kernels.geglu import geglu
from liger_trainer.kernels.relu2 import relu2
from liger_trainer.kernels.swiglu import swiglu

check = functools.partial(check_op, gated_linear, gated_linear_reference)
LEAVES = ("gate", "up", "weight", "bias")
pytestmark = pytest.mark.usefixtures("short_blocks")
on_triton = pytest.mark.skipif("triton" not in PATHS, reason="the plain form saves and computes what autograd asks for")


@pytest.fixture
def backward_calls(monkeypatch) -> list[dict]:
    """Sends ops to Triton, and lists the tensors that each backward launch was given."""
    calls, launch = [], _gated.backward

    def record(dh, gate, up, dgate, dup, activation, h=None):
        calls.append({"dh": dh, "dgate": dgate, "dup": dup, "h": h})
        launch(dh, gate, up, dgate, dup, activation, h)

    monkeypatch.setattr(_gated, "use_triton", lambda x: True)
    monkeypatch.setattr(_gated, "backward", record)
    return calls


def inputs(*shape: int, like: dict, bias: bool = True, hidden: int = 11, split: bool = True) -> dict:
    tensors = pair(shape, like) if split else packed(*shape, like=like)
    return tensors | head(shape[-1], like, bias, hidden)


def head(columns: int, like: dict, bias: bool = True, hidden: int = 11) -> dict:
    weight = normal(hidden, columns, like=like, seed=2, spread=0.3)
    return {"weight": weight, "bias": normal(hidden, like=like, seed=3) if bias else None}


@pytest.mark.parametrize("activation", _gated.ACTIVATIONS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_activations(place, activation, split, bias):
    check(inputs(5, 37, like=like(place), bias=bias, split=split), LEAVES, activation=activation)


@pytest.mark.parametrize("shape", [(1, 33), (19,), (2, 3, 16), (2, 2, 3, 18), (0, 16), (2, 0, 16)], ids=str)
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_shapes(place, shape, split):
    check(inputs(*shape, like=like(place), split=split), LEAVES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fp32, layout):
    tensors = strided_pair(layout, like(fp32))
    check(tensors | head(tensors["gate"].shape[-1], like(fp32)), LEAVES)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_weight_and_gradient_of_any_layout(fp32, layout):
    tensors = inputs(6, 20, like=like(fp32))
    tensors["weight"] = tensors["weight"].t().contiguous().t()
    check(tensors, LEAVES)
    leaves = [x.requires_grad_() for x in tensors.values()]
    dout = normal(1, like=like(fp32)).expand(6, 11) if layout == "expanded" else normal(11, 6, like=like(fp32)).t()
    got = torch.autograd.grad(gated_linear(**tensors), leaves, dout)
    torch.testing.assert_close(got, torch.autograd.grad(gated_linear(**tensors), leaves, dout.contiguous()))


@pytest.mark.parametrize(
    "leaves", [LEAVES[:2], LEAVES[:1], LEAVES[1:2], LEAVES[2:3], LEAVES[3:], LEAVES[1:3], LEAVES[:3]], ids="-".join
)
def test_frozen(place, leaves):
    check(inputs(5, 37, like=like(place)), leaves)


@pytest.mark.parametrize("leaf", LEAVES[:1] + LEAVES[2:])
def test_packed_frozen(fp32, leaf):
    check(inputs(5, 37, like=like(fp32), split=False), [leaf])


@on_triton
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_saves_gate_up_and_weight_alone(backward_calls, split):
    """Neither act(gate), nor act(gate) * up, nor the output."""
    tensors, saved = inputs(5, 37, like={}, split=split), []
    given = [x.requires_grad_() for x in tensors.values() if x is not None]
    before = {x.data_ptr() for x in given}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        out = gated_linear(**tensors)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for k, x in tensors.items() if x is not None and k != "bias"]
    kept = [x for x in vars(out.grad_fn).values() if isinstance(x, torch.Tensor)]
    assert not kept and {x.data_ptr() for x in saved} <= before


@on_triton
def test_autocast_makes_one_h_and_saves_no_cast_weight(backward_calls, monkeypatch):
    tensors, saved, made = inputs(5, 37, like={}), [], []
    monkeypatch.setattr(module, "forward", lambda *args: (made.append(args[-1]), _gated.forward(*args))[1])
    for x in tensors.values():
        x.requires_grad_()
    with (
        torch.autocast("cpu", torch.float16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x),
    ):
        gated_linear(**tensors)
    assert [x.data_ptr() for x in saved] == [tensors[k].data_ptr() for k in LEAVES[:3]]
    assert made == [torch.float16]


@on_triton
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_h_lies_over_its_gradient(backward_calls, split):
    check(inputs(5, 37, like={}, split=split), LEAVES)
    (call,) = backward_calls
    assert call["h"] is call["dh"]


@on_triton
def test_what_is_frozen_is_not_computed(backward_calls):
    tensors = inputs(5, 37, like={})
    check(tensors, ["gate", "up"])
    check(tensors, ["up", "weight"])
    check(tensors, ["weight", "bias"])
    absent = [[k for k, x in call.items() if x is None] for call in backward_calls]
    assert absent == [["h"], ["dgate"]]


@pytest.mark.parametrize("inside", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_autocast(fp32, inside, split):
    """Weights in fp32; gate and up as an earlier layer left them. The gradients are taken outside of autocast."""
    tensors = inputs(5, 37, like=like(fp32), split=split)
    tensors |= {k: x if x is None else x.to(inside) for k, x in tensors.items() if k in ("gate", "up")}
    double = {k: x if x is None else x.double() for k, x in tensors.items()}
    op, reference = (under_autocast(f, torch.float16) for f in (gated_linear, gated_linear_reference))
    got, plain = (outputs_and_grads(f, tensors, LEAVES, torch.float16) for f in (op, reference))
    truth = outputs_and_grads(gated_linear_reference, double, LEAVES, torch.float16)
    assert got["out0"].dtype == torch.float16 and got["d_weight"].dtype == got["d_bias"].dtype == torch.float32
    for name in truth:
        assert got[name].dtype == plain[name].dtype
        # computed in fp16, whatever dtype it comes back in
        assert_within_plain_error(name, got[name].half(), plain[name].half(), truth[name], torch.float16)
    if fp32.path == "triton":  # a sum of fp16 numbers, not rounded to fp16
        torch.testing.assert_close(got["d_bias"], truth["d_bias"].float())


def test_autocast_leaves_shared_weights_their_graph(fp32):
    """Autocast casts a weight once and hands the copy to every layer: one made where no graph is recorded has none."""
    tensors = inputs(5, 37, like=like(fp32))
    weight, bias = (tensors[k].requires_grad_() for k in ("weight", "bias"))
    with torch.autocast(fp32.device, torch.float16):
        gated_linear(**tensors)
        out = F.linear(tensors["up"], weight, bias)
    out.sum().backward()
    assert weight.grad is not None and bias.grad is not None


def test_mixed_dtypes_are_refused_as_by_linear(fp32):
    tensors = inputs(5, 37, like=like(fp32)) | {"weight": normal(11, 37, like=like(fp32)).half()}
    with pytest.raises(RuntimeError, match="dtype"):
        gated_linear(**tensors)


@on_triton
def test_gate_wider_than_up(backward_calls):
    tensors = inputs(5, 37, like={})
    tensors["up"] = tensors["up"].half()
    check(tensors, LEAVES)
    (call,) = backward_calls
    assert call["h"] is not call["dh"]


def test_reference_is_torch(fp32):
    tensors = inputs(5, 37, like=like(fp32))
    expected = F.linear(F.silu(tensors["gate"]) * tensors["up"], tensors["weight"], tensors["bias"])
    torch.testing.assert_close(gated_linear_reference(**tensors), expected, rtol=0, atol=0)


def test_compiles_whole(fp32):
    compiled = torch.compile(gated_linear, fullgraph=True, backend="aot_eager")
    check_op(compiled, gated_linear_reference, inputs(5, 37, like=like(fp32)), LEAVES)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"up": (4, 7)}, r"gate and up of one shape: gate is \(4, 6\), up is \(4, 7\)"),
        ({"gate": (4, 7), "up": None}, r"packed .* gate is \(4, 7\)"),
        ({"gate": (4, 10), "up": None}, r"\(H, I\) with I = 5, .*: weight is \(3, 6\)"),
        ({"weight": (6, 3)}, r"\(H, I\) with I = 6, .*: weight is \(6, 3\)"),
        ({"weight": (6,)}, r"\(H, I\) with I = 6, .*: weight is \(6,\)"),
        ({"bias": (6,)}, r"one per row of weight: bias is \(6,\), weight \(3, 6\)"),
    ],
)
def test_shape_errors(fp32, wrong, message):
    shapes = {"gate": (4, 6), "up": (4, 6), "weight": (3, 6), "bias": (3,)} | wrong
    with pytest.raises(ValueError, match=message):
        gated_linear(**{k: x if x is None else normal(*x, like=like(fp32)) for k, x in shapes.items()})


def test_unknown_activation(fp32):
    with pytest.raises(ValueError, match="one of silu, gelu_tanh, gelu, relu2, got 'swish'"):
        gated_linear(**inputs(5, 37, like=like(fp32)), activation="swish")
    assert module.ACTIVATIONS is _gated.ACTIVATIONS


BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", _gated.ACTIVATIONS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_sizes_on_gpu(activation, split, dtype):
    like = {"dtype": dtype, "device": "cuda"}
    for shape in [(2, 256, 4096), (333, 1504)]:
        tensors = pair(shape, like) if split else packed(*shape, like=like)
        weight = normal(512, shape[-1], like=like, seed=2, spread=shape[-1] ** -0.5)
        tensors |= {"weight": weight, "bias": normal(512, like=like, seed=3)}
        check_op(gated_linear, gated_linear_reference, tensors, tuple(tensors), activation=activation)


@pytest.mark.gpu
def test_keeps_nothing_but_its_output_on_gpu():
    """And its backward allocates one buffer of h's size beside the gradients."""
    tensors = pair((2048, 4096), BF16) | {"weight": normal(512, 4096, like=BF16, seed=2, spread=0.02)}
    leaves = [x.requires_grad_() for x in tensors.values()]
    size = tensors["gate"].nbytes
    gated_linear(**tensors).sum().backward()  # cuBLAS's workspace
    for x in leaves:
        x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = gated_linear(**tensors)
    assert torch.cuda.memory_allocated() - before <= out.nbytes + size // 8
    dout = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(dout)
    h_and_gradients = 3 * size + tensors["weight"].nbytes
    assert torch.cuda.max_memory_allocated() - before <= h_and_gradients + size // 8


@pytest.mark.gpu
def test_host_never_waits_on_gpu():
    weight = normal(512, 4096, like=BF16, seed=2, spread=0.02).requires_grad_()
    for mode in ("default", "error"):  # compiled in the first round
        gate, up = (x.requires_grad_() for x in pair((256, 4096), BF16).values())
        both = packed(256, 4096, like=BF16)["gate"].requires_grad_()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            outs = [swiglu(gate, up), swiglu(both), geglu(gate, up), relu2(gate)]
            torch.autograd.backward([*outs, gated_linear(gate, up, weight)], [*outs, gated_linear(both, None, weight)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
