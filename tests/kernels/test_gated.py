"""What is of one of the gated activations and of the linear layers behind them: limits, extremes, models, memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import Place, check, evaluate, normal, under_autocast
from op_table import CASES
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from liger_trainer.kernels.activation_linear import activation_linear_reference
from liger_trainer.kernels.clamped_swiglu import clamped_swiglu
from liger_trainer.kernels.gated_linear import gated_linear, gated_linear_reference
from liger_trainer.kernels.gated_mlp import gated_mlp
from liger_trainer.kernels.geglu import geglu, geglu_reference
from liger_trainer.kernels.linears import linears
from liger_trainer.kernels.relu2 import relu2, relu2_reference
from liger_trainer.kernels.swiglu import swiglu_reference

# Where exponentials overflow or vanish, and around zero.
EXTREMES = [0.0, -0.0, 1e-3, 0.7, -0.7, 2.5, -2.5, 5.5, -5.5, 9.0, -9.0, 30.0, -30.0, 95.0, -95.0, 200.0, -200.0]


@pytest.mark.parametrize("case", [CASES[n] for n in ("swiglu", "geglu", "geglu, erf", "relu2")], ids=lambda c: c.name)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's; the sigmoid is 0 there, as it should be
def test_extremes(place, case):
    gate = torch.tensor([EXTREMES]).to(place.device, place.dtype)
    tensors = {"x": gate} if case.op == "relu2" else {"gate": gate, "up": gate.flip(-1).clamp(-9, 9) + 1}
    check(case.function, case.reference, tensors, None, leaves=tuple(tensors), **case.options)


def test_references_are_torch(fp32):
    x, up, w, b = (normal(*shape, seed=i, like=fp32) for i, shape in enumerate(((5, 37), (5, 37), (3, 37), (3,))))
    for got, expected in (
        (swiglu_reference(x, up), F.silu(x) * up),
        (geglu_reference(x, up), F.gelu(x, approximate="tanh") * up),
        (geglu_reference(x, up, approximate="none"), F.gelu(x) * up),
        (relu2_reference(x), F.relu(x).square()),
        (gated_linear_reference(x, up, w, b), F.linear(F.silu(x) * up, w, b)),
        (activation_linear_reference(x, w, b), F.linear(F.gelu(x), w, b)),
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert torch.equal(geglu(x, up), geglu(x, up, approximate="tanh"))
    assert not torch.allclose(geglu(x, up), geglu(x, up, approximate="none"), rtol=1e-5, atol=1e-5)


def test_relu2_of_a_scalar_of_small_numbers_and_of_none(place):
    check(relu2, relu2_reference, {"x": normal(like=place)}, None, leaves=("x",))
    small = torch.tensor([[0.0, -0.0, -1e-3, 1e-2, 1e-3, 2e-4, 1e-4, 1e-5, 1e-6]]).to(place.device, place.dtype)
    (dx,) = torch.autograd.grad(relu2(small.requires_grad_()).sum(), small)  # in fp16 the last four squares are 0
    torch.testing.assert_close(dx, 2 * small.detach().clamp(min=0), rtol=2 * torch.finfo(place.dtype).eps, atol=0)
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0]).to(place.device, place.dtype)
    torch.testing.assert_close(relu2(x), F.relu(x).square(), rtol=0, atol=0, equal_nan=True)


def test_clamps_let_gradients_pass_at_the_limit_and_not_beyond(fp32):
    gate = torch.tensor([[1.0, 1.5, -9.0]], device=fp32.device, requires_grad=True)
    up = torch.tensor([[-1.0, 2.0, 1.0]], device=fp32.device, requires_grad=True)
    clamped_swiglu(gate, up, limit=1.0).sum().backward()
    assert (gate.grad != 0).tolist() == [[True, False, True]]
    assert (up.grad != 0).tolist() == [[True, False, True]]
    nan = torch.tensor([[1.0, torch.nan]], device=fp32.device)
    assert clamped_swiglu(torch.ones_like(nan), nan, limit=1.0).isnan().tolist() == [[False, True]]


def test_clamped_swiglu_is_the_gate_of_gpt_oss(fp32):
    packed = normal(4, 32, seed=2, like=fp32) * 10
    holder = type("Holder", (), {"limit": 7.0, "alpha": 1.702})()
    want = GptOssExperts._apply_gate(holder, packed)
    torch.testing.assert_close(clamped_swiglu(packed, limit=7.0, alpha=1.702, shift=1.0, interleaved=True), want)


def test_a_gate_wider_than_up(fp32):
    case = CASES["gated_linear, silu"]
    tensors = case.inputs(fp32)
    tensors["up"] = tensors["up"].half()
    check(case.function, case.reference, tensors, None, leaves=case.leaves, **case.options)
    with pytest.raises(RuntimeError, match="dtype"):  # as by F.linear
        gated_linear(**tensors | {"weight": tensors["weight"].half()})


def test_autocast_leaves_shared_weights_their_graph(fp32):
    """Autocast casts a weight once and hands the copy to every layer: one made where no graph is recorded has none."""
    tensors = CASES["gated_linear, silu"].inputs(fp32)
    weight, bias = (tensors[k].requires_grad_() for k in ("weight", "bias"))
    with torch.autocast(fp32.device, torch.float16):
        gated_linear(**tensors)
        out = F.linear(tensors["up"], weight, bias)
    out.sum().backward()
    assert weight.grad is not None and bias.grad is not None


def test_bias_gradients_under_autocast_are_not_rounded(triton_fp32):
    """A sum of fp16 numbers, in fp32."""
    case = CASES["gated_linear, silu"]
    tensors = case.inputs(triton_fp32)
    how = {"leaves": ("bias",), "rounded": torch.float16}
    got = evaluate(under_autocast(case.function, torch.float16), tensors, None, **how)
    expected = evaluate(case.reference, tensors, None, **how)
    torch.testing.assert_close(got["d_bias"], expected["d_bias"])


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["bias", "gelu"])
def test_gated_mlp_is_bit_for_bit_linears_and_gated_linear(triton_fp32, form, dtype):
    case = CASES[f"gated_mlp, {form}"]

    def apart(x, activation="silu", **tensors):
        names = [name for name in ("gate", "up") if name in tensors]
        gate, *up = linears(x, [tensors[n] for n in names], [tensors[f"{n}_bias"] for n in names])
        down, bias = tensors["down"], tensors["down_bias"]
        return gated_linear(gate, up[0] if up else None, down, bias, activation=activation)

    tensors = case.inputs(triton_fp32)
    run = (lambda op: lambda **t: under_autocast(op, dtype)(**t)) if dtype else (lambda op: op)
    got, want = (
        evaluate(run(lambda op=op, **t: op(**t, **case.options)), tensors, None, leaves=case.leaves)
        for op in (case.function, apart)
    )
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_gradients_of_linears_are_added_by_the_products():
    tensors = {name: x.requires_grad_() for name, x in CASES["linears, a bias"].inputs().items()}
    outputs = CASES["linears"].function(**tensors)
    with torch.profiler.profile() as profile:
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    names = [event.key for event in profile.key_averages()]
    assert "aten::addmm_" in names and "aten::add" not in names and "aten::add_" not in names


@pytest.mark.gpu
def test_gated_linear_keeps_nothing_but_its_output_on_gpu():
    """And its backward allocates one buffer of h's size next to the gradients."""
    on_gpu: Any = Place("triton", "cuda", torch.bfloat16)
    tensors = CASES["gated_linear"].inputs(on_gpu, rows=2048, hidden=4096, inner=512)
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


def test_gated_mlp_takes_no_biases_at_all(fp32):
    tensors = CASES["gated_mlp"].inputs(fp32)
    weights = [tensors[name] for name in ("gate", "up", "down")]
    assert torch.equal(gated_mlp(tensors["x"], weights), gated_mlp(tensors["x"], weights, [None] * 3))
