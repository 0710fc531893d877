"""What all ops of the layers and of given distributions promise, each in every form of tests/support/op_table.py.

Uninitialised memory is NaN here, and launch constants are so small that inputs take several blocks (conftest.py).
"""

import ast
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import (
    PATHS,
    Place,
    assert_same,
    assert_within_plain_error,
    check,
    compare,
    double,
    evaluate,
    fields,
    set_path,
    under_autocast,
)
from op_table import CASES, Case
from small_blocks import FOLDER
from torch import Tensor

from liger_trainer.kernels.weight_gradients import place_gradient, put_in_places, weight_gradient

BASE = {name: case for name, case in CASES.items() if name == case.op}  # one for each op
# One for each way through the kernels: of the unfused divergences, one whose entries are independent and one by rows.
WAYS = {name: case for name, case in CASES.items() if not case.op.startswith(("kl_div", "jsd", "tvd"))}
WAYS |= {name: CASES[name] for name in ("jsd", "jsd, none", "jsd, logits", "jsd, logits, none")}
MANY = {name: case for name, case in WAYS.items() if case.form in ("", "packed", "gate first", "logits", "none",
        "logits, none", "inplace", "inplace, none", "no weight", "OLMo2", "bias", "two adapters", "several ranks",
        "remade")}  # fmt: skip
LEADING = {name: case for name, case in MANY.items() if case.leading}


def of(cases: dict[str, Case]):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def check_case(case: Case, tensors: dict[str, Any], leaves=None, op: Callable | None = None, **options) -> dict:
    leaves = case.leaves_of(tensors) if leaves is None else leaves
    return check(op or case.function, case.reference, tensors, None, leaves=leaves, **case.options | options)


def run(case: Case, tensors: dict[str, Any], leaves=None, op: Callable | None = None) -> dict[str, Tensor]:
    leaves = case.leaves_of(tensors) if leaves is None else leaves
    return evaluate(op or case.function, tensors, None, leaves=leaves, **case.options)


def trained(case: Case, tensors: dict[str, Any]) -> list[Tensor]:
    """The outputs with a gradient."""
    return [y for y in fields(case.function(**tensors, **case.options)).values() if y.requires_grad]


def require_gradients(case: Case, tensors: dict[str, Any]) -> list[Tensor]:
    return [tensors[name].requires_grad_() for name in case.leaves_of(tensors)]


@of(CASES)
def test_outputs_and_gradients_are_within_the_bound(place, case):
    got = check_case(case, case.inputs(place))
    keep = case.inputs(place).get("labels")
    if keep is not None:
        assert not any(x[keep == -100].any() for name, x in got.items() if x.dim() and name != "loss")


@of(BASE)
def test_launch_constants_as_shipped(case, monkeypatch):
    device = set_path(monkeypatch, "triton" if "triton" in PATHS else "torch", shipped=True)
    for columns in (5, 700):
        sizes = {"rows": 3, "hidden": columns, "vocab": 8 * columns} if case.leading else {}
        check_case(case, case.inputs(Place("", device, torch.float32), **sizes))


@of(BASE)
def test_the_bound_sees_an_error_of_one_percent(case):
    """In each output and in each gradient."""
    tensors = case.inputs()
    got = run(case, tensors)
    plain, truth = (
        evaluate(case.reference, x, None, leaves=case.leaves_of(x), rounded=torch.float32, **case.options)
        for x in (tensors, double(tensors))
    )
    for name in (name for name, x in got.items() if x.dtype != torch.bool):
        with pytest.raises(AssertionError, match=f"{name}: "):
            compare(got | {name: got[name] * 1.01}, plain, truth, tensors, torch.float32)


@of(MANY)
def test_each_gradient_by_itself(fp32, case):
    """The gradient of a frozen input is not returned, and the others are as if it were trained."""
    tensors = case.inputs(fp32)
    every = run(case, tensors)
    for name in case.leaves_of(tensors):
        got = run(case, tensors, [name])
        assert {k for k in got if k[:2] == "d_"} == {f"d_{name}"}
        torch.testing.assert_close(got[f"d_{name}"], every[f"d_{name}"], rtol=1e-5, atol=1e-5)


@of(MANY)
def test_without_gradients_the_values_are_the_same(fp32, case):
    tensors = case.inputs(fp32)
    expected = run(case, tensors)
    assert_same(expected, fields(case.function(**tensors, **case.options)), rtol=1e-6, atol=1e-6)  # no leaf at all
    require_gradients(case, tensors)
    with torch.no_grad():
        got = fields(case.function(**tensors, **case.options))
    assert_same(expected, got, rtol=1e-6, atol=1e-6)
    assert not any(x.requires_grad for x in got.values())


@of({name: BASE[name] for name in ("add_rms_norm", "rope", "qk_norm_rope", "linears", "lora_linears")})
def test_only_one_output_is_used(fp32, case):
    """What an unused output would add to the gradients is left out, whether as zeros or as None."""
    tensors = case.inputs(fp32)
    for used in range(3 if case.op == "lora_linears" else 2):

        def one(op, used=used):
            return lambda **given: op(**given)[used] * 1

        outputs, leaves = [], require_gradients(case, tensors)
        for op in (case.function, case.reference):
            y = one(op)(**tensors, **case.options)
            outputs.append(
                torch.autograd.grad(y, leaves, torch.ones_like(y), materialize_grads=True, allow_unused=True)
            )
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "one row": lambda x: x[:1], "a vector": lambda x: x[0], "no rows": lambda x: x[:0],
    "three dimensions": lambda x: x[:6].unflatten(0, (2, 3)), "no rows of two": lambda x: x[:0][None].expand(2, -1, -1),
    "four dimensions": lambda x: x[:6].view(1, 3, 2, -1),
}  # fmt: skip


@of(LEADING)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_leading_dimensions(fp32, case, shape):
    if shape == "a vector" and case.op in ("jsd", "clamped_swiglu"):
        pytest.skip("needs rows")
    tensors = case.inputs(fp32, rows=7)
    shaped = {k: SHAPES[shape](x) for k, x in tensors.items() if k in case.rows and x is not None}
    got = check_case(case, tensors | shaped)
    if shape.startswith("no rows"):
        assert not any(got[f"d_{name}"].any() for name in tensors if f"d_{name}" in got)


@of({name: case for name, case in BASE.items() if not case.leading and "attention" not in case.op})
def test_an_empty_batch(fp32, case):
    tensors = case.inputs(fp32)
    got = check_case(case, tensors | {k: tensors[k][:0] for k in case.rows})
    assert not any(x.any() for x in got.values())


# The same values in other places: columns of a wider tensor, rows of a longer one, columns apart, first by columns.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns of a wider tensor": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "by columns": lambda x: x.mT.contiguous().mT,
    "by the second dimension": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one row expanded": lambda x: x[:1].expand_as(x),
}


@of(MANY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(fp32, case, layout):
    """Of all inputs at once, and of the first one only, so that one's strides cannot serve another."""
    tensors, change = case.inputs(fp32, **{"rows": 7} if case.leading else {}), LAYOUTS[layout]
    if case.leading and layout != "one row expanded":  # in three dimensions, where no stride leads over all rows
        tensors |= {k: x[:6].unflatten(0, (2, 3)) for k, x in tensors.items() if k in case.rows and x is not None}
    given = {k: x for k, x in tensors.items() if x is not None and k != "ends"}
    moved = {k: change(x) for k, x in given.items() if x.dim() > 1}
    if layout != "one row expanded":
        check_case(case, tensors | moved | {k: x.repeat_interleave(2)[::2] for k, x in given.items() if x.dim() == 1})
    check_case(case, tensors | {k: moved[k] for k in case.rows[:1]})


@of(MANY)
@pytest.mark.parametrize("layout", ["expanded", "by columns", "columns of a wider tensor"])
def test_gradients_of_any_strides(fp32, case, layout):
    tensors = case.inputs(fp32)
    leaves = require_gradients(case, tensors)
    outputs = trained(case, tensors)
    if not outputs[0].dim():
        pytest.skip("a number")
    if layout == "expanded":
        ups = [torch.full_like(y[..., :1], 1.5).expand_as(y) for y in outputs]
    else:
        ups = [torch.linspace(-1, 2, y.numel()).to(y).view_as(y) for y in outputs]
        ups = [LAYOUTS[layout](up) if up.dim() > 1 else up for up in ups]
    got, expected = (
        torch.autograd.grad(outputs, leaves, each, retain_graph=True) for each in (ups, [u.contiguous() for u in ups])
    )
    torch.testing.assert_close(got, expected)


@of(MANY)
def test_a_graph_runs_again_with_the_same_bits(fp32, case):
    """Twice through one graph, and from the start: no atomics, and nothing that the backward needs is written over."""
    tensors = case.inputs(fp32)
    leaves = require_gradients(case, tensors)
    results = []
    for _ in range(2):
        outputs = trained(case, tensors)
        ups = [torch.linspace(-1, 2, y.numel()).to(y).view_as(y) for y in outputs]
        results += [torch.autograd.grad(outputs, leaves, ups, retain_graph=keep) for keep in (True, False)]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@of(BASE)
def test_second_derivatives_are_refused_where_they_would_be_wrong(fp32, case):
    tensors = case.inputs(fp32)
    leaf, *_ = require_gradients(case, tensors)
    loss = sum(y.square().sum() for y in trained(case, tensors))
    if fp32.path == "torch" and torch.autograd.grad(loss, leaf, retain_graph=True)[0].grad_fn is None:
        try:
            torch.autograd.grad(loss, leaf, create_graph=True)[0].sum().backward()
        except RuntimeError as error:
            assert "no second derivatives" in str(error)
        return
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, leaf, create_graph=True)


def test_every_backward_refuses_them():
    """Tests see the refusal of each op; this one, that no autograd function was forgotten."""
    functions = {
        f"{path.name}: {node.name}": [ast.unparse(x) for part in node.body for x in getattr(part, "decorator_list", ())]
        for path in FOLDER.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases)
    }
    assert len(functions) > 10
    assert not [name for name, decorators in functions.items() if "first_order" not in decorators]


TRACED = ("cross_entropy, inplace", "gated_mlp, packed", "lora_linear, two adapters", "lora_mlp, remade")


@of({name: case for name, case in CASES.items() if name in (*BASE, *TRACED) and "experts" not in case.op})
def test_compiles_into_one_graph(triton_fp32, case):
    torch.compiler.reset()
    compiled = torch.compile(functools.partial(case.function, **case.options), fullgraph=True, backend="aot_eager")
    tensors = case.inputs(triton_fp32)
    got = evaluate(compiled, tensors, None, leaves=case.leaves_of(tensors))
    assert_same(got, run(case, tensors), rtol=1e-5, atol=1e-5)


AUTOCAST = ("gated_linear", "gated_mlp", "activation_linear", "linears", "lora_linear", "lora_linears", "lora_mlp",
            "lora_experts")  # fmt: skip


@of({name: case for name, case in BASE.items() if case.op in AUTOCAST})
def test_a_backward_within_autocast_has_the_gradients_of_one_outside(triton_fp32, case):
    tensors = case.inputs(triton_fp32)
    leaves = require_gradients(case, tensors)
    values = [sum(y.square().sum() for y in trained(case, tensors)) for _ in "12"]
    expected = torch.autograd.grad(values[0], leaves)
    with torch.autocast(triton_fp32.device, torch.bfloat16):
        got = torch.autograd.grad(values[1], leaves)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@of({name: case for name, case in MANY.items() if case.op in AUTOCAST})
@pytest.mark.parametrize("rows", [torch.float32, torch.float16], ids=str)
def test_autocast(fp32, case, rows):
    """fp32 weights, rows as an earlier layer left them; gradients are taken outside. Dtypes are plain torch's."""
    tensors = case.inputs(fp32)
    if case.op != "lora_experts":  # which leaves the dtype of the experts, as transformers' grouped product
        tensors |= {k: tensors[k].to(rows) for k in case.rows if tensors.get(k) is not None}
    how = {"upstream": None, "rounded": torch.float16, "leaves": case.leaves_of(tensors), **case.options}
    narrow = torch.float32 if case.op == "lora_experts" else torch.float16
    got = evaluate(under_autocast(case.function, torch.float16), tensors, **how)
    how.pop("remake", None)
    plain = evaluate(under_autocast(case.reference, torch.float16), tensors, **how)
    truth = evaluate(case.reference, double(tensors), **how)
    for name in truth:
        assert got[name].dtype == plain[name].dtype
        # computed in fp16, whatever dtype it comes back in
        ours, theirs = got[name].to(narrow), plain[name].to(narrow)
        assert_within_plain_error(name, ours, theirs, truth[name], narrow)


@of({name: case for name, case in MANY.items() if case.form in ("", "OLMo2", "no weight") and case.op not in AUTOCAST})
def test_mixed_dtypes(fp32, case):
    """One input wider than the others: each gradient in its own input's dtype, the output as the reference has it."""
    tensors = case.inputs(fp32)
    for wide in case.leaves_of(tensors):
        narrow = {k: x.half() for k, x in tensors.items() if isinstance(x, Tensor) and x.is_floating_point()}
        given = tensors | narrow | {wide: tensors[wide]}
        if case.op == "document_attention":
            with pytest.raises(ValueError, match="must share their dtype"):
                run(case, given)
            continue
        got = check_case(case, given)
        assert got[f"d_{wide}"].dtype == torch.float32


@of({name: case for name, case in MANY.items() if case.op.startswith("lora")})
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adapters_wider_than_the_base(case, dtype):
    """PEFT's default: fp32 adapters over a half-precision base. Their gradients have fp32's precision."""
    tensors = case.inputs()
    leaves = case.leaves_of(tensors)
    narrow = {k: x.to(dtype) for k, x in tensors.items() if isinstance(x, Tensor) and x.is_floating_point()
              and (k not in leaves or k in ("x", "weights"))}  # fmt: skip
    got = check_case(case, tensors | narrow)
    assert got["out0"].dtype == dtype


# What is kept for the backward besides inputs: a few numbers a row, or what the op's file says that it must keep.
KEPT: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(7,)], "add_rms_norm": [(7, 24), (7,)], "layer_norm": [(14,)], "gated_rms_norm": [(7,)],
    "gated_rms_norm, gate first": [(21,)], "rope": [], "qk_norm_rope": [(60,)], "qk_norm_rope, OLMo2": [(20,)],
    "document_attention": [(70, 2, 16), (2, 70), (2, 70)], "causal_conv, silu": [(2, 23)],
    "swiglu": [], "swiglu, packed": [], "geglu": [],
    "relu2": [(7, 24)], "clamped_swiglu": [], "clamped_swiglu, interleaved": [], "gated_linear": [],
    "gated_linear, silu, packed": [], "gated_mlp": [], "gated_mlp, packed": [], "activation_linear": [], "linears": [],
    "lora_linear": [(7, 1, 3)], "lora_linear, two adapters": [(7, 1, 8)],
    "lora_linear, none": [], "lora_linears": [(7, 1, 9)],
    "lora_mlp": [(7, 21), (7, 21), (7, 1, 6), (7, 1, 3)], "lora_mlp, packed": [(7, 42), (7, 1, 4), (7, 1, 3)],
    "lora_mlp, remade": [(7, 1, 3)], "lora_mlp, remade, packed": [(7, 1, 3)],
    "lora_experts": [(24, 32), (24, 3), (24, 3), (24,), (24,), (12, 2), (5,)],
    "kl_div, none": [], "jsd, logits, none": [(5, 4)], "jsd": [(5, 37), (5, 37)],  # whose gradients are made early
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_keeps_its_inputs_and_no_more(triton_fp32, name):
    case, saved = CASES[name], []
    tensors = case.inputs(triton_fp32)
    require_gradients(case, tensors)
    given = {x.data_ptr() for x in tensors.values() if isinstance(x, Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        outputs = trained(case, tensors)
    assert [tuple(x.shape) for x in saved if x.data_ptr() not in given] == KEPT[name]
    for y in outputs:  # nothing besides what autograd counts
        assert not [x for x in vars(y.grad_fn).values() if isinstance(x, Tensor)] or case.op in ("jsd", "lora_experts")


@pytest.mark.parametrize("name", ["gated_linear", "gated_mlp", "activation_linear", "linears"])
def test_under_autocast_no_cast_weight_is_kept(triton_fp32, name):
    """Only rows in autocast's dtype."""
    case, saved = CASES[name], []
    tensors = case.inputs(triton_fp32)
    require_gradients(case, tensors)
    given = {x.data_ptr() for x in tensors.values()}
    with (
        torch.autocast(triton_fp32.device, torch.float16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x),
    ):
        case.function(**tensors, **case.options)
    new = [tuple(x.shape) for x in saved if x.data_ptr() not in given]
    assert new == ([(7, 24)] if case.rows == ("x",) and name != "activation_linear" else [])


@pytest.mark.parametrize("name", ["gated_linear", "gated_mlp", "activation_linear", "linears"])
def test_a_weights_gradient_is_written_to_its_place(triton_fp32, name):
    """With the same bits, and by the first op that reads the weight."""
    case, places = CASES[name], {}
    tensors = case.inputs(triton_fp32)
    require_gradients(case, tensors)
    weights = {key: x for key, x in tensors.items() if x.shape[0] != 7}
    assert weights, list(tensors)
    for key, weight in weights.items():
        places[key] = torch.full_like(weight, torch.nan, requires_grad=False)
        place_gradient(weight, places[key])
    outputs, again = trained(case, tensors), trained(case, tensors)
    gradients = torch.autograd.grad(outputs, list(weights.values()), [torch.ones_like(y) for y in outputs])
    plain = torch.autograd.grad(again, list(weights.values()), [torch.ones_like(y) for y in again])
    for (key, place), gradient, want in zip(places.items(), gradients, plain, strict=True):
        assert gradient.data_ptr() == place.data_ptr() != want.data_ptr(), key
        assert torch.equal(place, want), key


def test_gradients_that_ops_of_torch_made_are_copied_to_their_places():
    made, place = torch.randn(3, 2), torch.zeros(3, 2)
    put_in_places([(made, place), (place, place)])
    assert torch.equal(place, made)
    half = torch.zeros(3, 2, dtype=torch.bfloat16)
    assert weight_gradient(made, torch.randn(3, 4), torch.zeros(2, 4, dtype=half.dtype)).dtype == torch.float32


class Guarded:
    """New memory with sentinels before and behind it, which no kernel may write to."""

    def __init__(self, monkeypatch):
        self.buffers: list[tuple[Tensor, int]] = []
        made = torch.empty

        def empty(*shape, dtype=None, device=None, **how):
            shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            n = torch.Size(shape).numel()
            buffer = made(n + 128, dtype=dtype, device=device).fill_(7)
            self.buffers.append((buffer, n))
            return buffer[64 : 64 + n].fill_(torch.nan if buffer.is_floating_point() else 99).view(shape)

        monkeypatch.setattr(torch, "empty", empty)

        def like(x, *shape, dtype=None, **how):
            return empty(*(shape or x.shape), dtype=dtype or x.dtype, device=x.device)

        monkeypatch.setattr(torch, "empty_like", like)
        monkeypatch.setattr(Tensor, "new_empty", like)

    def untouched(self) -> bool:
        return all((buffer[:64] == 7).all() and (buffer[64 + n :] == 7).all() for buffer, n in self.buffers)


@of({name: case for name, case in MANY.items() if name not in ("linears", "lora_linear, none", "lora_linears, none")})
def test_stays_inside_its_tensors(triton_fp32, case, monkeypatch):
    """What lies around an input is NaN, and what lies around an output is not written to."""
    tensors = case.inputs(triton_fp32)
    expected = run(case, tensors)
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            buffer = torch.full((x.numel() + 256,), torch.nan, dtype=x.dtype, device=x.device)
            tensors[name] = buffer[128 : 128 + x.numel()].view(x.shape).copy_(x)
    guarded = Guarded(monkeypatch)
    got = run(case, tensors)
    monkeypatch.undo()
    assert guarded.buffers and guarded.untouched()
    assert_same(got, expected)
