"""lora_linear: the numbers of PEFT's formula, what it saves, and the precision of adapters wider than the base."""

import functools

import pytest
import torch
from elementwise_checks import check_op, outputs_and_grads
from gated_checks import LAYOUTS, normal
from kernel_checks import PATHS, TRITON_DEVICE, assert_within_plain_error, under_autocast
from lora_checks import adapters_of, leaves_of, linear, projection
from torch.utils._python_dispatch import TorchDispatchMode

from liger_trainer.kernels import _low_rank
from liger_trainer.kernels._low_rank import Numerics, split
from liger_trainer.kernels.lora_linear import lora_linear, lora_linear_reference

check = functools.partial(check_op, linear(lora_linear), linear(lora_linear_reference))
on_triton = pytest.mark.skipif("triton" not in PATHS, reason="Triton is not here, or cannot run on a CPU")


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


def inputs(*shape: int, like: dict, rows: int = 11, ranks=(4,), **options) -> dict:
    return {"x": normal(*shape, like=like, seed=9)} | projection(rows, shape[-1], ranks, like, **options)


@pytest.mark.parametrize("ranks", [(4,), (1,), (3, 5), (2, 2, 1), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_adapters(place, ranks, bias):
    """None, one, and several of different rank and scale."""
    tensors = inputs(5, 37, like=like(place), ranks=ranks, bias=bias)
    check(tensors, leaves_of(tensors))


@pytest.mark.parametrize("shape", [(1, 33), (19,), (2, 3, 16), (2, 2, 3, 18), (0, 16), (2, 0, 16)], ids=str)
def test_shapes(fp32, shape):
    tensors = inputs(*shape, like=like(fp32))
    check(tensors, leaves_of(tensors))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fp32, layout):
    x = LAYOUTS[layout](0, like(fp32))
    tensors = {"x": x} | projection(11, x.shape[-1], (4,), like(fp32))
    for name in ("weight", "a0", "b0"):
        tensors[name] = tensors[name].t().contiguous().t()  # pyright: ignore[reportOptionalMemberAccess]
    check(tensors, leaves_of(tensors))


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_gradient_of_any_layout(fp32, layout):
    tensors = inputs(6, 20, like=like(fp32))
    leaves = [tensors[name].requires_grad_() for name in leaves_of(tensors)]
    dy = normal(1, like=like(fp32)).expand(6, 11) if layout == "expanded" else normal(11, 6, like=like(fp32)).t()
    got, want = (torch.autograd.grad(linear(lora_linear)(**tensors), leaves, g) for g in (dy, dy.contiguous()))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("leaves", [["x"], ["a0"], ["b1"], ["x", "b0"], ["a0", "a1"], ["x", "a1", "b1"]], ids="-".join)
def test_frozen(fp32, leaves):
    check(inputs(5, 37, like=like(fp32), ranks=(3, 2)), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [(4,), (3, 5)], ids=str)
def test_adapters_wider_than_the_base(dtype, ranks):
    """PEFT's default: fp32 adapters over a half-precision base. Their gradients have fp32's precision."""
    tensors = inputs(6, 37, like={"dtype": dtype, "device": TRITON_DEVICE}, ranks=ranks, adapters=torch.float32)
    got = check(tensors, leaves_of(tensors))
    assert got["out0"].dtype == dtype and got["d_a0"].dtype == got["d_b0"].dtype == torch.float32


@pytest.mark.parametrize("ranks", [(4,), (1,), (3, 5)], ids=str)
def test_fp32_factors_as_sums_of_bf16_matrices(wide_results, ranks):
    """The same precision from bf16 products: `check` allows the gradients of fp32 tensors errors of fp32."""
    tensors = inputs(
        6, 37, like={"dtype": torch.bfloat16, "device": TRITON_DEVICE}, ranks=ranks, adapters=torch.float32
    )
    adapters = adapters_of(tensors)
    assert Numerics.of(tensors["x"], adapters).split
    got = check(tensors, leaves_of(tensors))
    assert got["d_a0"].dtype == got["d_b0"].dtype == torch.float32


def test_a_term_of_split_factors_is_rounded_once(wide_results):
    """Added to zero, what reaches y and dx is the product in fp64, rounded to bf16."""
    numerics = Numerics(torch.bfloat16, torch.float32, split=True)
    m = normal(40, 37, like={"dtype": torch.bfloat16, "device": TRITON_DEVICE})
    a, b = (normal(37, 6, like={"device": TRITON_DEVICE}), normal(6, 50, like={"device": TRITON_DEVICE}, seed=1))
    values = m.new_empty(40, 4, 6)
    _low_rank.multiply(m, a, values, 0.7, numerics)
    y = m.new_zeros(40, 50)
    _low_rank.add(y, values, b, numerics)
    truth = 0.7 * (m.double() @ a.double()) @ b.double()
    torch.testing.assert_close(y.double(), truth, rtol=2**-7.99, atol=1e-3)


def test_adapters_narrower_than_the_base(fp32):
    tensors = inputs(6, 37, like=like(fp32), adapters=torch.bfloat16)
    got = check(tensors, leaves_of(tensors))
    assert got["out0"].dtype == torch.float32 and got["d_a0"].dtype == torch.bfloat16


@on_triton
@pytest.mark.parametrize("form", ["hml", "hmlh", "hhhm"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rows, width", [(1, 700), (37, 5), (600, 3), (0, 4)], ids=str)
def test_split(monkeypatch, form, count, rows, width):
    """Three matrices in half precision, at any stride, that sum up to what was split."""
    monkeypatch.setattr(_low_rank, "BLOCK", 64)
    dtype = torch.bfloat16 if TRITON_DEVICE == "cuda" else torch.float16  # which the interpreter has
    parts = normal(rows, count, width, like={"device": TRITON_DEVICE})
    out = parts.new_empty(rows, len(form), width + 2, dtype=dtype)[..., 1:-1]
    assert split(parts, form, out, 0.7) is out
    value = (parts.double().sum(1) * 0.7).float()
    for piece in "hml":
        for slot in (i for i, name in enumerate(form) if name == piece):
            torch.testing.assert_close(out[:, slot], value.to(dtype), rtol=1e-2, atol=1e-6)
        value = value - out[:, form.index(piece)].float() if piece in form else value
    assert form == "hhhm" or value.numel() == 0 or value.abs().max() < 2e-6


@pytest.mark.parametrize("inside", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(fp32, inside, base):
    """fp32 adapters; x as an earlier layer left it, the base in fp32 or cast. Gradients are taken outside."""
    tensors = inputs(5, 37, like={**like(fp32), "dtype": base}, adapters=torch.float32)
    tensors["x"] = tensors["x"].to(inside)
    leaves = leaves_of(tensors)
    double = {k: x if x is None else x.double() for k, x in tensors.items()}
    op, reference = (under_autocast(linear(f), torch.bfloat16) for f in (lora_linear, lora_linear_reference))
    got, plain = (outputs_and_grads(f, tensors, leaves, torch.bfloat16) for f in (op, reference))
    truth = outputs_and_grads(linear(lora_linear_reference), double, leaves, torch.bfloat16)
    assert got["out0"].dtype == torch.bfloat16 and got["d_a0"].dtype == torch.float32
    for name in truth:
        assert got[name].dtype == plain[name].dtype
        assert_within_plain_error(name, got[name].bfloat16(), plain[name].bfloat16(), truth[name], torch.bfloat16)


def test_gradients_under_autocast_are_not_rounded(wide_results):
    """On CUDA: fp32 gradients of fp32 adapters, from products of bf16 matrices, without a cast behind them."""
    tensors = inputs(
        5, 37, like={"device": TRITON_DEVICE, "dtype": torch.bfloat16}, adapters=torch.float32, ranks=(4, 2)
    )
    got = outputs_and_grads(under_autocast(linear(lora_linear), torch.bfloat16), tensors, ["a1", "b1"], torch.bfloat16)
    double = {k: x if x is None else x.double() for k, x in tensors.items()}
    truth = outputs_and_grads(linear(lora_linear_reference), double, ["a1", "b1"], torch.bfloat16)
    for name in ("d_a1", "d_b1"):
        assert got[name].dtype == torch.float32 and (got[name] != got[name].bfloat16()).any()
        torch.testing.assert_close(got[name].double(), truth[name], rtol=0.05, atol=0.1)


def saved_by(function) -> list[torch.Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        function()
    return saved


def test_saves_x_itself_and_matrices_of_the_rank(fp32):
    """x is shared with the other layers that read it; neither y nor the adapter's part of it is kept. A is stacked."""
    tensors = inputs(5, 37, like=like(fp32), ranks=(4, 2))
    for name in leaves_of(tensors):
        tensors[name].requires_grad_()
    given = {x.data_ptr() for x in tensors.values()}
    new = [x for x in saved_by(lambda: linear(lora_linear)(**tensors)) if x.data_ptr() not in given]
    assert [tuple(x.shape) for x in new] == [(5, 1, 6), (6, 37)]


def test_a_single_adapter_is_not_copied(fp32):
    tensors = inputs(5, 37, like=like(fp32))
    for name in leaves_of(tensors):
        tensors[name].requires_grad_()
    given = {x.data_ptr() for x in tensors.values()}
    saved = saved_by(lambda: linear(lora_linear)(**tensors))
    assert [tuple(x.shape) for x in saved if x.data_ptr() not in given] == [(5, 1, 4)]


def test_adapters_are_cast_once(fp32):
    """Under autocast, to one dtype by one operation, in the forward; the backward casts none."""
    tensors = inputs(5, 37, like=like(fp32), ranks=(4, 2))
    for name in leaves_of(tensors):
        tensors[name].requires_grad_()
    with Operations() as operations, torch.autocast(fp32.device, torch.bfloat16):
        y = linear(lora_linear)(**tensors)
    assert operations.seen.count("aten::_foreach_copy_") == 1
    assert operations.casts == 3  # of x, weight and bias
    with Operations() as operations:
        y.sum().backward()
    assert "aten::_foreach_copy_" not in operations.seen


class Operations(TorchDispatchMode):
    """Notes which operations run, and how many of them change a dtype."""

    def __init__(self):
        super().__init__()
        self.seen, self.casts = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function._schema.name)
        self.casts += function._schema.name == "aten::_to_copy"
        return function(*args, **(kwargs or {}))


def test_a_packed_weight_is_unpacked_twice_and_never_saved(fp32):
    tensors = inputs(5, 37, like=like(fp32))
    tensors["x"].requires_grad_()
    packed, calls = (tensors["weight"] * 2).t().contiguous(), []

    def unpack(weight):
        calls.append(weight)
        return weight.t() / 2

    adapters = adapters_of(tensors)
    want = lora_linear(tensors["x"], tensors["weight"], tensors["bias"], adapters)
    saved = saved_by(lambda: calls.append(lora_linear(tensors["x"], packed, tensors["bias"], adapters, unpack=unpack)))
    got = calls.pop()
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(y, tensors["x"], dy) for y in (got, want)))
    assert [x is packed for x in calls] == [True, True]
    assert [x.data_ptr() for x in saved if x.numel() >= packed.numel()] == [packed.data_ptr()]


def test_compiles_whole(fp32):
    tensors = inputs(5, 37, like=like(fp32))
    compiled = torch.compile(linear(lora_linear), fullgraph=True, backend="aot_eager")
    check_op(compiled, linear(lora_linear_reference), tensors, leaves_of(tensors))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"weight": (3, 7)}, r"weight must be \(O, K\) with K = 6, .* \(3, 7\)"),
        ({"weight": (6,)}, r"weight must be \(O, K\) with K = 6, .* \(6,\)"),
        ({"a0": (2, 5)}, r"a \(r, 6\) and b \(3, r\): a is \(2, 5\), b is \(3, 2\)"),
        ({"b0": (3, 1)}, r"a \(r, 6\) and b \(3, r\): a is \(2, 6\), b is \(3, 1\)"),
        ({"b0": (4, 2)}, r"a \(r, 6\) and b \(3, r\): a is \(2, 6\), b is \(4, 2\)"),
        ({"bias": (6,)}, r"one per row, \(3,\): it is \(6,\)"),
    ],
)
def test_shape_errors(wrong, message):
    shapes = {"x": (4, 6), "weight": (3, 6), "bias": (3,), "a0": (2, 6), "b0": (3, 2)} | wrong
    with pytest.raises(ValueError, match=message):
        linear(lora_linear)(**{name: normal(*shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_trained_base_is_refused(name):
    tensors = inputs(5, 37, like={})
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match="no gradient of weight and its bias: freeze them"):
        linear(lora_linear)(**tensors)
