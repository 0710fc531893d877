"""The fused losses under torch.compile: one opaque op each, with gradients among its outputs.

What they do depends on how many labels are in use, so there is nothing in them to trace. The op returns loss, per-token
values and the gradients of the head's tensors; its backward multiplies those by the gradient of the loss.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._autograd import first_order
from ._chunking import RowSelection, stats_dtype

# The host waits for the number of labels, which no CUDA graph can hold: Inductor leaves the ops out of those.
TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def check_traceable(rows: RowSelection | None, recompute: bool, overwrite_hidden: bool) -> None:
    """torch.compile sees the fused losses as one opaque op, which selects the rows itself and writes to no input."""
    given = {"rows": rows is not None, "recompute": recompute, "overwrite_hidden": overwrite_hidden}
    for name in (name for name, wanted in given.items() if wanted):
        raise ValueError(f"{name} has no place under torch.compile: leave it out, or call the loss outside of it.")


def traced_outputs(loss: Tensor, per_token: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """What the opaque op returns: contiguous, and nothing in place of None."""
    return loss, per_token.contiguous(), *(per_token.new_empty(0) if x is None else x.contiguous() for x in gradients)


def fake_outputs(inputs: Sequence, fields: int) -> tuple[Tensor, ...]:
    """Shapes and dtypes of `traced_outputs`, from the opaque op's inputs: `LinearHead.tensors`, ..., dtype, needs."""
    *_, dtype, needs = inputs
    hidden, stats = inputs[0], stats_dtype(dtype)
    loss, per_token = hidden.new_empty((), dtype=stats), hidden.new_empty((fields, hidden.shape[0]), dtype=stats)
    gradients = (
        x.new_empty(x.shape) if needed and x is not None else per_token.new_empty(0)
        for x, needed in zip(inputs, needs, strict=False)
    )
    return loss, per_token, *gradients


def save_gradients(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.inputs = len(inputs)


@first_order
def scaled_gradients(ctx, grad_loss: Tensor, *_) -> tuple[Tensor | None, ...]:
    """Backward of an opaque op whose first inputs are `LinearHead.tensors`."""
    gradients = [x * grad_loss if x.dim() and x.shape[0] else None for x in ctx.saved_tensors]
    return *gradients, *[None] * (ctx.inputs - len(gradients))
