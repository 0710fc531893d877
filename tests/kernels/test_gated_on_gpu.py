"""What only a GPU shows of the gated activations: bf16, h over dh in a compiled kernel, offsets beyond 2^31, memory."""

import pytest
import torch
from elementwise_checks import check_op
from gated_checks import extremes, normal, packed, pair

from liger_trainer.kernels._gated import ACTIVATIONS
from liger_trainer.kernels.gated_linear import gated_linear, gated_linear_reference
from liger_trainer.kernels.geglu import geglu, geglu_reference
from liger_trainer.kernels.relu2 import relu2, relu2_reference
from liger_trainer.kernels.swiglu import swiglu, swiglu_reference

pytestmark = pytest.mark.gpu

OPS = {
    "swiglu": (swiglu, swiglu_reference, {}),
    "geglu tanh": (geglu, geglu_reference, {"approximate": "tanh"}),
    "geglu erf": (geglu, geglu_reference, {"approximate": "none"}),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dtypes
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(1024, 4096), (3, 333, 1501)], ids=str)
def test_gated(op, shape, dtype):
    op, reference, options = OPS[op]
    like = {"dtype": dtype, "device": "cuda"}
    check_op(op, reference, pair(shape, like), ("gate", "up"), **options)
    check_op(op, reference, packed(*shape, like=like), ["gate"], **options)
    check_op(op, reference, extremes(like), ("gate", "up"), **options)


@dtypes
def test_relu2(dtype):
    for shape in [(2048, 4096), (3, 333, 1501)]:
        check_op(relu2, relu2_reference, {"x": normal(*shape, like={"dtype": dtype, "device": "cuda"})}, ["x"])


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_gated_linear(activation, split, dtype):
    like = {"dtype": dtype, "device": "cuda"}
    for shape in [(2, 256, 4096), (333, 1504)]:
        tensors = pair(shape, like) if split else packed(*shape, like=like)
        weight = normal(512, shape[-1], like=like, seed=2, spread=shape[-1] ** -0.5)
        tensors |= {"weight": weight, "bias": normal(512, like=like, seed=3)}
        check_op(gated_linear, gated_linear_reference, tensors, tuple(tensors), activation=activation)


def test_gated_linear_keeps_nothing_but_its_output():
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


def test_host_never_waits():
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


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("split", [True, False], ids=["split", "packed"])
def test_offsets_beyond_32_bits(split):
    """The last rows must give what they give alone: 2^31 elements and more in each tensor that a kernel walks over."""
    n, columns, tail = 2**19 + 8, 4096, 8
    torch.manual_seed(0)
    shape = (n, columns) if split else (n, 2 * columns)
    gate = torch.empty(shape, **BF16).normal_().requires_grad_()
    up = torch.empty(shape, **BF16).normal_().requires_grad_() if split else None
    leaves = [x for x in (gate, up) if x is not None]
    h = swiglu(gate, up)
    assert h.numel() > 2**31
    grads = torch.autograd.grad(h, leaves, h.detach())
    last = [x.detach()[-tail:].clone().requires_grad_() for x in leaves]
    expected = swiglu(*last)
    expected_grads = torch.autograd.grad(expected, last, expected.detach())
    assert torch.equal(h[-tail:], expected)
    assert all(torch.equal(x[-tail:], y) for x, y in zip(grads, expected_grads, strict=True))
