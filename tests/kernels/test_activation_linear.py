"""activation_linear: the same numbers as activation and linear layer apart, and what it neither saves nor computes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import check_op, outputs_and_grads
from gated_checks import LAYOUTS, like, normal
from kernel_checks import PATHS, assert_within_plain_error, under_autocast

from liger_trainer.kernels import _gated
from liger_trainer.kernels import activation_linear as module
from liger_trainer.kernels.activation_linear import activation_linear, activation_linear_reference

check = functools.partial(check_op, activation_linear, activation_linear_reference)
LEAVES = ("x", "weight", "bias")
pytestmark = pytest.mark.usefixtures("short_blocks")
on_triton = pytest.mark.skipif("triton" not in PATHS, reason="the plain form saves and computes what autograd asks for")


@pytest.fixture
def backward_calls(monkeypatch) -> list[dict]:
    """Sends the op to Triton, and lists the tensors that each backward launch was given."""
    calls = []

    def record(dh, x, up, dx, dup, activation, h=None):
        calls.append({"dh": dh, "dx": dx, "h": h})
        _gated.backward(dh, x, up, dx, dup, activation, h)

    monkeypatch.setattr(_gated, "use_triton", lambda x: True)
    monkeypatch.setattr(module, "backward", record)
    return calls


def inputs(*shape: int, like: dict, bias: bool = True) -> dict:
    return {
        "x": normal(*shape, like=like, spread=2.0), "weight": normal(11, shape[-1], like=like, seed=2, spread=0.3),
        "bias": normal(11, like=like, seed=3) if bias else None,
    }  # fmt: skip


@pytest.mark.parametrize("activation", _gated.ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_activations(place, activation, bias):
    check(inputs(5, 37, like=like(place), bias=bias), LEAVES, activation=activation)


@pytest.mark.parametrize("shape", [(1, 33), (19,), (2, 3, 16), (2, 2, 3, 18), (0, 16)], ids=str)
def test_shapes(fp32, shape):
    check(inputs(*shape, like=like(fp32)), LEAVES)


@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
def test_layouts(fp32, layout):
    make = LAYOUTS.get(layout, lambda seed, like: normal(1, 20, like=like, seed=seed).expand(6, 20))
    x = make(0, like(fp32))
    check(inputs(*x.shape, like=like(fp32)) | {"x": x}, LEAVES)


@pytest.mark.parametrize("leaves", [LEAVES[:1], LEAVES[1:2], LEAVES[2:], LEAVES[:2]], ids="-".join)
def test_frozen(place, leaves):
    check(inputs(5, 37, like=like(place)), leaves)


@on_triton
def test_saves_x_and_weight_alone(backward_calls):
    tensors, saved = inputs(5, 37, like={}), []
    for x in tensors.values():
        x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        out = activation_linear(**tensors)
    assert [x.data_ptr() for x in saved] == [tensors[name].data_ptr() for name in ("x", "weight")]
    assert not [x for x in vars(out.grad_fn).values() if isinstance(x, torch.Tensor)]


@on_triton
def test_h_lies_over_its_gradient_and_is_made_for_a_trained_weight_alone(backward_calls):
    check(inputs(5, 37, like={}), LEAVES)
    check(inputs(5, 37, like={}), ["x"])
    check(inputs(5, 37, like={}), ["weight"])
    trained, frozen = backward_calls
    assert trained["h"] is trained["dh"] and frozen["h"] is None


@pytest.mark.parametrize("inside", [torch.float32, torch.float16], ids=str)
def test_autocast(fp32, inside):
    """Weights in fp32; x as an earlier layer left it. The gradients are taken outside of autocast."""
    tensors = inputs(5, 37, like=like(fp32))
    tensors["x"] = tensors["x"].to(inside)
    double = {k: x.double() for k, x in tensors.items()}
    op, reference = (under_autocast(f, torch.float16) for f in (activation_linear, activation_linear_reference))
    got, plain = (outputs_and_grads(f, tensors, LEAVES, torch.float16) for f in (op, reference))
    truth = outputs_and_grads(activation_linear_reference, double, LEAVES, torch.float16)
    assert got["out0"].dtype == torch.float16 and got["d_weight"].dtype == got["d_bias"].dtype == torch.float32
    for name in truth:
        assert got[name].dtype == plain[name].dtype
        assert_within_plain_error(name, got[name].half(), plain[name].half(), truth[name], torch.float16)


def test_reference_is_torch(fp32):
    tensors = inputs(5, 37, like=like(fp32))
    expected = F.linear(F.gelu(tensors["x"], approximate="tanh"), tensors["weight"], tensors["bias"])
    torch.testing.assert_close(activation_linear_reference(**tensors, activation="gelu_tanh"), expected, rtol=0, atol=0)


def test_compiles_whole(fp32):
    compiled = torch.compile(activation_linear, fullgraph=True, backend="aot_eager")
    check_op(compiled, activation_linear_reference, inputs(5, 37, like=like(fp32)), LEAVES)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"weight": (6, 3)}, r"\(H, I\) with I the columns of x: weight is \(6, 3\), x \(4, 6\)"),
        ({"weight": (6,)}, r"weight is \(6,\)"),
        ({"bias": (6,)}, r"one per row of weight: bias is \(6,\), weight \(3, 6\)"),
    ],
)
def test_shape_errors(fp32, wrong, message):
    shapes = {"x": (4, 6), "weight": (3, 6), "bias": (3,)} | wrong
    with pytest.raises(ValueError, match=message):
        activation_linear(**{k: normal(*shape, like=like(fp32)) for k, shape in shapes.items()})


def test_unknown_activation(fp32):
    with pytest.raises(ValueError, match="one of silu, gelu_tanh, gelu, relu2, got 'swish'"):
        activation_linear(**inputs(5, 37, like=like(fp32)), activation="swish")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", _gated.ACTIVATIONS)
def test_sizes_on_gpu(activation, dtype):
    like = {"dtype": dtype, "device": "cuda"}
    for shape in [(2, 256, 4096), (333, 1504)]:
        tensors = {"x": normal(*shape, like=like), "bias": normal(512, like=like, seed=3)}
        tensors["weight"] = normal(512, shape[-1], like=like, seed=2, spread=shape[-1] ** -0.5)
        check(tensors, LEAVES, activation=activation)
