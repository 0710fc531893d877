"""What drives the fused linear losses: logits by chunks of rows, a row kernel, and two ways to their gradients.

A loss is a `LinearLoss`: what it is held against, and the kernel that turns rows of logits into their per-token values
and, in place, their gradient. Gradients come with the forward (`GradientsInForward`), since the loss is the last thing
a model computes; or the backward computes the logits once more (`Recomputed`), for a gradient of each token's loss and
for nothing held in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ._autograd import first_order
from ._chunking import Execution, Needs, Plan, Rows, put, rescale, row_plan, stats_dtype, take, upstream_rows, workspace
from ._head import HeadGradients, LinearHead

# logits (n, V), bias (V,) or None, the rows they are of, their values (fields, n), their gradient (n, V) or None, which
# may be the logits themselves
RowFunction = Callable[[Tensor, Tensor | None, slice, Tensor, Tensor | None], None]


@dataclass(frozen=True)
class LinearLoss:
    """Everything of a call that has no gradient of its own. Values by token begin with the loss."""

    rows: Rows
    vocab: int
    how: Execution

    fields: ClassVar[Sequence[str]]
    keeps_values: ClassVar[bool] = False  # whether `recomputed` needs what `statistics` gave

    def row_function(self, rows: int) -> RowFunction:
        """What is called for each chunk, of `rows` rows at most."""
        raise NotImplementedError

    def weighted(self, factor: Tensor) -> Self:
        """The same with each token's loss times factor (rows.count,)."""
        raise NotImplementedError

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which logits are kept, where products are in dtype."""
        return dtype

    def bytes_per_logit(self, dtype: torch.dtype) -> int:
        """Of the workspace. Wider logits widen the workspace, not the chunks."""
        return dtype.itemsize

    def plan(self, dtype: torch.dtype) -> Plan:
        return row_plan(self.rows.count, self.vocab, self.bytes_per_logit(dtype), self.how)

    def gradients(
        self, head: LinearHead, needs: Needs, plan: Plan, alpha: float, factor: Tensor | None = None
    ) -> HeadGradients:
        """Empty ones, to be filled by the chunks of `plan`."""
        wide = self.how.sum_dtype(-(-self.rows.count // plan.rows)) if factor is None else torch.float32
        return HeadGradients(head, needs, self.rows, self.vocab, wide, self.how.overwrite_hidden, alpha, factor)

    def statistics(self, head: LinearHead) -> Tensor:
        """(fields, rows.count) per-token values, for a backward that recomputes."""
        return walk(self, head, None)

    def recomputed(
        self, head: LinearHead, needs: Needs, upstream: Tensor, largest: Tensor | None, values: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The head's gradients from the gradient (rows.count,) of each row's loss, see `upstream_rows`."""
        gradients = self.gradients(head, needs, self.plan(head.dtype), 1.0, largest)
        walk(self.weighted(upstream), head, gradients)
        return gradients.finish()


def walk(loss: LinearLoss, head: LinearHead, gradients: HeadGradients | None) -> Tensor:
    """(fields, rows.count) per-token values, and the head's gradients if wanted."""
    rows, vocab, dtype, device = loss.rows, loss.vocab, head.dtype, head.hidden.device
    columns = slice(0, vocab)
    operands = head.operands(rows, vocab).part(slice(None), columns)  # each weight is cast once
    out = torch.empty(len(loss.fields), rows.count, dtype=stats_dtype(dtype), device=device)
    plan = loss.plan(dtype)
    size = min(plan.rows, rows.count)
    ws = workspace(size, vocab, loss.logits_dtype(dtype), device)
    grad_ws = ws.view(dtype)[:, :vocab]  # in place: in the front of each row where the logits are wider
    row_function = loss.row_function(size)
    for chunk in plan.chunks(rows.count):
        part = operands.part(chunk, columns)
        logits, dlogits = part.logits(ws), grad_ws[: chunk.stop - chunk.start]
        row_function(logits, part.bias, chunk, out[:, chunk], None if gradients is None else dlogits)
        if gradients is not None:
            gradients.add(dlogits, part, chunk, columns)
    return out


def with_gradients(loss: LinearLoss, head: LinearHead, needs: Needs):
    """(loss, per-token (fields, N), gradients of head.tensors)."""
    rows, result = loss.rows, (None,) * len(head.tensors)
    gradients = loss.gradients(head, needs, loss.plan(head.dtype), rows.alpha) if needs.any else None
    out = walk(loss, head, gradients)
    if gradients is not None:
        result = gradients.finish()
    return out[0].sum() * rows.alpha, put(out.t(), rows, head.hidden.shape[0]).t(), result


class GradientsInForward(torch.autograd.Function):
    """The backward only applies the gradient of the loss, and moves nothing where that is 1."""

    @staticmethod
    def forward(ctx, loss: LinearLoss, needs: Needs, dtype: torch.dtype, *tensors):
        with torch.autocast(tensors[0].device.type, enabled=False):
            value, per_token, gradients = with_gradients(loss, LinearHead(*tensors, dtype=dtype), needs)
        if needs.any:
            ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(per_token)
        return value, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        return None, None, None, *rescale(ctx.saved_tensors, grad_loss)


class Recomputed(torch.autograd.Function):
    """Logits computed once more in the backward."""

    @staticmethod
    def forward(ctx, loss: LinearLoss, per_token_loss: bool, dtype: torch.dtype, *tensors):
        ctx.loss, ctx.per_token_loss, ctx.dtype = loss, per_token_loss, dtype
        with torch.autocast(tensors[0].device.type, enabled=False):
            out = loss.statistics(LinearHead(*tensors, dtype=dtype))
        ctx.save_for_backward(out if loss.keeps_values else None, *tensors)
        per_token = put(out.t(), loss.rows, tensors[0].shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return per_token[0].clone() if per_token_loss else out[0].sum() * loss.rows.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        out, *tensors = ctx.saved_tensors
        loss, rows = ctx.loss, ctx.loss.rows
        upstream = take(grad_loss, rows) if ctx.per_token_loss else grad_loss * rows.alpha
        upstream, largest = upstream_rows(upstream, rows.count, ctx.dtype)
        needs = Needs(*ctx.needs_input_grad[3:])
        with torch.autocast(tensors[0].device.type, enabled=False):
            gradients = loss.recomputed(LinearHead(*tensors, dtype=ctx.dtype), needs, upstream, largest, out)
        return None, None, None, *gradients


def linear_loss(loss: LinearLoss, head: LinearHead, recompute: bool, reduction: str) -> tuple[Tensor, Tensor]:
    """(loss, per-token (fields, N))."""
    if recompute:
        return Recomputed.apply(loss, reduction == "none", head.dtype, *head.tensors)  # pyright: ignore[reportReturnType]
    needs = Needs.of(*head.tensors)
    return GradientsInForward.apply(loss, needs, head.dtype, *head.tensors)  # pyright: ignore[reportReturnType]
