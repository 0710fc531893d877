"""geglu in both forms of the GELU. Layouts and launches are swiglu's, and tested there."""

import pytest
import torch
import torch.nn.functional as F
from elementwise_checks import check_op
from gated_checks import SHAPES, extremes, normal, packed, pair, strided_pair

from liger_trainer.kernels import _gated
from liger_trainer.kernels.geglu import geglu, geglu_reference

BOTH = ("gate", "up")
forms = pytest.mark.parametrize("approximate", ["tanh", "none"])


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(_gated, name, (16, 1))


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


@forms
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(place, shape, approximate):
    check_op(geglu, geglu_reference, pair(shape, like(place)), BOTH, approximate=approximate)


@forms
def test_packed_and_strided(place, approximate):
    check_op(geglu, geglu_reference, packed(3, 4, 21, like=like(place)), ["gate"], approximate=approximate)
    for layout in ("columns of a wider tensor", "batch and sequence swapped"):
        check_op(geglu, geglu_reference, strided_pair(layout, like(place)), BOTH, approximate=approximate)


@forms
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's; the sigmoid is 0 there, as it should be
def test_extremes(place, approximate):
    check_op(geglu, geglu_reference, extremes(like(place)), BOTH, approximate=approximate)


@forms
@pytest.mark.parametrize("leaf", BOTH)
def test_one_input_frozen(fp32, leaf, approximate):
    check_op(geglu, geglu_reference, pair((5, 37), like(fp32)), [leaf], approximate=approximate)


@forms
def test_reference_is_torch(fp32, approximate):
    tensors = pair((5, 37), like(fp32))
    expected = F.gelu(tensors["gate"], approximate=approximate) * tensors["up"]
    torch.testing.assert_close(geglu_reference(**tensors, approximate=approximate), expected, rtol=0, atol=0)


def test_tanh_is_the_default_and_differs(fp32):
    tensors = pair((5, 37), like(fp32))
    assert torch.equal(geglu(**tensors), geglu(**tensors, approximate="tanh"))
    assert not torch.allclose(geglu(**tensors), geglu(**tensors, approximate="none"), rtol=1e-5, atol=1e-5)


@forms
def test_compiles_whole(fp32, approximate):
    compiled = torch.compile(geglu, fullgraph=True, backend="aot_eager")
    check_op(compiled, geglu_reference, pair((5, 37), like(fp32)), BOTH, approximate=approximate)


def test_errors(fp32):
    gate = normal(4, 7, like=like(fp32))
    with pytest.raises(ValueError, match='approximate must be "tanh" or "none", got \'erf\''):
        geglu(gate, gate, approximate="erf")
    with pytest.raises(ValueError, match=r"geglu needs gate and up of one shape"):
        geglu(gate, gate[:3])
    with pytest.raises(ValueError, match=r"geglu needs .* packed"):
        geglu(gate)
