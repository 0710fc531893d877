"""gated_rms_norm against plain torch in fp64, in both orders, with groups; and against the layers of transformers."""

import functools

import pytest
import torch
from elementwise_checks import check_op
from kernel_checks import Place
from norm_checks import STRIDED, check_stays_inside, random_tensors, set_small_tiles, strided
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from liger_trainer.kernels import gated_rms_norm as module
from liger_trainer.kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference

check = functools.partial(check_op, gated_rms_norm, gated_rms_norm_reference)
LEAVES = ["x", "gate", "weight"]
FORMS = {
    "norm first": {},
    "norm first, sigmoid": dict(activation="sigmoid"),
    "gate first": dict(gate_first=True),
    "gate first, sigmoid": dict(gate_first=True, activation="sigmoid"),
}
# rows and columns: single ones, odd ones, exact tiles; groups of one column, of several, of all
SHAPES = [((1, 1), 1), ((5, 7), 1), ((16, 32), 4), ((37, 24), 3), ((2, 3, 33), 11), ((9, 6), 6), ((65,), 5)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    set_small_tiles(monkeypatch, module)


def tensors_of(shape, place, weight_dtype=None):
    made = random_tensors(shape, place, ("x", "gate", "weight"), weight_dtype)
    made["gate"] = (made["gate"].flip(-1) * 2 - 1).contiguous()  # not x's own values; both signs
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_values_and_gradients(place, form, shape, groups):
    check(tensors_of(shape, place), LEAVES, **FORMS[form], groups=groups)


@pytest.mark.parametrize("form", ["norm first", "gate first"])
@pytest.mark.parametrize("leaves", [["x"], ["gate"], ["weight"], ["x", "weight"]], ids="-".join)
def test_frozen(fp32, form, leaves):
    check(tensors_of((11, 24), fp32), leaves, **FORMS[form], groups=2)


@pytest.mark.parametrize("form", ["norm first", "gate first"])
@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 6)], ids=str)
def test_no_rows(fp32, form, shape):
    check(tensors_of(shape, fp32), LEAVES, **FORMS[form], groups=2)


@pytest.mark.parametrize("form", ["norm first", "gate first"])
def test_wider_weights(place, form):
    if place.dtype.itemsize > 2:
        pytest.skip("there is nothing wider")
    got = check(tensors_of((7, 24), place, torch.float32), LEAVES, **FORMS[form], groups=2)
    assert got["out0"].dtype == (torch.float32 if form == "gate first" else place.dtype)
    assert got["d_weight"].dtype == torch.float32


@pytest.mark.parametrize("form", ["norm first", "gate first"])
@pytest.mark.parametrize("how", STRIDED)
@pytest.mark.parametrize("name", ["x", "gate"])
def test_strides(fp32, form, how, name):
    tensors = tensors_of((3, 5, 8), fp32)
    tensors[name] = strided(tensors[name], how)
    other = "gate" if name == "x" else "x"
    tensors[other] = tensors[other][tuple(slice(n) for n in tensors[name].shape)].expand_as(tensors[name]).contiguous()
    check(tensors, LEAVES, **FORMS[form], groups=2)


@pytest.mark.parametrize("gate_first", [False, True])
def test_writes_nothing_beyond_its_rows(fp32, monkeypatch, gate_first):
    op, reference = (
        functools.partial(f, gate_first=gate_first, groups=2) for f in (gated_rms_norm, gated_rms_norm_reference)
    )
    run = lambda f: lambda x, residual, weight: f(x, residual, weight)  # noqa: E731
    check_stays_inside(monkeypatch, run(op), run(reference), fp32, ("x", "residual", "weight"), module)


@pytest.mark.parametrize("kind", ["qwen3_next", "zamba2"])
def test_is_the_layer_of_transformers(fp32, kind):
    own = Qwen3NextRMSNormGated(24, 1e-5) if kind == "qwen3_next" else Zamba2RMSNormGated(24, 8, 1e-5)
    tensors = tensors_of((5, 24), fp32)
    own.to(fp32.device).weight.data = tensors["weight"]
    form = {} if kind == "qwen3_next" else dict(gate_first=True, groups=3)
    got = gated_rms_norm(tensors["x"], tensors["gate"], tensors["weight"], 1e-5, **form)
    torch.testing.assert_close(got, own(tensors["x"], tensors["gate"]).detach())


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [({}, dict(activation="gelu"), "one of silu, sigmoid"), ({}, dict(groups=5), "must divide the 24"),
     ({"gate": torch.ones(3, 24)}, {}, "x's shape"), ({"weight": torch.ones(3)}, {}, "one number per column")],
)  # fmt: skip
def test_refusals(change, options, message):
    given = {"x": torch.ones(2, 24), "gate": torch.ones(2, 24), "weight": torch.ones(24), **change}
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**given, **options)


GPU = {"head": ((8192, 128), 1), "wide": ((2048, 8192), 1), "groups": ((2048, 8192), 8), "odd": ((1001, 1000), 5)}


ON_GPU = [
    *((size, form, torch.bfloat16) for size in GPU for form in FORMS),
    *(("odd", form, dtype) for form in FORMS for dtype in (torch.float16, torch.float32)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "form", "dtype"), ON_GPU, ids=str)
def test_sizes_on_gpu(monkeypatch, size, form, dtype):
    monkeypatch.undo()  # the op's own tiles
    shape, groups = GPU[size]
    check(tensors_of(shape, Place("triton", "cuda", dtype)), LEAVES, **FORMS[form], groups=groups)
