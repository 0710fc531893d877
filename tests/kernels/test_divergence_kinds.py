"""The kinds of linear_divergence one by one: values, gradients, limits, and a mixed teacher.

What all of them share is in test_linear_divergence.py.
"""

import math

import pytest
import torch
from kernel_checks import LEAVES, check_divergence, evaluate, random_pair, set_path

from liger_trainer.kernels import _divergence_kernels
from liger_trainer.kernels._divergence_torch import BITS, DivergenceOptions
from liger_trainer.kernels.linear_divergence import (
    KINDS,
    distillation_reference,
    divergence_reference,
    linear_divergence,
)

NEW = ["skew_kl", "skew_reverse_kl", "symmetric_kl", "tvd"]
EACH = {kind: 0.2 + 0.1 * i for i, kind in enumerate(KINDS)}
CE = {"ce_weight": 0.4, "label_smoothing": 0.1, "z_loss": 0.02}
CAPS = {"softcap": 7.0, "teacher_softcap": 9.0, "scale": 0.8, "teacher_scale": 1.2}


@pytest.fixture
def place(place, monkeypatch):
    """Blocks of which a row here takes two or three: the interpreter's time goes by their number."""
    monkeypatch.setattr(_divergence_kernels, "LANES", 16)
    return place


@pytest.fixture
def fp32(fp32, monkeypatch):
    monkeypatch.setattr(_divergence_kernels, "LANES", 16)
    return fp32


def pair_of_logits(student, teacher, device="cpu"):
    """Inputs of the op whose logits are just these, (n, V)."""
    eye = torch.eye(student.shape[1], dtype=student.dtype)
    tensors = {"hidden": student, "weight": eye, "teacher_hidden": teacher, "teacher_weight": eye}
    return {k: x.to(device) for k, x in tensors.items()}


def random_logits(n, v, dtype=torch.float32, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return [spread * torch.randn(n, v, dtype=dtype, generator=generator) for _ in "qp"]


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "alpha": 0.3, "teacher_share": 0.4, **CAPS, **CE}], ids=["", "all"]
)
def test_each_kind(fp32, kind, options):
    tensors = random_pair(3, 12, 9, 37, device=fp32.device, bias=True)
    got = check_divergence(tensors, kind=kind, **options)
    torch.testing.assert_close(got[f"of {kind}"], got["divergence"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_kinds_together(place, temperature):
    tensors = random_pair(4, 12, 9, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    tensors["token_weight"] = torch.linspace(0.5, 2.0, 4, device=place.device)
    got = check_divergence(tensors, 3.0, kind=EACH, temperature=temperature, beta=0.3, **CE)
    of_kinds = sum(weight * got[f"of {kind}"] for kind, weight in EACH.items())
    torch.testing.assert_close(got["divergence"], of_kinds.to(got["divergence"]))


def test_recomputed(fp32):
    tensors = random_pair(5, 6, 5, 37, device=fp32.device, bias=True, ignored=0.3)
    each = torch.linspace(-1.5, 3.0, 5, device=fp32.device)
    how = {"recompute": True, "reduction": "none", "workspace_mb": 0.0005}
    check_divergence(tensors, each, kind=EACH, temperature=1.5, teacher_share=0.3, **how, **CE)


@pytest.mark.parametrize("size", [1e4, 30.0])
@pytest.mark.parametrize("kind", [k for k in NEW if k != "symmetric_kl"])
@pytest.mark.parametrize("teacher_share", [1.0, 0.3])
def test_extreme_logits(fp32, size, kind, teacher_share):
    """Student and teacher sure of different tokens: either's probability underflows to 0 under the other."""
    hidden = torch.tensor([[1.0], [-1.0], [0.5]], device=fp32.device)
    weight = torch.tensor([[1.0], [-1.0], [0.0], [0.5], [0.25]], device=fp32.device) * size
    tensors = {"hidden": hidden, "weight": weight, "teacher_weight": weight}
    options = {"kind": kind, "temperature": 2.0, "teacher_share": teacher_share}
    for teacher_hidden in (-hidden, torch.zeros_like(hidden)):
        tensors["teacher_hidden"] = teacher_hidden
        got = evaluate(linear_divergence, tensors, **options)
        truth = evaluate(_reference, {k: x.double() for k, x in tensors.items()}, **options)
        for name in ("loss", "divergence", "d_hidden"):
            wrong = (got[name].double() - truth[name]).abs().max().item()
            largest = max(size if name == "d_hidden" else 1.0, truth[name].abs().max().item())
            bound = (4 * torch.finfo(got[name].dtype).eps + 1e-6 * size) * largest
            assert wrong <= bound, f"{name}: error {wrong:.2e}, bound {bound:.2e}"  # NaN fails too


def _reference(hidden, weight, teacher_hidden, teacher_weight, **options):
    return distillation_reference(hidden @ weight.t(), teacher_hidden @ teacher_weight.t(), **options)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("kind", [*KINDS, EACH], ids=str)
def test_gradcheck(kind, temperature, monkeypatch):
    """Value and gradient belong together, T^2 included."""
    set_path(monkeypatch, "torch")
    tensors = random_pair(3, 3, 2, 5, dtype=torch.float64, bias=True)
    leaves = {k: tensors.pop(k).requires_grad_() for k in LEAVES}

    def loss(*values):
        values = dict(zip(leaves, values, strict=True))
        return linear_divergence(**tensors, **values, kind=kind, temperature=temperature, alpha=0.2, beta=0.3).loss

    assert torch.autograd.gradcheck(loss, list(leaves.values()))


@pytest.mark.parametrize("kind, limit", [("skew_kl", "forward_kl"), ("skew_reverse_kl", "reverse_kl")])
def test_skewed_kls_tend_to_the_kls(fp32, kind, limit):
    tensors = pair_of_logits(*random_logits(4, 21), fp32.device)
    expected = evaluate(linear_divergence, tensors, kind=limit, temperature=2.0)
    at_end = evaluate(linear_divergence, tensors, kind=kind, alpha=0.0, temperature=2.0)
    assert torch.equal(at_end.pop(f"of {kind}"), expected.pop(f"of {limit}"))
    assert all(torch.equal(at_end[k], expected[k]) for k in expected)
    near = evaluate(linear_divergence, tensors, kind=kind, alpha=1e-7, temperature=2.0)
    for name in ("loss", "divergence", "d_hidden"):
        torch.testing.assert_close(near[name], expected[name], rtol=1e-4, atol=1e-5)
    far = divergence_reference(*random_logits(4, 21, torch.float64), kind=kind, alpha=1 - 1e-9)
    assert 0 <= far.max() < 1e-8


def test_symmetric_kl_is_the_mean_of_both(fp32):
    tensors = random_pair(5, 6, 5, 20, device=fp32.device)
    got = evaluate(linear_divergence, tensors, kind="symmetric_kl")
    both = {"forward_kl": 0.5, "reverse_kl": 0.5}
    expected = evaluate(linear_divergence, tensors, kind=both)
    assert all(torch.equal(got[k], x) for k, x in expected.items() if not k.startswith("of "))
    torch.testing.assert_close(got["of symmetric_kl"], (got["forward_kl"] + got["reverse_kl"]) / 2)


def test_tvd_lies_between_0_and_1_and_has_no_slope_where_both_agree(fp32):
    student, teacher = torch.tensor([[50.0, 0, 0, 0], [1, 2, 3, 4]]), torch.tensor([[0, 50.0, 0, 0], [1, 2, 3, 4]])
    got = evaluate(linear_divergence, pair_of_logits(student, teacher, fp32.device), kind="tvd")
    assert got["divergence"].tolist() == [1.0, 0.0] and got["d_hidden"].abs().max() < 1e-20
    student, teacher = torch.tensor([[1.0, 1.0, 3.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0, 3.0]])
    got = evaluate(linear_divergence, pair_of_logits(student, teacher, fp32.device), kind="tvd")
    q = student.softmax(-1)
    sign = torch.tensor([0.0, 0.0, 1.0, -1.0])
    expected = (q * (sign - (q * sign).sum()) / 2).to(fp32.device)
    torch.testing.assert_close(got["d_hidden"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_teacher_share(fp32, temperature):
    student, teacher = random_logits(2, 37)
    tensors = pair_of_logits(student, teacher, fp32.device)
    options = {"kind": EACH, "temperature": temperature, "beta": 0.3}
    plain = evaluate(linear_divergence, tensors, **options)
    whole = evaluate(linear_divergence, tensors, teacher_share=1.0, **options)
    assert all(torch.equal(whole[k], plain[k]) for k in plain)
    none = evaluate(linear_divergence, tensors, teacher_share=0.0, **options)
    assert not any(none[k].any() for k in none if k in ("loss", "divergence", "d_hidden") or k.startswith("of "))
    mixed = pair_of_logits(student, student + 0.3 * (teacher - student), fp32.device)
    got, expected = evaluate(linear_divergence, tensors, teacher_share=0.3, **options), evaluate(
        linear_divergence, mixed, **options
    )  # fmt: skip
    for name, x in got.items():
        real = name in ("forward_kl", "reverse_kl", "agrees", "entropy", "is_top1") or name.startswith("teacher_")
        assert real == torch.equal(x, plain[name]) or not x.any(), f"{name} is of the {'real' if real else 'mixed'} one"
        if not real:
            torch.testing.assert_close(x, expected[name], rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_kinds_of_weight_0_are_measured_alone(fp32):
    tensors = random_pair(4, 6, 5, 20, device=fp32.device, bias=True, ignored=0.3)
    options = {"temperature": 2.0, "teacher_share": 0.8, **CE}
    got = evaluate(linear_divergence, tensors, kind=dict.fromkeys(KINDS, 0.0) | {"reverse_kl": 0.7}, **options)
    alone = evaluate(linear_divergence, tensors, kind={"reverse_kl": 0.7}, **options)
    assert {k for k in got if k.startswith("of ")} == {f"of {kind}" for kind in KINDS}
    assert {k for k in alone if k.startswith("of ")} == {"of reverse_kl"}
    for name, x in alone.items():
        torch.testing.assert_close(got[name], x, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
    for kind in KINDS if fp32.path == "torch" else ("skew_kl",):
        one = linear_divergence(**tensors, kind=kind, **options)
        torch.testing.assert_close(got[f"of {kind}"], one.divergence, rtol=1e-6, atol=1e-7)
        assert list(one.terms) == [kind] and torch.equal(one.terms[kind], one.divergence)


@pytest.mark.parametrize("beta, limit", [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_terms_have_the_names_that_were_given(fp32, beta, limit):
    tensors = random_pair(4, 6, 5, 20, device=fp32.device)
    got = linear_divergence(**tensors, kind={"jsd": 0.5, "skew_kl": 0.0}, beta=beta, alpha=0.0)
    assert set(got.terms) == {"jsd", "skew_kl"}
    assert torch.equal(got.terms["jsd"], getattr(got, limit)) and torch.equal(got.terms["skew_kl"], got.forward_kl)


@pytest.mark.parametrize("scaled", [True, False])
def test_temperature_squared(fp32, scaled):
    tensors = random_pair(4, 6, 5, 20, device=fp32.device)
    got = linear_divergence(**tensors, kind=EACH, temperature=3.0, scale_by_temperature_squared=scaled)
    plain = divergence_terms(tensors, temperature=3.0)
    for kind, x in got.terms.items():
        torch.testing.assert_close(x, plain[kind] * (9.0 if scaled else 1.0), rtol=2e-5, atol=1e-5)


def divergence_terms(tensors, temperature):
    student = tensors["hidden"] @ tensors["weight"].t()
    teacher = tensors["teacher_hidden"] @ tensors["teacher_weight"].t()
    return {kind: divergence_reference(student, teacher, kind=kind, temperature=temperature) for kind in KINDS}


def test_what_is_not_named_is_not_compiled():
    """Measured are kinds of the second pass, for which alone it is made."""

    def bits(*kinds):
        return sum(BITS[kind] for kind in kinds)

    for weights, measured, graded in (
        ({"forward_kl": 1.0}, bits(), bits("forward_kl")),
        ({"jsd": 0.0, "tvd": 1.0}, bits("jsd", "tvd"), bits("tvd")),
        ({"skew_kl": 0.0, "reverse_kl": 0.0}, bits("skew_kl"), bits()),
    ):
        options = DivergenceOptions(weights)
        assert (options.measured, options.graded) == (measured, graded), weights


@pytest.mark.parametrize(
    "options, message",
    [
        ({"alpha": 1.0}, r"alpha must lie in \[0, 1\), got 1.0. It is a distribution's share"),
        ({"alpha": -0.1}, "alpha must lie"),
        ({"alpha": math.nan}, "alpha must lie"),
        ({"teacher_share": 1.1}, r"teacher_share must lie in \[0, 1\], got 1.1"),
        ({"teacher_share": -0.1}, "teacher_share must lie"),
        ({"kind": "skew"}, "kind must be one of forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl, symmetric_kl"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        linear_divergence(**random_pair(4, 6, 5, 20), **options)
