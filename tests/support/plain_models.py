"""A model with the fused loss, and the same model without it."""

from collections.abc import Mapping
from typing import Any

import torch
from tiny import assert_same_gradients, masked_batch, named_gradients
from torch import Tensor

from liger_trainer.losses.deferring_head import deferred_logits


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


def assert_equals_plain(model: Any, truth: Any, batch: Mapping[str, Any] | None = None, want: Any = None, **more: Any):
    """Loss and every gradient are those of `truth`, a plain model in fp64, or those of its loss `want`.

    Returns the outputs and gradients of `model`, which `more` are passed to as well.
    """
    batch = masked_batch() if batch is None else batch
    want = truth(**batch).loss if want is None else want
    got = model(**batch, **more)
    torch.testing.assert_close(got.loss.double(), want.double(), rtol=1e-6, atol=0)
    if not got.loss.requires_grad:
        return got, {}
    found = named_gradients(model, got.loss)
    assert_same_gradients(found, named_gradients(truth, want))
    return got, found


def deferred_of(teacher: Any, batch: Mapping[str, Any]) -> Any:
    """Return a teacher's deferred logits of a batch."""
    with torch.no_grad(), deferred_logits(teacher):
        return teacher(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits


def relative_error(model: Any, loss: Tensor, want: Mapping[str, Tensor], names: str = "") -> float:
    """The distance of the gradients, of those with such names, from the true ones."""
    got = named_gradients(model, loss)
    return float(sum((got[n].double() - g).square().sum() for n, g in want.items() if names in n) ** 0.5)
