"""One weight that embeds tokens and is the output head: the gradients of both uses in one buffer.

    embed(ids) = weight[ids]        logits = hidden @ weight.T
    d weight   = d head,  then      d weight[ids[n]] += d embed[n]

Shapes    weight: (V, H)   ids: any, N in all   embed(ids): (*ids.shape, H)
Method    Autograd sees two aliases of the weight, for the embedding and the head. The embedding's backward keeps its
          rows. The aliases' node, which comes last, adds them to the head's gradient. The ids are sorted; a program
          adds the rows of one token, in the order of the positions, and no more than lie in SPAN sorted positions. What
          other programs have of the same token they leave in `sums`, and a second launch adds these.
Numerics  fp32 sums. A row of the gradient is rounded once more than the head's, twice where a token is in several spans
Traffic   read the rows, read and write those of the gradient whose tokens occur. In torch, which makes a gradient of
          (V, H) of the rows and adds it to the other: 4VH more
Source    sorted ids: torch's embedding_dense_backward
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import first_order
from ._triton import Launch, remembered, tl, triton, use_triton

SPAN, ROWS, BLOCK, WARPS = 128, 16, 512, 4
NO_PADDING = -1

Uses = list[tuple[Tensor, Tensor, int]]  # of an embedding, whose backward has run: ids, gradient of the rows, padding


def add_rows_reference(dweight: Tensor, ids: Tensor, rows: Tensor, padding: int = NO_PADDING) -> None:
    """Compute `add_rows_` in plain torch."""
    dweight.add_(torch.ops.aten.embedding_dense_backward(rows, ids, dweight.shape[0], padding, False))


@triton.jit
def _tokens_kernel(
    ids_ptr, order_ptr, rows_ptr, dweight_ptr, sums_ptr, N, H, padding,
    SPAN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the rows of one token, from a position on that begins its run or a span. ids_ptr: sorted."""
    first = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + first).to(tl.int64)  # token * H passes 2^31
    goes_on = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1) == token
    if (token != padding) & ((first % SPAN == 0) | (goes_on == 0)):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        end = tl.minimum((first // SPAN + 1) * SPAN, N)
        at = first
        while at < end:
            places = at + tl.arange(0, ROWS)
            same = tl.load(ids_ptr + places, mask=places < end, other=-1) == token
            rows = tl.load(order_ptr + places, mask=same, other=0)
            x = tl.load(
                rows_ptr + rows[:, None] * H + cols[None, :], mask=same[:, None] & (cols < H)[None, :], other=0.0
            )
            total += tl.sum(x.to(tl.float32), 0)
            at = tl.where(tl.sum(same.to(tl.int32), 0) == ROWS, at + ROWS, end)
        if goes_on:
            tl.store(sums_ptr + first // SPAN * H + cols, total, mask=cols < H)
        else:
            out = dweight_ptr + token * H + cols
            total += tl.load(out, mask=cols < H).to(tl.float32)
            tl.store(out, total, mask=cols < H)


@triton.jit
def _sums_kernel(ids_ptr, sums_ptr, dweight_ptr, N, H, padding, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Add what spans have of a token whose run began before: the first of them adds for all."""
    span = tl.program_id(0).to(tl.int64) + 1
    token = tl.load(ids_ptr + span * SPAN).to(tl.int64)
    before = tl.load(ids_ptr + span * SPAN - 1)
    one_before = tl.load(ids_ptr + (span - 1) * SPAN - 1, mask=span > 1, other=-1)
    if (token != padding) & (before == token) & (one_before != token):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        same = token
        while same == token:
            total += tl.load(sums_ptr + span * H + cols, mask=cols < H, other=0.0)
            span += 1
            same = tl.load(ids_ptr + span * SPAN, mask=span * SPAN < N, other=-1).to(tl.int64)
        out = dweight_ptr + token * H + cols
        total += tl.load(out, mask=cols < H).to(tl.float32)
        tl.store(out, total, mask=cols < H)


@remembered
def _launches(N: int, H: int, padding: int) -> tuple[Launch, Launch | None]:
    columns = -(-H // BLOCK)
    numbers, sizes = (N, H, padding), {"SPAN": SPAN, "BLOCK": BLOCK, "num_warps": WARPS}
    more = (N - 1) // SPAN
    return (
        Launch(_tokens_kernel, (N, columns), *numbers, ROWS=ROWS, **sizes),
        Launch(_sums_kernel, (more, columns), *numbers, **sizes) if more else None,
    )


def add_rows_(dweight: Tensor, ids: Tensor, rows: Tensor, padding: int = NO_PADDING) -> None:
    """Add the gradient of embedded rows to that of their weight, in place: the same result each time.

    Args:
        dweight: (V, H), contiguous, fp32, fp16, bf16 (fp64: torch).
        ids: (N,), int64 or int32, below V.
        rows: (N, H), in dweight's dtype.
        padding: the token whose rows are left out, as nn.Embedding's padding_idx; -1: none.
    """
    if not rows.numel():
        return
    if not use_triton(rows):
        return add_rows_reference(dweight, ids, rows, padding)
    in_order, order = ids.sort(stable=True)
    sums = rows.new_empty(-(-len(ids) // SPAN), rows.shape[1], dtype=torch.float32)
    tokens, several = _launches(*rows.shape, padding)
    if not tokens(in_order, order, rows.contiguous(), dweight, sums, has_twin=True):
        return add_rows_reference(dweight, ids, rows, padding)
    if several is not None:  # which has no twin: a part is added already, and it compiles where the first does
        several(in_order, sums, dweight)


class TiedWeightFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, uses):
        ctx.uses = uses
        ctx.like = weight.detach()
        ctx.set_materialize_grads(False)
        return weight.detach(), weight.detach()

    @staticmethod
    @first_order
    def backward(ctx, _, dhead):
        """Add to the head's gradient, which nothing else holds. (The losses return another if the graph is kept.)"""
        uses = ctx.uses.copy()
        ctx.uses.clear()
        dweight = torch.zeros_like(ctx.like) if dhead is None else dhead.contiguous()
        for use in uses:
            add_rows_(dweight, *use)
        return dweight, None


class TiedEmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding, uses):
        ctx.save_for_backward(ids)
        ctx.padding, ctx.uses = padding, uses
        return F.embedding(ids, weight)

    @staticmethod
    @first_order
    def backward(ctx, drows):
        (ids,) = ctx.saved_tensors
        ctx.uses.append((ids.reshape(-1), drows.reshape(-1, drows.shape[-1]), ctx.padding))
        return None, None, None, None


class TiedWeight:
    """A weight for forwards whose backward makes one gradient of its use as an embedding and as a head.

    Args:
        weight: (V, H), fp32, fp16, bf16 or fp64, which requires a gradient.

    Attributes:
        head: the alias that the logits must be computed with. Its gradient is overwritten.
    """

    def __init__(self, weight: Tensor):
        self.weight = weight
        self._uses: Uses = []
        self._embedding, self.head = TiedWeightFunction.apply(weight, self._uses)

    def embed(self, ids: Tensor, padding: int | None = None) -> Tensor:
        """Return the rows (*ids.shape, H) of ids, int64 or int32. padding: as that of torch's embedding."""
        skipped = NO_PADDING if padding is None else padding % len(self.weight)
        return TiedEmbeddingFunction.apply(ids, self._embedding, skipped, self._uses)
