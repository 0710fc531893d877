"""What is of the ops with adapters: precision of wider adapters, casts, shared products, packed weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import TRITON_DEVICE, Place, check, compare, double, evaluate, normal, under_autocast
from op_table import CASES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_trainer.extras.selfcheck_cases import layer
from liger_trainer.kernels import _low_rank
from liger_trainer.kernels._low_rank import Numerics, split
from liger_trainer.kernels.lora_experts import StackedProjection, lora_experts
from liger_trainer.kernels.lora_linear import lora_linear
from liger_trainer.kernels.types import Gate

LINEAR, LINEARS, MLP, EXPERTS = (CASES[name] for name in ("lora_linear", "lora_linears", "lora_mlp", "lora_experts"))


def adapters_in(dtype: torch.dtype, base: torch.dtype, form: str = "", **sizes: int) -> tuple[Any, dict[str, Any]]:
    """A case of lora_linear, and its inputs in `base` with adapters in another dtype."""
    case = CASES[f"lora_linear, {form}" if form else "lora_linear"]
    tensors = case.inputs(Place("", TRITON_DEVICE, base), **sizes)
    return case, {k: x.to(dtype) if x is not None and k[0] in "ab" and k != "bias" else x for k, x in tensors.items()}


class Operations(TorchDispatchMode):
    """Notes which operations run, the shapes that products read, and how many operations change a dtype."""

    def __init__(self):
        super().__init__()
        self.seen, self.read, self.casts = [], [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        self.seen.append(name)
        self.casts += name == "aten::_to_copy"
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.read += [tuple(x.shape) for x in args[-2:]]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["", "rank 1", "two adapters"])
def test_fp32_factors_as_sums_of_bf16_matrices(wide_results, form):
    """The same precision from bf16 products: `check` allows the gradients of fp32 tensors errors of fp32."""
    case, tensors = adapters_in(torch.float32, torch.bfloat16, form)
    assert Numerics.of(tensors["x"], layer(tensors).adapters).split
    got = check(case.function, case.reference, tensors, None, leaves=case.leaves_of(tensors))
    assert got["d_a0"].dtype == got["d_b0"].dtype == torch.float32


def test_a_term_of_split_factors_is_rounded_once(wide_results):
    """Added to zero, what reaches y and dx is the product in fp64, rounded to bf16."""
    numerics = Numerics(torch.bfloat16, torch.float32, split=True)
    m = normal(40, 37, spread=2.0).to(TRITON_DEVICE, torch.bfloat16)
    a, b = (normal(*shape, seed=i, spread=2.0).to(TRITON_DEVICE) for i, shape in enumerate(((37, 6), (6, 50))))
    values = m.new_empty(40, 4, 6)
    _low_rank.multiply(m, a, values, 0.7, numerics)
    y = m.new_zeros(40, 50)
    _low_rank.add(y, values, b, numerics)
    truth = 0.7 * (m.double() @ a.double()) @ b.double()
    torch.testing.assert_close(y.double(), truth, rtol=2**-7.99, atol=1e-3)


@pytest.mark.parametrize("form", ["hml", "hmlh", "hhhm"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rows, width", [(1, 700), (37, 5), (600, 3), (0, 4)], ids=str)
def test_split(triton_fp32, form, count, rows, width):
    """Three matrices in half precision, at any stride, that sum up to what was split."""
    dtype = torch.bfloat16 if triton_fp32.device == "cuda" else torch.float16  # which the interpreter has
    parts = normal(rows, count, width, spread=2.0, like=triton_fp32)
    out = parts.new_empty(rows, len(form), width + 2, dtype=dtype)[..., 1:-1]
    assert split(parts, form, out, 0.7) is out
    value = (parts.double().sum(1) * 0.7).float()
    for piece in "hml":
        for slot in (i for i, name in enumerate(form) if name == piece):
            torch.testing.assert_close(out[:, slot], value.to(dtype), rtol=1e-2, atol=1e-6)
        value = value - out[:, form.index(piece)].float() if piece in form else value
    assert form == "hhhm" or value.numel() == 0 or value.abs().max() < 2e-6


def test_adapters_narrower_than_the_base(fp32):
    case, tensors = adapters_in(torch.bfloat16, torch.float32)
    got = check(case.function, case.reference, tensors, None, leaves=case.leaves_of(tensors))
    assert got["out0"].dtype == torch.float32 and got["d_a0"].dtype == torch.bfloat16


def test_autocast_over_a_base_in_half_precision(fp32):
    """fp32 adapters, the base cast; gradients are taken outside."""
    case, tensors = adapters_in(torch.float32, torch.bfloat16)
    how = {"upstream": None, "leaves": case.leaves_of(tensors), "rounded": torch.bfloat16}
    op, reference = (under_autocast(f, torch.bfloat16) for f in (case.function, case.reference))
    got, plain = (evaluate(f, tensors, **how) for f in (op, reference))
    truth = evaluate(case.reference, double(tensors), **how)
    assert got["out0"].dtype == torch.bfloat16 and got["d_a0"].dtype == torch.float32
    narrow = [{k: x.bfloat16() for k, x in each.items()} for each in (got, plain)]
    compare(*narrow, truth, {k: x.bfloat16() for k, x in tensors.items()}, torch.bfloat16)


def test_gradients_under_autocast_are_not_rounded(wide_results):
    """On CUDA: fp32 gradients of fp32 adapters, from products of bf16 matrices, without a cast behind them."""
    case, tensors = adapters_in(torch.float32, torch.bfloat16, "two adapters")
    how = {"upstream": None, "leaves": ("a1", "b1"), "rounded": torch.bfloat16}
    got = evaluate(under_autocast(case.function, torch.bfloat16), tensors, **how)
    truth = evaluate(case.reference, double(tensors), **how)
    for name in ("d_a1", "d_b1"):
        assert got[name].dtype == torch.float32 and (got[name] != got[name].bfloat16()).any()
        torch.testing.assert_close(got[name].double(), truth[name], rtol=0.05, atol=0.1)


def test_adapters_are_cast_by_one_operation_in_each_pass(fp32):
    """Under autocast. Between the passes they are kept as they are."""
    case = CASES["lora_linear, two adapters"]
    tensors, kept = case.inputs(fp32), []
    leaves = [tensors[name].requires_grad_() for name in case.leaves_of(tensors) if name != "x"]
    with (
        Operations() as operations, torch.autocast(fp32.device, torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x),
    ):  # fmt: skip
        y = case.function(**tensors)
    assert operations.seen.count("aten::_foreach_copy_") == 1
    assert operations.casts == 2  # of x and weight
    shapes = {leaf.shape for leaf in leaves}
    addresses = {leaf.data_ptr() for leaf in leaves}
    assert {x.data_ptr() for x in kept if x.shape in shapes} == addresses
    with Operations() as operations:
        y.sum().backward()
    assert operations.seen.count("aten::_foreach_copy_") == 1


OF_LAYERS = [name for name in CASES if name.startswith(("lora_linear", "lora_mlp"))]


@pytest.mark.parametrize("name", OF_LAYERS)
def test_terms_that_are_written_before_the_base_products(place, monkeypatch, name):
    """As for results that are larger than a cache: every output and gradient against fp64."""
    case = CASES[name]
    monkeypatch.setattr(_low_rank, "TERM_FIRST", 0)
    tensors = case.inputs(place)
    check(case.function, case.reference, tensors, None, leaves=case.leaves_of(tensors), **case.options)


def test_a_term_that_comes_first_is_not_added_later(fp32, monkeypatch):
    """Of two adapters the second is, and of a layer with a bias both, to y; to dx nothing."""
    added, add = [], _low_rank.add
    monkeypatch.setattr(_low_rank, "add", lambda y, *rest: (added.append(tuple(y.shape)), add(y, *rest))[1])
    for form, rows, expected in (("", 0, 0), ("two adapters", 0, 1), ("bias", 0, 1), ("", 10**9, 2)):
        monkeypatch.setattr(_low_rank, "TERM_FIRST", rows)
        case = CASES[f"lora_linear, {form}" if form else "lora_linear"]
        tensors, _ = case.inputs(fp32), added.clear()
        evaluate(case.function, tensors, None, leaves=case.leaves_of(tensors), **case.options)
        assert len(added) == expected, form


def test_layers_of_one_input_share_its_products(fp32):
    """One product for all A; x is read once for the three dA."""
    tensors = LINEARS.inputs(fp32)
    tensors |= {name: tensors[name][:13].clone() for name in ("q_weight", "q_b0")}  # no gradient has the shape of x
    for name in LINEARS.leaves_of(tensors):
        tensors[name].requires_grad_()
    with Operations() as operations:
        outputs = LINEARS.function(**tensors)
    assert operations.read.count((24, 9)) == 1 and operations.read.count((7, 24)) == 1 + 3
    assert len({y.grad_fn.next_functions for y in outputs}) == 1
    with Operations() as operations:
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert operations.read.count((7, 24)) == 1


def test_a_packed_weight_is_unpacked_twice_and_never_saved(fp32):
    tensors = LINEAR.inputs(fp32)
    x, weight = tensors["x"].requires_grad_(), tensors["weight"]
    packed, calls, saved = (weight * 2).t().contiguous(), [], []

    def unpack(weight):
        calls.append(weight)
        return weight.t() / 2

    adapters = layer(tensors).adapters
    want = lora_linear(x, weight, None, adapters)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        got = lora_linear(x, packed, None, adapters, unpack=unpack)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy) for y in (got, want)))
    assert [x is packed for x in calls] == [True, True]
    assert [x.data_ptr() for x in saved if x.numel() >= packed.numel()] == [packed.data_ptr()]


@pytest.mark.parametrize("form", ["remade", "remade, packed"])
@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["no dropout", "dropout"])
def test_a_remade_mlp_is_bit_for_bit_the_same(triton_fp32, form, dropout):
    case = CASES[f"lora_mlp, {form}"]
    tensors = case.inputs(triton_fp32)

    def run(remake: bool) -> dict[str, Tensor]:
        from liger_trainer.kernels.lora_mlp import lora_mlp

        def dropping(x, **given):
            parts = [layer(given, n) if f"{n}_weight" in given else None for n in ("gate", "up", "down")]
            parts = [p and replace(p, adapters=tuple(a._replace(dropout=dropout) for a in p.adapters)) for p in parts]
            return lora_mlp(x, *parts, remake=remake)

        torch.manual_seed(0)
        return evaluate(dropping, tensors, None, leaves=case.leaves_of(tensors))

    got, want = run(True), run(False)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_weight_of_experts_that_is_unpacked_is_unpacked_for_each_pass(triton_fp32):
    tensors, calls = EXPERTS.inputs(triton_fp32), []

    def unpacked(name: str) -> Callable[[], Tensor]:
        return lambda: (calls.append(name), tensors[f"{name}_weight"])[1]

    layers = [StackedProjection(unpacked(n), None, tensors[f"{n}_a"], tensors[f"{n}_b"]) for n in ("up", "down")]
    y = lora_experts(tensors["x"].requires_grad_(), tensors["index"], tensors["weights"], *layers)
    assert calls == ["up", "down"]
    y.sum().backward()
    assert calls == ["up", "down", "down", "up"]
    torch.testing.assert_close(y, EXPERTS.reference(**tensors, gate=Gate()))


def test_a_choice_of_no_expert_adds_nothing(fp32):
    """As in transformers, where experts on other ranks are such."""
    tensors = CASES["lora_experts, bias"].inputs(fp32)
    tensors["index"][::3, 1] = 5
    got = check(EXPERTS.function, EXPERTS.reference, tensors, None, leaves=EXPERTS.leaves_of(tensors), gate=Gate())
    assert not got["d_weights"][::3, 1].any()
    first = {name: tensors[name][::3, :1] for name in ("index", "weights")}
    expected = EXPERTS.function(**tensors | first | {"x": tensors["x"][::3]}, gate=Gate())
    torch.testing.assert_close(got["out0"][::3], expected)


TRAINED = {"lora_linear": "weight", "lora_linears": "q_weight", "lora_mlp": "up_weight", "lora_experts": "up_weight"}


@pytest.mark.parametrize("op", TRAINED)
def test_a_trained_base_is_refused(op):
    tensors = CASES[op].inputs()
    tensors[TRAINED[op]].requires_grad_()
    with pytest.raises(ValueError, match="freeze them|no gradient of (weight 0|up and its bias)"):
        CASES[op].function(**tensors)


def test_an_mlp_writes_gradients_over_what_it_kept(triton_fp32):
    """Those of gate and up, where the graph ends with this backward, so that it takes no memory for them."""
    tensors, kept = MLP.inputs(triton_fp32), []
    leaves = [tensors[name].requires_grad_() for name in MLP.leaves_of(tensors)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        y = MLP.function(**tensors)
    gate, up = (x for x in kept if x.shape == (7, 21))
    before = gate.clone(), up.clone()
    torch.autograd.grad(y, leaves, torch.randn_like(y), retain_graph=True)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
