"""The losses of extras/modules/losses.py beside plain torch in fp64."""

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import assert_true

from liger_trainer import LigerFusedCETVDLoss, LigerFusedLinearKLDivLoss
from liger_trainer.extras.modules import losses as teacher_losses

N, H, V = 12, 8, 31


def some_labels(labelled: bool):
    labels = torch.randint(V, (N,))
    labels[::3] = 7
    return (labels if labelled else None), (labels != 7 if labelled else torch.ones(N, dtype=torch.bool))


@pytest.mark.parametrize("ignore_index", [7, -100])
def test_cross_entropy_and_total_variation_of_each_token(ignore_index):
    labels = torch.randint(V, (N,))
    labels[::3] = ignore_index
    keep = labels != ignore_index

    def truth(student, teacher):
        hard = F.cross_entropy(student, labels, reduction="none", ignore_index=ignore_index)
        return hard, 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) * keep

    loss = LigerFusedCETVDLoss(ignore_index)
    assert_true(lambda s, t: loss(s, t, labels), truth, 3 * torch.randn(N, V), 3 * torch.randn(N, V))
    hard, soft = loss(torch.randn(N, V).bfloat16(), torch.randn(N, V), labels)
    assert hard.dtype == soft.dtype == torch.float32


def kl_truth(keep, reduction, temperature):
    def truth(x, weight, target):
        log_q = (F.linear(x, weight) / temperature).log_softmax(-1)
        each = (torch.xlogy(target, target) - target * log_q)[keep]
        return each.sum() / {"batchmean": keep.sum(), "mean": keep.sum() * V, "sum": 1}[reduction]

    return truth


@pytest.mark.parametrize("rows", [1, 5, N])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("reduction, temperature", [("batchmean", 1.0), ("mean", 2.0), ("sum", 0.7)])
def test_fused_linear_kl_div(reduction, temperature, labelled, rows, monkeypatch):
    """Chunks of so many rows. The targets need not sum to 1, as rounded ones do not."""
    monkeypatch.setattr(teacher_losses, "CHUNK", rows * V + V - 1)
    labels, keep = some_labels(labelled)
    loss = LigerFusedLinearKLDivLoss(reduction, ignore_index=7, temperature=temperature)
    target = torch.rand(N, V) / V
    assert_true(
        lambda x, w, t: loss(x, w, t, labels), kl_truth(keep, reduction, temperature),
        torch.randn(N, H), torch.randn(V, H), target, tolerance=1e-5,
    )  # fmt: skip


def test_fused_linear_kl_div_of_targets_with_zeros():
    target = F.one_hot(torch.randint(V, (N,)), V).float()
    loss = LigerFusedLinearKLDivLoss()
    assert_true(
        lambda x, w: loss(x, w, target),
        lambda x, w: F.cross_entropy(F.linear(x, w), target.double()), torch.randn(N, H), torch.randn(V, H),
    )  # fmt: skip


def test_fused_linear_kl_div_stores_no_logits(monkeypatch):
    monkeypatch.setattr(teacher_losses, "CHUNK", 4 * V)
    x, weight, kept, products = torch.randn(N, H).requires_grad_(), torch.randn(V, H), [], []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: products.append(len(x)) or linear(x, w))
    target = torch.rand(N, V)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = LigerFusedLinearKLDivLoss()(x, weight, target)
    mine = {target.untyped_storage().data_ptr()}
    assert not [t for t in kept if t.shape[-1:] == (V,) and t.untyped_storage().data_ptr() not in mine]
    loss.backward()
    assert products == [4] * 6


def test_fused_linear_kl_div_of_bf16():
    x, weight = torch.randn(N, H).bfloat16().requires_grad_(), torch.randn(V, H).bfloat16()
    target = torch.randn(N, V).softmax(-1).bfloat16()
    loss = LigerFusedLinearKLDivLoss()(x, weight, target)
    truth = kl_truth(torch.ones(N, dtype=torch.bool), "batchmean", 1.0)(x.double(), weight.double(), target.double())
    assert loss.dtype == torch.float32 and (loss - truth).abs() < 0.01 * truth
    with torch.autocast("cpu", torch.bfloat16):
        under = LigerFusedLinearKLDivLoss()(x.float(), weight.float(), target)
    assert under.dtype == torch.float32 and (under - truth).abs() < 0.01 * truth


def test_on_the_kernels(kernels, monkeypatch):
    test_cross_entropy_and_total_variation_of_each_token(7)
    test_fused_linear_kl_div("mean", 2.0, True, 5, monkeypatch)


def test_without_any_label_the_loss_is_zero():
    none = torch.full((N,), -100)
    x = torch.randn(N, H).requires_grad_()
    loss = LigerFusedLinearKLDivLoss()(x, torch.randn(V, H), torch.rand(N, V), none)
    assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()


def kl(*shapes, **options):
    return LigerFusedLinearKLDivLoss(**options)(*(torch.rand(shape) for shape in shapes))


REFUSED = [
    (lambda: LigerFusedLinearKLDivLoss("none"), "reduction must be"),
    (lambda: LigerFusedLinearKLDivLoss(temperature=0.0), "temperature must be"),
    (lambda: LigerFusedLinearKLDivLoss(eps=1e-3), "eps must lie"),
    (lambda: LigerFusedLinearKLDivLoss(accum_dtype=torch.float32), "accum_dtype must be None"),
    (lambda: kl((N, H), (V, H + 1), (N, V)), "student_input must be"),
    (lambda: kl((N, H), (V, H), (N, V + 1)), "student_input must be"),
    (lambda: kl((N, H), (V, H), (1, V)), "student_input must be"),
    (lambda: kl((N, H), (V, H), (N, V), (N + 1,)), "shift_labels must be"),
    (lambda: LigerFusedCETVDLoss()(torch.randn(N, V), torch.randn(N, V), torch.zeros(3, dtype=torch.int64)), "labels"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
