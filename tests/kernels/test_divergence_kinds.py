"""The kinds of linear_divergence one by one: values, gradients, limits, the adaptive KL's head, and a mixed teacher.

What all of them share is in test_linear_divergence.py.
"""

import math

import pytest
import torch
from kernel_checks import LEAVES, check_divergence, evaluate, random_pair, set_path

from liger_trainer.kernels import _divergence_rows
from liger_trainer.kernels._divergence_options import BITS, DivergenceOptions
from liger_trainer.kernels._divergence_reference import likeliest_half
from liger_trainer.kernels.linear_divergence import (
    KINDS,
    distillation_reference,
    divergence_reference,
    linear_divergence,
)

NEW = ["skew_kl", "skew_reverse_kl", "symmetric_kl", "tvd", "adaptive_kl"]
EACH = {kind: 0.2 + 0.1 * i for i, kind in enumerate(KINDS)}
CE = {"ce_weight": 0.4, "label_smoothing": 0.1, "z_loss": 0.02}
CAPS = {"softcap": 7.0, "teacher_softcap": 9.0, "scale": 0.8, "teacher_scale": 1.2}


@pytest.fixture
def place(place, monkeypatch):
    """Blocks of which a row here takes two or three: the interpreter's time goes by their number."""
    monkeypatch.setattr(_divergence_rows, "LANES", 16)
    return place


@pytest.fixture
def fp32(fp32, monkeypatch):
    monkeypatch.setattr(_divergence_rows, "LANES", 16)
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
@pytest.mark.parametrize(
    "kind", [k for k in KINDS if k != "adaptive_kl"] + [{k: w for k, w in EACH.items() if k != "adaptive_kl"}], ids=str
)
def test_gradcheck(kind, temperature, monkeypatch):
    """Value and gradient belong together, T^2 included."""
    set_path(monkeypatch, "torch")
    tensors = random_pair(3, 3, 2, 5, dtype=torch.float64, bias=True)
    leaves = {k: tensors.pop(k).requires_grad_() for k in LEAVES}

    def loss(*values):
        values = dict(zip(leaves, values, strict=True))
        return linear_divergence(**tensors, **values, kind=kind, temperature=temperature, alpha=0.2, beta=0.3).loss

    assert torch.autograd.gradcheck(loss, list(leaves.values()))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_adaptive_kl_is_two_kls_with_weights_of_each_row(fp32, temperature):
    """Its gradient is that of the KLs, whose own is checked by finite differences, with the weights held."""
    student, teacher = random_logits(3, 37)
    of_head = head_weights(student / temperature, teacher / temperature)
    assert 0.1 < of_head.min() and of_head.max() < 0.9
    for row in range(3):
        tensors = pair_of_logits(student[row : row + 1], teacher[row : row + 1], fp32.device)
        weight = of_head[row].item()
        kls = {"forward_kl": weight, "reverse_kl": 1 - weight}
        got, expected = (
            evaluate(linear_divergence, tensors, kind=kind, temperature=temperature) for kind in ("adaptive_kl", kls)
        )
        for name in ("loss", "d_hidden", "d_weight"):
            torch.testing.assert_close(got[name], expected[name], rtol=2e-5, atol=2e-6)


def head_weights(student, teacher):
    """The weight of the forward KL in each row, by adding up the head token by token."""
    q, p = (x.double().softmax(-1) for x in (student, teacher))
    weights = []
    for q_row, p_row, t_row in zip(q, p, teacher, strict=True):
        groups = sorted(set(t_row.tolist()), reverse=True)
        head, mass = torch.zeros_like(t_row, dtype=torch.bool), 0.0
        for value in groups:
            mass += p_row[t_row == value].sum().item()
            if mass > 0.5 and head.any():
                break
            head |= t_row == value
        gaps = (p_row - q_row).abs()
        weights.append(gaps[head].sum() / gaps.sum())
    return torch.stack(weights)


HEADS = {
    "one token above all": [9.0, 1.0, 0.0, -1.0, 3.0],
    "two share the first place": [5.0, 5.0, 0.0, 1.0, 2.0],
    "three share the second": [3.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.6],
    "ties at the edge": [2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.5],
    "all equal": [0.25] * 7,
    "two values": [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "all but equal": [1e-4 * x for x in (3, 1, 4, 1.5, 9, 2, 6, 5, 3.5)],
    "far below zero": [-300.0, -301.0, -302.0, -300.5, -301.5, -305.0],
    "one far above a flat rest": [6.0] + [0.01 * x for x in range(12)],
    "large and close": [1000.0 + 2.0**-9 * x for x in range(9)],
}


def test_head_of_adaptive_kl(fp32):
    rows = [torch.tensor(x + [-1e4] * (20 - len(x))) for x in HEADS.values()]  # the rest weighs nothing
    generator = torch.Generator().manual_seed(1)
    rows += [x[torch.randperm(20, generator=generator)] for x in rows]  # wherever in the row they lie
    teacher = torch.stack(rows)
    check_head(fp32, 2 * torch.randn(teacher.shape, generator=generator), teacher)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab, spread", [(300, 0.05), (300, 2.0), (77, 6.0)])
def test_head_of_adaptive_kl_at_random(fp32, vocab, spread, dtype, monkeypatch):
    monkeypatch.setattr(_divergence_rows, "LANES", 64)
    student, teacher = random_logits(3, vocab, seed=3, spread=spread)
    check_head(fp32, student, teacher.to(dtype).float())


def check_head(place, student, teacher):
    kind = {"forward_kl": 0.0, "reverse_kl": 0.0, "adaptive_kl": 1.0}
    with torch.no_grad():
        got = linear_divergence(**pair_of_logits(student, teacher, place.device), kind=kind).terms
    forward, reverse, value = (got[name].cpu().double() for name in kind)
    of_head = head_weights(student, teacher)
    torch.testing.assert_close(value, of_head * forward + (1 - of_head) * reverse, rtol=1e-5, atol=1e-6)


def test_likeliest_half_by_adding_up():
    log_p = torch.randn(50, 23, generator=torch.Generator().manual_seed(0)).mul(3).round().log_softmax(-1)  # has ties
    p = log_p.exp()
    as_likely = torch.stack([(p * (log_p >= log_p[:, i : i + 1])).sum(-1) for i in range(23)], 1)
    assert torch.equal(likeliest_half(log_p), (as_likely <= 0.5) | (log_p == log_p.amax(-1, True)))


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
    for kind in KINDS if fp32.path == "torch" else ("adaptive_kl",):
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
    """Measured are kinds of the second pass, for which alone it is made; the adaptive KL's gradient is of both KLs."""

    def bits(*kinds):
        return sum(BITS[kind] for kind in kinds)

    for weights, measured, graded in (
        ({"forward_kl": 1.0}, bits(), bits("forward_kl")),
        ({"jsd": 0.0, "tvd": 1.0}, bits("jsd", "tvd"), bits("tvd")),
        ({"adaptive_kl": 0.0, "reverse_kl": 0.0}, bits("adaptive_kl"), bits()),
        ({"adaptive_kl": 0.5, "forward_kl": 0.5}, bits("adaptive_kl"), bits("forward_kl", "reverse_kl")),
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
