"""What is of linear_divergence: its kinds, their limits and terms, a mixed teacher, and the teacher's own dtype."""

import itertools

import pytest
import torch
from fused_losses import CE, EACH, MIX
from kernel_checks import assert_same, check_divergence, double, evaluate, random_inputs, random_pair, set_path
from small_blocks import home

from liger_trainer.kernels.linear_divergence import (
    KINDS,
    divergence_reference,
    divergence_weights,
    linear_divergence,
    linear_divergence_reference,
)

LIMITS = pytest.mark.parametrize("kind, how, limit", [
    ("jsd", {"beta": 0.0}, "forward_kl"), ("jsd", {"beta": 1.0}, "reverse_kl"),
    ("skew_kl", {"alpha": 0.0}, "forward_kl"), ("skew_reverse_kl", {"alpha": 0.0}, "reverse_kl"),
])  # fmt: skip


def pair_of_logits(student, teacher, device="cpu"):
    """Inputs of the op whose logits are just these, (n, V)."""
    eye = torch.eye(student.shape[1], dtype=student.dtype)
    tensors = {"hidden": student, "weight": eye, "teacher_hidden": teacher, "teacher_weight": eye}
    return {k: x.to(device) for k, x in tensors.items()}


def random_logits(n, v, dtype=torch.float32, spread=2.0):
    generator = torch.Generator().manual_seed(0)
    return [spread * torch.randn(n, v, dtype=dtype, generator=generator) for _ in "qp"]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_divergence_is_the_weighted_sum_of_its_terms(place, temperature):
    tensors = random_pair(4, 12, 9, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    tensors["token_weight"] = torch.linspace(0.5, 2.0, 4, device=place.device)
    got = check_divergence(tensors, 3.0, kind=EACH, temperature=temperature, beta=0.3, **CE)
    of_kinds = sum(weight * got[f"of {kind}"] for kind, weight in EACH.items())
    torch.testing.assert_close(got["divergence"], of_kinds.to(got["divergence"]))


@pytest.mark.parametrize("scaled", [True, False])
def test_each_term_is_that_of_the_reference(fp32, scaled):
    tensors = random_pair(4, 6, 5, 20, device=fp32.device)
    got = linear_divergence(**tensors, kind=EACH, temperature=3.0, scale_by_temperature_squared=scaled)
    student, teacher = (tensors[f"{side}hidden"] @ tensors[f"{side}weight"].t() for side in ("", "teacher_"))
    for kind, x in got.terms.items():
        plain = divergence_reference(student, teacher, kind=kind, temperature=3.0)
        torch.testing.assert_close(x, plain * (9.0 if scaled else 1.0), rtol=2e-5, atol=1e-5)


def test_kinds_of_weight_0_are_only_measured(fp32):
    tensors = random_pair(4, 6, 5, 20, device=fp32.device, bias=True, ignored=0.3)
    options = {"temperature": 2.0, "teacher_share": 0.8, **CE}
    got = evaluate(linear_divergence, tensors, kind=dict.fromkeys(KINDS, 0.0) | {"reverse_kl": 0.7}, **options)
    single = evaluate(linear_divergence, tensors, kind={"reverse_kl": 0.7}, **options)
    assert {k for k in got if k.startswith("of ")} == {f"of {kind}" for kind in KINDS}
    assert {k for k in single if k.startswith("of ")} == {"of reverse_kl"}
    assert_same(got, single, rtol=1e-5, atol=2e-6)  # sums are taken in another order where kinds are measured
    for kind in KINDS if fp32.path == "torch" else ("skew_kl",):
        one = linear_divergence(**tensors, kind=kind, **options)
        torch.testing.assert_close(got[f"of {kind}"], one.divergence, rtol=1e-6, atol=1e-7)
        assert list(one.terms) == [kind] and torch.equal(one.terms[kind], one.divergence)


@LIMITS
def test_at_its_end_a_kind_is_a_kl(fp32, kind, how, limit):
    """To the bit, under the name that was given."""
    tensors = pair_of_logits(*random_logits(4, 21), fp32.device)
    expected = evaluate(linear_divergence, tensors, kind=limit, temperature=2.0)
    got = evaluate(linear_divergence, tensors, kind=kind, temperature=2.0, **how)
    assert torch.equal(got.pop(f"of {kind}"), expected.pop(f"of {limit}"))
    assert_same(got, expected)
    mixed = linear_divergence(**tensors, kind={kind: 0.5, "tvd": 0.0}, **how)
    assert set(mixed.terms) == {kind, "tvd"} and torch.equal(mixed.terms[kind], getattr(mixed, limit))


@LIMITS
def test_near_its_end_a_kind_tends_to_the_kl(kind, how, limit):
    """The JSD after division by beta or 1 - beta. A skewed KL to itself, at alpha 1, tends to 0."""
    logits = random_logits(4, 21, torch.float64)
    (name, end), share = next(iter(how.items())), 1e-7
    near = divergence_reference(*logits, kind=kind, **{name: abs(end - share)}) / (share if kind == "jsd" else 1)
    torch.testing.assert_close(near, divergence_reference(*logits, kind=limit), rtol=1e-4, atol=1e-4)
    if name == "alpha":
        assert 0 <= divergence_reference(*logits, kind=kind, alpha=1 - 1e-9).max() < 1e-8


def test_symmetric_kl_is_the_mean_of_both(fp32):
    tensors = random_pair(5, 6, 5, 20, device=fp32.device)
    got = evaluate(linear_divergence, tensors, kind="symmetric_kl")
    expected = evaluate(linear_divergence, tensors, kind={"forward_kl": 0.5, "reverse_kl": 0.5})
    assert_same(got, {k: x for k, x in expected.items() if not k.startswith("of ")})
    torch.testing.assert_close(got["of symmetric_kl"], (got["forward_kl"] + got["reverse_kl"]) / 2)


def test_tvd_lies_between_0_and_1_and_has_no_slope_where_both_agree(fp32):
    student, teacher = torch.tensor([[50.0, 0, 0, 0], [1, 2, 3, 4]]), torch.tensor([[0, 50.0, 0, 0], [1, 2, 3, 4]])
    got = evaluate(linear_divergence, pair_of_logits(student, teacher, fp32.device), kind="tvd")
    assert got["divergence"].tolist() == [1.0, 0.0] and got["d_hidden"].abs().max() < 1e-20
    student, teacher = torch.tensor([[1.0, 1.0, 3.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0, 3.0]])
    got = evaluate(linear_divergence, pair_of_logits(student, teacher, fp32.device), kind="tvd")
    q, sign = student.softmax(-1), torch.tensor([0.0, 0.0, 1.0, -1.0])
    expected = (q * (sign - (q * sign).sum()) / 2).to(fp32.device)
    torch.testing.assert_close(got["d_hidden"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_teacher_share(fp32, temperature):
    student, teacher = random_logits(2, 37)
    tensors = pair_of_logits(student, teacher, fp32.device)
    options = {"kind": EACH, "temperature": temperature, "beta": 0.3}
    plain = evaluate(linear_divergence, tensors, **options)
    assert_same(evaluate(linear_divergence, tensors, teacher_share=1.0, **options), plain)
    none = evaluate(linear_divergence, tensors, teacher_share=0.0, **options)
    assert not any(none[k].any() for k in none if k in ("loss", "divergence", "d_hidden") or k.startswith("of "))
    mixed = pair_of_logits(student, student + 0.3 * (teacher - student), fp32.device)
    expected = evaluate(linear_divergence, mixed, **options)
    for name, x in evaluate(linear_divergence, tensors, teacher_share=0.3, **options).items():
        real = name in ("forward_kl", "reverse_kl", "agrees", "entropy", "is_top1") or name.startswith("teacher_")
        assert real == torch.equal(x, plain[name]) or not x.any(), f"{name} is of the {'real' if real else 'mixed'} one"
        if not real:
            torch.testing.assert_close(x, expected[name], rtol=2e-5, atol=2e-6, msg=name)


def assert_nothing_to_learn(got):
    of_kinds = [name for name in got if name.startswith("of ")]
    for name in ("loss", "divergence", "forward_kl", "reverse_kl", "d_hidden", "d_weight", *of_kinds):
        assert not got[name].any(), f"{name} is up to {got[name].abs().max()}"


@pytest.mark.parametrize("kind", [*KINDS, EACH], ids=str)
@pytest.mark.parametrize("temperature, teacher_share", [(2.0, 0.7), pytest.param(1.0, 1.0, marks=pytest.mark.slow)])
def test_student_equal_to_teacher_gives_exactly_zero(place, kind, temperature, teacher_share):
    tensors = random_inputs(5, 6, 37, dtype=place.dtype, device=place.device, bias=True)
    tensors |= {f"teacher_{k}": x.clone() for k, x in tensors.items() if k != "labels"}
    options = {"kind": kind, "temperature": temperature, "teacher_share": teacher_share, "softcap": 6.0,
               "teacher_softcap": 6.0, "workspace_mb": 0.002}  # fmt: skip
    got = evaluate(linear_divergence, tensors, **options)
    assert_nothing_to_learn(got)
    assert got["agrees"].all() and not got["d_bias"].any()
    for name in ("log_prob", "entropy"):  # whose last operations a compiler may fuse on one side only
        torch.testing.assert_close(got[name], got[f"teacher_{name}"], rtol=1e-6, atol=1e-6)


def test_agrees_with_torch(fp32):
    tensors = random_pair(6, 6, 5, 20, device=fp32.device, labels=False)
    log_q, log_p = (
        (tensors[f"{side}hidden"] @ tensors[f"{side}weight"].t()).log_softmax(-1) for side in ("", "teacher_")
    )
    got, kl_div = linear_divergence(**tensors), torch.nn.functional.kl_div
    torch.testing.assert_close(got.loss, kl_div(log_q, log_p, reduction="batchmean", log_target=True))
    torch.testing.assert_close(got.reverse_kl, kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1))
    torch.testing.assert_close(got.teacher_entropy, torch.distributions.Categorical(logits=log_p).entropy())


@pytest.mark.parametrize("options", [{}, {"kind": MIX, "temperature": 2.0, "softcap": 6.0, **CE}], ids=["", "all"])
@pytest.mark.parametrize("workspace_mb", [1e-6, 0.001, 512])
def test_wider_logits(place, options, workspace_mb):
    """fp32 logits under narrower products; the gradient lies in the front half of its row of logits."""
    tensors = random_pair(7, 12, 9, 77, dtype=place.dtype, device=place.device, bias=True, ignored=0.2)
    got = check_divergence(tensors, logits_dtype=torch.float32, workspace_mb=workspace_mb, **options)
    if place.dtype.itemsize <= 2:
        wide = {k: x.float() if x.is_floating_point() else x for k, x in tensors.items()}
        unrounded = evaluate(linear_divergence_reference, wide, **options)
        # no narrow number lies on the way to the values
        values = {k: x for k, x in unrounded.items() if k[:2] != "d_" and x.is_floating_point()}
        assert_same(got, values, rtol=1e-5, atol=1e-5)


def test_whether_both_agree_on_the_likeliest(fp32, monkeypatch):
    """Some likeliest token is common to both. is_top1: none is likelier than the label."""
    one = torch.ones(1, 1, device=fp32.device)
    cases = [
        ([1, 3, 2, 3], [0, 3, 0, 2], True),  # the teacher's choice is the student's first of two
        ([1, 3, 2, 3], [0, 2, 0, 3], True), ([3, 1, 2, 0], [0, 3, 0, 3], False), ([3, 1, 2, 3], [3, 3, 3, 0], True),
        ([2, 2, 2, 2], [0, 0, 1, 0], True), ([0, 0, 1, 0], [1, 1, 0, 1], False),
    ]  # fmt: skip
    # across lanes, within one, and within one from block to block
    for (vector_bytes, lanes), (student, teacher, agree) in itertools.product(((4, 8), (16, 8), (4, 2)), cases):
        for name, value in (("VECTOR_BYTES", vector_bytes), ("LANES", lanes)):
            monkeypatch.setattr(home("_divergence_kernels", name), name, value)
        s, t = (torch.tensor(x, dtype=torch.float32, device=fp32.device)[:, None] for x in (student, teacher))
        for label in range(4):
            got = linear_divergence(one, s, one, t, labels=torch.tensor([label], device=fp32.device))
            assert got.agrees.item() == agree, (student, teacher, vector_bytes, lanes)
            assert got.is_top1.item() == (student[label] == max(student)), (student, label, vector_bytes, lanes)


def test_a_head_of_both_sides_whose_products_differ_in_dtype(fp32):
    """Each side in its own: fp16 hidden states next to the teacher's fp32."""
    x, y, weight = (torch.randn(*shape, device=fp32.device) for shape in ((33, 16), (33, 16), (50, 16)))
    x, weight = x.half().requires_grad_(), weight.half()
    losses = [linear_divergence(x, weight, y, of_teacher).loss for of_teacher in (weight, weight.clone())]
    assert losses[0].item() == losses[1].item() > 0


@pytest.mark.parametrize("frozen, casts", [(True, 1), (False, 2)])
def test_a_frozen_head_that_is_its_own_teacher_is_cast_once(fp32, products, frozen, casts):
    x, y, weight = (torch.randn(*shape, device=fp32.device) for shape in ((33, 16), (33, 16), (50, 16)))
    x.requires_grad_(), weight.requires_grad_(not frozen)
    with torch.autocast(fp32.device, torch.bfloat16):
        losses = [linear_divergence(x, weight, y, of_teacher).loss for of_teacher in (weight, weight.detach().clone())]
    assert len({w.data_ptr() for w in products.weights[:2]}) == casts
    assert all(w.dtype == torch.bfloat16 for w in products.weights)
    assert losses[0].item() == losses[1].item() > 0
    one, two = (torch.autograd.grad(loss, x)[0] for loss in losses)
    assert torch.equal(one, two)


DTYPES = ["float64", "float32", "bfloat16", "float16"]
PAIRS = [("torch", *pair) for pair in itertools.product(DTYPES, DTYPES)]
PAIRS += [("triton", "float32", teacher) for teacher in ("float64", "float16")]


@pytest.mark.parametrize("path, student, teacher", PAIRS)
def test_teacher_of_another_dtype(request, monkeypatch, path, student, teacher):
    device = request.getfixturevalue("triton_fp32").device if path == "triton" else set_path(monkeypatch, "torch")
    student, teacher = getattr(torch, student), getattr(torch, teacher)
    tensors = {
        k: x.to(device, None if k == "labels" else teacher if k.startswith("teacher") else student)
        for k, x in random_pair(7, 6, 5, 20, bias=True).items()
    }
    options = {"kind": MIX, "temperature": 2.0, **CE}
    got = evaluate(linear_divergence, tensors, **options)
    truth = evaluate(linear_divergence_reference, double(tensors), **options)
    tolerance = 10 * max(torch.finfo(student).eps, torch.finfo(teacher).eps, 1e-7)
    for name in ("loss", "divergence", "d_hidden", "d_weight", "d_bias"):
        assert got[name].dtype == (student if name[:2] == "d_" else torch.promote_types(student, torch.float32))
        wrong = (got[name].double() - truth[name]).norm() / truth[name].norm()
        assert wrong < tolerance, f"{name}: relative error {wrong:.2e}"


@pytest.mark.parametrize("kind, how, expected", [
    *((kind, {}, {kind: 1}) for kind in ("forward_kl", "reverse_kl", "jsd")),
    ("jsd", {"beta": 0}, {"forward_kl": 1}), ("jsd", {"beta": 1}, {"reverse_kl": 1}), (MIX, {"beta": 0.3}, MIX),
    (MIX, {"beta": 0.0}, {"forward_kl": 1.0, "reverse_kl": 0.5}),
    (MIX, {"beta": 1.0}, {"forward_kl": 0.3, "reverse_kl": 1.2}), ({"reverse_kl": 2}, {}, {"reverse_kl": 2}),
    ({"jsd": 0}, {"beta": 0.0}, {"forward_kl": 0}), ("symmetric_kl", {}, {"forward_kl": 0.5, "reverse_kl": 0.5}),
    ({"symmetric_kl": 0.4, "forward_kl": 0.1, "tvd": 0}, {}, {"forward_kl": 0.3, "reverse_kl": 0.2, "tvd": 0}),
    ({"skew_kl": 2, "skew_reverse_kl": 3}, {}, {"skew_kl": 2, "skew_reverse_kl": 3}),
    ({"skew_kl": 2, "skew_reverse_kl": 3, "tvd": 1}, {"alpha": 0.0}, {"forward_kl": 2, "reverse_kl": 3, "tvd": 1}),
], ids=str)  # fmt: skip
def test_what_kinds_stand_for(kind, how, expected):
    got = divergence_weights(kind, **{"beta": 0.5, **how})
    assert got == pytest.approx(expected)
    assert divergence_weights(got, **{"beta": 0.5, **how}) == got


@pytest.mark.parametrize("change, message", [
    ({"teacher_hidden": torch.zeros(3, 5)}, "same tokens: hidden has 4 rows, teacher_hidden 3"),
    ({"logits_dtype": torch.float64}, "logits_dtype must be None or torch.float32, got torch.float64"),
    ({"alpha": 1.0}, r"alpha must lie in \[0, 1\), got 1.0. It is a distribution's share"),
    ({"teacher_share": 1.1}, r"teacher_share must lie in \[0, 1\], got 1.1"),
    ({"teacher_share": -0.1}, "teacher_share must lie"),
])  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        linear_divergence(**{**random_pair(4, 6, 5, 20), **change})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "teacher_share": 0.5, "softcap": 15.0}], ids=["", "mixed"]
)
def test_tvd_whose_sign_turns_on_a_rounding_error_on_gpu(dtype, options):
    tensors = random_pair(333, 96, 128, 20003, dtype=dtype, device="cuda", ignored=0.3)
    got = evaluate(linear_divergence, tensors, kind="tvd", workspace_mb=16, **options)
    plain = evaluate(linear_divergence_reference, tensors, kind="tvd", **options)
    truth = evaluate(linear_divergence_reference, double(tensors), kind="tvd", **options)
    for name in ("loss", "divergence", "of tvd", "d_hidden", "d_weight"):
        wrong, allowed = ((x[name].double() - truth[name]).norm() / truth[name].norm() for x in (got, plain))
        assert wrong <= 2 * allowed + 1e-3, f"{name}: relative error {wrong:.2e}, of plain torch {allowed:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5001, 20000])
def test_wider_logits_on_gpu(dtype, vocab):
    """The gradient overwrites the front of logits that other threads of the program still read."""
    tensors = random_pair(512, 96, 128, vocab, dtype=dtype, device="cuda", ignored=0.1)
    ce = {"ce_weight": 0.4, "label_smoothing": 0.1, "z_loss": 0.001}
    check_divergence(tensors, logits_dtype=torch.float32, workspace_mb=32, kind=MIX, **ce)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("teacher_share", [1.0, 0.7])
@pytest.mark.parametrize("kind", [MIX, EACH], ids=["mix", "each"])
def test_student_equal_to_teacher_gives_exactly_zero_on_gpu(dtype, teacher_share, kind):
    tensors = random_inputs(300, 128, 5001, dtype=dtype, device="cuda")
    tensors |= {f"teacher_{k}": tensors[k] for k in ("hidden", "weight")}
    options = {"kind": kind, "temperature": 2.0, "teacher_share": teacher_share}
    assert_nothing_to_learn(evaluate(linear_divergence, tensors, **options))
