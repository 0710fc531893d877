"""Fused linear losses whose head is sharded by rows, that is by vocabulary, over the ranks of a group.

Every rank computes the logits of a chunk of tokens over its own rows of the head. Row statistics (maxima, sums of
exponentials, the label's logit) are combined by all-reduce, a few numbers a token; each rank then has all that the
gradient of its logits needs. The head is never gathered, nor is its gradient.

Tokens    "replicated": all ranks have the same tokens, as in tensor parallelism. The gradient of hidden is all-reduced.
          "sharded": each rank has its own tokens, as under FSDP. A chunk holds tokens of all ranks: their hidden
          states are all-gathered, and the gradients of these reduce-scattered. The weight's gradient sums over the
          tokens of all ranks: it is complete.
Method    One walk over the chunks: products, statistics, all-reduce, gradient, products. Statistics of all tokens first
          and one all-reduce for all of them would need every logit twice, a third more arithmetic; an all-reduce of
          some 50 kB a chunk takes microseconds, next to products of milliseconds. The workspace of a chunk holds
          as many logits as without ranks, of W times as many tokens over 1 / W of the vocabulary; gathered hidden
          states and the fp32 sum of their gradient lie within its budget.
          All ranks walk over the same chunks. A rank's tokens spread evenly over them, so ranks may have different
          numbers of tokens, or none.
Numerics  sums over ranks are in fp32 (fp64 for fp64 products), the gradient of hidden included.
Source    the cross-entropy of tensor parallelism: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._autograd import NeededGradients, first_order, multiply_, rescale, stats_dtype
from ._cross_entropy_rows import (
    LOG_PROB,
    LSE,
    CrossEntropyOptions,
    Targets,
    Tile,
    finish,
    gradient_factor,
    new_carry,
    tile_gradient,
    tile_statistics,
)
from ._divergence_shards import divergence_shard
from ._divergence_torch import RowInputs
from ._linear_head import (
    LinearHead,
    Operands,
    Rows,
    TermGradients,
    addmm_into,
    gather_rows,
    labelled_weight,
    scatter_rows,
)
from ._linear_loss import TILE_ROWS, Execution, LinearLoss, upstream_rows, workspace
from ._ranks import RankSums, VocabParallel, all_gather, counts_of_ranks, reduce_scatter
from .linear_cross_entropy import LinearCrossEntropy
from .linear_divergence import LinearPair

MOST_ROWS = 2**16  # tokens of a chunk: beyond, a chunk's products gain nothing


class Span(NamedTuple):
    """A chunk of tokens: `rows` among all, in the order of the chunks, and each rank's own among its labelled rows."""

    rows: slice
    parts: tuple[slice, ...]

    @property
    def sizes(self) -> list[int]:
        return [part.stop - part.start for part in self.parts]


class TokenLayout:
    """The labelled rows of all ranks, in chunks that hold an even share of each rank's."""

    def __init__(self, parallel: VocabParallel, selected: Rows, device: torch.device):
        self.parallel, self.selected = parallel, selected
        self.sharded = parallel.tokens == "sharded"
        self.counts, self.alphas, self.place = [selected.count], [selected.alpha], 0
        if self.sharded:
            self.place = parallel.rank  # whose part of a chunk is ours
            of_ranks = selected.of_ranks
            if of_ranks is None:
                mine = torch.tensor([selected.count, selected.alpha], dtype=torch.float64, device=device)
                of_ranks = counts_of_ranks(mine, parallel.group).tolist()
            self.counts, self.alphas = [int(count) for count, _ in of_ranks], [alpha for _, alpha in of_ranks]
        self.length = 0  # of the order of the chunks, with the gaps between them
        self.spans: list[Span] = []

    @property
    def alpha(self) -> float:
        """Return the factor of the summed loss that all ranks' products apply; see `relative`."""
        return max(self.alphas)

    @property
    def relative(self) -> list[float]:
        """Return by rank what remains of its factor. All are 1 where ranks divide by the same number of items."""
        return [alpha / self.alpha if self.alpha else 1.0 for alpha in self.alphas]

    def cut(self, rows: int) -> None:
        """Choose the chunks, of about `rows` tokens at most.

        Each begins at a multiple of 16 numbers, or the row kernels would be compiled, and launched slowly, for others.
        """
        chunks, start = -(-sum(self.counts) // rows), 0
        self.spans.clear()
        for i in range(chunks):
            parts = tuple(slice(n * i // chunks, n * (i + 1) // chunks) for n in self.counts)
            stop = start + sum(part.stop - part.start for part in parts)
            if stop > start:  # few tokens, rounded down, may leave a chunk empty
                self.spans.append(Span(slice(start, stop), parts))
            start = -(-stop // 16) * 16
        self.length = start

    @property
    def most_rows(self) -> int:
        return max((span.rows.stop - span.rows.start for span in self.spans), default=0)

    def all_of(self, x: Tensor) -> Tensor:
        """Return the values (length,) of all tokens in the order of the chunks. x: (count,) of this rank's rows."""
        if self.sharded:
            longest = max(self.counts)
            mine = x.new_zeros(longest)
            mine[: x.shape[0]] = x
            of_ranks = x.new_empty(len(self.counts) * longest)
            all_gather(of_ranks, mine, group=self.parallel.group)
            table = of_ranks.view(len(self.counts), longest)
        else:
            table = x[None]
        return self._in_order(x, lambda rank, part: table[rank, part])

    def relative_of_all(self, like: Tensor) -> Tensor:
        """Return what remains of each token's factor (length,); see `relative`."""
        relative = self.relative
        return self._in_order(like, lambda rank, part: like.new_full((part.stop - part.start,), relative[rank]))

    def _in_order(self, like: Tensor, piece: Callable[[int, slice], Tensor]) -> Tensor:
        out = like.new_zeros(self.length)
        for span in self.spans:
            torch.cat([piece(rank, part) for rank, part in enumerate(span.parts)], out=out[span.rows])
        return out

    def gather(self, x: Tensor, span: Span) -> Tensor:
        """Return rows (n, H) of a chunk's tokens. x: (count, H) of this rank's rows."""
        mine = x[span.parts[self.place]]
        if not self.sharded:
            return mine
        sizes = span.sizes
        longest = max(sizes)
        padded = _padded(mine, longest)
        of_ranks = x.new_empty(len(sizes) * longest, x.shape[1])
        all_gather(of_ranks, padded, group=self.parallel.group)
        if min(sizes) == longest:
            return of_ranks
        return torch.cat([of_ranks[i * longest : i * longest + size] for i, size in enumerate(sizes)])

    def reduce(self, partial: Tensor, span: Span) -> Tensor:
        """Sum a chunk's (n, H) over the ranks and return the rows of this rank's tokens."""
        if not self.sharded:
            return self.parallel.sum_(partial)
        sizes = span.sizes
        longest = max(sizes)
        if min(sizes) != longest:
            padded = partial.new_zeros(len(sizes) * longest, partial.shape[1])
            for i, piece in enumerate(partial.split(sizes)):
                padded[i * longest : i * longest + sizes[i]] = piece
            partial = padded
        mine = partial.new_empty(longest, partial.shape[1])
        reduce_scatter(mine, partial, group=self.parallel.group)
        return mine[: sizes[self.place]]

    def own(self, values: Tensor) -> Tensor:
        """Return the columns (fields, count) of this rank's tokens out of (fields, length)."""
        pieces = []
        for span in self.spans:
            start = span.rows.start + sum(span.sizes[: self.place])
            pieces.append(values[:, start : start + span.sizes[self.place]])
        return torch.cat(pieces, 1) if pieces else values


def _padded(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    out = x.new_zeros(rows, x.shape[1])
    out[: x.shape[0]] = x
    return out


class ShardChunk(NamedTuple):
    """A chunk of tokens over this rank's columns of the vocabulary."""

    rows: slice  # positions among the tokens of all ranks
    span: Span
    logits: Tensor  # (n, c), raw, without bias; c may be 0
    bias: Tensor | None  # (c,)
    values: Tensor  # (fields, n), to be written, the same on all ranks
    dlogits: Tensor | None  # (n, c), to be written, possibly over the logits
    chunk_state: Any
    parallel: VocabParallel


class ShardGradients:
    """d loss / d (hidden, weight, bias, low, low_weight) from d loss / d logits of this rank's columns."""

    def __init__(
        self, head: LinearHead, needs: NeededGradients, layout: TokenLayout, columns: int, wide: torch.dtype | None,
        alpha: float, factor: Tensor | None,
    ):  # fmt: skip
        self._head, self._layout, self._alpha, self._factor = head, layout, alpha, factor
        # FSDP averages gradients over ranks; these are sums
        share = alpha / layout.parallel.size if layout.parallel.average else alpha
        every = Rows(None, layout.length, 1.0)
        pairs = [(head.hidden, head.weight, needs.hidden, needs.weight)]
        if head.low is not None and head.low_weight is not None:
            pairs.append((head.low, head.low_weight, needs.low, needs.low_weight))
        self._sums = [
            TermGradients(x, w, (False, needed), every, columns, share, wide, False) for x, w, _, needed in pairs
        ]
        count = layout.selected.count
        self._of_rows = [
            torch.empty(count, x.shape[1], dtype=x.dtype, device=x.device) if needed else None
            for x, _, needed, _ in pairs
        ]
        self._share, self._bias = share, None
        if needs.bias:
            assert head.bias is not None
            self._bias = torch.zeros(head.bias.shape[0], dtype=stats_dtype(head.bias.dtype), device=head.bias.device)

    def add(self, dlogits: Tensor, operands: Operands, span: Span) -> None:
        """Add a chunk. dlogits: (n, c); operands: its tokens' hidden states and this rank's columns, in its dtype."""
        columns = slice(0, dlogits.shape[1])
        if self._bias is not None:
            self._bias[columns].add_(dlogits.sum(0, dtype=self._bias.dtype), alpha=self._share)
        for sums, rows, (x, w) in zip(self._sums, self._of_rows, operands.terms, strict=True):
            sums.add(dlogits, x, w, span.rows, columns)
            if rows is not None:
                # fp32: ranks' parts are summed before they are rounded.
                partial = torch.empty(x.shape, dtype=stats_dtype(x.dtype), device=x.device)
                addmm_into(partial, dlogits, w, beta=0, alpha=self._alpha)
                # this rank's own tokens
                rows[span.parts[self._layout.place]] = self._layout.reduce(partial, span).to(rows.dtype)

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of `LinearHead.tensors`, each in its tensor's shape and dtype; None where not needed."""
        head, selected = self._head, self._layout.selected
        if self._factor is not None:
            multiply_([self._bias, *self._of_rows, *(sums.w for sums in self._sums)], self._factor)
        sides = [(head.hidden, head.weight), (head.low, head.low_weight)]
        terms: list[Tensor | None] = []
        for sums, rows, (x, w) in zip(self._sums, self._of_rows, sides, strict=False):
            assert x is not None and w is not None
            terms += [
                None if rows is None else scatter_rows(rows, selected, x.shape[0]),
                sums.finish(selected, x, w, False)[1],
            ]
        dbias = None if self._bias is None or head.bias is None else self._bias.to(head.bias.dtype)
        dhidden, dweight, *low = terms
        return dhidden, dweight, dbias, *(low or (None, None))


@dataclass(frozen=True)
class ParallelLoss:
    """A loss over the tokens of all ranks. `loss` has their labels and weights in the layout's order."""

    loss: LinearLoss
    layout: TokenLayout

    def columns(self, weight: Tensor) -> int:
        return self.layout.parallel.columns(self.loss.vocab, weight.shape[0])

    def new_gradients(self, head: LinearHead, needs: NeededGradients, alpha: float, factor: Tensor | None = None):
        chunks = len(self.layout.spans)
        wide = self.loss.how.sum_dtype(chunks) if factor is None else torch.float32
        return ShardGradients(head, needs, self.layout, self.columns(head.weight), wide, alpha, factor)

    def walk(self, head: LinearHead, gradients: ShardGradients | None) -> Tensor:
        """Return the values (fields, count) of this rank's rows, and add every chunk to `gradients`."""
        loss, layout, columns = self.loss, self.layout, self.columns(head.weight)
        own = head.operands(layout.selected, columns)  # this rank's tokens, and its columns of the head
        weights = [w.to(x.dtype) for x, w in own.terms]  # each is cast once
        dtype, device = head.dtype, head.hidden.device
        values = torch.empty(len(loss.fields), layout.length, dtype=stats_dtype(dtype), device=device)
        # not `fit_to_memory`: a rank that took smaller chunks than the others would wait for them forever
        ws = workspace(layout.most_rows, columns, loss.logits_dtype(dtype), device)
        grad_ws = ws.view(dtype)[:, :columns] if columns else ws.to(dtype)
        chunk_state = _teacher_side(loss, layout, columns)
        for span in layout.spans:
            terms = [(layout.gather(x, span), w) for (x, _), w in zip(own.terms, weights, strict=True)]
            part = Operands(terms, own.bias)
            logits = part.logits(ws)
            dlogits = None if gradients is None else grad_ws[: logits.shape[0]]
            write_shard(
                loss,
                ShardChunk(
                    span.rows, span, logits, part.bias, values[:, span.rows], dlogits, chunk_state, layout.parallel
                ),
            )
            if gradients is not None and dlogits is not None:
                gradients.add(dlogits, part, span)
        return layout.own(values)


class ParallelGradientsInForward(torch.autograd.Function):
    """As `GradientsInForward`. The gradient of the loss must be the same on all ranks: see `_agreed`."""

    @staticmethod
    def forward(ctx, run: ParallelLoss, needs: NeededGradients, reduction: str, dtype: torch.dtype, *tensors):
        head, layout, gradients = LinearHead(*tensors, dtype=dtype), run.layout, None
        with torch.autocast(head.hidden.device.type, enabled=False):
            if needs.any:
                gradients = run.new_gradients(head, needs, layout.alpha)
            values = run.walk(head, gradients)
            if gradients is not None:
                ctx.save_for_backward(*gradients.finish())
            per_token = scatter_rows(values.t(), layout.selected, head.hidden.shape[0]).t()
        ctx.parallel = layout.parallel
        ctx.mark_non_differentiable(per_token)
        return values[0].sum() * layout.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        return None, None, None, None, *rescale(ctx.saved_tensors, _agreed(grad_loss, ctx.parallel))


def _agreed(grad_loss: Tensor, parallel: VocabParallel) -> Tensor:
    """Return the gradient of the loss if all ranks have the same, else NaN: the weight's gradient is summed already.

    NaN, since asking on the host would make it wait for the device.
    """
    ends = torch.stack([grad_loss, -grad_loss])  # one all-reduce for the largest and the smallest
    largest, smallest = parallel.max_(ends.to(stats_dtype(ends.dtype))).unbind()
    return grad_loss.where(largest == -smallest, torch.nan)


class ParallelRecomputed(torch.autograd.Function):
    """As `Recomputed`: gradients from logits that the backward computes again, for any gradient of each rank's loss."""

    @staticmethod
    def forward(ctx, run: ParallelLoss, needs: NeededGradients, reduction: str, dtype: torch.dtype, *tensors):
        ctx.run, ctx.needs, ctx.reduction, ctx.dtype = run, needs, reduction, dtype
        head, selected = LinearHead(*tensors, dtype=dtype), run.layout.selected
        with torch.autocast(head.hidden.device.type, enabled=False):
            values = run.walk(head, None)
        ctx.save_for_backward(*tensors)
        per_token = scatter_rows(values.t(), selected, head.hidden.shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return per_token[0].clone() if reduction == "none" else values[0].sum() * run.layout.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        run, layout = ctx.run, ctx.run.layout
        selected = layout.selected
        upstream = gather_rows(grad_loss, selected) if ctx.reduction == "none" else grad_loss * layout.alpha
        upstream = upstream.to(stats_dtype(ctx.dtype)).expand(selected.count).contiguous()
        upstream, largest = upstream_rows(layout.all_of(upstream), layout.length, ctx.dtype)
        weighted = replace(run, loss=run.loss.weighted(upstream))
        head = LinearHead(*ctx.saved_tensors, dtype=ctx.dtype)
        with torch.autocast(head.hidden.device.type, enabled=False):
            gradients = weighted.new_gradients(head, ctx.needs, 1.0, largest)
            weighted.walk(head, gradients)
        return None, None, None, None, *gradients.finish()


def _teacher_side(loss: LinearLoss, layout: TokenLayout, columns: int) -> Any:
    """Return what `write_shard` needs of a teacher: (layout, operands of its logits for this rank, a workspace)."""
    if not isinstance(loss, LinearPair):
        return None
    terms, bias = loss.teacher.operands(layout.selected, columns)
    dtype = loss.logits_dtype(loss.teacher.dtype)
    ws = workspace(layout.most_rows, columns, dtype, loss.teacher.hidden.device)
    return layout, Operands([(x, w.to(x.dtype)) for x, w in terms], bias), ws


def write_shard(loss: LinearLoss, chunk: ShardChunk) -> None:
    """Write the values of a chunk's rows and, if `dlogits` is there, the gradient of this rank's logits."""
    shard = chunk.parallel
    if isinstance(loss, LinearCrossEntropy):
        targets, tile = loss.targets.rows(chunk.rows), Tile(chunk.logits, chunk.bias, shard.first, loss.vocab)
        return shard_rows(tile, targets, chunk.values, chunk.dlogits, loss.options, shard)
    assert isinstance(loss, LinearPair)
    layout, operands, ws = chunk.chunk_state
    terms = [(layout.gather(x, chunk.span), w) for x, w in operands.terms]
    teacher = Operands(terms, operands.bias).logits(ws)
    labels, token_weight = (None if x is None else x[chunk.rows] for x in (loss.labels, loss.token_weight))
    inputs = RowInputs(chunk.logits, teacher, chunk.bias, operands.bias, labels, token_weight)
    divergence_shard(inputs, shard.first, loss.vocab, chunk.values, chunk.dlogits, loss.options, shard)


def shard_rows(
    tile: Tile, targets: Targets, out: Tensor, grad: Tensor | None, o: CrossEntropyOptions, ranks: RankSums
) -> None:
    """Fill out (len(FIELDS), n), and grad (n, columns) unless it is None, where other ranks have the other columns.

    Each rank's statistics are a carry; carries are combined by two all-reduces. grad may be the tile itself.
    """
    carry = new_carry(out.shape[1], tile.logits)
    if tile.logits.shape[1]:
        tile_statistics(tile, targets, carry, o)
    place = targets.labels - tile.first
    inside = (place >= 0) & (place < tile.logits.shape[1])  # whether the label is among this rank's columns
    own_top, total, weighted, plain, x_label = carry
    top = ranks.max_(own_top.clone())  # the first all-reduce
    share = (own_top - top).exp()  # what this rank's sums shrink by
    sums = torch.stack([total * share, weighted * share, plain, x_label.where(inside, 0)])
    total, weighted, plain, x_label = ranks.sum_(sums)
    x_label = x_label.where((targets.labels >= 0) & (targets.labels < tile.vocab), torch.nan)  # a wrong label shows
    out.copy_(finish(torch.stack([top, total, weighted, plain, x_label]), targets, tile.vocab, o))
    if grad is not None and grad.shape[1]:
        factor = gradient_factor(torch.ones_like(out[LSE]), out[LOG_PROB], targets, o)
        tile_gradient(tile, targets, out[LSE].contiguous(), factor, grad, o)


def parallel_loss(
    parallel: VocabParallel, build: Callable[..., LinearLoss], sides: Sequence[LinearHead], selected: Rows,
    labels: Tensor | None, token_weight: Tensor | None, arguments: Sequence[Any], how: Execution, reduction: str,
    recompute: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute a loss over the tokens of all ranks and return (this rank's loss, per-token values (fields, N)).

    Args:
        build, labels, token_weight, arguments: see `LossOp`. build gets the rows of all ranks, their labels and
            their weights.
        sides: the head with this rank's tokens and rows, and the teacher's.
        selected: the rows of this rank that take part.
    """
    head, (bytes_per_logit, gathered_bytes) = sides[0], (
        sum(x.dtype.itemsize for x in sides), sum(x.hidden.shape[1] * x.dtype.itemsize for x in sides)
    )  # fmt: skip
    layout = TokenLayout(parallel, selected, head.hidden.device)
    copies = 2 if layout.sharded else 0  # gathered, and a second time where ranks have unequal numbers
    per_token = copies * gathered_bytes + head.hidden.shape[1] * stats_dtype(head.dtype).itemsize
    layout.cut(chunk_rows(parallel, bytes_per_logit, per_token, how))  # all ranks cut alike: chunks meet in collectives
    labels = None if labels is None else layout.all_of(gather_rows(labels, selected)).contiguous()
    weights = labelled_weight(token_weight, selected, head.hidden.dtype)
    weights = token_weights(layout, weights, head.hidden, reduction)
    every = Rows(None, layout.length, 1.0)
    run = ParallelLoss(build(every, how, head, labels, weights, *arguments), layout)
    function = ParallelRecomputed if recompute else ParallelGradientsInForward
    return function.apply(run, NeededGradients.of(*head.tensors), reduction, head.dtype, *head.tensors)


def chunk_rows(parallel: VocabParallel, bytes_per_logit: int, bytes_per_token: int, how: Execution) -> int:
    """Return how many tokens a chunk holds, so that their logits and the rest of their bytes fit the workspace."""
    budget = how.workspace_bytes(parallel.widest)
    rows = int(min(MOST_ROWS, budget // (parallel.widest * bytes_per_logit + bytes_per_token)))
    return max(1, rows // TILE_ROWS * TILE_ROWS if rows >= TILE_ROWS else rows)


def token_weights(layout: TokenLayout, own: Tensor | None, like: Tensor, reduction: str) -> Tensor | None:
    """Return the weights (length,) of all tokens, which hold what ranks' factors differ by; None if all are 1.

    own: (count,) of this rank's rows.
    """
    weights = None if own is None else layout.all_of(own)
    pairs = zip(layout.relative, layout.counts, strict=True)
    if reduction == "none" or all(share == 1 for share, count in pairs if count):
        return weights
    shares = layout.relative_of_all(like.new_empty(0, dtype=stats_dtype(like.dtype)))
    return shares if weights is None else shares * weights
