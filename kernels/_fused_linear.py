"""The loop of the fused linear losses: logits by chunks of rows, a row kernel, and two ways to compute gradients.

A loss is a `LinearLoss`: its targets, and the kernel that turns rows of logits into per-token values and, in place,
their gradient. Two matrix products then carry that gradient to the hidden states and to the weight (_head.py).
`GradientsInForward` computes gradients in the forward, which works since the loss is the last thing that a model
computes. `Recomputed` computes the logits again in the backward: it accepts a gradient for each token's loss, and holds
nothing in between.

An op calls `GradientsInForward.apply`. Its forward calls the loss's `write_rows` for each chunk, which launches the
kernel. `docs/architecture.md` follows this path from the model on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ._autograd import Needs, check_label_dtype, first_order, rescale, stats_dtype
from ._chunking import ChunkPlan, Execution, fitted, row_plan, workspace
from ._head import HeadGradients, LinearHead, Operands
from ._labelled_rows import Rows, put, take


class LogitChunk(NamedTuple):
    """A chunk of rows: its logits in the workspace, and where its values and gradient go."""

    rows: slice  # positions among the rows that take part
    operands: Operands  # the tensors that the logits are computed from
    logits: Tensor  # (n, V), raw, without bias
    bias: Tensor | None  # (V,)
    values: Tensor  # (fields, n), for the kernel to write
    dlogits: Tensor | None  # (n, V), for the kernel to write, possibly over the logits; None: not needed
    other_side: Any  # what the loss's own `other_side` returned


@dataclass(frozen=True)
class LinearLoss:
    """All inputs of a call that need no gradient. The first per-token value is the loss."""

    rows: Rows
    vocab: int
    how: Execution

    fields: ClassVar[Sequence[str]]
    keeps_values: ClassVar[bool] = False  # whether `recomputed` needs what `statistics` returned

    def other_side(self, rows: int) -> Any:
        """Return what `write_rows` needs beside the chunk, for chunks of at most `rows` rows.

        It lives for one walk over the chunks, so that a loss that waits for its backward holds no workspace.
        """
        return None

    def write_rows(self, chunk: LogitChunk) -> None:
        """Write the values of a chunk's rows and, if `dlogits` is there, their gradient."""
        raise NotImplementedError

    def write_shard(self, chunk: Any) -> None:
        """Write values and gradient of a `ShardChunk`, whose vocabulary lies on several ranks: _vocab_parallel.py."""
        raise NotImplementedError

    def shard_other_side(self, layout: Any, columns: int) -> Any:
        """Return what `write_shard` needs beside the chunk. layout: a `TokenLayout`; columns: those of this rank."""
        return None

    def weighted(self, factor: Tensor) -> Self:
        """Return this loss with each token's loss multiplied by factor (rows.count,)."""
        raise NotImplementedError

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored logits. dtype: that of the products."""
        return dtype

    def bytes_per_logit(self, dtype: torch.dtype) -> int:
        """Return the workspace bytes per logit. Wider logits widen the workspace instead of shrinking the chunks."""
        return dtype.itemsize

    def plan(self, dtype: torch.dtype) -> ChunkPlan:
        return row_plan(self.rows.count, self.vocab, self.bytes_per_logit(dtype), self.how)

    def gradients(
        self, head: LinearHead, needs: Needs, plan: ChunkPlan, alpha: float, factor: Tensor | None = None,
        rounded_in_place: bool = False,
    ) -> HeadGradients:  # fmt: skip
        """Return empty gradients for the chunks of `plan` to fill."""
        wide = self.how.sum_dtype(-(-self.rows.count // plan.rows)) if factor is None else torch.float32
        over = self.how.overwrite_hidden
        return HeadGradients(head, needs, self.rows, self.vocab, wide, over, alpha, factor, rounded_in_place)

    def new_values(self, head: LinearHead) -> Tensor:
        """Return memory for the per-token values (fields, rows.count).

        Where labelled rows are chosen, their number changes with each batch. The fields then lie a multiple of 16
        apart, or Triton would compile the row kernel again for the first number that is one.
        """
        count = self.rows.count
        apart = count if self.rows.index is None else -(-count // 16) * 16
        shape = len(self.fields), apart
        return torch.empty(shape, dtype=stats_dtype(head.dtype), device=head.hidden.device)[:, :count]

    def chunks(self, head: LinearHead, values: Tensor, gradients: HeadGradients | None) -> Iterator[LogitChunk]:
        """Yield each chunk for `write_rows`, then add the gradient that it wrote to `gradients`.

        A generator keeps the loop over chunks and the kernel's call visible in the caller.
        """
        dtype, columns = head.dtype, slice(0, self.vocab)
        operands = head.operands(self.rows, self.vocab).part(slice(None), columns)  # each weight is cast once
        plan, (ws, other_side) = fitted(self.plan(dtype), lambda plan: self.memory(head, plan))
        grad_ws = ws.view(dtype)[:, : self.vocab]  # in place: wider logits leave it the front of each row
        for rows in plan.chunks(self.rows.count):
            part = operands.part(rows, columns)
            logits, dlogits = part.logits(ws), grad_ws[: rows.stop - rows.start]
            wanted = None if gradients is None else dlogits
            yield LogitChunk(rows, part, logits, part.bias, values[:, rows], wanted, other_side)
            if gradients is not None:
                gradients.add(dlogits, part, rows, columns)

    def memory(self, head: LinearHead, plan: ChunkPlan) -> tuple[Tensor, Any]:
        """Return (workspace, other side) for the chunks of a plan."""
        rows = min(plan.rows, self.rows.count)
        ws = workspace(rows, self.vocab, self.logits_dtype(head.dtype), head.hidden.device)
        return ws, self.other_side(rows)

    def statistics(self, head: LinearHead, needs: Needs) -> Tensor:
        """Return per-token values (fields, rows.count), for a backward that recomputes and returns `needs`."""
        values = self.new_values(head)
        for chunk in self.chunks(head, values, None):
            self.write_rows(chunk)
        return values

    def recomputed(
        self, head: LinearHead, needs: Needs, upstream: Tensor, largest: Tensor | None, values: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the head's gradients. upstream (rows.count,), largest: see `upstream_rows`."""
        gradients, loss = self.gradients(head, needs, self.plan(head.dtype), 1.0, largest), self.weighted(upstream)
        for chunk in loss.chunks(head, loss.new_values(head), gradients):
            loss.write_rows(chunk)
        chunk = None  # as in GradientsInForward
        return gradients.finish()


class GradientsInForward(torch.autograd.Function):
    """Gradients computed in the forward; the backward multiplies them by the loss's gradient unless that is 1."""

    @staticmethod
    def forward(ctx, loss: LinearLoss, needs: Needs, reduction: str, dtype: torch.dtype, *tensors):
        head, rows, gradients = LinearHead(*tensors, dtype=dtype), loss.rows, None
        with torch.autocast(head.hidden.device.type, enabled=False):
            if needs.any:
                gradients = loss.gradients(head, needs, loss.plan(dtype), rows.alpha)
            values = loss.new_values(head)
            for chunk in loss.chunks(head, values, gradients):
                loss.write_rows(chunk)
            chunk = None  # free the workspace before `finish` allocates
            if gradients is not None:
                ctx.save_for_backward(*gradients.finish())
            per_token = put(values.t(), rows, head.hidden.shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return values[0].sum() * rows.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        return None, None, None, None, *rescale(ctx.saved_tensors, grad_loss)


class Recomputed(torch.autograd.Function):
    """Gradients from logits that the backward computes again."""

    @staticmethod
    def forward(ctx, loss: LinearLoss, needs: Needs, reduction: str, dtype: torch.dtype, *tensors):
        ctx.loss, ctx.needs, ctx.reduction, ctx.dtype = loss, needs, reduction, dtype
        with torch.autocast(tensors[0].device.type, enabled=False):
            values = loss.statistics(LinearHead(*tensors, dtype=dtype), needs)
        ctx.save_for_backward(values if loss.keeps_values else None, *tensors)
        per_token = put(values.t(), loss.rows, tensors[0].shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return per_token[0].clone() if reduction == "none" else values[0].sum() * loss.rows.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        values, *tensors = ctx.saved_tensors
        loss, rows = ctx.loss, ctx.loss.rows
        upstream = take(grad_loss, rows) if ctx.reduction == "none" else grad_loss * rows.alpha
        upstream, largest = upstream_rows(upstream, rows.count, ctx.dtype)
        with torch.autocast(tensors[0].device.type, enabled=False):
            gradients = loss.recomputed(LinearHead(*tensors, dtype=ctx.dtype), ctx.needs, upstream, largest, values)
        return None, None, None, None, *gradients


def upstream_rows(upstream: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return each row's upstream gradient (count,), and in fp16 the largest of them, which they are divided by.

    Most logits' gradients of a mean are below fp16's smallest number.
    """
    upstream = upstream.to(stats_dtype(dtype)).expand(count).contiguous()
    if dtype != torch.float16 or not count:
        return upstream, None
    largest = upstream.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return upstream / largest, largest


def check_labels(hidden: Tensor, labels: Tensor | None, ce_weight: float = 0.0) -> None:
    check_label_dtype(labels)
    if labels is not None and labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"labels must be one per row of hidden: labels is {tuple(labels.shape)}, hidden {tuple(hidden.shape)}."
        )
    if labels is None and ce_weight:
        raise ValueError(f"ce_weight is {ce_weight}, but cross-entropy needs labels and none were given.")


def check_execution(
    hidden: Tensor, token_weight: Tensor | None, reduction: str, num_items, recompute: bool, overwrite_hidden: bool
) -> None:
    if token_weight is not None and token_weight.shape != hidden.shape[:1]:
        raise ValueError(
            f"token_weight must be one per row of hidden: "
            f"token_weight is {tuple(token_weight.shape)}, hidden {tuple(hidden.shape)}."
        )
    if reduction not in ("mean", "none"):
        raise ValueError(f'reduction must be "mean" or "none", got {reduction!r}. For a sum, give num_items=1.')
    if reduction == "none" and not recompute:
        raise ValueError('reduction="none" needs recompute=True: the forward cannot know each token\'s gradient.')
    if reduction == "none" and num_items is not None:
        raise ValueError('num_items is what reduction="mean" divides by; with reduction="none" it has no use.')
    if overwrite_hidden and hidden.is_leaf and hidden.requires_grad:
        raise ValueError("overwrite_hidden=True would overwrite a leaf: hidden must be the output of a layer.")
    if overwrite_hidden and recompute:
        raise ValueError("overwrite_hidden works without recompute: the backward computes logits from hidden again.")
