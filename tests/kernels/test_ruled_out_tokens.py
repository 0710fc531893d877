"""Tokens with a logit of -inf: where both sides rule one out it adds nothing, as if it were not in the vocabulary."""

import pytest
import torch
from kernel_checks import evaluate, random_inputs, random_pair
from torch import Tensor

from liger_trainer.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from liger_trainer.kernels.jsd import jsd, jsd_reference
from liger_trainer.kernels.kl_div import kl_div, kl_div_reference
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from liger_trainer.kernels.linear_divergence import KINDS, linear_divergence, linear_divergence_reference
from liger_trainer.kernels.linear_sparse_divergence import linear_sparse_divergence, linear_sparse_divergence_reference
from liger_trainer.kernels.linear_uld import linear_uld, linear_uld_reference
from liger_trainer.kernels.tvd import tvd, tvd_reference

V, OUT = 37, [0, 11, 12, 36]  # the vocabulary, and what is ruled out of it
LEFT = [token for token in range(V) if token not in OUT]
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.0},
    "scale": {"scale": 1.5, "teacher_scale": 0.5},
    "teacher_share": {"teacher_share": 0.4},
    "ce": {"ce_weight": 0.5, "z_loss": 0.1},
}


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


def assert_as_without(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in got.items():
        if name in ("d_weight", "d_bias"):
            assert not x[OUT].any(), name
            x = x[LEFT]
        torch.testing.assert_close(x, expected[name], rtol=2e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("op", [linear_divergence, linear_divergence_reference], ids=["", "reference"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_divergences(fp32, kind, options, op):
    tensors = pair(fp32.device)
    expected = evaluate(linear_divergence, without(tensors), kind=kind, **options)
    assert_as_without(evaluate(op, ruled_out(tensors, "", "teacher_"), kind=kind, **options), expected)


@pytest.mark.parametrize("side", ["", "teacher_"], ids=["student", "teacher"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_side_alone_rules_out(fp32, kind, side):
    """What is finite by definition stays so, and what is infinite is: the KLs from where there is mass."""
    tensors = ruled_out(pair(fp32.device), side)
    truth = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    got, expected = (evaluate(op, x, kind=kind) for op, x in
                     ((linear_divergence, tensors), (linear_divergence_reference, truth)))  # fmt: skip
    infinite = {"": ("forward_kl", "symmetric_kl"), "teacher_": ("reverse_kl", "symmetric_kl")}
    assert got["loss"].isinf() == (kind in infinite[side])
    for name, x in expected.items():
        if not name.startswith("d_") or kind not in infinite[side]:
            torch.testing.assert_close(got[name], x.to(got[name].dtype), rtol=1e-4, atol=1e-5)


def test_a_row_without_any_token_is_no_number(fp32):
    tensors = pair(fp32.device)
    tensors["bias"] = torch.full_like(tensors["bias"], -torch.inf)
    assert linear_divergence(**tensors, kind="jsd").loss.isnan()


@pytest.mark.parametrize("op", [linear_uld, linear_uld_reference], ids=["", "reference"])
@pytest.mark.parametrize("options", [{}, {"ce_weight": 0.5, "temperature": 2.0}], ids=["", "ce"])
def test_uld(fp32, options, op):
    tensors = pair(fp32.device)
    expected = evaluate(linear_uld, without(tensors), **options)
    assert_as_without(evaluate(op, ruled_out(tensors, "", "teacher_"), **options), expected)


@pytest.mark.parametrize("op", [linear_cross_entropy, linear_cross_entropy_reference], ids=["", "reference"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=["", "recompute"])
def test_cross_entropy(fp32, options, op):
    tensors = inputs(lambda **how: random_inputs(7, 6, V, **how), fp32.device)
    expected = evaluate(linear_cross_entropy, without(tensors))
    options = options if op is linear_cross_entropy else {}
    assert_as_without(evaluate(op, ruled_out(tensors, ""), **options), expected)


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
    tensors = inputs(lambda **how: random_inputs(7, 6, V, **how), fp32.device)
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


GIVEN = {
    "kl_div": (kl_div, kl_div_reference, {}),
    "jsd": (jsd, jsd_reference, {"beta": 0.3}),
    "jsd at 0": (jsd, jsd_reference, {"beta": 0.0}),
    "jsd at 1": (jsd, jsd_reference, {"beta": 1.0}),
    "tvd": (tvd, tvd_reference, {}),
}


@pytest.mark.parametrize("as_reference", [False, True], ids=["", "reference"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("from_logits", [False, True], ids=["given", "logits"])
@pytest.mark.parametrize("name", GIVEN)
def test_given_distributions(fp32, name, from_logits, reduction, as_reference):
    op, reference, options = GIVEN[name]
    generator = torch.Generator().manual_seed(0)
    sides = [torch.randn(5, V, generator=generator).to(fp32.device) for _ in range(2)]

    def values(op, ruled: bool) -> list[Tensor]:
        x, t = (side.clone() if ruled else side[:, LEFT] for side in sides)
        if ruled:
            x[:, OUT] = t[:, OUT] = -torch.inf
        if not from_logits:
            x, t = x.log_softmax(-1), t.log_softmax(-1)
            x, t = (x.exp(), t.exp()) if name == "tvd" else (x, t.exp() if name == "kl_div" else t)
        x, t = x.requires_grad_(), t.requires_grad_()
        loss = op(x, t, reduction=reduction, from_logits=from_logits, **options)
        return [loss, *torch.autograd.grad(loss.sum(), (x, t))]

    expected, got = values(op, ruled=False), values(reference if as_reference else op, ruled=True)
    for x, y in zip(got, expected, strict=True):
        if x.dim() > 1:
            assert torch.isfinite(x).all() and not x[:, OUT].any()
            x = x[:, LEFT]
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)
