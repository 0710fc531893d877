"""rms_norm, add_rms_norm and layer_norm: one table of cases, and what is of one of them alone."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import check_op, outputs_and_grads
from norm_checks import EMPTY, SHAPES, STRIDED, USES, check_stays_inside, random_tensors, set_small_tiles, strided
from torch import Tensor

from liger_trainer.kernels import _norm
from liger_trainer.kernels import add_rms_norm as add_rms_norm_module
from liger_trainer.kernels import layer_norm as layer_norm_module
from liger_trainer.kernels import rms_norm as rms_norm_module
from liger_trainer.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from liger_trainer.kernels.layer_norm import layer_norm, layer_norm_reference
from liger_trainer.kernels.rms_norm import rms_norm, rms_norm_reference

OPTIONS = ({}, {"eps": 0.5})
RMS_OPTIONS = (
    *OPTIONS, {"offset": 1.0}, {"cast_before_weight": True}, {"eps": 0.3, "offset": 0.7, "cast_before_weight": True},
)  # fmt: skip


class Norm(NamedTuple):
    op: Callable
    reference: Callable
    names: tuple[str, ...]  # of the tensors: rows, then weights
    modules: tuple[ModuleType, ...]  # that launch kernels
    backward: tuple[ModuleType, str]  # what computes gradients, where a test can watch it
    options: tuple[dict, ...]
    saved_per_row: int

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name in ("weight", "bias"))

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.weights)

    def inputs(self, shape, place, **options) -> dict[str, Tensor]:
        """The residual is x with its rows turned around: as many sizes, other values."""
        tensors = random_tensors(shape, place, self.names, **options)
        return tensors | ({"residual": tensors["residual"].flip(0) - 0.7} if "residual" in tensors else {})

    def check(self, tensors, leaves=None, **options) -> dict[str, Tensor]:
        return check_op(self.op, self.reference, tensors, self.names if leaves is None else leaves, **options)


NORMS = {
    "rms_norm": Norm(
        rms_norm, rms_norm_reference, ("x", "weight"), (rms_norm_module,), (rms_norm_module, "rms_norm_backward"),
        RMS_OPTIONS, 1,
    ),
    "add_rms_norm": Norm(
        add_rms_norm, add_rms_norm_reference, ("x", "residual", "weight"), (add_rms_norm_module, rms_norm_module),
        (add_rms_norm_module, "rms_norm_backward"), RMS_OPTIONS, 1,
    ),
    "layer_norm": Norm(
        layer_norm, layer_norm_reference, ("x", "weight", "bias"), (layer_norm_module,),
        (layer_norm_module, "_backward"), OPTIONS, 2,
    ),
}  # fmt: skip
ADDING, LAYER = NORMS["add_rms_norm"], NORMS["layer_norm"]


def cases_of(values: Callable[[Norm], Any]) -> list:
    """(norm, value) of all norms."""
    return [pytest.param(norm, x, id=f"{name}-{x}") for name, norm in NORMS.items() for x in values(norm)]


@pytest.fixture(params=NORMS.values(), ids=NORMS)
def norm(request) -> Norm:
    return request.param


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    """Also on a GPU, where torch's layer_norm would run on tensors as small as these."""
    monkeypatch.setattr(layer_norm_module, "TORCH_NUMBERS", -1)


@pytest.fixture(params=[False, True], ids=["", "small tiles"])
def tiles(request, monkeypatch):
    if request.param:
        set_small_tiles(monkeypatch, rms_norm_module, add_rms_norm_module, layer_norm_module)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(place, tiles, norm, shape):
    norm.check(norm.inputs(shape, place))


@pytest.mark.parametrize(("norm", "options"), cases_of(lambda norm: norm.options))
def test_options(place, tiles, norm, options):
    norm.check(norm.inputs((37, 24), place), **options)


@pytest.mark.parametrize(
    ("norm", "absent"), cases_of(lambda norm: sorted({norm.weights[:1], norm.weights[1:], norm.weights}))
)
def test_without_weights(place, tiles, norm, absent):
    norm.check(norm.inputs((37, 24), place) | dict.fromkeys(absent), **norm.options[-1])


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_batch(place, norm, shape):
    got = norm.check(norm.inputs(shape, place))
    assert not any(got[f"d_{name}"].any() for name in norm.weights)


def test_stays_inside_its_tensors(fp32, tiles, norm, monkeypatch):
    check_stays_inside(monkeypatch, norm.op, norm.reference, fp32, norm.names, *norm.modules, _norm)


@pytest.mark.parametrize(
    ("norm", "leaves"), cases_of(lambda norm: [*((name,) for name in norm.names), norm.names[:2], norm.names[1:]])
)
def test_frozen(fp32, tiles, norm, leaves, monkeypatch):
    """The gradient of a frozen input is neither computed nor returned."""
    module, name = norm.backward
    backward, results = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *a, **k: results.append(backward(*a, **k)) or results[-1])
    if not set(leaves) & set(norm.weights):
        for module in norm.modules:
            monkeypatch.setattr(module, "sum_programs", None, raising=False)
    norm.check(norm.inputs((37, 24), fp32), leaves)
    wanted = [bool(set(leaves) & set(norm.rows)), *(name in leaves for name in norm.weights)]
    assert all([grad is not None for grad in grads] == wanted for grads in results)
    assert bool(results) == (fp32.path == "triton")


@pytest.mark.parametrize("how", STRIDED)
def test_strides_of_inputs(fp32, tiles, norm, how):
    tensors = norm.inputs((3, 4, 24), fp32)
    weights = {name: tensors[name].repeat_interleave(2)[::2] for name in norm.weights}
    norm.check(tensors | {name: strided(tensors[name], how) for name in norm.rows} | weights)


@pytest.mark.parametrize("which", ADDING.rows)
@pytest.mark.parametrize("how", STRIDED)
def test_strides_of_one_summand(fp32, tiles, how, which):
    tensors = ADDING.inputs((3, 4, 24), fp32)
    ADDING.check(tensors | {which: strided(tensors[which], how)})


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(("norm", "which"), cases_of(lambda norm: range(len(norm.rows))))
def test_strides_of_gradients(fp32, tiles, norm, use, which):
    def used(op):
        def result(**tensors):
            outputs = op(**tensors)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            outputs[which] = use(outputs[which])
            return outputs

        return result

    check_op(used(norm.op), used(norm.reference), norm.inputs((3, 4, 24), fp32), norm.names)


@pytest.mark.parametrize("cast", [False, True], ids=["", "cast"])
@pytest.mark.parametrize("wide", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("norm", "which"), cases_of(lambda norm: [*norm.names, norm.names[1:]]))
def test_mixed_dtypes(place, norm, which, wide, cast):
    """Each gradient in its own input's dtype."""
    if cast and norm is LAYER:
        pytest.skip("layer_norm rounds once")
    tensors = norm.inputs((37, 24), place)
    which = {which} if isinstance(which, str) else set(which)
    for name in which:
        dtype = wide if name in norm.weights else torch.promote_types(place.dtype, torch.float32)
        tensors[name] = tensors[name].to(dtype)
    got = norm.check(tensors, **({"cast_before_weight": True} if cast else {}))
    for name in norm.names:
        assert got[f"d_{name}"].dtype == tensors[name].dtype
    x, weight = tensors["x"].dtype, tensors["weight"].dtype
    assert got["out0"].dtype == (torch.promote_types(x, weight) if cast else x)
    assert norm is not ADDING or got["out1"].dtype == x


def test_saves_one_input_and_a_few_numbers_per_row(fp32, norm):
    """What is normalized (for add_rms_norm the sum) and the weight, not the output."""
    if fp32.path == "torch":
        pytest.skip("autograd decides what plain torch saves")
    saved, tensors = [], {k: x.requires_grad_() for k, x in norm.inputs((37, 24), fp32).items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = norm.op(**tensors)
    normalized = outputs[1] if norm is ADDING else tensors["x"]
    assert sorted(t.numel() for t in saved) == [24, 37 * norm.saved_per_row, 37 * 24]
    assert {normalized.data_ptr(), tensors["weight"].data_ptr()} < {t.data_ptr() for t in saved}


def test_second_derivatives_are_refused_where_they_would_be_wrong(fp32, norm):
    tensors = {k: x.requires_grad_() for k, x in norm.inputs((3, 8), fp32).items()}
    outputs = norm.op(**tensors)
    loss = (outputs if isinstance(outputs, Tensor) else outputs[0]).sum()
    if fp32.path == "torch":
        (dx,) = torch.autograd.grad(loss, tensors["x"], create_graph=True)
        dx.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(loss, tensors["x"], create_graph=True)


def test_compiles_into_one_graph(fp32, norm):
    tensors, options = norm.inputs((5, 24), fp32), norm.options[-1]
    compiled = torch.compile(norm.op, backend="aot_eager", fullgraph=True)
    got = outputs_and_grads(compiled, tensors, norm.names, torch.float32, **options)
    expected = outputs_and_grads(norm.reference, tensors, norm.names, torch.float32, **options)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("op", "shapes", "message"),
    [
        (rms_norm, [()], r"at least one column, got \(\)"),
        (rms_norm, [(3, 0)], r"at least one column, got \(3, 0\)"),
        (rms_norm, [(3, 4), (3, 4)], r"weight is \(3, 4\)"),
        (add_rms_norm, [(), (), None], "at least one column"),
        (add_rms_norm, [(3, 4), (4,), (4,)], r"x and residual must have one shape: x is \(3, 4\), residual is \(4,\)"),
        (layer_norm, [()], "at least one column"),
        (
            layer_norm,
            [(3, 4), (4,), (5,)],
            r"bias must hold one number per column of x: x is \(3, 4\), bias is \(5,\)",
        ),
        *(
            (norm.op, [(3, 4)] * len(norm.rows) + [(3,)], "weight must hold one number per column of x: x is .3, 4., w")
            for norm in NORMS.values()
        ),
    ],
)
def test_errors(op, shapes, message):
    with pytest.raises(ValueError, match=message):
        op(*(None if shape is None else torch.ones(shape) for shape in shapes))


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


def test_shares_are_even():
    """No more trips than `limit` programs would take, and no program without a tile."""
    for tiles, limit in ((0, 4), (1, 4), (4, 4), (5, 4), (9, 4), (2048, 264), (8192, 528)):
        programs = _norm.programs_for(tiles, limit)
        assert 1 <= programs <= min(limit, max(1, tiles))
        assert -(-tiles // programs) == -(-tiles // limit)


def test_rounds_as_hugging_face_models_do(place):
    """Bit for bit in torch; the kernels sum in another order, so a row's rstd may differ in its last bit."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    x, weight = random_tensors((64, 96), place).values()
    if place.dtype == torch.float64:
        pytest.skip("the models' norms compute fp64 in fp32")
    results = []
    options_of = {LlamaRMSNorm: {"cast_before_weight": True}, GemmaRMSNorm: {"offset": 1.0}, Olmo2RMSNorm: {}}
    for model_norm, options in options_of.items():
        layer = model_norm(96, eps=1e-5).to(x)
        layer.weight.data.copy_(weight)
        with torch.no_grad():
            expected, got = layer(x), rms_norm(x, weight, 1e-5, **options)
        assert got.dtype == expected.dtype
        if place.path == "torch":
            assert torch.equal(got, expected), model_norm
        elif place.dtype != torch.float32:
            assert (got == expected).float().mean() > 0.99, model_norm
        results.append(got)
    llama, gemma, olmo = results
    if place.dtype != torch.float32:
        assert (llama != olmo).float().mean() > 0.05, "where the cast is must show"
    torch.testing.assert_close(gemma, rms_norm(x, weight.float() + 1, 1e-5))


def test_norm_is_that_of_the_rounded_sum(place):
    tensors = ADDING.inputs((37, 24), place)
    normed, summed = add_rms_norm(**tensors, cast_before_weight=True)
    assert torch.equal(summed, tensors["x"] + tensors["residual"])
    assert torch.equal(normed, rms_norm(summed, tensors["weight"], cast_before_weight=True))


@pytest.mark.parametrize("used", [0, 1], ids=["norm alone", "sum alone"])
def test_one_output_is_used(fp32, tiles, used, monkeypatch):
    if used == 1:
        monkeypatch.setattr(add_rms_norm_module, "rms_norm_backward", None)
    check_op(
        lambda **tensors: add_rms_norm(**tensors)[used],
        lambda **tensors: add_rms_norm_reference(**tensors)[used],
        ADDING.inputs((37, 24), fp32),
        ADDING.names[: 3 - used],
    )


def test_layers_in_a_row_share_one_stream(fp32, tiles):
    """The gradient of the stream passes through each layer's norm and sum."""

    def layers(op):
        def result(x, residual, weight):
            for _ in range(3):
                x, residual = op(x.tanh(), residual, weight)
            return x, residual

        return result

    check_op(layers(add_rms_norm), layers(add_rms_norm_reference), ADDING.inputs((9, 24), fp32), ADDING.names)


def test_writing_over_the_saved_sum_is_noticed(fp32):
    tensors = {k: x.requires_grad_() for k, x in ADDING.inputs((5, 24), fp32).items()}
    normed, summed = add_rms_norm(**tensors)
    summed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (normed.sum() + summed.sum()).backward()


def test_layer_norm_is_that_of_torch(place):
    tensors = LAYER.inputs((37, 24), place)
    expected = F.layer_norm(tensors["x"], (24,), tensors["weight"], tensors["bias"], 1e-5)
    torch.testing.assert_close(layer_norm(**tensors), expected)


def test_rows_far_from_zero(fp32):
    """The variance is taken after the mean is subtracted; E[x^2] - E[x]^2 would leave none of these digits."""
    tensors = LAYER.inputs((5, 24), fp32)
    LAYER.check(tensors | {"x": tensors["x"] + 3000})


def test_what_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(layer_norm_module, "TORCH_NUMBERS", 32)
    suits, x, w = layer_norm_module._suits_torch, torch.rand(4, 8), torch.rand(8)
    for inputs in ((x, w, w), (x, w, None), (x.half(), w.half(), w.half())):
        assert suits(*inputs)
        torch.testing.assert_close(F.layer_norm(inputs[0], (8,), *inputs[1:]), layer_norm_reference(*inputs))
    for inputs in (
        (torch.rand(5, 8), w, w), (torch.rand(0, 8), w, w), (x, torch.rand(7), w), (x, w, torch.rand(7)),
        (x, None, None), (x.t().contiguous().t(), w, w), (x, None, w), (x.half(), w, None), (x, w, w.half()),
    ):  # fmt: skip
        assert not suits(*inputs)
    with torch.autocast("cpu"):  # torch's would return fp32
        assert not suits(x.bfloat16(), w.bfloat16(), None)


# Each size of tile, exact and not; H 16384 and above prefetches nothing.
GPU_SHAPES = [(2048, 4096), (2047, 1024), (333, 2560), (4099, 128), (77, 576), (512, 8192), (130, 20000), (3, 65536)]


def on_gpu(dtype) -> Any:
    return SimpleNamespace(device="cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_sizes_on_gpu(norm, shape, dtype, frozen):
    norm.check(norm.inputs(shape, on_gpu(dtype)), norm.rows if frozen else norm.names)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_stands_for_small_layer_norms_is_within_the_bound_on_gpu(dtype, monkeypatch):
    monkeypatch.setattr(layer_norm_module, "TORCH_NUMBERS", 2**22)
    tensors = LAYER.inputs((512, 4096), on_gpu(dtype))
    y: Any = layer_norm(**{k: x.detach().requires_grad_() for k, x in tensors.items()})
    assert y.grad_fn.name() == "NativeLayerNormBackward0"
    LAYER.check(tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [NORMS["rms_norm"], ADDING], ids=["rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cast_before_weight_on_gpu(norm, weight_dtype):
    tensors = norm.inputs((1024, 2048), on_gpu(torch.bfloat16), weight_dtype=weight_dtype)
    norm.check(tensors, cast_before_weight=True, offset=0.5)


@pytest.mark.gpu
def test_bf16_is_rounded_where_the_models_round_it_on_gpu():
    """All but the entries at which rstd's last bit decides."""
    x, weight = random_tensors((2048, 4096), on_gpu(torch.bfloat16)).values()
    for cast in (False, True):
        expected = rms_norm_reference(x, weight, cast_before_weight=cast)
        assert (rms_norm(x, weight, cast_before_weight=cast) == expected).float().mean() > 0.999


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
def test_offsets_beyond_32_bits_on_gpu(norm):
    """The last rows alone must give what they give among the others."""
    H, N = 8192, 2**18 + 3
    weights = {k: torch.rand(H, device="cuda", dtype=torch.bfloat16) for k in norm.weights}
    tail = {k: torch.randn(5, H, device="cuda", dtype=torch.bfloat16) for k in norm.rows}
    large = {k: torch.zeros(N, H, device="cuda", dtype=torch.bfloat16) for k in tail}
    assert large["x"].numel() > 2**31
    for k, x in large.items():
        x[-5:] = tail[k]

    def run(rows):
        leaves = {k: (rows | weights)[k].requires_grad_() for k in norm.names}
        outputs = norm.op(**leaves)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        grads = torch.autograd.grad([y[-5:].float().square().sum() for y in outputs], list(leaves.values()))
        return [t[-5:] if t.dim() == 2 else t for t in (*outputs, *grads)]

    torch.testing.assert_close(run(large), run(tail))


@pytest.mark.gpu
def test_host_never_waits_on_gpu(norm):
    tensors = {k: x.requires_grad_() for k, x in norm.inputs((512, 1024), on_gpu(torch.bfloat16)).items()}
    for mode in ("default", "error"):  # the first run compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            outputs = norm.op(**tensors)
            outputs = outputs if isinstance(outputs, Tensor) else sum(outputs)
            outputs.backward(torch.ones_like(outputs))
        finally:
            torch.cuda.set_sync_debug_mode("default")
