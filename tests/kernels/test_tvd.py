"""tvd: its definition and bounds, and where both sides agree."""

import pytest
import torch
from given_checks import FORMS, REDUCTIONS, check_definition, in_backward, short_blocks, sides

from liger_trainer.kernels.tvd import tvd

TVD = {name: form for name, form in FORMS.items() if name.startswith("tvd")}


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    short_blocks(monkeypatch)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", TVD.values(), ids=TVD)
def test_definition(place, form, reduction):
    check_definition(form, place, reduction)


@pytest.mark.parametrize("form", TVD.values(), ids=TVD)
def test_definition_with_gradients_in_the_backward(fp32, form, monkeypatch):
    in_backward(monkeypatch, True)
    check_definition(form, fp32, "mean")


def test_logits_are_softmaxed(fp32):
    x, t = sides(FORMS["tvd-logits"], 4, 37, device=fp32.device).values()
    expected = ((x / 2).softmax(-1) - (t / 2).softmax(-1)).abs().sum(-1) / 2
    options = {"temperature": 2.0, "from_logits": True, "reduction": "none"}
    torch.testing.assert_close(tvd(x, t, **options), expected * 4)
    torch.testing.assert_close(tvd(x, t, **options, scale_by_temperature_squared=False), expected)


def test_no_overlap_is_one(fp32):
    x = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")], [50.0, 0.0, 0.0, 0.0]], device=fp32.device)
    t = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0], [0.0, 0.0, 50.0, 0.0]], device=fp32.device)
    torch.testing.assert_close(tvd(x, t, from_logits=True, reduction="none"), torch.ones(2, device=fp32.device))


@pytest.mark.parametrize("form", TVD.values(), ids=TVD)
def test_equal_sides_give_exactly_zero(fp32, form):
    x = sides(form, 3, 37, device=fp32.device)["input"]
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    loss = tvd(*leaves, **form.options)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("form", TVD.values(), ids=TVD)
def test_nan_shows(fp32, form):
    tensors = sides(form, 3, 37, device=fp32.device)
    tensors["target"][1, 20] = float("nan")
    out = tvd(**tensors, **form.options, reduction="none")
    assert out.reshape(3, -1).isnan().any(1).tolist() == [False, True, False]
