"""Cross-entropy of a linear head, without the logits of the whole batch.

    x = transform(hidden @ weight.T + bias + lora) / temperature          transform: scale, then softcap (_logits.py)
    loss = sum over labelled rows of w [(1 - s) nll + s (lse - mean x) + z lse^2] / num_items
           with nll = lse - x[label], w token_weight, s label_smoothing, z z_loss; lora: see _linear_head.py

Shapes    hidden: (N, H)  weight: (V, H)  labels: (N,) int64  bias: (V,)  token_weight: (N,)
Method    The loss is the last thing a model computes, so the forward can compute its gradients too. Rows without a
          label are dropped. For each chunk of rows cuBLAS writes logits into one reused workspace, a kernel turns them
          into their gradient in place, and two products give d hidden and d weight. That makes three products, two for
          a frozen weight, one without gradients. The backward only multiplies by the gradient of the loss, and moves
          nothing if that is 1.
          With recompute, the forward only takes each row's statistics, tile by tile of the vocabulary, and the backward
          computes the tiles again: four products, nothing held in between, and an upstream gradient for each token's
          loss. A tile's logits are stored in the part of the weight's gradient that later tiles overwrite, so
          computing them again needs no extra memory. The sums of the hidden states' gradient are rounded in place. A
          weight that is frozen, adapted or of another dtype than the products takes a workspace the size of the hidden
          states.
Numerics  logits in the products' dtype, softmax and sums in fp32, the logits' gradient rounded once to the products'
          dtype. The weight's gradient is rounded once a chunk up to 16 chunks; beyond, it is summed in fp32.
Traffic   per logit: 2 reads and 2 writes by the kernel and the first product, 2 reads by the other two
Source    gradients in the forward: M. Wijmans' efficient_cross_entropy and Liger-Kernel (Hsu et al. 2024,
          arXiv:2410.10989); tiles of the vocabulary: Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009); online
          softmax: Milakov & Gimelshein 2018, arXiv:1805.02867; DFT: Wu et al. 2025, arXiv:2508.05629
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._autograd import NeededGradients, stats_dtype
from ._cross_entropy_rows import (
    FIELDS,
    LOG_PROB,
    CrossEntropy,
    CrossEntropyOptions,
    Targets,
    Tile,
    cross_entropy_reference,
    finish,
    gradient_factor,
    new_carry,
    tile_gradient,
    tile_statistics,
    whole_rows,
)
from ._linear_head import (
    Adapters,
    HeadGradients,
    LinearHead,
    Lora,
    Rows,
    RowSelection,
    check_head,
    check_overwritten,
    gather_rows,
    labelled_weight,
    linear_reference,
)
from ._linear_loss import (
    ChunkPlan,
    Execution,
    LinearLoss,
    LogitChunk,
    LossOp,
    check_execution,
    check_labels,
    fit_to_memory,
    tile_plan,
    tiles_in_gradient,
    workspace,
)
from ._logits import LogitTransform, transform
from ._ranks import VocabParallel

NOTHING = NeededGradients(False, False, False)

__all__ = ["CrossEntropy", "Lora", "VocabParallel", "linear_cross_entropy", "linear_cross_entropy_reference"]


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, lora: Adapters = None, **options,
) -> CrossEntropy:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    logits = transform(linear_reference(hidden, weight, lora), bias, LogitTransform(scale, softcap))[0]
    return cross_entropy_reference(logits, labels, **options)


@dataclass(frozen=True)
class LinearCrossEntropy(LinearLoss):
    """The loss of one call. targets: those of the rows that take part."""

    targets: Targets
    options: CrossEntropyOptions

    fields = FIELDS
    keeps_values = True  # log-partitions, from which the backward makes gradients without another pass

    def write_rows(self, chunk: LogitChunk) -> None:
        targets = self.targets.rows(chunk.rows)
        # dlogits may be the logits
        whole_rows(chunk.logits, chunk.bias, targets, chunk.values, chunk.dlogits, self.options)

    def weighted(self, factor: Tensor) -> "LinearCrossEntropy":
        token_weight = self.targets.token_weight
        weight = factor if token_weight is None else factor * token_weight  # (rows.count,)
        return replace(self, targets=replace(self.targets, token_weight=weight))

    def statistics(self, head: LinearHead, needs: NeededGradients) -> Tensor:
        """Return per-token values, computed tile by tile of the vocabulary."""
        rows, dtype, o = self.rows, head.dtype, self.options
        operands = head.operands(rows, self.vocab)
        out = torch.empty(len(FIELDS), rows.count, dtype=stats_dtype(dtype), device=head.hidden.device)
        # bytes that the backward will take: statistics may use as many
        gradient = head.weight.numel() * head.weight.itemsize
        plan, ws = self._tiles(head, NOTHING, gradient if self._takes_gradient(head, needs) else 0)
        for chunk in plan.chunks(rows.count):
            targets, carry = self.targets.rows(chunk), new_carry(chunk.stop - chunk.start, ws)
            for columns in plan.tiles(self.vocab):
                part = operands.part(chunk, columns)
                # Each tile overwrites the workspace of the one before; what is kept of it is the carry.
                tile_statistics(Tile(part.logits(ws), part.bias, columns.start, self.vocab), targets, carry, o)
            out[:, chunk] = finish(carry, targets, self.vocab, o)
        return out

    def recomputed(
        self, head: LinearHead, needs: NeededGradients, upstream: Tensor, largest: Tensor | None, values: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the head's gradients, computed tile by tile of the vocabulary."""
        assert values is not None
        o, operands = self.options, head.operands(self.rows, self.vocab)
        # (rows.count,): token weights, and the probability under DFT
        factor = gradient_factor(upstream, values[LOG_PROB], self.targets, o)
        if self._takes_gradient(head, needs):
            plan = ChunkPlan(self.rows.count, self.vocab)  # near the end up to ROUNDINGS chunks
            gradients = self.gradients(head, needs, plan, 1.0, largest, rounded_in_place=True)
            tiles = self._tiles_in_gradient(head, gradients)
        else:
            plan, ws = self._tiles(head, needs)
            gradients = self.gradients(head, needs, plan, 1.0, largest)
            tiles = ((rows, columns, ws) for rows in plan.chunks(self.rows.count) for columns in plan.tiles(self.vocab))
        for rows, columns, memory in tiles:
            part = operands.part(rows, columns)
            tile = Tile(part.logits(memory), part.bias, columns.start, self.vocab)
            tile_gradient(tile, self.targets.rows(rows), values[4, rows], factor[rows], tile.logits, o)
            gradients.add(tile.logits, part, rows, columns)  # the logits are the gradient now
        return gradients.finish()

    def _takes_gradient(self, head: LinearHead, needs: NeededGradients) -> bool:
        """Whether logits may lie in the weight's gradient. (Rows of a weight in another dtype are cast elsewhere.)"""
        plain = head.low is None and head.weight.dtype == head.dtype
        return needs.weight and plain and self.how.workspace_mb is None and self.rows.count > 0

    def _tiles(self, head: LinearHead, needs: NeededGradients, spare: int = 0) -> tuple[ChunkPlan, Tensor]:
        """Return (plan, workspace of a tile)."""
        count, dtype = self.rows.count, head.dtype
        plan = tile_plan(count, self.vocab, head.hidden.shape[1], dtype.itemsize, needs, self.how, spare)
        return fit_to_memory(
            plan, lambda plan: workspace(min(plan.rows, count), plan.columns, dtype, head.hidden.device)
        )

    def _tiles_in_gradient(self, head: LinearHead, gradients: HeadGradients) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (rows, columns, memory for their logits), in the gradient of the weight as long as they fit."""
        dtype, elsewhere = head.dtype, None
        row_bytes = head.hidden.shape[1] * head.weight.itemsize
        for rows, columns in tiles_in_gradient(self.rows.count, self.vocab, dtype.itemsize, row_bytes):
            shape = ChunkPlan(rows.stop - rows.start, columns.stop - columns.start)
            # Rows of the weight's gradient behind this tile's words: later tiles will write them.
            inside = gradients.free_rows(columns.stop, shape, dtype)
            if inside is not None:
                yield rows, columns, inside
                continue
            if elsewhere is None:  # allocated once, for the last tiles
                elsewhere = fit_to_memory(shape, lambda plan: workspace(*plan, dtype, head.hidden.device))
            fits, ws = elsewhere
            for start in range(rows.start, rows.stop, fits.rows):
                yield slice(start, min(start + fits.rows, rows.stop)), columns, ws


def _loss(
    rows: Rows, how: Execution, head: LinearHead, labels: Tensor, token_weight: Tensor | None, vocab: int, scale: float,
    softcap: float | None, temperature: float, label_smoothing: float, z_loss: float, dft: bool,
) -> LinearCrossEntropy:  # fmt: skip
    options = CrossEntropyOptions(LogitTransform(scale, softcap), temperature, label_smoothing, z_loss, dft)
    weight = labelled_weight(token_weight, rows, head.hidden.dtype)
    targets = Targets(gather_rows(labels, rows).contiguous(), weight)
    return LinearCrossEntropy(rows, vocab, how, targets, options)


_op = LossOp("linear_cross_entropy", _loss)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None,
    token_weight: Tensor | None = None, num_items: float | Tensor | None = None, reduction: str = "mean",
    scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0, label_smoothing: float = 0.0,
    z_loss: float = 0.0, ignore_index: int = -100, dft: bool = False, rows: RowSelection | None = None,
    recompute: bool = False, workspace_mb: float | None = None, accumulate_dtype: torch.dtype | None = None,
    overwrite_hidden: bool = False, lora: Adapters = None, parallel: VocabParallel | None = None,
) -> CrossEntropy:  # fmt: skip
    """Compute cross-entropy of `hidden @ weight.T` against labels; the forward also computes the gradients.

    Equals F.cross_entropy(transform(F.linear(hidden, weight, bias)) / temperature, labels, reduction="sum") divided by
    num_items.

    Args:
        hidden: (N, H), fp32, fp16, bf16 (fp64: torch). Any strides.
        weight: (V, H). Frozen if it requires no gradient: its product is skipped.
        labels: (N,) int64, each in [0, V) or ignore_index. Ignored rows cost nothing. On the GPU a label outside gives
            NaN.
        bias: (V,), added to the logits.
        token_weight: (N,), multiplies each token's loss without changing num_items. It gets no gradient.
        num_items: divisor of the sum over tokens, positive unless no row is labelled. Default: the number of labelled
            rows. With the count over all micro-batches and ranks, splitting a batch changes nothing. A tensor is read
            through `rows`.
        reduction: "mean", or "none" for the loss of each token (N,), which needs recompute.
        scale: multiplies the logits (Granite, Cohere).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2), after scale.
        temperature: divides the logits, after softcap.
        label_smoothing: share of the target spread evenly over the vocabulary, as in torch.
        z_loss: weight of the squared log-partition (PaLM).
        dft: weight each token by its own probability, without gradient (dynamic fine-tuning).
        rows: the labelled rows, if their selection started earlier (see `RowSelection`); the host then need not wait.
            It holds num_items, so leave that argument out.
        recompute: compute the logits again in the backward instead of the gradients in the forward. Takes the least
            memory, for a third more arithmetic.
        workspace_mb: MiB for the chunk of logits. More is faster up to about 1024, see docs/results/losses.md. Default:
            512, or the size of 2,048 rows if that is larger, up to 1024, and half of that for a frozen weight, but no
            less than 1,024 rows; with recompute the size of the hidden states, or next to none for a trained weight in
            the products' dtype without lora.
        accumulate_dtype: torch.float32 sums the weight's gradient in fp32 and rounds it once, in twice the memory.
            Default: the weight's dtype up to 16 chunks; beyond, fp32, since roundings would double the error.
        overwrite_hidden: let the gradient of hidden take its memory. Autograd raises an error if something else needed
            hidden.
        lora: low-rank additions to the head, one `Lora` or several. They are computed in the products' dtype, whatever
            their own; their gradients have their own.
        parallel: how the rows of the head lie on the ranks of a group; weight, bias and each b of lora then hold this
            rank's rows. All ranks must call the op. num_items, and the gradient of the loss without recompute, must be
            the same on all; the latter's being different makes the gradients NaN. See docs/extras.md.

    Returns:
        CrossEntropy: loss and per-token values.

    Raises:
        ValueError: if shapes don't fit, an option is out of range, options exclude each other, or num_items is 0 though
            rows have labels.
    """
    check_head(hidden, weight, bias, lora)
    check_labels(hidden, labels)
    check_execution(hidden, token_weight, reduction, num_items, recompute, overwrite_hidden)
    check_overwritten(overwrite_hidden, lora)
    head = LinearHead.of(hidden, weight, bias, lora)
    if parallel is not None:
        parallel.check(weight, overwrite_hidden)
    vocab = weight.shape[0] if parallel is None else parallel.vocab  # of the whole head, wherever its rows lie
    value, per_token = _op(
        head, labels, token_weight, (vocab, scale, softcap, temperature, label_smoothing, z_loss, dft), rows=rows,
        num_items=num_items, ignore_index=ignore_index, reduction=reduction, recompute=recompute,
        workspace_mb=workspace_mb, accumulate_dtype=accumulate_dtype, overwrite_hidden=overwrite_hidden,
        parallel=parallel,
    )  # fmt: skip
    return CrossEntropy(value, per_token[1], per_token[2], per_token[3] > 0)
