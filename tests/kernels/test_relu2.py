"""relu2: the gated kernels without an up, and with the output saved in place of the input."""

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import check_op
from gated_checks import LAYOUTS, SHAPES, normal
from kernel_checks import PATHS

from liger_trainer.kernels import _gated
from liger_trainer.kernels.relu2 import relu2, relu2_reference


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(_gated, name, (16, 1))


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


@pytest.mark.parametrize("shape", [*SHAPES.values(), ()], ids=[*SHAPES, "scalar"])
def test_shapes(place, shape):
    check_op(relu2, relu2_reference, {"x": normal(*shape, like=like(place))}, ["x"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(place, layout):
    check_op(relu2, relu2_reference, {"x": LAYOUTS[layout](0, like(place))}, ["x"])


def test_small_inputs_keep_their_gradient(place):
    """Squares of the last four are 0 in fp16."""
    x = torch.tensor([[0.0, -0.0, -1e-3, 1e-2, 1e-3, 2e-4, 1e-4, 1e-5, 1e-6]]).to(**like(place)).requires_grad_()
    (dx,) = torch.autograd.grad(relu2(x).sum(), x)
    torch.testing.assert_close(dx, 2 * x.detach().clamp(min=0), rtol=2 * torch.finfo(place.dtype).eps, atol=0)


@pytest.mark.parametrize("upstream", ["expanded", "transposed", "sliced"])
def test_gradient_of_any_layout(place, upstream):
    x = normal(6, 20, like=like(place)).requires_grad_()
    dy = {
        "expanded": normal(1, like=like(place), seed=2).expand(6, 20),
        "transposed": normal(20, 6, like=like(place), seed=2).t(),
        "sliced": normal(6, 50, like=like(place), seed=2)[:, 7:27],
    }[upstream]
    got = torch.autograd.grad(relu2(x), x, dy)
    torch.testing.assert_close(got, torch.autograd.grad(relu2(x), x, dy.contiguous()))


def test_nan_and_infinity(place):
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0]).to(**like(place))
    torch.testing.assert_close(relu2(x), F.relu(x).square(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif("triton" not in PATHS, reason="the plain form saves what autograd asks for")
@pytest.mark.parametrize("dtype, from_output", [(torch.float32, True), (torch.float16, False)])
def test_saves_one_tensor(monkeypatch, dtype, from_output):
    monkeypatch.setattr(_gated, "use_triton", lambda x: True)
    x, saved = normal(5, 37, like={"dtype": dtype}).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda _: x):
        y = relu2(x)
    assert saved == [(y if from_output else x).data_ptr()]


@pytest.mark.skipif("triton" not in PATHS, reason="the plain form can be differentiated again")
def test_second_derivative_is_refused(monkeypatch):
    monkeypatch.setattr(_gated, "use_triton", lambda x: True)
    x = normal(5, 37).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(relu2(x).sum(), x, create_graph=True)


def test_compiles_whole(fp32):
    compiled = torch.compile(relu2, fullgraph=True, backend="aot_eager")
    check_op(compiled, relu2_reference, {"x": normal(5, 37, like=like(fp32))}, ["x"])
