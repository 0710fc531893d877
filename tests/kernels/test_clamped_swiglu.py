"""clamped_swiglu against plain torch in fp64: values and gradients, at the limits and far beyond them."""

import functools

import pytest
import torch
from elementwise_checks import check_op
from gated_checks import normal
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from liger_trainer.kernels import _packed_gate
from liger_trainer.kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference

check = functools.partial(check_op, clamped_swiglu, clamped_swiglu_reference)
FORMS = {
    "DeepSeek V4": dict(limit=1.5),
    "gpt-oss": dict(limit=1.5, alpha=1.702, shift=1.0),
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(_packed_gate, "BLOCK", 16)


def like(place) -> dict:
    return {"dtype": place.dtype, "device": place.device}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(5, 21), (2, 3, 16), (1, 1), (0, 8)], ids=str)
def test_split(place, form, shape):
    tensors = {name: normal(*shape, like=like(place), seed=i) * 3 for i, name in enumerate(("gate", "up"))}
    check(tensors, ["gate", "up"], **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_packed(place, form, interleaved):
    gate = normal(2, 5, 42, like=like(place), seed=3) * 3
    check({"gate": gate}, ["gate"], **FORMS[form], interleaved=interleaved)


@pytest.mark.parametrize("leaf", ["gate", "up"])
def test_one_of_both(fp32, leaf):
    tensors = {name: normal(4, 9, like=like(fp32), seed=i) * 3 for i, name in enumerate(("gate", "up"))}
    check(tensors, [leaf], limit=1.0)


def test_gradients_pass_at_the_limit_and_not_beyond(fp32):
    gate = torch.tensor([[1.0, 1.5, -9.0]], device=fp32.device, requires_grad=True)
    up = torch.tensor([[-1.0, 2.0, 1.0]], device=fp32.device, requires_grad=True)
    clamped_swiglu(gate, up, limit=1.0).sum().backward()
    assert (gate.grad != 0).tolist() == [[True, False, True]]
    assert (up.grad != 0).tolist() == [[True, False, True]]


def test_nan_stays(fp32):
    gate, up = torch.ones(1, 2, device=fp32.device), torch.tensor([[1.0, torch.nan]], device=fp32.device)
    assert clamped_swiglu(gate, up, limit=1.0).isnan().tolist() == [[False, True]]


def test_is_the_gate_of_gpt_oss(fp32):
    packed = normal(4, 32, like=like(fp32), seed=2) * 5
    holder = type("Holder", (), {"limit": 7.0, "alpha": 1.702})()
    want = GptOssExperts._apply_gate(holder, packed)
    torch.testing.assert_close(clamped_swiglu(packed, limit=7.0, alpha=1.702, shift=1.0, interleaved=True), want)


@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(limit=0.0), "above 0"), (dict(limit=1.0, interleaved=True, up=torch.ones(2, 4)), "packed gate")],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        clamped_swiglu(torch.ones(2, 4), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", ["apart", "halves", "interleaved"])
def test_sizes_on_gpu(monkeypatch, dtype, form, packed):
    monkeypatch.undo()  # the op's own blocks
    on_gpu = {"dtype": dtype, "device": "cuda"}
    gate, up = (normal(1024, 2880, like=on_gpu, seed=i) * 3 for i in (0, 1))
    if packed == "apart":
        check({"gate": gate, "up": up}, ["gate", "up"], **FORMS[form])
    else:
        check({"gate": gate}, ["gate"], **FORMS[form], interleaved=packed == "interleaved")
