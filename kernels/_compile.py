"""The fused losses under torch.compile: one opaque op each, with gradients among its outputs.

What they do depends on how many labels are in use, so there is nothing to trace in them. The op returns the loss,
per-token values and the gradients of the head's tensors; its backward multiplies these by the gradient of the loss.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._autograd import Needs, first_order, stats_dtype
from ._chunking import Execution
from ._fused_linear import GradientsInForward, LinearLoss
from ._head import LinearHead
from ._labelled_rows import RowSelection, selected_rows

# The host waits for the number of labels, which a CUDA graph can't record: Inductor leaves the ops out of its graphs.
TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
SHARED_BY_BUILDERS = 4  # rows, how, head and labels: an opaque op makes these four from its own inputs


def check_traceable(rows: RowSelection | None, recompute: bool, overwrite_hidden: bool) -> None:
    """Raise ValueError for an option that must select the rows outside the op, or write to an input."""
    options = {"rows": rows is not None, "recompute": recompute, "overwrite_hidden": overwrite_hidden}
    for name in (name for name, wanted in options.items() if wanted):
        raise ValueError(f"{name} has no place under torch.compile: leave it out, or call the loss outside of it.")


def opaque_loss(name: str, build: Callable[..., LinearLoss]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register a fused loss as the op liger_trainer::<name>, and return the function that calls it.

    `build` is called with (rows, how, head, labels, *arguments). The op's schema holds the tensors and numbers that the
    first four are made from, then `arguments` with the types that build annotates.
    """
    fields = len(inspect.signature(build).return_annotation.fields)

    def run(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, low_weight: Tensor | None,
        dtype: torch.dtype, needs: Sequence[bool], labels: Tensor | None, num_items: Tensor | None, ignore_index: int,
        workspace_mb: float | None, accumulate_dtype: torch.dtype | None, *arguments: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Compute the loss and its gradients. `dtype` is that of the products: autocast is off when this runs."""
        rows = selected_rows(hidden, labels, None, num_items, ignore_index)
        head = LinearHead(hidden, weight, bias, low, low_weight, dtype)
        loss = build(rows, Execution(workspace_mb, accumulate_dtype), head, labels, *arguments)
        saved = SavedGradients()
        value, per_token = GradientsInForward.forward(saved, loss, Needs(*needs), "mean", dtype, *head.tensors)
        return _outputs(value, per_token, saved.gradients)  # pyright: ignore[reportReturnType]

    run.__signature__ = _signature(run, build)
    op = torch.library.custom_op(f"liger_trainer::{name}", mutates_args=(), tags=TAGS)(run)
    op.register_fake(lambda *inputs: _fake_outputs(inputs, fields))
    op.register_autograd(_scaled_gradients, setup_context=_save_gradients)

    def call(
        head: LinearHead, labels: Tensor | None, num_items: float | Tensor | None, ignore_index: int,
        workspace_mb: float | None, accumulate_dtype: torch.dtype | None, arguments: Sequence[Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return (loss, per-token values (fields, N))."""
        value, per_token, *_ = op(
            *head.tensors, head.dtype, list(Needs.of(*head.tensors)), labels,
            None if num_items is None else torch.as_tensor(num_items), ignore_index, workspace_mb, accumulate_dtype,
            *arguments,
        )  # fmt: skip
        return value, per_token.detach()

    return call


class SavedGradients:
    """Autograd's context for a forward that runs outside of a graph."""

    gradients: tuple[Tensor | None, ...] = (None,) * 5

    def save_for_backward(self, *gradients: Tensor | None) -> None:
        self.gradients = gradients

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass


def _signature(run: Callable, build: Callable) -> inspect.Signature:
    """Return the signature from which torch reads the op's schema: run's, with build's own arguments at the end."""
    *inputs, _ = inspect.signature(run).parameters.values()
    arguments = list(inspect.signature(build).parameters.values())[SHARED_BY_BUILDERS:]
    return inspect.signature(run).replace(parameters=[*inputs, *arguments])


def _outputs(loss: Tensor, per_token: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the outputs of the opaque op: contiguous, with an empty tensor for None."""
    return loss, per_token.contiguous(), *(per_token.new_empty(0) if x is None else x.contiguous() for x in gradients)


def _fake_outputs(inputs: Sequence, fields: int) -> tuple[Tensor, ...]:
    """Return empty tensors with the shapes and dtypes of `_outputs`. inputs: `LinearHead.tensors`, dtype, needs, ..."""
    head, (dtype, needs) = inputs[:5], inputs[5:7]
    hidden, stats = head[0], stats_dtype(dtype)
    loss, per_token = hidden.new_empty((), dtype=stats), hidden.new_empty((fields, hidden.shape[0]), dtype=stats)
    gradients = (
        x.new_empty(x.shape) if needed and x is not None else per_token.new_empty(0)
        for x, needed in zip(head, needs, strict=True)
    )
    return loss, per_token, *gradients


def _save_gradients(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.inputs = len(inputs)


@first_order
def _scaled_gradients(ctx, grad_loss: Tensor, *_) -> tuple[Tensor | None, ...]:
    """Run the backward of an opaque op whose first inputs are `LinearHead.tensors`."""
    gradients = [x * grad_loss if x.dim() and x.shape[0] else None for x in ctx.saved_tensors]
    return *gradients, *[None] * (ctx.inputs - len(gradients))
