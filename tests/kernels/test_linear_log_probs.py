"""What is of linear_log_probs: whether it selects rows, how many products it takes, and what it shares with a loss."""

import pytest
import torch
from fused_losses import EVERY
from kernel_checks import LEAVES, check, double, evaluate, random_inputs

from liger_trainer.kernels import linear_log_probs as file
from liger_trainer.kernels.linear_log_probs import linear_log_probs
from liger_trainer.kernels.types import RowSelection

ALONE, WITH_ENTROPY = EVERY["log_probs"], EVERY["entropy"]
frozen_parts = pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",)], ids=["trained", "head", "hidden"])


def test_rows_without_ignored_labels_need_no_selection(fp32, monkeypatch):
    tensors = random_inputs(6, 6, 21, device=fp32.device, bias=True)
    expected = evaluate(WITH_ENTROPY.op, tensors, WITH_ENTROPY.upstream(6))
    monkeypatch.setattr(file, "selected_rows", None)
    got = evaluate(WITH_ENTROPY.op, tensors, WITH_ENTROPY.upstream(6), ignore_index=None)
    assert all(torch.equal(got[name], x) for name, x in expected.items())
    with pytest.raises(ValueError, match="give one of them"):
        linear_log_probs(**tensors, rows=RowSelection(tensors["labels"]), ignore_index=None)


def test_a_frozen_head_takes_two_products_and_a_trained_one_four(fp32, products):
    tensors = random_inputs(9, 6, 20, device=fp32.device)
    logits, of_weight, of_hidden = ("logits", 9, 20), ("gradient", 20, 6), ("gradient", 9, 6)
    for frozen, expected in (("weight", [logits, of_hidden]), ("", [logits, logits, of_weight, of_hidden])):
        products.clear()
        evaluate(ALONE.op, tensors, ALONE.upstream(9), (frozen,))
        assert products == expected


@pytest.mark.parametrize("loss", [ALONE, WITH_ENTROPY], ids=["log_prob", "entropy"])
def test_a_frozen_head_in_each_dtype(place, loss):
    tensors = random_inputs(9, 12, 37, dtype=place.dtype, device=place.device, bias=True, ignored=0.3)
    check(loss.op, loss.reference, tensors, loss.upstream(9), ("weight", "bias"), **loss.options)


@frozen_parts
def test_backward_twice(fp32, frozen):
    tensors = random_inputs(5, 6, 21, device=fp32.device)
    leaves = [tensors[k].requires_grad_() for k in LEAVES if k in tensors and k not in frozen]
    out = linear_log_probs(**tensors)
    first, again = (torch.autograd.grad(out.log_prob.square().sum(), leaves, retain_graph=True) for _ in range(2))
    doubled = torch.autograd.grad((2 * out.log_prob.square()).sum(), leaves)
    for a, b, c in zip(first, again, doubled, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(2 * a, c)


def test_small_upstream_gradients_in_fp16(fp32):
    """A mean over many tokens gives gradients below fp16's smallest number; their sum is not."""
    tensors = random_inputs(40, 6, 21, device=fp32.device, dtype=torch.float16)
    upstream = torch.full((80,), 3e-8)
    got = evaluate(WITH_ENTROPY.op, tensors, upstream, ("hidden",))["d_weight"]
    truth = evaluate(WITH_ENTROPY.reference, double(tensors), upstream, ("hidden",))["d_weight"]
    torch.testing.assert_close(got.double(), truth, rtol=0.02, atol=1.2e-7)
    assert got.any()
