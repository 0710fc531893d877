"""Cross-entropy of a linear head, without the logits of the whole batch.

    x = transform(hidden @ weight.T + bias) / temperature                 transform: scale, then softcap (_rows.py)
    loss = sum over labelled rows of w [(1 - s) nll + s (lse - mean x) + z lse^2] / num_items
           with nll = lse - x[label], w token_weight, s label_smoothing, z z_loss

Shapes    hidden: (N, H)  weight: (V, H)  labels: (N,) int64  bias: (V,)  token_weight: (N,)
Method    the loss is the last thing a model computes, so its gradients can be computed with it: rows without a label
          are dropped, and for each chunk of rows cuBLAS writes logits into one reused workspace, a kernel turns them
          into their gradient in place, and two products give d hidden and d weight. Three products in all, two for a
          frozen weight, one without gradients. Backward only applies the gradient of the loss, and moves nothing when
          that is 1.
          With recompute, the forward only takes each row's statistics, tile by tile of the vocabulary, and the backward
          computes the tiles once more: four products, a workspace no larger than the hidden states, nothing held in
          between, and a gradient of its own for each token's loss.
Numerics  logits in the products' dtype, softmax and sums in fp32, the logits' gradient rounded once to the products'
          dtype; the weight's gradient is rounded once a chunk, unless accumulate_dtype is fp32
Traffic   per logit: 2 reads and 2 writes by the kernel and the first product, 2 reads by the other two
Source    gradients in the forward: M. Wijmans' efficient_cross_entropy and Liger-Kernel (Hsu et al. 2024,
          arXiv:2410.10989); tiles of the vocabulary: Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009); online
          softmax: Milakov & Gimelshein 2018, arXiv:1805.02867; DFT: Wu et al. 2025, arXiv:2508.05629
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import first_order
from ._chunks import (
    Execution,
    HeadGradients,
    Needs,
    Rows,
    RowSelection,
    check_execution,
    check_head,
    check_labels,
    compute_dtype,
    labelled_weight,
    project,
    put,
    rescale,
    row_plan,
    selected_rows,
    stats_dtype,
    take,
    tile_plan,
    upstream_rows,
    workspace,
)
from ._cross_entropy_rows import (
    FIELDS,
    CrossEntropyOptions,
    Targets,
    Tile,
    finish,
    gradient_factor,
    new_carry,
    tile_gradient,
    tile_statistics,
    whole_rows,
)
from ._rows import LogitTransform, transform
from ._traced import check_traceable, fake_outputs, save_gradients, scaled_gradients, traced_outputs
from .cross_entropy import CrossEntropy, cross_entropy_reference


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, **options,
) -> CrossEntropy:  # fmt: skip
    """What the op must equal, in plain torch. Tests and benchmarks import this one."""
    logits = transform(F.linear(hidden, weight), bias, LogitTransform(scale, softcap))[0]
    return cross_entropy_reference(logits, labels, **options)


def _with_gradients(hidden, weight, bias, targets, rows: Rows, needs: Needs, dtype, o: CrossEntropyOptions, how):
    """(loss, per-token (5, N), d hidden, d weight, d bias). dtype: of the products."""
    x_rows, w = take(hidden, rows).to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.contiguous()
    vocab = weight.shape[0]
    out = torch.empty(len(FIELDS), rows.count, dtype=stats_dtype(dtype), device=hidden.device)
    gradients = HeadGradients(hidden, weight, bias, needs, rows, vocab, how, rows.alpha)
    plan = row_plan(rows.count, vocab, dtype.itemsize, how)
    logits_ws = workspace(min(plan.rows, rows.count), vocab, dtype, hidden.device)
    for chunk in plan.chunks(rows.count):
        x = x_rows[chunk]
        logits = project(x, w, logits_ws[: x.shape[0]])
        whole_rows(logits, bias, targets.rows(chunk), out[:, chunk], logits if needs.any else None, o)
        if needs.any:
            gradients.add(logits, x, w, chunk, slice(0, vocab))
    loss = out[0].sum() * rows.alpha
    per_token = put(out.t(), rows, hidden.shape[0]).t()
    return loss, per_token, *gradients.finish(rows, hidden, weight, bias, how)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Gradients in the forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, rows, needs, options, how):
        dtype = compute_dtype(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            loss, per_token, *gradients = _with_gradients(
                hidden, weight, bias, targets, rows, needs, dtype, options, how
            )
        if needs.any:
            ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(per_token)
        return loss, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        return *rescale(ctx.saved_tensors, grad_loss), None, None, None, None, None


def _statistics(hidden, weight, bias, targets, rows: Rows, dtype, o: CrossEntropyOptions, how: Execution) -> Tensor:
    """(5, rows.count) per-token values."""
    x_rows, vocab = take(hidden, rows).to(dtype), weight.shape[0]
    out = torch.empty(len(FIELDS), rows.count, dtype=stats_dtype(dtype), device=hidden.device)
    plan = tile_plan(rows.count, vocab, hidden.shape[1], dtype.itemsize, Needs(False, False, False), how)
    ws = workspace(min(plan.rows, rows.count), plan.columns, dtype, hidden.device)
    for chunk in plan.chunks(rows.count):
        x, chunk_targets = x_rows[chunk], targets.rows(chunk)
        carry = new_carry(x.shape[0], ws)
        for columns in plan.tiles(vocab):
            tile = _tile(x, weight[columns].to(dtype), bias, columns, ws, vocab)
            tile_statistics(tile, chunk_targets, carry, o)
        out[:, chunk] = finish(carry, chunk_targets, vocab, o)
    return out


def _tile(x: Tensor, w: Tensor, bias: Tensor | None, columns: slice, ws: Tensor, vocab: int) -> Tile:
    logits = project(x, w, ws[: x.shape[0], : w.shape[0]])
    return Tile(logits, None if bias is None else bias[columns].contiguous(), columns.start, vocab)


def _recomputed_gradients(
    hidden, weight, bias, targets, rows: Rows, needs: Needs, dtype, o, how, out, upstream, largest
):  # fmt: skip
    """(d hidden, d weight, d bias) from the gradient (rows.count,) of each row's loss: see `upstream_rows`."""
    x_rows, vocab = take(hidden, rows).to(dtype), weight.shape[0]
    factor = gradient_factor(upstream, out[1], targets, o)
    gradients = HeadGradients(hidden, weight, bias, needs, rows, vocab, how, alpha=1.0, factor=largest)
    plan = tile_plan(rows.count, vocab, hidden.shape[1], dtype.itemsize, needs, how)
    ws = workspace(min(plan.rows, rows.count), plan.columns, dtype, hidden.device)
    for chunk in plan.chunks(rows.count):
        x, chunk_targets, lse, chunk_factor = x_rows[chunk], targets.rows(chunk), out[4, chunk], factor[chunk]
        for columns in plan.tiles(vocab):
            w = weight[columns].to(dtype)
            tile = _tile(x, w, bias, columns, ws, vocab)
            tile_gradient(tile, chunk_targets, lse, chunk_factor, tile.logits, o)
            gradients.add(tile.logits, x, w, chunk, columns)
    return gradients.finish(rows, hidden, weight, bias, how)


class RecomputedCrossEntropyFunction(torch.autograd.Function):
    """Logits computed once more in the backward, for least memory and for a gradient of each token's loss."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, rows, options, how, per_token_loss):
        ctx.dtype = compute_dtype(hidden, weight)
        ctx.call = targets, rows, options, how
        ctx.per_token_loss = per_token_loss
        with torch.autocast(hidden.device.type, enabled=False):
            out = _statistics(hidden, weight, bias, targets, rows, ctx.dtype, options, how)
        ctx.save_for_backward(hidden, weight, bias, out)
        per_token = put(out.t(), rows, hidden.shape[0]).t()
        ctx.mark_non_differentiable(per_token)
        return per_token[0].clone() if per_token_loss else out[0].sum() * rows.alpha, per_token

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        hidden, weight, bias, out = ctx.saved_tensors
        targets, rows, options, how = ctx.call
        upstream = take(grad_loss, rows) if ctx.per_token_loss else grad_loss * rows.alpha
        upstream, largest = upstream_rows(upstream, rows.count, ctx.dtype)
        needs = Needs(*ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _recomputed_gradients(
                hidden, weight, bias, targets, rows, needs, ctx.dtype, options, how, out, upstream, largest
            )
        return *gradients, None, None, None, None, None


@torch.library.custom_op("liger_trainer::linear_cross_entropy", mutates_args=())
def _traced_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, token_weight: Tensor | None,
    num_items: Tensor | None, scale: float, softcap: float | None, temperature: float, label_smoothing: float,
    z_loss: float, ignore_index: int, dft: bool, workspace_mb: float | None, accumulate_dtype: torch.dtype | None,
    dtype: torch.dtype, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The default mode as torch.compile sees it. dtype: of the products, since autocast is over when this runs."""
    rows = selected_rows(hidden, labels, None, num_items, ignore_index)
    targets = Targets(take(labels, rows).contiguous(), labelled_weight(token_weight, rows, hidden.dtype))
    options = CrossEntropyOptions(LogitTransform(scale, softcap), temperature, label_smoothing, z_loss, dft)
    how = Execution(workspace_mb, accumulate_dtype)
    loss, per_token, *gradients = _with_gradients(
        hidden, weight, bias, targets, rows, Needs(*needs), dtype, options, how
    )
    return traced_outputs(loss, per_token, gradients)  # pyright: ignore[reportReturnType]


@_traced_op.register_fake
def _(hidden, weight, bias, *options):
    *_, dtype, needs = options
    return fake_outputs(hidden, weight, bias, dtype, len(FIELDS), needs)


_traced_op.register_autograd(scaled_gradients, setup_context=save_gradients)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None,
    token_weight: Tensor | None = None, num_items: float | Tensor | None = None, reduction: str = "mean",
    scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0, label_smoothing: float = 0.0,
    z_loss: float = 0.0, ignore_index: int = -100, dft: bool = False, rows: RowSelection | None = None,
    recompute: bool = False, workspace_mb: float | None = None, accumulate_dtype: torch.dtype | None = None,
    overwrite_hidden: bool = False,
) -> CrossEntropy:  # fmt: skip
    """Cross-entropy of `hidden @ weight.T` against labels, with the gradients computed on the way.

    Equals F.cross_entropy(transform(F.linear(hidden, weight, bias)) / temperature, labels, reduction="sum") divided by
    num_items.

    Args:
        hidden: (N, H), fp32, fp16, bf16 (fp64 on CPU). Any strides.
        weight: (V, H). Frozen if it does not require a gradient: its product is skipped.
        labels: (N,) int64, each in [0, V) or ignore_index. Ignored rows cost nothing. On the GPU a label outside gives
            NaN.
        bias: (V,), added to the logits.
        token_weight: (N,), multiplies each token's loss; num_items stays what it is. No gradient goes to it.
        num_items: what the sum over tokens is divided by. Default: the number of labelled rows. With the count over all
            micro-batches and ranks, splitting a batch changes nothing. A tensor is read through `rows`.
        reduction: "mean", or "none" for the loss of each token (N,), which needs recompute.
        scale: multiplies the logits (Granite, Cohere).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2), after scale.
        temperature: divides the logits, after softcap.
        label_smoothing: share of the target spread evenly over the vocabulary, as in torch.
        z_loss: weight of the squared log-partition (PaLM).
        dft: weigh each token by its own probability, without gradient (dynamic fine-tuning).
        rows: the labelled rows, if their selection was started earlier (see `RowSelection`); the host then need not
            wait. It holds num_items, so that argument must be absent.
        recompute: compute the logits again in the backward instead of the gradients in the forward: the least memory,
            for a third more arithmetic.
        workspace_mb: MiB for the chunk of logits. More is faster up to about 1024, see docs/results/losses.md. Default
            512, with recompute the size of the hidden states.
        accumulate_dtype: torch.float32 sums the weight's gradient in fp32 and rounds it once, in twice the memory.
        overwrite_hidden: let the gradient of hidden take its memory. Autograd raises an error if something else needed
            hidden.

    Returns:
        CrossEntropy: loss and per-token values.

    Raises:
        ValueError: shapes that do not fit, an option out of range, or options that exclude each other.
    """
    check_head(hidden, weight, bias)
    check_labels(hidden, labels)
    check_execution(hidden, token_weight, reduction, num_items, recompute, overwrite_hidden)
    if torch.compiler.is_compiling():
        check_traceable(rows, recompute, overwrite_hidden)
        needs = Needs.of(hidden, weight, bias)
        loss, per_token, *_ = _traced_op(
            hidden, weight, bias, labels, token_weight, None if num_items is None else torch.as_tensor(num_items),
            scale, softcap, temperature, label_smoothing, z_loss, ignore_index, dft, workspace_mb, accumulate_dtype,
            compute_dtype(hidden, weight), [needs.hidden, needs.weight, needs.bias],
        )  # fmt: skip
        return CrossEntropy(loss, per_token[1], per_token[2], per_token[3] > 0)
    options = CrossEntropyOptions(LogitTransform(scale, softcap), temperature, label_smoothing, z_loss, dft)
    how = Execution(workspace_mb, accumulate_dtype, overwrite_hidden)
    selected = selected_rows(hidden, labels, rows, num_items, ignore_index)
    token_weight = labelled_weight(token_weight, selected, hidden.dtype)
    targets = Targets(take(labels, selected).contiguous(), token_weight)
    if recompute:
        loss, per_token = RecomputedCrossEntropyFunction.apply(
            hidden, weight, bias, targets, selected, options, how, reduction == "none"
        )
    else:
        needs = Needs.of(hidden, weight, bias)
        loss, per_token = LinearCrossEntropyFunction.apply(hidden, weight, bias, targets, selected, needs, options, how)
    return CrossEntropy(loss, per_token[1], per_token[2], per_token[3] > 0)
