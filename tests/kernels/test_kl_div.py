"""kl_div: against torch's own, where probabilities vanish, and its gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from given_checks import BOTH, FORMS, REDUCTIONS, check_definition, check_form, in_backward, short_blocks, sides

from liger_trainer.kernels.kl_div import kl_div
from liger_trainer.kernels.linear_divergence import divergence_reference

INF = float("inf")
KL = {name: form for name, form in FORMS.items() if name.startswith("kl_div")}


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    short_blocks(monkeypatch)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", KL.values(), ids=KL)
def test_definition(place, form, reduction):
    check_definition(form, place, reduction)


@pytest.mark.parametrize("form", KL.values(), ids=KL)
def test_definition_with_gradients_in_the_backward(fp32, form, monkeypatch):
    in_backward(monkeypatch, True)
    check_definition(form, fp32, "mean")


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("shape", [(37,), (3, 37), (2, 3, 37)], ids=str)
def test_equals_torch(fp32, reduction, log_target, shape):
    form = FORMS["kl_div-log_target" if log_target else "kl_div"]
    tensors = sides(form, *shape, device=fp32.device)
    results = []
    for op in (kl_div, F.kl_div):
        leaves = {k: x.clone().requires_grad_() for k, x in tensors.items()}
        out = op(**leaves, reduction=reduction, log_target=log_target)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_default_is_batchmean(fp32):
    tensors = sides(FORMS["kl_div"], 3, 37, device=fp32.device)
    torch.testing.assert_close(kl_div(**tensors), F.kl_div(**tensors, reduction="batchmean"))


@pytest.mark.parametrize("squared", [True, False])
def test_logits_at_a_temperature(fp32, squared):
    form = FORMS["kl_div-logits"]
    tensors = sides(form, 3, 37, device=fp32.device)
    options = {"reduction": "none", "scale_by_temperature_squared": squared}
    got = check_form(form, tensors, **options)
    expected = divergence_reference(tensors["input"], tensors["target"], temperature=1.7) * (1.7**2 if squared else 1)
    torch.testing.assert_close(got["out0"], expected, rtol=1e-5, atol=1e-6)


def test_far_apart_logits(fp32):
    """One side's maximum is the other's minimum, at the row's ends, and rows are offset by hundreds."""
    offset = torch.tensor([[0.0], [300.0], [-300.0]], device=fp32.device)
    x = torch.linspace(-40, 40, 37, device=fp32.device) + offset
    check_form(FORMS["kl_div-logits"], {"input": x, "target": x.flip(-1)})


def rows(*values, device, log=False):
    x = torch.tensor(values, device=device)
    return (x.log() if log else x).requires_grad_()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of what a where then drops
@pytest.mark.parametrize("log_target", [False, True])
def test_zero_probability_in_the_target_has_no_part(fp32, log_target):
    x = rows([0.5, 0.5, 0.0], [0.2, 0.3, 0.5], device=fp32.device, log=True)
    p = rows([0.5, 0.5, 0.0], [0.0, 0.5, 0.5], device=fp32.device, log=log_target)
    out = kl_div(x, p, reduction="none", log_target=log_target)
    expected = torch.zeros(2, 3, device=fp32.device)
    expected[1, 1] = 0.5 * math.log(5 / 3)
    torch.testing.assert_close(out, expected)
    d_x, d_p = torch.autograd.grad(out.sum(), (x, p))
    torch.testing.assert_close(d_x, -(p.exp() if log_target else p).detach())
    slope = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1 + math.log(5 / 3), 1.0]], device=fp32.device)
    torch.testing.assert_close(d_p, slope * p.exp().detach() if log_target else slope)


@pytest.mark.parametrize("log_target", [False, True])
def test_mass_where_the_input_has_none_is_infinite(fp32, log_target):
    x = rows([1.0, 0.0], device=fp32.device, log=True)
    p = rows([0.5, 0.5], device=fp32.device, log=log_target)
    out = kl_div(x, p, reduction="none", log_target=log_target)
    assert out[0, 1] == INF and torch.isfinite(out[0, 0])
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, -0.5))


def test_masked_logits(fp32):
    """-inf on both sides: as if the column were not there. On the input's alone: infinite. NaN shows."""
    tensors = sides(FORMS["kl_div-logits"], 4, 37, device=fp32.device)
    masked = {k: x.clone() for k, x in tensors.items()}
    for name in BOTH:
        masked[name][:, 5:22] = -INF  # the second block has no other
    got = check_form(FORMS["kl_div-logits"], masked, reduction="none")
    left = {k: torch.cat([x[:, :5], x[:, 22:]], 1) for k, x in tensors.items()}
    expected = check_form(FORMS["kl_div-logits"], left, reduction="none")
    torch.testing.assert_close(got["out0"], expected["out0"], rtol=1e-5, atol=1e-6)
    assert not got["d_input"][:, 5:22].any() and not got["d_target"][:, 5:22].any()
    tensors["input"][0, 3], tensors["target"][1, 3], tensors["input"][2, 20] = -INF, -INF, float("nan")
    out = kl_div(**tensors, from_logits=True, reduction="none")
    assert out[0] == INF and out[1].isfinite() and out[2].isnan() and out[3].isfinite()


@pytest.mark.parametrize("log_target", [False, True])
def test_nan_shows(fp32, log_target):
    tensors = sides(FORMS["kl_div-log_target" if log_target else "kl_div"], 3, 5, device=fp32.device)
    tensors["input"][0, 2] = tensors["target"][1, 3] = float("nan")
    out = kl_div(**tensors, reduction="none", log_target=log_target)
    assert out.isnan().nonzero().tolist() == [[0, 2], [1, 3]]


def test_equal_logits_give_exactly_zero(fp32):
    x = sides(FORMS["kl_div-logits"], 3, 37, spread=8.0, device=fp32.device)["input"]
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    loss = kl_div(*leaves, from_logits=True)
    grads = torch.autograd.grad(loss, leaves)
    assert loss == 0 and all(g.abs().max() < 1e-7 for g in grads)
    if fp32.path == "triton":
        assert not any(g.any() for g in grads)


def test_log_target_and_logits_exclude_each_other(fp32):
    x = torch.zeros(2, 3, device=fp32.device)
    with pytest.raises(ValueError, match="log_target says"):
        kl_div(x, x, log_target=True, from_logits=True)
