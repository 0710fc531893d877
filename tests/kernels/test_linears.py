"""linears: the numbers of layers apart, from one tensor of dx."""

import functools

import pytest
import torch
from elementwise_checks import check_op, outputs_and_grads
from gated_checks import normal
from kernel_checks import assert_within_plain_error, under_autocast

from liger_trainer.kernels.linears import linears, linears_reference

WIDTHS = (11, 7, 20)
LEAVES = ("x", "w0", "w1", "w2", "b0", "b2")


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


def inputs(*shape: int, like: dict) -> dict:
    """The second layer has no bias."""
    tensors = {"x": normal(*shape, like=like, seed=9)}
    tensors |= {f"w{i}": normal(n, shape[-1], like=like, seed=i, spread=0.3) for i, n in enumerate(WIDTHS)}
    return tensors | {f"b{i}": normal(WIDTHS[i], like=like, seed=i) for i in (0, 2)}


def by(op):
    def run(x, **tensors):
        return op(x, [tensors[f"w{i}"] for i in range(3)], [tensors.get(f"b{i}") for i in range(3)])

    return run


check = functools.partial(check_op, by(linears), by(linears_reference))


@pytest.mark.parametrize("shape", [(5, 37), (37,), (2, 3, 16), (0, 16), (2, 0, 16)], ids=str)
def test_shapes(place, shape):
    check(inputs(*shape, like=like(place)), LEAVES)


@pytest.mark.parametrize("leaves", [LEAVES[:1], LEAVES[1:2], LEAVES[2:4], LEAVES[4:], ("x", "w1")], ids="-".join)
def test_frozen(place, leaves):
    check(inputs(5, 37, like=like(place)), leaves)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2)], ids=str)
def test_outputs_that_nobody_uses(place, used):
    def some(op):
        return lambda **tensors: [y for i, y in enumerate(by(op)(**tensors)) if i in used]

    leaves = ["x", *(f"w{i}" for i in used)]
    check_op(some(linears), some(linears_reference), inputs(5, 37, like=like(place)), leaves)


def test_strides(fp32):
    tensors = inputs(6, 20, like=like(fp32))
    tensors["x"] = normal(20, 12, like=like(fp32), seed=9).t()[::2]
    tensors["w1"] = tensors["w1"].t().contiguous().t()
    check(tensors, LEAVES)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(fp32, x, weights):
    """Dtypes and errors of F.linear under autocast."""
    tensors = {name: t.to(x if name == "x" else weights) for name, t in inputs(5, 37, like=like(fp32)).items()}
    double = {name: t.double() for name, t in tensors.items()}
    got, plain = (
        outputs_and_grads(under_autocast(by(op), torch.bfloat16), tensors, LEAVES, torch.bfloat16)
        for op in (linears, linears_reference)
    )
    truth = outputs_and_grads(by(linears_reference), double, LEAVES, torch.bfloat16)
    for name, want in truth.items():
        assert got[name].dtype == plain[name].dtype
        assert_within_plain_error(name, got[name], plain[name], want, torch.bfloat16)


def test_autograd_adds_nothing():
    tensors = {name: t.requires_grad_() for name, t in inputs(5, 37, like={}).items()}
    with torch.profiler.profile() as profile:
        torch.autograd.backward(by(linears)(**tensors), [torch.ones(5, n) for n in WIDTHS])
    names = [event.key for event in profile.key_averages()]
    assert "aten::addmm_" in names and "aten::add" not in names and "aten::add_" not in names


@pytest.mark.parametrize(
    "weights, biases, message",
    [
        ([], None, "0 weights"),
        ([torch.ones(2, 4)], [None, None], "1 weights, 2 biases"),
        ([torch.ones(2, 4), torch.ones(2, 5)], None, "weight 1 must be .O, K. with K = 4"),
        ([torch.ones(2, 4)], [torch.ones(3)], "bias 0 must be one per row of weight 0, 2"),
    ],
    ids=range(4),
)
def test_shapes_that_do_not_fit(weights, biases, message):
    with pytest.raises(ValueError, match=message):
        linears(torch.ones(3, 4), weights, biases)
