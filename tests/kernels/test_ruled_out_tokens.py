"""Tokens with a logit of -inf: where both sides rule one out it adds nothing, as if it were not in the vocabulary."""

import pytest
import torch
from fused_losses import EVERY
from kernel_checks import double, evaluate, random_inputs, random_pair
from torch import Tensor

from liger_trainer.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from liger_trainer.kernels.linear_divergence import KINDS, linear_divergence, linear_divergence_reference
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence, linear_sparse_divergence_reference

V, OUT = 37, [0, 11, 12, 36]  # the vocabulary, and what is ruled out of it
LEFT = [token for token in range(V) if token not in OUT]
OPTIONS = [
    {}, {"temperature": 2.0, "scale": 1.5, "teacher_scale": 0.5},
    {"teacher_share": 0.4, "ce_weight": 0.5, "z_loss": 0.1},
]  # fmt: skip
CASES = [
    *(("divergence", {"kind": kind, **options}) for kind in KINDS for options in OPTIONS),
    ("uld", {}), ("uld", {"ce_weight": 0.5, "temperature": 2.0}), ("cross_entropy", {}),
    ("cross_entropy", {"recompute": True}), ("log_probs", {}), ("entropy", {}),
]  # fmt: skip


def ruled_out(tensors: dict[str, Tensor], *sides: str) -> dict[str, Tensor]:
    """The same inputs with a bias of -inf at OUT, in the student's head ("") or the teacher's ("teacher_")."""
    biases = {f"{side}bias": tensors[f"{side}bias"].clone() for side in sides}
    for bias in biases.values():
        bias[OUT] = -torch.inf
    return {**tensors, **biases}


def without(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs without these rows of the heads, labels renumbered."""
    cut = {name: tensors[name][LEFT] for name in tensors if name.endswith(("weight", "bias"))}
    number = torch.full((V,), -100)
    number[LEFT] = torch.arange(len(LEFT))
    labels = tensors["labels"].cpu()
    cut["labels"] = number[labels.clamp(min=0)].where(labels >= 0, -100).to(tensors["labels"].device)
    return {**tensors, **cut}


def inputs(make, device) -> dict[str, Tensor]:
    tensors = make(device=device, bias=True, ignored=0.2)
    tensors["labels"][torch.isin(tensors["labels"].cpu(), torch.tensor(OUT)).to(device)] = LEFT[3]
    return tensors


def pair(device) -> dict[str, Tensor]:
    return inputs(lambda **how: random_pair(4, 6, 5, V, **how), device)


def single(device) -> dict[str, Tensor]:
    return inputs(lambda **how: random_inputs(7, 6, V, **how), device)


def assert_as_without(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in got.items():
        if name in ("d_weight", "d_bias"):
            assert not x[OUT].any(), name
            x = x[LEFT]
        torch.testing.assert_close(x, expected[name], rtol=2e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("as_reference", [False, True], ids=["", "reference"])
@pytest.mark.parametrize("loss, options", [(EVERY[name], options) for name, options in CASES], ids=map(str, CASES))
def test_fused_losses(fp32, loss, options, as_reference):
    two_sides = loss.takes("teacher_weight")
    tensors = pair(fp32.device) if two_sides else single(fp32.device)
    upstream = loss.upstream(len(tensors["hidden"])) if loss.values else 1.0
    recompute = {k: options[k] for k in options if k == "recompute"}
    plain = {k: x for k, x in options.items() if k != "recompute"}
    expected = evaluate(loss.op, without(tensors), upstream, **plain)
    given = ruled_out(tensors, *("", "teacher_")[: 1 + two_sides])
    op, how = (loss.reference, {}) if as_reference else (loss.op, recompute)
    assert_as_without(evaluate(op, given, upstream, **plain, **how), expected)


@pytest.mark.parametrize("side", ["", "teacher_"], ids=["student", "teacher"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_one_side_rules_out(fp32, kind, side):
    """What is finite by definition stays so, and what is infinite is: the KLs from where there is mass."""
    tensors = ruled_out(pair(fp32.device), side)
    got = evaluate(linear_divergence, tensors, kind=kind)
    expected = evaluate(linear_divergence_reference, double(tensors), kind=kind)
    infinite = {"": ("forward_kl", "symmetric_kl"), "teacher_": ("reverse_kl", "symmetric_kl")}
    assert got["loss"].isinf() == (kind in infinite[side])
    for name, x in expected.items():
        if not name.startswith("d_") or kind not in infinite[side]:
            torch.testing.assert_close(got[name], x.to(got[name].dtype), rtol=1e-4, atol=1e-5)


def test_a_row_without_any_token_is_no_number(fp32):
    tensors = pair(fp32.device)
    tensors["bias"] = torch.full_like(tensors["bias"], -torch.inf)
    assert linear_divergence(**tensors, kind="jsd").loss.isnan()


@pytest.mark.parametrize("op", [cross_entropy, cross_entropy_reference], ids=["", "reference"])
def test_cross_entropy_of_given_logits(fp32, op):
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0)).to(fp32.device)
    labels = torch.tensor([1, 0, 3, -100, 2], device=fp32.device)
    expected = evaluate(cross_entropy, {"logits": logits[:, LEFT], "labels": labels}, leaves=("logits",))
    masked, places = logits.clone(), torch.tensor(LEFT, device=fp32.device)
    masked[:, OUT] = -torch.inf
    given = {"logits": masked, "labels": places[labels.clamp(min=0)].where(labels >= 0, -100)}
    got = evaluate(op, given, leaves=("logits",))
    assert not got["d_logits"][:, OUT].any()
    got["d_logits"] = got["d_logits"][:, LEFT]
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("op", [linear_sparse_divergence, linear_sparse_divergence_reference], ids=["", "reference"])
@pytest.mark.parametrize("tail", ["bucket", "none"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_sparse_divergences(fp32, tail, padded, op):
    """What the student rules out, the teacher either names with probability 0 or does not name."""
    tensors = single(fp32.device)
    log_probs, places = torch.randn(7, len(LEFT), device=fp32.device).log_softmax(-1).topk(5)
    named = {"ids": places, "log_probs": log_probs}
    expected = evaluate(linear_sparse_divergence, {**without(tensors), **named}, tail=tail, ce_weight=0.5)
    ids = torch.tensor(LEFT, device=fp32.device)[places]
    if padded:
        more = torch.tensor([OUT[1], -1], device=fp32.device).expand(7, 2)
        ids = torch.cat([ids, more], -1)
        log_probs = torch.cat([log_probs, torch.full((7, 2), -torch.inf, device=fp32.device)], -1)
    given = {**ruled_out(tensors, ""), "ids": ids, "log_probs": log_probs}
    assert_as_without(evaluate(op, given, tail=tail, ce_weight=0.5), expected)
