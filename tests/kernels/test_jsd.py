"""jsd: its limits in beta, Liger-Kernel's convention, and where probabilities vanish."""

import pytest
import torch
import torch.nn.functional as F
from given_checks import BOTH, FORMS, REDUCTIONS, check_definition, check_form, in_backward, short_blocks, sides

from liger_trainer.kernels.jsd import jsd
from liger_trainer.kernels.linear_divergence import divergence_reference

INF = float("inf")
JSD = {name: form for name, form in FORMS.items() if name.startswith("jsd")}


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    short_blocks(monkeypatch)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", JSD.values(), ids=JSD)
def test_definition(place, form, reduction):
    check_definition(form, place, reduction)


@pytest.mark.parametrize("form", JSD.values(), ids=JSD)
def test_definition_with_gradients_in_the_backward(fp32, form, monkeypatch):
    in_backward(monkeypatch, True)
    check_definition(form, fp32, "mean")


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_of_logits_is_that_of_linear_divergence(fp32, beta):
    x, t = sides(FORMS["jsd-logits"], 4, 37, device=fp32.device).values()
    got = jsd(x, t, beta=beta, from_logits=True, temperature=2.0, reduction="none", scale_by_temperature_squared=False)
    expected = divergence_reference(x, t, kind="jsd", beta=beta, temperature=2.0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    given = jsd((x / 2).log_softmax(-1), (t / 2).log_softmax(-1), beta=beta, reduction="none").sum(-1)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_convention_of_liger_kernel(fp32, beta):
    """Summed over entries and divided by the rows that are not ignored; log-probabilities of student, then teacher."""
    log_q, log_p = sides(FORMS["jsd"], 6, 37, device=fp32.device).values()
    labels = torch.tensor([3, 7, -100, 2, -100, 1], device=fp32.device)
    keep, m = labels != -100, (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    forward, reverse = (F.kl_div(m[keep], x[keep], log_target=True, reduction="sum") for x in (log_p, log_q))
    if beta in (0.0, 1.0):  # the limits after division by beta, by 1 - beta
        forward, reverse = (forward + reverse, 0) if beta == 0 else (0, forward + reverse)
        pair = (log_q, log_p) if beta == 0 else (log_p, log_q)
        expected = F.kl_div(*(x[keep] for x in pair), log_target=True, reduction="sum") / 4
    else:
        expected = (beta * forward + (1 - beta) * reverse) / 4
    torch.testing.assert_close(jsd(log_q, log_p, beta=beta, labels=labels), expected, rtol=1e-5, atol=1e-6)


def test_batchmean_is_over_the_rows_of_all_leading_dimensions(fp32):
    tensors = sides(FORMS["jsd"], 2, 3, 37, device=fp32.device)
    flat = {k: x.flatten(0, 1) for k, x in tensors.items()}
    torch.testing.assert_close(jsd(**tensors), jsd(**flat))


@pytest.mark.parametrize("name", ["jsd", "jsd-logits"])
def test_vanishing_probabilities(fp32, name):
    """-inf on either side or on both, and logarithms whose exponential is 0: all finite."""
    tensors = sides(FORMS[name], 3, 37, device=fp32.device)
    for x, columns in zip(tensors.values(), ([3, 20, 21], [4, 20, 22]), strict=True):
        x[:, columns] = -INF
        x[1, :30] -= 200.0
    got = check_form(FORMS[name], tensors, reduction="sum")
    assert not got["d_input"][:, [3, 20, 21]].any() and not got["d_target"][:, [4, 20, 22]].any()


@pytest.mark.parametrize("name", ["jsd", "jsd-logits"])
def test_far_apart(fp32, name):
    """No overlap: the divergence tends to beta log 1/beta + (1 - beta) log 1/(1 - beta)."""
    x = torch.linspace(-300, 300, 37, device=fp32.device)
    pair = [x[None], x.flip(-1)[None]]
    if name == "jsd":
        pair = [y.log_softmax(-1) for y in pair]
    got = jsd(*pair, beta=0.3, from_logits=name == "jsd-logits")
    torch.testing.assert_close(got.item(), 0.6108643, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["jsd", "jsd-logits"])
def test_equal_sides_give_exactly_zero(fp32, name):
    form = FORMS[name]
    x = sides(form, 3, 37, spread=8.0, device=fp32.device)["input"]
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    loss = jsd(*leaves, **form.options)
    grads = torch.autograd.grad(loss, leaves)
    assert loss == 0 and all(g.abs().max() < 1e-7 for g in grads)
    if fp32.path == "triton":
        assert not any(g.any() for g in grads)


def test_almost_equal_sides(fp32):
    """Of second order in their difference, which differences of logarithms of m would lose."""
    x = sides(FORMS["jsd"], 4, 37, device=fp32.device)["input"].double()
    t = (x + 1e-2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)).log_softmax(-1)
    tensors = {"input": x.float(), "target": t.float()}
    truth = jsd(*(y.double() for y in tensors.values()))
    torch.testing.assert_close(jsd(**tensors).double(), truth, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["jsd", "jsd-logits"])
def test_nan_shows(fp32, name):
    for wrong in BOTH:
        tensors = sides(FORMS[name], 3, 37, device=fp32.device)
        tensors[wrong][1, 20] = float("nan")
        out = jsd(**tensors, **FORMS[name].options, reduction="none").reshape(3, -1).sum(1)
        assert out.isnan().tolist() == [False, True, False]


def test_beta_is_checked(fp32):
    x = torch.zeros(2, 3, device=fp32.device)
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
        jsd(x, x, beta=1.5)
