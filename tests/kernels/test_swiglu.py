"""swiglu, and what all gated activations share: layouts, launches, frozen inputs, errors."""

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import check_op
from gated_checks import LAYOUTS, SHAPES, extremes, normal, packed, pair, strided_pair
from kernel_checks import PATHS

from liger_trainer.kernels import _gated
from liger_trainer.kernels.swiglu import swiglu, swiglu_reference

BOTH = ("gate", "up")
SHIPPED = {"FORWARD": _gated.FORWARD, "BACKWARD": _gated.BACKWARD}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    for name in SHIPPED:
        monkeypatch.setattr(_gated, name, (16, 1))


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(place, shape):
    check_op(swiglu, swiglu_reference, pair(shape, like(place)), BOTH)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packed(place, shape):
    got = check_op(swiglu, swiglu_reference, packed(*shape, like=like(place)), ["gate"])
    assert got["d_gate"].is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fp32, layout):
    check_op(swiglu, swiglu_reference, strided_pair(layout, like(fp32)), BOTH)


@pytest.mark.parametrize("layout", ["columns of a wider tensor", "batch and sequence swapped", "transposed"])
def test_packed_layouts(fp32, layout):
    gate = LAYOUTS[layout](0, like(fp32))
    check_op(swiglu, swiglu_reference, {"gate": gate[..., : gate.shape[-1] // 2 * 2], "up": None}, ["gate"])


def test_gate_and_up_of_different_layouts(fp32):
    tensors = {"gate": normal(3, 4, 24, like=like(fp32)), "up": normal(4, 3, 24, like=like(fp32), seed=1)}
    tensors["up"] = tensors["up"].transpose(0, 1)
    check_op(swiglu, swiglu_reference, tensors, BOTH)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's; the sigmoid is 0 there, as it should be
def test_extremes(place):
    check_op(swiglu, swiglu_reference, extremes(like(place)), BOTH)


def test_launch_configurations_as_shipped(place, monkeypatch):
    for name, tile in SHIPPED.items():
        monkeypatch.setattr(_gated, name, tile)
    for shape in [(3, 700), (2, 1024), (1, 5)]:
        check_op(swiglu, swiglu_reference, pair(shape, like(place)), BOTH)
        check_op(swiglu, swiglu_reference, packed(*shape, like=like(place)), ["gate"])


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
    got = check_op(swiglu, swiglu_reference, tensors, BOTH)
    assert got["out0"].dtype == torch.float32


@pytest.mark.parametrize("leaf", BOTH)
def test_one_input_frozen(fp32, leaf, monkeypatch):
    asked = []
    launch = _gated.backward
    monkeypatch.setattr(
        _gated, "backward", lambda *a, **k: (asked.append([x is None for x in a[3:5]]), launch(*a, **k))
    )
    for tensors in (pair((5, 37), like(fp32)), strided_pair("columns of a wider tensor", like(fp32))):
        check_op(swiglu, swiglu_reference, tensors, [leaf])
    assert asked == ([[leaf == "up", leaf == "gate"]] * 2 if fp32.path == "triton" else [])


@pytest.mark.parametrize("upstream", ["expanded", "transposed", "sliced"])
@pytest.mark.parametrize("up", [True, False], ids=["split", "packed"])
def test_gradient_of_any_layout(fp32, upstream, up):
    tensors = pair((6, 20), like(fp32)) if up else packed(6, 20, like=like(fp32))
    leaves = [x.requires_grad_() for x in tensors.values() if x is not None]
    dh = {
        "expanded": normal(1, like=like(fp32), seed=2).expand(6, 20),
        "transposed": normal(20, 6, like=like(fp32), seed=2).t(),
        "sliced": normal(6, 50, like=like(fp32), seed=2)[:, 7:27],
    }[upstream]
    got = torch.autograd.grad(swiglu(**tensors), leaves, dh)
    expected = torch.autograd.grad(swiglu(**tensors), leaves, dh.contiguous())
    torch.testing.assert_close(got, expected)


def test_reference_is_torch(fp32):
    tensors = pair((5, 37), like(fp32))
    torch.testing.assert_close(swiglu_reference(**tensors), F.silu(tensors["gate"]) * tensors["up"], rtol=0, atol=0)


@pytest.mark.skipif("triton" not in PATHS, reason="the plain form saves what autograd asks for")
def test_saves_its_inputs_alone(monkeypatch):
    monkeypatch.setattr(_gated, "use_triton", lambda x: True)
    for tensors in (pair((5, 37), {}), packed(5, 37, like={})):
        inputs = [x.requires_grad_() for x in tensors.values() if x is not None]
        h = swiglu(**tensors)
        assert [x.data_ptr() for x in h.grad_fn.saved_tensors if x is not None] == [x.data_ptr() for x in inputs]


@pytest.mark.skipif("triton" not in PATHS, reason="the plain form can be differentiated again")
def test_second_derivative_is_refused(monkeypatch):
    monkeypatch.setattr(_gated, "use_triton", lambda x: True)
    gate = normal(5, 38).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(swiglu(gate).sum(), gate, create_graph=True)


def test_compiles_whole(fp32):
    for tensors in (pair((5, 37), like(fp32)), packed(5, 37, like=like(fp32))):
        check_op(torch.compile(swiglu, fullgraph=True, backend="aot_eager"), swiglu_reference, tensors, ["gate"])


@pytest.mark.parametrize(
    "gate, up, message",
    [
        ((4, 6), (4, 7), r"of one shape: gate is \(4, 6\), up is \(4, 7\)"),
        ((4, 6), (6,), r"of one shape: gate is \(4, 6\), up is \(6,\)"),
        ((4, 7), None, r"packed .* \(\.\.\., 2 I\) with up=None: gate is \(4, 7\)"),
        ((), (), r"gate of shape \(\.\.\., I\).*gate is \(\)"),
    ],
)
def test_errors(fp32, gate, up, message):
    with pytest.raises(ValueError, match=f"swiglu needs .*{message}"):
        swiglu(normal(*gate, like=like(fp32)), None if up is None else normal(*up, like=like(fp32)))
