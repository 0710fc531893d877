"""Cross-entropy of a linear head, without the logits of the whole batch.

    x = transform(hidden @ weight.T + bias) / temperature                 transform: scale, then softcap (_rows.py)
    loss = sum over labelled rows of [(1 - s) nll + s (lse - mean x) + z lse^2] / num_items
           with nll = lse - x[label], s label_smoothing, z z_loss

Shapes    hidden: (N, H)  weight: (V, H)  labels: (N,) int64  bias: (V,)
Method    the loss is the last thing a model computes, so its gradients can be computed with it: rows without a label
          are dropped, and for each chunk of rows cuBLAS writes logits into one reused workspace, a kernel turns them
          into their gradient in place, and two products give d hidden and d weight. Three products in all, two for a
          frozen weight, one without gradients. Backward only applies the gradient of the loss, and moves nothing when
          that is 1.
Numerics  logits in the products' dtype, softmax and sums in fp32, the logits' gradient rounded once to the products'
          dtype
Traffic   per logit: 2 reads and 2 writes by the kernel and the first product, 2 reads by the other two
Source    gradients in the forward: M. Wijmans' efficient_cross_entropy and Liger-Kernel (Hsu et al. 2024,
          arXiv:2410.10989); online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867; DFT: Wu et al. 2025,
          arXiv:2508.05629
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._chunks import (
    WORKSPACE_MB,
    HeadGradients,
    Needs,
    Rows,
    RowSelection,
    chunk_bounds,
    compute_dtype,
    project,
    put,
    rescale,
    stats_dtype,
    take,
    workspace,
)
from ._rows import LogitTransform, fold, load_label_logit, load_logits, transform
from ._triton import tl, triton, use_triton

BLOCK, WARPS = 4096, 16
FIELDS = ("loss", "log_prob", "entropy", "is_top1")


class LinearCrossEntropy(NamedTuple):
    """What `linear_cross_entropy` returns. Per-token values are fp32 (fp64 for fp64 inputs), 0 where ignored."""

    loss: Tensor  # scalar, differentiable in hidden, weight and bias
    log_prob: Tensor  # (N,) log-probability of the label, nats
    entropy: Tensor  # (N,) entropy of the predicted distribution, nats
    is_top1: Tensor  # (N,) bool, whether no token is likelier than the label


@dataclass(frozen=True)
class CrossEntropyOptions:
    """Scalars of one call. See `linear_cross_entropy`."""

    transform: LogitTransform = field(default_factory=LogitTransform)
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dft: bool = False
    workspace_mb: float = WORKSPACE_MB

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}.")


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, *, num_items: float | Tensor | None = None, temperature: float = 1.0,
    label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100, dft: bool = False,
) -> LinearCrossEntropy:  # fmt: skip
    """The loss in plain torch, from logits (N, V)."""
    x = logits.to(stats_dtype(logits.dtype)) / temperature
    keep = labels != ignore_index
    log_probs = x.log_softmax(-1)
    log_prob = log_probs.gather(1, (labels * keep)[:, None]).squeeze(1)
    per_token = -(1 - label_smoothing) * log_prob - label_smoothing * log_probs.mean(-1)
    per_token = per_token + z_loss * x.logsumexp(-1).square()
    if dft:
        per_token = per_token * log_prob.detach().exp()
    loss = per_token[keep].sum() / (keep.sum().clamp(min=1) if num_items is None else num_items)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    is_top1 = (log_prob >= log_probs.amax(-1)) & keep
    return LinearCrossEntropy(loss, (log_prob * keep).detach(), (entropy * keep).detach(), is_top1)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, **options,
) -> LinearCrossEntropy:  # fmt: skip
    """What the op must equal, in plain torch. Tests and benchmarks import this one."""
    logits = transform(F.linear(hidden, weight), bias, LogitTransform(scale, softcap))[0]
    return cross_entropy_reference(logits, labels, **options)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, bias_ptr, labels_ptr, out_ptr, stride_row, stride_out, V,
    scale, softcap, inv_temperature, smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr, DFT: tl.constexpr,
    WRITE_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride_row passes 2^31
    logits_ptr += row * stride_row
    label = tl.load(labels_ptr + row)
    x_label = load_label_logit(logits_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    x_label = x_label * inv_temperature

    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + lanes
        mask = cols < V
        x, _ = load_logits(logits_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        x = x * inv_temperature
        top, total, weighted = fold(x, top, total, weighted, x)
        if HAS_SMOOTHING:
            plain += tl.where(mask, x, 0.0)

    highest = tl.max(top, 0)
    share = tl.exp(top - highest)
    denominator = tl.sum(total * share, 0)
    lse = highest + tl.log(denominator)
    nll = lse - x_label
    loss = nll + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss += smoothing * (x_label - tl.sum(plain, 0) / V)
    token_weight = 1.0
    if DFT:
        token_weight = tl.exp(-nll)
    tl.store(out_ptr + row, loss * token_weight)
    tl.store(out_ptr + stride_out + row, -nll)
    tl.store(out_ptr + 2 * stride_out + row, lse - tl.sum(weighted * share, 0) / denominator)
    tl.store(out_ptr + 3 * stride_out + row, (x_label >= highest).to(tl.float32))

    if WRITE_GRAD:
        softmax_weight = 1.0 + 2.0 * z_loss * lse
        for start in range(0, V, BLOCK):
            cols = start + lanes
            mask = cols < V
            x, slope = load_logits(logits_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            grad = tl.exp(x * inv_temperature - lse) * softmax_weight
            grad = tl.where(cols == label, grad - (1.0 - smoothing), grad)
            if HAS_SMOOTHING:
                grad -= smoothing / V
            grad = grad * slope * (inv_temperature * token_weight)
            tl.store(logits_ptr + cols, grad.to(logits_ptr.dtype.element_ty), mask=mask)


def _rows_triton(logits, bias, labels, out, options: CrossEntropyOptions, write_grad: bool) -> None:
    how = options.transform
    _cross_entropy_kernel[(logits.shape[0],)](
        logits, logits if bias is None else bias, labels, out, logits.stride(0), out.stride(0), logits.shape[1],
        float(how.scale), float(how.softcap or 1.0), 1.0 / options.temperature,
        float(options.label_smoothing), float(options.z_loss),
        HAS_BIAS=bias is not None, HAS_SOFTCAP=how.softcap is not None, HAS_SMOOTHING=options.label_smoothing > 0,
        DFT=options.dft, WRITE_GRAD=write_grad, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _rows_torch(logits, bias, labels, out, options: CrossEntropyOptions, write_grad: bool) -> None:
    x, slope = transform(logits, bias, options.transform)
    if options.temperature != 1.0:
        x, slope = x / options.temperature, slope / options.temperature
    lse = x.logsumexp(-1)
    x_label = x.gather(1, labels[:, None]).squeeze(1)
    log_probs = x - lse[:, None]
    probs = log_probs.exp()
    loss = lse - x_label + options.z_loss * lse.square()
    if options.label_smoothing:
        loss += options.label_smoothing * (x_label - x.mean(-1))
    token_weight = (x_label - lse).exp() if options.dft else torch.ones_like(lse)
    entropy = -torch.linalg.vecdot(probs, log_probs)
    torch.stack([loss * token_weight, x_label - lse, entropy, (x_label >= x.amax(-1)).to(lse.dtype)], out=out)
    if write_grad:
        grad = probs.mul_((1 + 2 * options.z_loss * lse)[:, None])
        grad.scatter_add_(1, labels[:, None], torch.full_like(lse, options.label_smoothing - 1)[:, None])
        if options.label_smoothing:
            grad -= options.label_smoothing / x.shape[1]
        grad *= slope
        if options.dft:
            grad *= token_weight[:, None]
        logits.copy_(grad)


def _linear_cross_entropy(hidden, weight, bias, labels, rows: Rows, needs: Needs, dtype, options: CrossEntropyOptions):
    """(loss, per-token (4, N), d hidden, d weight, d bias). dtype: of the products."""
    x_rows, w, label_rows = take(hidden, rows).to(dtype), weight.to(dtype), take(labels, rows).contiguous()
    bias = None if bias is None else bias.contiguous()
    out = torch.empty(len(FIELDS), rows.count, dtype=stats_dtype(dtype), device=hidden.device)
    gradients = HeadGradients(hidden, weight, bias, needs, rows, weight.shape[0])
    bounds = list(chunk_bounds(rows.count, weight.shape[0] * dtype.itemsize, options.workspace_mb))
    logits_ws = workspace(bounds, weight.shape[0], dtype, hidden.device)
    each_row = _rows_triton if use_triton(logits_ws) else _rows_torch
    for start, stop in bounds:
        logits, x = logits_ws[: stop - start], x_rows[start:stop]
        project(x, w, logits)
        each_row(logits, bias, label_rows[start:stop], out[:, start:stop], options, needs.any)
        if needs.any:
            gradients.add(logits, x, w, start, stop)
    loss = out[0].sum() / rows.num_items if rows.num_items else out.new_zeros(())
    per_token = put(out.t(), rows, hidden.shape[0]).t()
    return loss, per_token, *gradients.finish(rows, hidden.shape[0], bias)


class LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, rows, needs, options):
        dtype = compute_dtype(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            loss, per_token, *gradients = _linear_cross_entropy(
                hidden, weight, bias, labels, rows, needs, dtype, options
            )
        if needs.any:
            ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(per_token)
        return loss, per_token

    @staticmethod
    def backward(ctx, grad_loss, _):
        return *rescale(ctx.saved_tensors, grad_loss), None, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None,
    num_items: float | Tensor | None = None, scale: float = 1.0, softcap: float | None = None,
    temperature: float = 1.0, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100,
    dft: bool = False, rows: RowSelection | None = None, workspace_mb: float = WORKSPACE_MB,
) -> LinearCrossEntropy:  # fmt: skip
    """Cross-entropy of `hidden @ weight.T` against labels, with the gradients computed on the way.

    Equals F.cross_entropy(transform(F.linear(hidden, weight, bias)) / temperature, labels, reduction="sum") divided by
    num_items.

    Args:
        hidden: (N, H), fp32, fp16, bf16 (fp64 on CPU). Any strides.
        weight: (V, H). Frozen if it does not require a gradient: its product is skipped.
        labels: (N,) int64, each in [0, V) or ignore_index. Ignored rows cost nothing. On the GPU a label outside gives
            NaN.
        bias: (V,), added to the logits.
        num_items: what the sum over tokens is divided by. Default: the number of labelled rows. With the count over all
            micro-batches and ranks, splitting a batch changes nothing. A tensor is read through `rows`.
        scale: multiplies the logits (Granite, Cohere).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2), after scale.
        temperature: divides the logits, after softcap.
        label_smoothing: share of the target spread evenly over the vocabulary, as in torch.
        z_loss: weight of the squared log-partition (PaLM).
        dft: weigh each token by its own probability, without gradient (dynamic fine-tuning).
        rows: the labelled rows, if their selection was started earlier (see `RowSelection`); the host then need not
            wait. It holds num_items, so that argument must be absent.
        workspace_mb: MiB for the chunk of logits. More is faster up to about 1024, see docs/results/losses.md.

    Returns:
        LinearCrossEntropy: loss and per-token values.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
    """
    _check(hidden, weight, labels, bias)
    options = CrossEntropyOptions(
        LogitTransform(scale, softcap), temperature, label_smoothing, z_loss, dft, workspace_mb
    )
    selected = selected_rows(labels, rows, num_items, ignore_index)
    needs = Needs.of(hidden, weight, bias)
    loss, per_token = LinearCrossEntropyFunction.apply(hidden, weight, bias, labels, selected, needs, options)
    return LinearCrossEntropy(loss, per_token[1], per_token[2], per_token[3] > 0)


def selected_rows(labels: Tensor, rows: RowSelection | None, num_items, ignore_index: int) -> Rows:
    if rows is not None and num_items is not None:
        raise ValueError("num_items was given twice: rows already holds it. Give it to RowSelection alone.")
    return (RowSelection(labels, num_items, ignore_index) if rows is None else rows).wait()


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden (N, H) and weight (V, H) must share H: "
            f"hidden is {tuple(hidden.shape)}, weight is {tuple(weight.shape)}."
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"labels must be one per row of hidden: labels is {tuple(labels.shape)}, hidden {tuple(hidden.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be one per row of weight: bias is {tuple(bias.shape)}, weight {tuple(weight.shape)}."
        )
