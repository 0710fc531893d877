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
from liger_trainer.kernels import rms_norm as module
from liger_trainer.kernels.rms_norm import rms_norm, rms_norm_reference

BOTH = ("x", "weight")
OPTIONS = {
    "plain": {},
    "eps": {"eps": 0.5},
    "offset": {"offset": 1.0},
    "cast": {"cast_before_weight": True},
    "all": {"eps": 0.3, "offset": 0.7, "cast_before_weight": True},
}


def check(tensors, leaves=BOTH, **options):
    return check_op(rms_norm, rms_norm_reference, tensors, leaves, **options)


@pytest.fixture(params=[False, True], ids=["", "small tiles"])
def tiles(request, monkeypatch):
    if request.param:
        set_small_tiles(monkeypatch, module)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(place, tiles, shape):
    check(random_tensors(shape, place))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("weight", [True, False], ids=["", "no weight"])
def test_options(place, tiles, options, weight):
    tensors = random_tensors((37, 24), place)
    check(tensors if weight else tensors | {"weight": None}, **options)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_batch(place, shape):
    got = check(random_tensors(shape, place))
    assert not got["d_weight"].any()


def test_stays_inside_its_tensors(fp32, tiles, monkeypatch):
    check_stays_inside(monkeypatch, rms_norm, rms_norm_reference, fp32, BOTH, module, _norm)


@pytest.mark.parametrize("leaves", [("x",), ("weight",)], ids=" ".join)
def test_frozen(fp32, tiles, leaves, monkeypatch):
    """The gradient of a frozen input is neither computed nor returned."""
    backward, results = module.rms_norm_backward, []
    monkeypatch.setattr(module, "rms_norm_backward", lambda *a: results.append(backward(*a)) or results[-1])
    if leaves == ("x",):
        monkeypatch.setattr(module, "sum_programs", None)
    check(random_tensors((37, 24), fp32), leaves)
    assert all((dx is not None, dw is not None) == ("x" in leaves, "weight" in leaves) for dx, dw in results)
    assert bool(results) == (fp32.path == "triton")


@pytest.mark.parametrize("how", STRIDED)
def test_strides_of_inputs(fp32, tiles, how):
    tensors = random_tensors((3, 4, 24), fp32)
    weight = tensors["weight"].repeat_interleave(2)[::2]
    check({"x": strided(tensors["x"], how), "weight": weight})


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_strides_of_gradients(fp32, tiles, use):
    check_op(
        lambda **tensors: use(rms_norm(**tensors)),
        lambda **tensors: use(rms_norm_reference(**tensors)),
        random_tensors((3, 4, 24), fp32),
        BOTH,
    )


@pytest.mark.parametrize("how", STRIDED)
def test_rows_are_copied_only_if_no_stride_leads_over_them(how):
    x = strided(torch.randn(2, 6, 8), how)
    rows, stride = _norm.rows_of(x)
    copied = how in ("columns first", "batch second")
    assert (rows.data_ptr() == x.data_ptr()) == (not copied)
    assert stride == {"slice of columns": 16, "every other row": 16, "expanded": 0}.get(how, 8)


def test_rows_of_a_tensor_with_a_dimension_of_one():
    """Such a dimension's stride says nothing, and the tensor counts as contiguous."""
    x = torch.randn(4, 8).as_strided((4, 1, 8), (8, 999, 1))
    assert _norm.rows_of(x)[1] == 8


@pytest.mark.parametrize("cast", [False, True], ids=["", "cast"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
def test_weight_of_another_dtype(place, cast, weight_dtype):
    got = check(random_tensors((37, 24), place, weight_dtype=weight_dtype), cast_before_weight=cast)
    promoted = torch.promote_types(place.dtype, weight_dtype)
    assert got["out0"].dtype == (promoted if cast else place.dtype) and got["d_weight"].dtype == weight_dtype


def hugging_face_norms():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    return {
        LlamaRMSNorm: {"cast_before_weight": True},
        GemmaRMSNorm: {"offset": 1.0},
        Olmo2RMSNorm: {},
    }


def test_rounds_as_hugging_face_models_do(place):
    """Bit for bit in torch; the kernels sum in another order, so a row's rstd may differ in its last bit."""
    x, weight = random_tensors((64, 96), place).values()
    if place.dtype == torch.float64:  # the models compute in fp32
        pytest.skip("the models' norms compute fp64 in fp32")
    results = []
    for norm, options in hugging_face_norms().items():
        layer = norm(96, eps=1e-5).to(x)
        layer.weight.data.copy_(weight)
        with torch.no_grad():
            expected, got = layer(x), rms_norm(x, weight, 1e-5, **options)
        assert got.dtype == expected.dtype
        if place.path == "torch":
            assert torch.equal(got, expected), norm
        elif place.dtype != torch.float32:
            assert (got == expected).float().mean() > 0.99, norm
        results.append(got)
    llama, gemma, olmo = results
    if place.dtype != torch.float32:
        assert (llama != olmo).float().mean() > 0.05, "where the cast is must show"
    torch.testing.assert_close(gemma, rms_norm(x, weight.float() + 1, 1e-5))


def test_saves_its_input_and_one_number_per_row(fp32):
    if fp32.path == "torch":
        pytest.skip("autograd decides what plain torch saves")
    tensors, saved = random_tensors((37, 24), fp32), []
    x, weight = (t.requires_grad_() for t in tensors.values())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, weight)
    assert sorted(t.numel() for t in saved) == [24, 37, 37 * 24]
    assert {x.data_ptr(), weight.data_ptr()} < {t.data_ptr() for t in saved}


def test_second_derivatives_are_refused_where_they_would_be_wrong(fp32):
    x, weight = (t.requires_grad_() for t in random_tensors((3, 8), fp32).values())
    if fp32.path == "torch":
        (dx,) = torch.autograd.grad(rms_norm(x, weight).sum(), x, create_graph=True)
        dx.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(rms_norm(x, weight).sum(), x, create_graph=True)


def test_compiles_into_one_graph(fp32):
    tensors, options = random_tensors((5, 24), fp32), {"offset": 1.0, "cast_before_weight": True}
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    got = outputs_and_grads(compiled, tensors, BOTH, torch.float32, **options)
    expected = outputs_and_grads(rms_norm_reference, tensors, BOTH, torch.float32, **options)
    torch.testing.assert_close(got, expected)


def test_shares_are_even():
    """No more trips than `limit` programs would take, and no program without a tile."""
    for tiles, limit in ((0, 4), (1, 4), (4, 4), (5, 4), (9, 4), (2048, 264), (8192, 528)):
        programs = _norm.programs_for(tiles, limit)
        assert 1 <= programs <= min(limit, max(1, tiles))
        assert -(-tiles // programs) == -(-tiles // limit)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((), None, r"at least one column, got \(\)"),
        ((3, 0), None, r"at least one column, got \(3, 0\)"),
        ((3, 4), (3,), r"weight must hold one number per column of x: x is \(3, 4\), weight is \(3,\)"),
        ((3, 4), (3, 4), r"weight is \(3, 4\)"),
    ],
)
def test_errors(x, weight, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.ones(x), None if weight is None else torch.ones(weight))
