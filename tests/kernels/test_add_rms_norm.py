import pytest
import torch
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
from liger_trainer.kernels import add_rms_norm as module
from liger_trainer.kernels import rms_norm as rms_norm_module
from liger_trainer.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from liger_trainer.kernels.rms_norm import rms_norm

ALL = ("x", "residual", "weight")
OPTIONS = {
    "plain": {},
    "eps": {"eps": 0.5},
    "offset": {"offset": 1.0},
    "cast": {"cast_before_weight": True},
    "all": {"eps": 0.3, "offset": 0.7, "cast_before_weight": True},
}


def check(tensors, leaves=ALL, **options):
    return check_op(add_rms_norm, add_rms_norm_reference, tensors, leaves, **options)


def inputs(shape, place, **options):
    """The residual is x with its rows turned around: as many sizes, other values."""
    tensors = random_tensors(shape, place, ALL, **options)
    return tensors | {"residual": tensors["residual"].flip(0) - 0.7}


@pytest.fixture(params=[False, True], ids=["", "small tiles"])
def tiles(request, monkeypatch):
    if request.param:
        set_small_tiles(monkeypatch, module, rms_norm_module)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(place, tiles, shape):
    check(inputs(shape, place))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("weight", [True, False], ids=["", "no weight"])
def test_options(place, tiles, options, weight):
    tensors = inputs((37, 24), place)
    check(tensors if weight else tensors | {"weight": None}, **options)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_batch(place, shape):
    got = check(inputs(shape, place))
    assert not got["d_weight"].any()


def test_stays_inside_its_tensors(fp32, tiles, monkeypatch):
    check_stays_inside(monkeypatch, add_rms_norm, add_rms_norm_reference, fp32, ALL, module, rms_norm_module, _norm)


def test_norm_is_that_of_the_rounded_sum(place):
    tensors = inputs((37, 24), place)
    normed, summed = add_rms_norm(**tensors, cast_before_weight=True)
    assert torch.equal(summed, tensors["x"] + tensors["residual"])
    assert torch.equal(normed, rms_norm(summed, tensors["weight"], cast_before_weight=True))


@pytest.mark.parametrize("leaves", [("x",), ("residual",), ("weight",), ("x", "residual"), ("residual", "weight")])
def test_frozen(fp32, tiles, leaves, monkeypatch):
    if "weight" not in leaves:
        monkeypatch.setattr(rms_norm_module, "sum_programs", None)
    check(inputs((37, 24), fp32), leaves)


@pytest.mark.parametrize("used", [0, 1], ids=["norm alone", "sum alone"])
def test_one_output_is_used(fp32, tiles, used, monkeypatch):
    if used == 1:
        monkeypatch.setattr(module, "rms_norm_backward", None)
    check_op(
        lambda **tensors: add_rms_norm(**tensors)[used],
        lambda **tensors: add_rms_norm_reference(**tensors)[used],
        inputs((37, 24), fp32),
        ALL[: 3 - used],
    )


@pytest.mark.parametrize("how", STRIDED)
@pytest.mark.parametrize("which", [("x",), ("residual",), ("x", "residual")], ids=" ".join)
def test_strides_of_inputs(fp32, tiles, how, which):
    tensors = inputs((3, 4, 24), fp32)
    check(tensors | {name: strided(tensors[name], how) for name in which})


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("which", [0, 1], ids=["norm", "sum"])
def test_strides_of_gradients(fp32, tiles, use, which):
    def used(op):
        def result(**tensors):
            outputs = list(op(**tensors))
            outputs[which] = use(outputs[which])
            return outputs

        return result

    check_op(used(add_rms_norm), used(add_rms_norm_reference), inputs((3, 4, 24), fp32), ALL)


@pytest.mark.parametrize("cast", [False, True], ids=["", "cast"])
@pytest.mark.parametrize("wide", [("residual",), ("weight",), ("residual", "weight"), ("x",)], ids=" ".join)
def test_mixed_dtypes(place, cast, wide):
    tensors = inputs((37, 24), place)
    tensors |= {name: tensors[name].to(torch.promote_types(place.dtype, torch.float32)) for name in wide}
    got = check(tensors, cast_before_weight=cast)
    for name in ALL:
        assert got[f"d_{name}"].dtype == tensors[name].dtype
    assert got["out1"].dtype == tensors["x"].dtype


def test_layers_in_a_row_share_one_stream(fp32, tiles):
    """The gradient of the stream passes through each layer's norm and sum."""

    def layers(op):
        def result(x, residual, weight):
            for _ in range(3):
                x, residual = op(x.tanh(), residual, weight)
            return x, residual

        return result

    check_op(layers(add_rms_norm), layers(add_rms_norm_reference), inputs((9, 24), fp32), ALL)


def test_saves_the_sum_and_one_number_per_row(fp32):
    if fp32.path == "torch":
        pytest.skip("autograd decides what plain torch saves")
    saved, tensors = [], {k: x.requires_grad_() for k, x in inputs((37, 24), fp32).items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, summed = add_rms_norm(**tensors)
    assert sorted(t.numel() for t in saved) == [24, 37, 37 * 24]
    assert {summed.data_ptr(), tensors["weight"].data_ptr()} < {t.data_ptr() for t in saved}


def test_writing_over_the_saved_sum_is_noticed(fp32):
    tensors = {k: x.requires_grad_() for k, x in inputs((5, 24), fp32).items()}
    normed, summed = add_rms_norm(**tensors)
    summed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (normed.sum() + summed.sum()).backward()


def test_second_derivatives_are_refused_where_they_would_be_wrong(fp32):
    tensors = {k: x.requires_grad_() for k, x in inputs((3, 8), fp32).items()}
    loss = add_rms_norm(**tensors)[0].sum()
    if fp32.path == "torch":
        (dx,) = torch.autograd.grad(loss, tensors["x"], create_graph=True)
        dx.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(loss, tensors["x"], create_graph=True)


def test_compiles_into_one_graph(fp32):
    tensors, options = inputs((5, 24), fp32), {"offset": 1.0, "cast_before_weight": True}
    compiled = torch.compile(add_rms_norm, backend="aot_eager", fullgraph=True)
    got = outputs_and_grads(compiled, tensors, ALL, torch.float32, **options)
    expected = outputs_and_grads(add_rms_norm_reference, tensors, ALL, torch.float32, **options)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("x", "residual", "weight", "message"),
    [
        ((), (), None, "at least one column"),
        ((3, 4), (3, 4), (3,), r"weight must hold one number per column of x: x is \(3, 4\), weight is \(3,\)"),
        ((3, 4), (4,), (4,), r"x and residual must have one shape: x is \(3, 4\), residual is \(4,\)"),
    ],
)
def test_errors(x, residual, weight, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm(torch.ones(x), torch.ones(residual), None if weight is None else torch.ones(weight))
