"""linear_alm beside plain torch in fp64, and what its formula promises."""

import functools
import math

import pytest
import torch
from kernel_checks import check, evaluate, random_inputs, under_autocast

from liger_trainer.kernels._linear_head import RowSelection
from liger_trainer.kernels.linear_alm import (
    FLOOR,
    SpanDivergence,
    alm_reference,
    linear_alm,
    linear_alm_reference,
    stored_alm,
    sum_of_spans,
)  # fmt: skip
from liger_trainer.kernels.linear_log_probs import linear_log_probs_reference
from liger_trainer.kernels.types import Lora

check_alm = functools.partial(check, linear_alm, linear_alm_reference)
ALL = {"alm_weight": 1.5, "ce_weight": 0.4, "tau": 20.0, "scale": 0.8, "softcap": 7.0, "num_items": 5}
OPTIONS = {
    "paper": {},
    "raw likelihoods": {"tau": 1.0},
    "small tau": {"tau": 0.3},
    "with ce": {"ce_weight": 0.5},
    "ce alone": {"alm_weight": 0.0, "ce_weight": 1.0},
    "num_items": {"num_items": 3},
    "padded": {"vocab_size": 31},
    "all": ALL,
}


def random_spans(n=9, h=12, v=37, *, dtype=torch.float32, bias=False, ignored=0.0, seed=0) -> dict:
    """Spans of one to three rows; rows without a label, and some others, are in none."""
    generator = torch.Generator().manual_seed(seed)
    tensors = random_inputs(n, h, v, bias=bias, ignored=ignored, seed=seed)
    spans, row = torch.full((n,), -1), 0
    while row < n:
        size = min(int(torch.randint(1, 4, (), generator=generator)), n - row)
        if bool((tensors["labels"][row : row + size] != -100).all()) and row != 2:
            spans[row : row + size] = row
        row += size
    tensors["spans"] = spans
    tensors["teacher_log_prob"] = -5 * torch.rand(n, generator=generator)  # also at rows where it is not read
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in tensors.items()}


@pytest.mark.parametrize("sizes", [(1, 1, 2), (5, 3, 24), (12, 24, 101)], ids=str)
def test_values_and_gradients(place, sizes):
    tensors = {name: x.to(place.device) for name, x in random_spans(*sizes, dtype=place.dtype).items()}
    check_alm(tensors, ce_weight=0.3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_options(options, dtype):
    tensors = random_spans(dtype=dtype, bias=True, ignored=0.2, seed=3)
    keep = tensors["labels"] != -100
    assert 0 < keep.sum() < 9 and (tensors["spans"] >= 0).sum() > len(set(tensors["spans"].tolist())) - 1
    tensors["labels"] = tensors["labels"].remainder(31).where(keep, -100)
    check_alm(tensors, **options)


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("hidden",)], ids=["frozen head", "frozen hidden"])
def test_frozen_parts(frozen):
    check_alm(random_spans(bias=True), frozen=frozen, ce_weight=0.2)


def test_weights_of_tokens_and_adapters():
    tensors = random_spans()
    tensors["token_weight"] = torch.rand(9)
    check_alm(tensors, ce_weight=0.2)
    adapter = Lora(torch.randn(2, 12), torch.randn(37, 2), 0.5)
    check_alm(random_spans(), lora=adapter, leaves=("hidden",), frozen=())


@pytest.mark.parametrize("tau", [0.5, 1.0, 100.0])
def test_gradients_by_finite_differences(tau):
    tensors, step = random_spans(dtype=torch.float64), 1e-6
    got = evaluate(linear_alm, tensors, tau=tau)
    for name in ("hidden", "weight"):
        way = torch.randn(tensors[name].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        one, other = (
            linear_alm(**{**tensors, name: tensors[name] + sign * step * way}, tau=tau).loss for sign in (1, -1)
        )
        assert (got[f"d_{name}"] * way).sum().item() == pytest.approx((one - other).item() / (2 * step), rel=1e-5)


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
    """fp32 beside fp64, where one side is certain, hopeless, or both are nearly alike."""
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


def test_a_student_like_its_teacher():
    tensors = random_spans(dtype=torch.float32)
    log_prob = linear_log_probs_reference(*(tensors[x] for x in ("hidden", "weight", "labels"))).log_prob
    ours = evaluate(linear_alm, tensors)["log_prob"]
    torch.testing.assert_close(ours, log_prob)
    tensors["teacher_log_prob"] = sum_of_spans(ours, tensors["spans"], 9)
    got = evaluate(linear_alm, tensors)
    assert got["loss"] == 0 and not got["alm"].any() and not got["d_hidden"].any() and not got["d_weight"].any()


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


def test_rows_that_were_selected_before_and_chunks():
    tensors = random_spans(ignored=0.3)
    want = evaluate(linear_alm, tensors, ce_weight=0.3, num_items=11)
    rows = RowSelection(tensors["labels"], torch.tensor(11.0))
    for options in ({"rows": rows}, {"num_items": torch.tensor(11.0), "workspace_mb": 1e-6}):
        got = evaluate(linear_alm, tensors, ce_weight=0.3, **options)
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, msg=name)


def test_under_autocast():
    tensors = random_spans()
    got = evaluate(under_autocast(linear_alm, torch.bfloat16), tensors, ce_weight=0.2)
    for name, x in evaluate(linear_alm_reference, tensors, ce_weight=0.2).items():
        if name != "is_top1":
            assert (got[name] - x).norm() < 0.03 * x.norm(), name


def test_compiled():
    tensors = random_spans(ignored=0.2)
    compiled = torch.compile(functools.partial(linear_alm, **ALL), backend="aot_eager", fullgraph=True)
    got, want = (evaluate(op, tensors) for op in (compiled, functools.partial(linear_alm, **ALL)))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=name)


def test_nothing_to_learn():
    tensors = random_spans()
    tensors["labels"], tensors["spans"] = torch.full((9,), -100), torch.full((9,), -1)
    got = evaluate(linear_alm, tensors, ce_weight=0.5)
    assert got["loss"] == 0 and not got["d_hidden"].any() and not got["d_weight"].any()
    empty = {name: x[:0] if name != "weight" else x for name, x in random_spans().items()}
    assert evaluate(linear_alm, empty)["loss"] == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tau": 0.0}, "tau must be positive, got 0.0"),
        ({"spans": torch.zeros(3, dtype=torch.int64)}, r"spans must be one number per row of hidden: expected \(9,\)"),
        ({"teacher_log_prob": torch.zeros(2)}, r"teacher_log_prob must be one number .* got \(2,\)"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        linear_alm(**{**random_spans(), **change})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype):
    tensors = {name: x.cuda() for name, x in random_spans(200, 64, 1001, dtype=dtype, ignored=0.2).items()}
    check_alm(tensors, ce_weight=0.3)


@pytest.mark.gpu
def test_no_logits_are_stored_on_a_gpu():
    tensors = {name: x.cuda() for name, x in random_spans(4096, 128, 64_000, dtype=torch.bfloat16).items()}
    evaluate(linear_alm, tensors, workspace_mb=32)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    evaluate(linear_alm, tensors, workspace_mb=32)
    logits = 4096 * 64_000 * 2
    assert torch.cuda.max_memory_allocated() - before < logits / 3
