"""Distributions for the tests of kl_div, jsd and tvd, and every form of the three ops."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from elementwise_checks import check_op
from torch import Tensor

from liger_trainer.kernels import _unfused_divergence
from liger_trainer.kernels.jsd import jsd, jsd_reference
from liger_trainer.kernels.kl_div import kl_div, kl_div_reference
from liger_trainer.kernels.tvd import tvd, tvd_reference

BOTH = ("input", "target")
REDUCTIONS = ("none", "mean", "sum", "batchmean")


class Form(NamedTuple):
    op: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    options: dict[str, Any]
    input: Callable[[Tensor], Tensor]  # from logits
    target: Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


softmax, log_softmax = partial(torch.softmax, dim=-1), partial(torch.log_softmax, dim=-1)
FORMS = {
    "kl_div": Form(kl_div, kl_div_reference, {}, log_softmax, softmax),
    "kl_div-log_target": Form(kl_div, kl_div_reference, {"log_target": True}, log_softmax, log_softmax),
    "kl_div-logits": Form(kl_div, kl_div_reference, {"from_logits": True, "temperature": 1.7}, identity, identity),
    "jsd": Form(jsd, jsd_reference, {"beta": 0.3}, log_softmax, log_softmax),
    "jsd-logits": Form(jsd, jsd_reference, {"beta": 0.3, "from_logits": True, "temperature": 1.7}, identity, identity),
    "jsd-forward": Form(jsd, jsd_reference, {"beta": 0.0}, log_softmax, log_softmax),
    "jsd-reverse": Form(jsd, jsd_reference, {"beta": 1.0}, log_softmax, log_softmax),
    "jsd-reverse-logits": Form(jsd, jsd_reference, {"beta": 1.0, "from_logits": True}, identity, identity),
    "tvd": Form(tvd, tvd_reference, {}, softmax, softmax),
    "tvd-logits": Form(tvd, tvd_reference, {"from_logits": True, "temperature": 1.7}, identity, identity),
}


def sides(form: Form, *shape: int, dtype=torch.float32, device="cpu", seed=0, spread=2.0) -> dict[str, Any]:
    """input and target of a form, fp32 distributions rounded to dtype."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(shape, generator=generator) * spread for _ in BOTH]
    made = (form.input(logits[0]), form.target(logits[1]))
    return {name: x.to(device, dtype) for name, x in zip(BOTH, made, strict=True)}


def check_definition(form: Form, place, reduction: str) -> None:
    """One form against its reference, with some rows ignored where all entries of the others are counted."""
    tensors = sides(form, 5, 37, dtype=place.dtype, device=place.device)
    if reduction == "mean":
        tensors["labels"] = some_labels(5, device=place.device)
    check_form(form, tensors, reduction=reduction)


def some_labels(*shape: int, ignored=0.4, ignore_index=-100, device="cpu") -> Tensor:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(1, 9, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = ignore_index
    return labels.to(device)


def check_form(form: Form, tensors, leaves=BOTH, **options) -> dict[str, Tensor]:
    return check_op(form.op, form.reference, tensors, leaves, **{**form.options, **options})


def short_blocks(monkeypatch) -> None:
    """Rows of 37 entries take three blocks."""
    for name in ("GIVEN_BLOCK", "LOGITS_BLOCK"):
        monkeypatch.setattr(_unfused_divergence, name, 16)


def in_backward(monkeypatch, late: bool) -> None:
    """Leave the gradients of reduced losses to the backward, whatever their size and dtype."""
    if late:
        monkeypatch.setattr(_unfused_divergence, "_early", lambda *_: False)
