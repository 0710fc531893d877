import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import check_op, outputs_and_grads
from norm_checks import (
    EMPTY,
    SHAPES,
    STRIDED,
    USES,
    check_stays_inside,
    random_tensors,
    set_small_tiles,
    strided,
)

from liger_trainer.kernels import _norm
from liger_trainer.kernels import layer_norm as module
from liger_trainer.kernels.layer_norm import layer_norm, layer_norm_reference

ALL = ("x", "weight", "bias")


def check(tensors, leaves=ALL, **options):
    return check_op(layer_norm, layer_norm_reference, tensors, leaves, **options)


def inputs(shape, place, **options):
    return random_tensors(shape, place, ALL, **options)


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    """Also on a GPU, where torch's would run on tensors as small as these."""
    monkeypatch.setattr(module, "TORCH_NUMBERS", -1)


@pytest.fixture(params=[False, True], ids=["", "small tiles"])
def tiles(request, monkeypatch):
    if request.param:
        set_small_tiles(monkeypatch, module)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(place, tiles, shape):
    check(inputs(shape, place))


@pytest.mark.parametrize("options", [{}, {"eps": 0.5}], ids=str)
@pytest.mark.parametrize("absent", [(), ("weight",), ("bias",), ("weight", "bias")], ids="no {}".format)
def test_options(place, tiles, options, absent):
    check(inputs((37, 24), place) | dict.fromkeys(absent), **options)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_batch(place, shape):
    got = check(inputs(shape, place))
    assert not got["d_weight"].any() and not got["d_bias"].any()


def test_stays_inside_its_tensors(fp32, tiles, monkeypatch):
    check_stays_inside(monkeypatch, layer_norm, layer_norm_reference, fp32, ALL, module, _norm)


@pytest.mark.parametrize(
    "leaves", [("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "bias"), ("weight", "bias")], ids=" ".join
)
def test_frozen(fp32, tiles, leaves, monkeypatch):
    """The gradient of a frozen input is neither computed nor returned."""
    backward, results = module._backward, []
    monkeypatch.setattr(module, "_backward", lambda *a: results.append(backward(*a)) or results[-1])
    if leaves == ("x",):
        monkeypatch.setattr(module, "sum_programs", None)
    check(inputs((37, 24), fp32), leaves)
    assert all([grad is not None for grad in grads] == [name in leaves for name in ALL] for grads in results)
    assert bool(results) == (fp32.path == "triton")


@pytest.mark.parametrize("how", STRIDED)
def test_strides_of_inputs(fp32, tiles, how):
    tensors = inputs((3, 4, 24), fp32)
    each_other = {name: tensors[name].repeat_interleave(2)[::2] for name in ("weight", "bias")}
    check({"x": strided(tensors["x"], how), **each_other})


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_strides_of_gradients(fp32, tiles, use):
    check_op(
        lambda **tensors: use(layer_norm(**tensors)),
        lambda **tensors: use(layer_norm_reference(**tensors)),
        inputs((3, 4, 24), fp32),
        ALL,
    )


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
def test_weight_of_another_dtype(place, weight_dtype):
    tensors = inputs((37, 24), place, weight_dtype=weight_dtype)
    tensors["bias"] = tensors["bias"].float()  # so that dw and db may differ
    got = check(tensors)
    assert got["out0"].dtype == place.dtype
    assert got["d_weight"].dtype == weight_dtype and got["d_bias"].dtype == torch.float32


def test_is_that_of_torch(place):
    tensors = inputs((37, 24), place)
    expected = F.layer_norm(tensors["x"], (24,), tensors["weight"], tensors["bias"], 1e-5)
    torch.testing.assert_close(layer_norm(**tensors), expected)


def test_rows_far_from_zero(fp32):
    """The variance is taken after the mean is subtracted; E[x^2] - E[x]^2 would leave none of these digits."""
    tensors = inputs((5, 24), fp32)
    check(tensors | {"x": tensors["x"] + 3000})


def test_saves_its_input_and_two_numbers_per_row(fp32):
    if fp32.path == "torch":
        pytest.skip("autograd decides what plain torch saves")
    saved, tensors = [], {k: x.requires_grad_() for k, x in inputs((37, 24), fp32).items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer_norm(**tensors)
    assert sorted(t.numel() for t in saved) == [24, 2 * 37, 37 * 24]
    assert {tensors["x"].data_ptr(), tensors["weight"].data_ptr()} < {t.data_ptr() for t in saved}


def test_what_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(module, "TORCH_NUMBERS", 32)
    x, w = torch.rand(4, 8), torch.rand(8)
    for given in ((x, w, w), (x, w, None), (x.half(), w.half(), w.half())):
        assert module._suits_torch(*given)
        torch.testing.assert_close(F.layer_norm(x.to(given[0].dtype), (8,), *given[1:]), layer_norm_reference(*given))
    for given in (
        (torch.rand(5, 8), w, w),
        (torch.rand(0, 8), w, w),
        (x, torch.rand(7), w),
        (x, w, torch.rand(7)),
        (x, None, None),
        (x.t().contiguous().t(), w, w),
        (x, None, w),
        (x.half(), w, None),
        (x, w, w.half()),
    ):
        assert not module._suits_torch(*given)
    with torch.autocast("cpu"):  # torch's would return fp32
        assert not module._suits_torch(x.bfloat16(), w.bfloat16(), None)


def test_second_derivatives_are_refused_where_they_would_be_wrong(fp32):
    tensors = {k: x.requires_grad_() for k, x in inputs((3, 8), fp32).items()}
    if fp32.path == "torch":
        (dx,) = torch.autograd.grad(layer_norm(**tensors).sum(), tensors["x"], create_graph=True)
        dx.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(layer_norm(**tensors).sum(), tensors["x"], create_graph=True)


def test_compiles_into_one_graph(fp32):
    tensors = inputs((5, 24), fp32)
    compiled = torch.compile(layer_norm, backend="aot_eager", fullgraph=True)
    got = outputs_and_grads(compiled, tensors, ALL, torch.float32)
    expected = outputs_and_grads(layer_norm_reference, tensors, ALL, torch.float32)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        ((), None, None, "at least one column"),
        ((3, 4), (3,), (4,), r"weight must hold one number per column of x: x is \(3, 4\), weight is \(3,\)"),
        ((3, 4), None, (5,), r"bias must hold one number per column of x: x is \(3, 4\), bias is \(5,\)"),
    ],
)
def test_errors(x, weight, bias, message):
    weight, bias = (None if shape is None else torch.ones(shape) for shape in (weight, bias))
    with pytest.raises(ValueError, match=message):
        layer_norm(torch.ones(x), weight, bias)
