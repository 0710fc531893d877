"""swiglu, geglu in both forms of the GELU, and relu2: the ops over _gated.py without a projection behind them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import check_op
from gated_checks import LAYOUTS, SHAPES, extremes, normal, packed, pair, strided_pair
from kernel_checks import PATHS
from torch import Tensor

from liger_trainer.kernels import _gated
from liger_trainer.kernels.geglu import geglu, geglu_reference
from liger_trainer.kernels.relu2 import relu2, relu2_reference
from liger_trainer.kernels.swiglu import swiglu, swiglu_reference

SHIPPED = {"FORWARD": _gated.FORWARD, "BACKWARD": _gated.BACKWARD}
under_triton = pytest.mark.skipif("triton" not in PATHS, reason="plain torch saves and differentiates what it likes")


class Activation(NamedTuple):
    """A gated op with its options, or relu2, which has no up."""

    op: Callable
    reference: Callable
    options: dict[str, Any]
    torch: Callable[[Tensor], Tensor]

    @property
    def gated(self) -> bool:
        return self.op is not relu2

    def tensors(self, gate: Tensor, up: Tensor | None) -> dict[str, Tensor | None]:
        return {"gate": gate, "up": up} if self.gated else {"x": gate}

    def pair(self, shape, like) -> dict[str, Tensor | None]:
        return self.tensors(*pair(shape, like).values())

    def check(self, tensors, leaves=None, op=None) -> dict[str, Tensor]:
        leaves = [k for k, x in tensors.items() if x is not None] if leaves is None else leaves
        return check_op(op or self.op, self.reference, tensors, leaves, **self.options)

    def __call__(self, *tensors, **named) -> Tensor:
        return self.op(*tensors, **named, **self.options)


GATED = {
    "swiglu": Activation(swiglu, swiglu_reference, {}, F.silu),
    "geglu tanh": Activation(geglu, geglu_reference, {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    "geglu erf": Activation(geglu, geglu_reference, {"approximate": "none"}, F.gelu),
}
RELU2 = Activation(relu2, relu2_reference, {}, lambda x: F.relu(x).square())
EVERY = {**GATED, "relu2": RELU2}
each = pytest.mark.parametrize("activation", EVERY.values(), ids=EVERY)
each_gated = pytest.mark.parametrize("activation", GATED.values(), ids=GATED)


@pytest.fixture(autouse=True)
def short_blocks(request, monkeypatch):
    """Several blocks a row, but for a GPU, where blocks are as shipped."""
    for name in SHIPPED:
        if not request.node.get_closest_marker("gpu"):
            monkeypatch.setattr(_gated, name, (16, 1))


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


@each
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(place, activation, shape):
    activation.check(activation.pair(shape, like(place)))


@each_gated
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packed(place, activation, shape):
    got = activation.check(packed(*shape, like=like(place)))
    assert got["d_gate"].is_contiguous()


def test_relu2_of_a_scalar(place):
    RELU2.check({"x": normal(like=like(place))})


@each
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fp32, activation, layout):
    activation.check(activation.tensors(*strided_pair(layout, like(fp32)).values()))


@pytest.mark.parametrize("layout", ["columns of a wider tensor", "batch and sequence swapped", "transposed"])
def test_packed_layouts(fp32, layout):
    gate = LAYOUTS[layout](0, like(fp32))
    GATED["swiglu"].check({"gate": gate[..., : gate.shape[-1] // 2 * 2], "up": None})


def test_gate_and_up_of_different_layouts(fp32):
    gate, up = normal(3, 4, 24, like=like(fp32)), normal(4, 3, 24, like=like(fp32), seed=1).transpose(0, 1)
    GATED["swiglu"].check({"gate": gate, "up": up})


@each
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's; the sigmoid is 0 there, as it should be
def test_extremes(place, activation):
    activation.check(activation.tensors(*extremes(like(place)).values()))


@pytest.mark.parametrize("shape", [(3, 700), (2, 1024), (1, 5)], ids=str)
def test_launch_configurations_as_shipped(place, shape, monkeypatch):
    for name, tile in SHIPPED.items():
        monkeypatch.setattr(_gated, name, tile)
    GATED["swiglu"].check(pair(shape, like(place)))
    GATED["swiglu"].check(packed(*shape, like=like(place)))


@pytest.mark.parametrize(
    "columns, expected",
    [
        (4096, (1024, 4, True)),
        (1500, (1024, 4, False)),
        (512, (512, 2, True)),
        (100, (128, 1, False)),
        (1, (32, 1, False)),
    ],
)
def test_blocks_shrink_with_the_row(columns, expected):
    assert _gated._tile(columns, (1024, 4)) == expected


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str)
def test_mixed_dtypes(fp32, dtypes):
    tensors = {k: x.to(dtype) for (k, x), dtype in zip(pair((5, 37), like(fp32)).items(), dtypes, strict=True)}
    got = GATED["swiglu"].check(tensors)
    assert got["out0"].dtype == torch.float32


@each_gated
@pytest.mark.parametrize("leaf", ["gate", "up"])
def test_one_input_frozen(fp32, activation, leaf, monkeypatch):
    """The gradient of a frozen input is not computed."""
    asked, launch = [], _gated.backward
    monkeypatch.setattr(
        _gated, "backward", lambda *a, **k: (asked.append([x is None for x in a[3:5]]), launch(*a, **k))
    )
    for tensors in (pair((5, 37), like(fp32)), strided_pair("columns of a wider tensor", like(fp32))):
        activation.check(tensors, [leaf])
    assert asked == ([[leaf == "up", leaf == "gate"]] * 2 if fp32.path == "triton" else [])


@each
@pytest.mark.parametrize("upstream", ["expanded", "transposed", "sliced"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_gradient_of_any_layout(fp32, activation, upstream, split):
    tensors = activation.pair((6, 20), like(fp32)) if split or activation is RELU2 else packed(6, 20, like=like(fp32))
    leaves = [x.requires_grad_() for x in tensors.values() if x is not None]
    dh = {
        "expanded": normal(1, like=like(fp32), seed=2).expand(6, 20),
        "transposed": normal(20, 6, like=like(fp32), seed=2).t(),
        "sliced": normal(6, 50, like=like(fp32), seed=2)[:, 7:27],
    }[upstream]
    got = torch.autograd.grad(activation(**tensors), leaves, dh)
    torch.testing.assert_close(got, torch.autograd.grad(activation(**tensors), leaves, dh.contiguous()))


@each
def test_reference_is_torch(fp32, activation):
    gate, up = pair((5, 37), like(fp32)).values()
    expected = activation.torch(gate) * (up if activation.gated else 1)
    got = activation.reference(**activation.tensors(gate, up), **activation.options)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_tanh_is_the_default_of_geglu_and_differs(fp32):
    tensors = pair((5, 37), like(fp32))
    assert torch.equal(geglu(**tensors), geglu(**tensors, approximate="tanh"))
    assert not torch.allclose(geglu(**tensors), geglu(**tensors, approximate="none"), rtol=1e-5, atol=1e-5)


def test_small_inputs_of_relu2_keep_their_gradient(place):
    """Squares of the last four are 0 in fp16."""
    x = torch.tensor([[0.0, -0.0, -1e-3, 1e-2, 1e-3, 2e-4, 1e-4, 1e-5, 1e-6]]).to(**like(place)).requires_grad_()
    (dx,) = torch.autograd.grad(relu2(x).sum(), x)
    torch.testing.assert_close(dx, 2 * x.detach().clamp(min=0), rtol=2 * torch.finfo(place.dtype).eps, atol=0)


def test_nan_and_infinity_in_relu2(place):
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0]).to(**like(place))
    torch.testing.assert_close(relu2(x), F.relu(x).square(), rtol=0, atol=0, equal_nan=True)


@under_triton
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_gated_ops_save_their_inputs_alone(split, monkeypatch):
    monkeypatch.setattr(_gated, "use_triton", lambda x: True)
    tensors = pair((5, 37), {}) if split else packed(5, 37, like={})
    inputs = [x.requires_grad_() for x in tensors.values() if x is not None]
    h = swiglu(**tensors)
    assert [x.data_ptr() for x in h.grad_fn.saved_tensors if x is not None] == [x.data_ptr() for x in inputs]


@under_triton
@pytest.mark.parametrize("dtype, from_output", [(torch.float32, True), (torch.float16, False)])
def test_relu2_saves_one_tensor(dtype, from_output, monkeypatch):
    monkeypatch.setattr(_gated, "use_triton", lambda x: True)
    x, saved = normal(5, 37, like={"dtype": dtype}).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda _: x):
        y = relu2(x)
    assert saved == [(y if from_output else x).data_ptr()]


@pytest.mark.parametrize("activation", [GATED["swiglu"], RELU2], ids=["swiglu", "relu2"])
def test_compiles_into_one_graph(fp32, activation):
    compiled = torch.compile(activation.op, fullgraph=True, backend="aot_eager")
    activation.check(activation.pair((5, 37), like(fp32)), op=compiled)
    if activation.gated:
        activation.check(packed(5, 37, like=like(fp32)), op=compiled)


@pytest.mark.parametrize("op", [swiglu, geglu])
@pytest.mark.parametrize(
    "gate, up, message",
    [
        ((4, 6), (4, 7), r"of one shape: gate is \(4, 6\), up is \(4, 7\)"),
        ((4, 6), (6,), r"of one shape: gate is \(4, 6\), up is \(6,\)"),
        ((4, 7), None, r"packed .* \(\.\.\., 2 I\) with up=None: gate is \(4, 7\)"),
        ((), (), r"gate of shape \(\.\.\., I\).*gate is \(\)"),
    ],
)
def test_errors(op, gate, up, message):
    with pytest.raises(ValueError, match=f"{op.__name__} needs .*{message}"):
        op(normal(*gate), None if up is None else normal(*up))


def test_unknown_form_of_the_gelu():
    with pytest.raises(ValueError, match='approximate must be "tanh" or "none", got \'erf\''):
        geglu(torch.zeros(4, 7), torch.zeros(4, 7), approximate="erf")


@pytest.mark.gpu
@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1024, 4096), (3, 333, 1501)], ids=str)
def test_sizes_on_gpu(activation, shape, dtype):
    where = {"dtype": dtype, "device": "cuda"}
    activation.check(activation.pair(shape, where))
    if activation.gated:
        activation.check(packed(*shape, like=where))
        activation.check(extremes(where))


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_offsets_beyond_32_bits_on_gpu(split):
    """The last rows must give what they give alone: 2^31 elements and more in each tensor that a kernel walks over."""
    n, columns, tail = 2**19 + 8, 4096, 8
    where = {"dtype": torch.bfloat16, "device": "cuda"}
    torch.manual_seed(0)
    shape = (n, columns) if split else (n, 2 * columns)
    gate = torch.empty(shape, **where).normal_().requires_grad_()
    up = torch.empty(shape, **where).normal_().requires_grad_() if split else None
    leaves = [x for x in (gate, up) if x is not None]
    h = swiglu(gate, up)
    assert h.numel() > 2**31
    grads = torch.autograd.grad(h, leaves, h.detach())
    last = [x.detach()[-tail:].clone().requires_grad_() for x in leaves]
    expected = swiglu(*last)
    expected_grads = torch.autograd.grad(expected, last, expected.detach())
    assert torch.equal(h[-tail:], expected)
    assert all(torch.equal(x[-tail:], y) for x, y in zip(grads, expected_grads, strict=True))
