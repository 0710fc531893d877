"""lora_linears: the numbers of several LoRA layers of one x, and what they share."""

import functools

import pytest
import torch
from elementwise_checks import check_op
from gated_checks import normal
from lora_checks import leaves_of, linears, named, projection
from torch.utils._python_dispatch import TorchDispatchMode

from liger_trainer.kernels.lora_linears import lora_linears, lora_linears_reference
from liger_trainer.kernels.types import Projection

check = functools.partial(check_op, linears(lora_linears), linears(lora_linears_reference))


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


def inputs(*shape: int, like: dict, ranks=((4,), (4,), (4,)), **options) -> dict:
    """Three layers of different size."""
    tensors = {"x": normal(*shape, like=like, seed=9)}
    for seed, (name, rows, own) in enumerate(zip("qkv", (13, 7, 9), ranks, strict=False)):
        tensors |= named(name, projection(rows, shape[-1], own, like, seed=20 * seed, **options))
    return tensors


@pytest.mark.parametrize(
    "ranks", [((4,), (4,), (4,)), ((2,), (5,), (1, 3)), ((4,), (), (2,)), ((), ()), ((4,),)], ids=str
)
def test_layers(place, ranks):
    """Of one rank, of several, with two adapters, and without."""
    tensors = inputs(6, 37, like=like(place), ranks=ranks)
    check(tensors, leaves_of(tensors))


@pytest.mark.parametrize("shape", [(1, 33), (19,), (2, 3, 16), (0, 16)], ids=str)
def test_shapes(fp32, shape):
    tensors = inputs(*shape, like=like(fp32), bias=False)
    check(tensors, leaves_of(tensors))


@pytest.mark.parametrize("leaves", [["x"], ["k_a0"], ["v_b0"], ["x", "k_b0"], ["q_a0", "v_a0"]], ids="-".join)
def test_frozen(fp32, leaves):
    ops = [
        lambda op=op, **tensors: torch.cat(linears(op)(**tensors), -1) for op in (lora_linears, lora_linears_reference)
    ]
    check_op(*ops, inputs(6, 37, like=like(fp32)), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adapters_wider_than_the_base(dtype):
    tensors = inputs(6, 37, like={"dtype": dtype}, adapters=torch.float32)
    got = check(tensors, leaves_of(tensors))
    assert got["d_k_a0"].dtype == torch.float32 and got["out1"].dtype == dtype


def test_an_output_that_nothing_reads(fp32):
    tensors = inputs(6, 37, like=like(fp32))
    leaves = [tensors[name].requires_grad_() for name in leaves_of(tensors)]
    q, _, v = linears(lora_linears)(**tensors)
    want_q, _, want_v = linears(lora_linears_reference)(**tensors)
    got = torch.autograd.grad((q * v.sum()).sum(), leaves)
    want = torch.autograd.grad((want_q * want_v.sum()).sum(), leaves, materialize_grads=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


class Products(TorchDispatchMode):
    """Notes the shapes that matrix products read."""

    def __init__(self):
        super().__init__()
        self.read = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.read += [tuple(x.shape) for x in args[-2:]]
        return function(*args, **(kwargs or {}))


def test_one_product_for_all_a(fp32):
    tensors = inputs(6, 37, like=like(fp32), bias=False)
    for name in leaves_of(tensors):
        tensors[name].requires_grad_()
    with Products() as products:
        outputs = linears(lora_linears)(**tensors)
    assert products.read.count((37, 12)) == 1 and products.read.count((6, 37)) == 1 + 3
    assert len({y.grad_fn.next_functions for y in outputs}) == 1
    with Products() as products:
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert products.read.count((6, 37)) == 1  # x, for the three dA


def test_compiles_whole(fp32):
    tensors = inputs(5, 37, like=like(fp32))
    compiled = torch.compile(linears(lora_linears), fullgraph=True, backend="aot_eager")
    check_op(compiled, linears(lora_linears_reference), tensors, leaves_of(tensors))


def test_refusals():
    with pytest.raises(ValueError, match="at least one"):
        lora_linears(normal(2, 6), [])
    with pytest.raises(ValueError, match=r"weight 1 must be \(O, K\) with K = 6, .* \(3, 7\)"):
        lora_linears(normal(2, 6), [Projection(normal(3, 6)), Projection(normal(3, 7))])
    with pytest.raises(ValueError, match="no gradient of weight 0"):
        lora_linears(normal(2, 6), [Projection(normal(3, 6).requires_grad_())])
