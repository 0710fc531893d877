"""What kl_div.py, jsd.py and tvd.py share beside their kernels: checks, plain torch, and when to compute gradients.

The forward writes the gradients of a reduced loss together with its value, while the entries are in registers. The
backward multiplies them by the loss's own gradient, which moves nothing if that is 1. The backward computes them itself
where that costs no more (logits whose rows leave the L2 cache between two passes), for reduction "none", and in fp16,
where p / N underflows before a gradient scaler can lift it.
"""

import torch
from torch import Tensor

from ._autograd import check_dtypes, empty, first_order, rescale, stats_dtype, vector
from ._triton import use_triton
from ._unfused_divergence_kernels import Call, Tensors, launch_given, launch_logits, value_programs

EARLY_ROW_BYTES = 128 * 1024  # of both sides together: 132 SMs with two such rows each fit into an H100's L2 cache

REDUCTIONS = ("none", "mean", "sum", "batchmean")


def check(
    name: str, input: Tensor, target: Tensor, labels: Tensor | None, reduction: str, from_logits: bool,
    temperature: float,
) -> None:  # fmt: skip
    check_dtypes(input=input, target=target)
    if input.shape != target.shape or not input.dim():
        raise ValueError(
            f"{name} needs input and target of one shape (..., V): "
            f"input is {tuple(input.shape)}, target is {tuple(target.shape)}."
        )
    if labels is not None and labels.shape != input.shape[:-1]:
        raise ValueError(
            f"labels must be one per row of input: labels is {tuple(labels.shape)}, input {tuple(input.shape)}."
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    if temperature != 1.0 and not from_logits:
        raise ValueError(f"temperature is {temperature}, but it divides logits: it needs from_logits=True.")


def prepare(
    input: Tensor, target: Tensor, from_logits: bool, temperature: float, labels: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Prepare a reference's inputs: return (input, target, rows that take part), in fp32 or fp64, as log-probabilities.

    Without from_logits, input and target keep their meaning. Both sides of rows that take no part become 0, so these
    rows reach neither value nor gradient.
    """
    dtype = stats_dtype(torch.promote_types(input.dtype, target.dtype))
    x, t = input.to(dtype), target.to(dtype)
    keep = None if labels is None else labels != ignore_index
    if keep is not None:
        x, t = (y.masked_fill(~keep.unsqueeze(-1), 0.0) for y in (x, t))
    if from_logits:
        if temperature != 1.0:
            x, t = x / temperature, t / temperature
        x, t = x.log_softmax(-1), t.log_softmax(-1)
    return x, t, keep


def reduced(
    values: Tensor, input: Tensor, target: Tensor, keep: Tensor | None, reduction: str, from_logits: bool,
    scale: float, batch: int | None = None,
) -> Tensor:  # fmt: skip
    """Return a reference's result from the values of single entries (..., V). The other arguments are `Call`'s."""
    if from_logits:
        values = values.sum(-1)
    if scale != 1.0:
        values = values * scale
    if reduction == "none":
        return values if from_logits else values.to(torch.promote_types(input.dtype, target.dtype))
    total = values.sum()
    if reduction == "sum":
        return total
    if reduction == "mean" and not from_logits:
        total, batch = total / max(input.shape[-1], 1), None
    if keep is not None:
        return total / keep.sum().clamp(min=1)
    return total / max(input.shape[:-1].numel() if batch is None else batch, 1)


def _early(input: Tensor, target: Tensor, o: Call) -> bool:
    """Return whether the forward writes the gradients; see the top of this file."""
    if o.reduction == "none" or torch.float16 in (input.dtype, target.dtype):
        return False
    row_bytes = input.shape[-1] * (input.element_size() + target.element_size())
    return not o.from_logits or row_bytes <= EARLY_ROW_BYTES


def _empty_grads(x: Tensors, needs: tuple[bool, bool]) -> list[Tensor | None]:
    return [empty(x.input) if needs[0] else None, empty(x.target) if needs[1] else None]


def _values(x: Tensors, grads, stats: Tensor | None, o: Call) -> Tensor:
    input = x.input
    if o.from_logits:
        out = torch.empty(input.shape[:-1], dtype=torch.float32, device=input.device)
        launch_logits(x, grads, out, stats, None, o)
    elif o.reduction == "none":
        out = torch.empty(input.shape, dtype=torch.promote_types(input.dtype, x.target.dtype), device=input.device)
        launch_given(x, grads, out, None, o)
    else:
        out = vector(value_programs(input.shape), input)
        launch_given(x, grads, out, None, o)
    return out if o.reduction == "none" else out.sum()


class GivenRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, target, labels, count, needs, o: Call):
        x = Tensors(input, target, labels, count)
        ctx.call, ctx.needs, ctx.early = o, needs, _early(input, target, o)
        if ctx.early:
            grads = _empty_grads(x, needs)
            ctx.save_for_backward(*grads)
            return _values(x, grads, None, o)
        stats = None
        if o.from_logits:
            stats = torch.empty(*input.shape[:-1], 4, dtype=torch.float32, device=input.device)
        ctx.save_for_backward(*x, stats)
        return _values(x, (None, None), stats, o)

    @staticmethod
    @first_order
    def backward(ctx, upstream):
        if ctx.early:
            return *rescale(ctx.saved_tensors, upstream), None, None, None, None
        *x, stats = ctx.saved_tensors
        x = Tensors(*x)
        grads = _empty_grads(x, ctx.needs)
        if ctx.call.from_logits:
            launch_logits(x, grads, None, stats, upstream.contiguous(), ctx.call)
        else:
            launch_given(x, grads, None, upstream, ctx.call)
        return *grads, None, None, None, None


def takes_reference(input: Tensor, target: Tensor) -> bool:
    """Return whether a call goes to the op's reference: on a CPU, in fp64, and while torch.compile traces."""
    if torch.compiler.is_compiling() or not use_triton(input):
        return True
    return torch.float64 in (input.dtype, target.dtype)


def given_rows(input: Tensor, target: Tensor, labels: Tensor | None, o: Call) -> Tensor:
    """Return the kernels' value of a checked call, differentiable in input and target."""
    count = None
    if labels is not None:
        labels = labels.reshape(-1).contiguous()
        if o.reduction in ("mean", "batchmean"):
            count = (labels != o.ignore_index).sum()
    grad = torch.is_grad_enabled()
    needs = (grad and input.requires_grad, grad and target.requires_grad)
    if not any(needs):
        return _values(Tensors(input, target, labels, count), (None, None), None, o)
    return GivenRowsFunction.apply(input, target, labels, count, needs, o)
