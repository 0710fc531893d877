"""Cross-entropy of given logits, with per-token values from the same pass; the gradient can take the logits' place.

    x = transform(logits) / temperature                                   transform: scale, then softcap (_logits.py)
    per token: (1 - s) c[label] nll + s / V sum_j c_j (lse - x_j) + z lse^2
               with nll = lse - x[label], c class weights, s label_smoothing, z z_loss
    mean:      the sum over tokens, divided as in torch by the sum of c[label]; the z-loss by the number of tokens

Shapes    logits: (N, V)  labels: (N,) int64  weight: (V,)
Numerics  softmax and sums in fp32, the gradient rounded once to the logits' dtype
Traffic   forward 1 read, backward 1 read and 1 write; in place 2 reads (the second mostly from L2) and 1 write in total
Source    online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867; overwriting the logits with the gradient in the
          forward: Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989); z-loss: PaLM, arXiv:2204.02311
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ._autograd import check_dtypes, check_label_dtype, first_order, graph_is_kept, rescale, stats_dtype
from ._cross_entropy_rows import (
    ENTROPY,
    FIELDS,
    IS_TOP1,
    LOG_PROB,
    LOSS,
    LSE,
    CrossEntropy,
    CrossEntropyOptions,
    Targets,
    Tile,
    cross_entropy_reference,
    tile_gradient,
    weight_of_labels,
    whole_rows,
)
from ._linear_head import token_count
from ._logits import LogitTransform

__all__ = ["CrossEntropy", "cross_entropy", "cross_entropy_reference"]

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets: Targets, denominator, options: CrossEntropyOptions, reduction: str, inplace):
        ctx.options, ctx.inplace = options, inplace
        ctx.set_materialize_grads(False)  # else `out` would get a gradient of zeros, which nobody reads
        rows = logits.shape[0]
        out = logits.new_empty((len(FIELDS), rows), dtype=stats_dtype(logits.dtype))
        # In fp16 a mean's gradient underflows before a gradient scaler can lift it, so the backward computes it.
        ctx.ready = inplace and reduction != "none" and logits.dtype != torch.float16
        if ctx.ready:
            if denominator is not None:
                # The mean's divisor as every token's weight: the kernel then writes the gradient of the mean.
                share = denominator.expand(rows).reciprocal()
                targets = Targets(targets.labels, share, targets.class_weight, targets.ignore_index)
            whole_rows(logits, None, targets, out, logits.detach(), options)
            increment_version(logits)  # a kernel doesn't tell autograd that it wrote
            ctx.save_for_backward(logits.detach())
            loss = out[LOSS].sum()
        else:
            whole_rows(logits, None, targets, out, None, options)
            if ctx.needs_input_grad[0]:
                ctx.targets = targets
                ctx.save_for_backward(logits, out, denominator)
            loss = out[LOSS].clone() if reduction == "none" else out[LOSS].sum()
            loss = loss if denominator is None else loss / denominator
        ctx.mark_non_differentiable(out)
        return loss, out

    @staticmethod
    @first_order
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return None, None, None, None, None, None
        if ctx.ready:
            return *rescale(ctx.saved_tensors, grad_loss), None, None, None, None, None
        logits, out, denominator = ctx.saved_tensors
        each = grad_loss.to(out.dtype).expand(out.shape[1])  # (N,), from a scalar or already so
        factor = each.contiguous() if denominator is None else each / denominator
        raw = logits.detach()  # autograd must not see the write
        over = ctx.inplace and not graph_is_kept()  # the graph is kept: another backward reads the logits again
        grad = raw if over else torch.empty_like(raw)
        tile_gradient(Tile(raw, None, 0, raw.shape[1]), ctx.targets, out[LSE], factor, grad, ctx.options)
        if over:
            increment_version(raw)
        return grad, None, None, None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, num_items: float | Tensor | None = None,
    reduction: str = "mean", scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0,
    label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100, inplace: bool = False,
) -> CrossEntropy:  # fmt: skip
    """Compute cross-entropy of logits against labels, like F.cross_entropy, with options that models and trainers need.

    Args:
        logits: (N, V), fp32, fp16, bf16 (fp64: torch).
        labels: (N,) int64, each in [0, V) or ignore_index. On the GPU a label outside gives NaN.
        weight: (V,) class weights. They get no gradient.
        num_items: divisor of reduction="mean"; 0 gives inf if a label is in use, as in torch and transformers.
            Default: the number of labels in use; with class weights, as in torch, the sum of their weights. The z-loss
            is a mean over tokens in any case.
        reduction: "mean", "sum" or "none".
        scale, softcap, temperature: applied to the logits first, see `linear_cross_entropy`.
        label_smoothing: share of the target spread evenly over the vocabulary, as in torch.
        z_loss: weight of the squared log-partition (PaLM).
        ignore_index: tokens with this label give 0 and take no part in the mean. Without any label in use, it is 0.
        inplace: let the gradient take the logits' memory: half the memory, and the logits are gone. Autograd raises an
            error if something else needed them. No effect under torch.compile, which plans memory itself.

    Returns:
        CrossEntropy: loss and per-token values.

    Raises:
        ValueError: if shapes don't fit, or an option is out of range.
        RuntimeError: if inplace would overwrite logits that are a leaf, which autograd must keep.
    """
    _check(logits, labels, weight, num_items, reduction)
    inplace = inplace and logits.requires_grad and torch.is_grad_enabled()
    if inplace and logits.is_leaf:
        raise RuntimeError("inplace=True would overwrite logits that are a leaf: pass the output of a layer.")
    options = CrossEntropyOptions(LogitTransform(scale, softcap), temperature, label_smoothing, z_loss)
    if torch.compiler.is_compiling():
        return cross_entropy_reference(
            logits, labels, weight=weight, num_items=num_items, reduction=reduction, scale=scale, softcap=softcap,
            temperature=temperature, label_smoothing=label_smoothing, z_loss=z_loss, ignore_index=ignore_index,
        )  # fmt: skip
    weight = None if weight is None else weight.detach().to(stats_dtype(logits.dtype)).contiguous()
    denominator = None
    if reduction == "mean":
        denominator = token_count(labels != ignore_index, num_items, stats_dtype(logits.dtype))
        if weight is not None and num_items is None:  # now of mean 1 over the labels: one count divides every part
            weight = weight * (denominator / weight_of_labels(labels, weight, ignore_index))
    if logits.stride(1) != 1 or (inplace and logits.stride(0) < logits.shape[1]):  # the latter: rows share memory
        logits = logits.contiguous()
    targets = Targets(labels.contiguous(), class_weight=weight, ignore_index=ignore_index)
    loss, out = CrossEntropyFunction.apply(logits, targets, denominator, options, reduction, inplace)
    return CrossEntropy(loss, out[LOG_PROB], out[ENTROPY], out[IS_TOP1] > 0)


def _check(logits: Tensor, labels: Tensor, weight: Tensor | None, num_items, reduction: str) -> None:
    check_dtypes(logits=logits, weight=weight)
    check_label_dtype(labels)
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"cross_entropy needs logits (N, V) and labels (N,): "
            f"logits is {tuple(logits.shape)}, labels is {tuple(labels.shape)}."
        )
    if weight is not None and weight.shape != logits.shape[1:]:
        raise ValueError(
            f"weight must have one entry per class: weight is {tuple(weight.shape)}, logits {tuple(logits.shape)}."
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    if num_items is not None and reduction != "mean":
        raise ValueError(f'num_items is what reduction="mean" divides by; with reduction="{reduction}" it has no use.')
