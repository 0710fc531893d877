"""What is of linear_alm: its formula and limits, spans, and the same from stored logits.

What it shares with the other fused losses is in tests/kernels, test_linear_losses.py and test_linear_modes.py.
"""

import math

import pytest
import torch
from fused_losses import random_spans
from kernel_checks import evaluate

from liger_trainer.kernels.linear_alm import FLOOR, SpanDivergence, alm_reference, linear_alm, stored_alm, sum_of_spans


def test_the_value_is_a_kl_of_two_coins():
    p, q, tau = 0.3, 0.6, 4.0
    student, teacher = (torch.tensor(math.log(x), dtype=torch.float64) + FLOOR for x in (q, p))
    u, v = p ** (1 / tau), q ** (1 / tau)
    want = tau * (u * math.log(u / v) + (1 - u) * math.log((1 - u) / (1 - v)))
    assert SpanDivergence.apply(student, teacher, tau).item() == pytest.approx(want, rel=1e-12)
    a, b = -math.log(p), -math.log(q)
    assert SpanDivergence.apply(student, teacher, 1e7).item() == pytest.approx(b - a + a * math.log(a / b), rel=1e-5)


@pytest.mark.parametrize("tau", [0.1, 1.0, 100.0])
def test_extreme_likelihoods(tau):
    """fp32 against fp64, where one side is certain, hopeless, or both are nearly alike."""
    nats = torch.tensor([0.0, -1e-7, -1e-3, -0.5, -0.5001, -30.0, -30.001, -2000.0], dtype=torch.float64)
    student, teacher = (x.flatten() for x in torch.meshgrid(nats, nats, indexing="ij"))
    leaf, truth_leaf = student.float().requires_grad_(), student.clone().requires_grad_()
    got, truth = SpanDivergence.apply(leaf, teacher.float(), tau), SpanDivergence.apply(truth_leaf, teacher, tau)
    for value, of_leaf in ((got, leaf), (truth, truth_leaf)):
        value.sum().backward()
        assert torch.isfinite(value).all() and torch.isfinite(of_leaf.grad).all()
    # the inputs' own rounding to fp32 moves a gap of nearly equal surprisals by as much
    torch.testing.assert_close(got.double(), truth, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(leaf.grad.double(), truth_leaf.grad, rtol=5e-3, atol=2e-4)
    usual = (teacher > -20) & (student > -20) & (tau >= 1)
    torch.testing.assert_close(truth[usual], alm_reference(student, teacher, tau)[usual], rtol=1e-7, atol=1e-9)
    same = student == teacher
    assert not got[same].any() and not leaf.grad[same].any() and (truth > -1e-12).all()


def test_what_a_model_rules_out():
    never, some = torch.tensor(-math.inf), torch.tensor(-1.0)
    student = torch.stack([some, never]).requires_grad_()
    value = SpanDivergence.apply(student, torch.stack([never, never]), 100.0)
    value.sum().backward()
    assert value[0] > 1 and value[1] == 0 and student.grad[0] > 0 and student.grad[1] == 0
    assert SpanDivergence.apply(never, some, 100.0) == math.inf


def test_a_student_like_its_teacher_has_nothing_to_learn():
    tensors = random_spans()
    tensors["teacher_log_prob"] = sum_of_spans(evaluate(linear_alm, tensors)["log_prob"], tensors["spans"], 9)
    got = evaluate(linear_alm, tensors)
    assert not any(got[name].any() for name in ("loss", "alm", "d_hidden", "d_weight"))


def test_a_span_counts_once_and_the_rest_not():
    tensors = random_spans(seed=1)
    spans = tensors["spans"]
    got = evaluate(linear_alm, tensors)
    first = spans == torch.arange(9)
    assert bool((got["alm"][first] > 0).all()) and not got["alm"][~first].any()
    assert torch.equal(got["d_hidden"].abs().sum(-1) > 0, spans >= 0) and not bool((spans >= 0).all())
    assert got["loss"].item() == pytest.approx(got["alm"].sum().item() / 9)
    changed = {**tensors, "teacher_log_prob": tensors["teacher_log_prob"].where(first, 3.0)}
    assert evaluate(linear_alm, changed)["loss"] == got["loss"]


def test_stored_logits_give_the_same():
    tensors = random_spans(dtype=torch.float64, ignored=0.2)
    want = evaluate(linear_alm, tensors, ce_weight=0.3, num_items=4)
    rest = {name: tensors[name] for name in ("labels", "spans", "teacher_log_prob")}
    got = stored_alm(tensors["hidden"] @ tensors["weight"].t(), **rest, ce_weight=0.3, num_items=4)
    for name, value in got._asdict().items():
        torch.testing.assert_close(value, want[name], msg=name)


def test_without_rows_there_is_no_loss_and_without_spans_only_cross_entropy():
    empty = evaluate(linear_alm, random_spans(0))
    assert empty["loss"] == 0 and not empty["d_weight"].any()
    tensors = random_spans()
    tensors["spans"] = torch.full((9,), -1)
    got = evaluate(linear_alm, tensors, ce_weight=0.5)
    assert not got["alm"].any() and got["loss"].item() == pytest.approx(-0.5 * got["log_prob"].mean().item())


@pytest.mark.parametrize("change, message", [
    ({"tau": 0.0}, "tau must be positive, got 0.0"),
    ({"spans": torch.zeros(3, dtype=torch.int64)}, r"spans must be one number per row of hidden: expected \(9,\)"),
    ({"teacher_log_prob": torch.zeros(2)}, r"teacher_log_prob must be one number .* got \(2,\)"),
])  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        linear_alm(**{**random_spans(), **change})


@pytest.mark.gpu
def test_no_logits_are_stored_on_gpu():
    tensors = random_spans(4096, 128, 64_000, dtype=torch.bfloat16, device="cuda")
    evaluate(linear_alm, tensors, workspace_mb=32)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    evaluate(linear_alm, tensors, workspace_mb=32)
    logits = 4096 * 64_000 * 2
    assert torch.cuda.max_memory_allocated() - before < logits / 3
