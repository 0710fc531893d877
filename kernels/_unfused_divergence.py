"""What kl_div.py, jsd.py and tvd.py share: kernels, checks, plain torch, and when to compute gradients.

The tensors (..., V) hold the distributions themselves (probabilities or their logarithms; then every entry counts for
itself), or logits (softmax over the row). q is the input, p the target; either may need a gradient. A logit's is

    d/ds_j = q_j (r_j - sum_k q_k r_k)       with the input's r; for the target, the same with p and the target's r:
    jsd    r = (1 - beta) log q/m            target: beta log p/m
    tvd    r = sign(q - p) / 2               target: sign(p - q) / 2
    KL     input: q - p                      target: r = log p/q

The forward writes the gradients of a reduced loss together with its value, while the entries are in registers. The
backward multiplies them by the loss's own gradient, which moves nothing if that is 1. The backward computes them itself
where that costs no more (logits whose rows leave the L2 cache between two passes), for reduction "none", and in fp16,
where p / N underflows before a gradient scaler can lift it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import check_dtypes, empty, first_order, rescale, stats_dtype, vector
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES

GIVEN_BLOCK, GIVEN_WARPS = SHAPES.GIVEN  # entries of one row per program, if each entry counts for itself
LOGITS_BLOCK, LOGITS_WARPS = SHAPES.GIVEN_LOGITS  # entries per step of a program that walks along a row


class Call(NamedTuple):
    """The options of one call."""

    kind: str  # "kl" (target: probabilities), "kl_log" (their logarithms, or logits), "jsd", "tvd"
    reduction: str
    from_logits: bool
    beta: float = 0.5
    temperature: float = 1.0
    scale: float = 1.0  # of value and gradients
    ignore_index: int = -100
    batch: int | None = None  # divisor of "batchmean" without labels; None: the number of rows

    def scaled(self, rows: int, vocab: int, counted: bool) -> float:
        """Return the factor of one row's sum. counted: the device itself divides by the number of rows."""
        if self.reduction in ("none", "sum"):
            return self.scale
        scale = self.scale
        if self.reduction == "mean" and not self.from_logits:
            scale /= max(vocab, 1)
        elif self.batch is not None:
            rows = self.batch
        return scale if counted else scale / max(rows, 1)


class Tensors(NamedTuple):
    """Inputs of a call. labels: flattened. count: how many of them are not ignored, if the reduction needs it."""

    input: Tensor
    target: Tensor
    labels: Tensor | None
    count: Tensor | None


@triton.jit
def fold(x, top, total, weighted, value):
    """Update an online softmax with one running maximum a lane: lanes are reduced once, when the row ends.

    total = sum exp(x - top), weighted = sum exp(x - top) * value. One of the two rescaling factors is always 1, so a
    single exponential of -|x - top| serves both cases.
    """
    rise = x - top
    e = tl.exp(-tl.abs(rise))
    higher = rise > 0
    total = tl.where(higher, total * e + 1.0, total + e)
    weighted = tl.where(higher, weighted * e + value, weighted + e * value)
    return tl.where(higher, x, top), total, weighted


@triton.jit
def _log_ratios(log_q, log_p, beta):
    """Return (q, p, log q/m, log p/m), m = (1 - beta) q + beta p.

    The ratios are exactly 0 where log_q == log_p, and finite where q or p underflows.
    """
    d = log_p - log_q
    e = tl.exp(-tl.abs(d))
    share = tl.where(d > 0, 1.0 - beta, beta)  # weight in m of the smaller probability
    log_m = tl.log(1.0 + share * (e - 1.0))  # relative to the larger probability
    larger = tl.exp(tl.maximum(log_q, log_p))
    q = tl.where(d > 0, larger * e, larger)
    p = tl.where(d > 0, larger, larger * e)
    return q, p, tl.minimum(-d, 0.0) - log_m, tl.minimum(d, 0.0) - log_m


@triton.jit
def _given_terms(x, t, beta, KIND: tl.constexpr):
    """Return (value, d/dx, d/dt) of entries. Entries to which p gives no mass take no part in a KL."""
    if KIND == "tvd":
        d = x - t
        value = 0.5 * tl.abs(d)
        dx = tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, d))
        dt = -dx
    elif KIND == "jsd":
        x = tl.where(x < -1e30, -1e30, x)  # -inf becomes finite, so that differences are numbers; NaN passes
        t = tl.where(t < -1e30, -1e30, t)
        q, p, q_ratio, p_ratio = _log_ratios(x, t, beta)
        dx = (1.0 - beta) * q * q_ratio
        dt = beta * p * p_ratio
        value = dx + dt
    else:
        if KIND == "kl":
            p = t
            ratio = tl.log(tl.where(p == 0, 1.0, p)) - x
            dt = tl.where(p == 0, 0.0, ratio + 1.0)
        else:
            p = tl.exp(t)
            ratio = t - x
            dt = tl.where(p == 0, 0.0, p * (ratio + 1.0))
        dx = -p
        value = tl.where(p == 0, 0.0, p * ratio)
    return value, dx, dt


@triton.jit
def _given_kernel(
    input_ptr, target_ptr, labels_ptr, count_ptr, upstream_ptr, out_ptr, grad_input_ptr, grad_target_ptr,
    parts, inner, V, input_outer, input_inner, target_outer, target_inner, up_outer, up_inner, up_col,
    ignore_index, beta, scale,
    KIND: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_UPSTREAM: tl.constexpr,
    WRITE_SUM: tl.constexpr, WRITE_VALUES: tl.constexpr, GRAD_INPUT: tl.constexpr, GRAD_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Row `row` begins at row // inner * outer's stride + row % inner * inner's stride: no copy for slices of (B, S, V).
    pid = tl.program_id(0)
    row = (pid // parts).to(tl.int64)  # int64: row * stride passes 2^31
    cols = pid % parts * BLOCK + tl.arange(0, BLOCK)
    inside = cols < V
    mask = inside
    factor = scale
    if HAS_COUNT:
        factor = scale / tl.load(count_ptr).to(tl.float32)  # 0 only if no row is live
    if HAS_LABELS:  # masked entries load as 0 on both sides, which has value 0 in every kind
        live = tl.load(labels_ptr + row) != ignore_index
        mask = cols < tl.where(live, V, 0)
        factor = tl.where(live, factor, 0.0)
    outer_row = row // inner
    inner_row = row % inner
    x = tl.load(input_ptr + outer_row * input_outer + inner_row * input_inner + cols, mask=mask, other=0.0)
    t = tl.load(target_ptr + outer_row * target_outer + inner_row * target_inner + cols, mask=mask, other=0.0)
    value, dx, dt = _given_terms(x.to(tl.float32), t.to(tl.float32), beta, KIND)
    if WRITE_SUM:
        tl.store(out_ptr + pid, tl.sum(value, 0) * factor)
    if WRITE_VALUES:
        tl.store(out_ptr + row * V + cols, value * factor, mask=inside)
    if HAS_UPSTREAM:
        upstream_ptr += outer_row * up_outer + inner_row * up_inner
        up = tl.load(upstream_ptr + cols.to(tl.int64) * up_col, mask=mask, other=0.0).to(tl.float32) * factor
        dx = dx * up
        dt = dt * up
    else:
        dx = dx * factor
        dt = dt * factor
    if GRAD_INPUT:
        tl.store(grad_input_ptr + row * V + cols, dx, mask=inside)
    if GRAD_TARGET:
        tl.store(grad_target_ptr + row * V + cols, dt, mask=inside)


@triton.jit
def _load_logits(ptr, cols, mask, inv_temperature):
    """Load logits / temperature. Masked lanes and -inf become -1e30: they weigh nothing, yet are finite. NaN passes."""
    x = tl.load(ptr + cols, mask=mask, other=float("-inf")).to(tl.float32) * inv_temperature
    return tl.where(x < -1e30, -1e30, x)


@triton.jit
def _softmax_terms(log_q, log_p, beta, KIND: tl.constexpr):
    """Return (q, p, r of the input, r of the target, value) of entries; see the top of this file."""
    if KIND == "jsd":
        q, p, q_ratio, p_ratio = _log_ratios(log_q, log_p, beta)
        r = (1.0 - beta) * q_ratio
        r_target = beta * p_ratio
        value = q * r + p * r_target
    else:
        q = tl.exp(log_q)
        p = tl.exp(log_p)
        d = q - p
        r = tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, d))
        r_target = -r
        value = 0.5 * tl.abs(d)
    return q, p, r, r_target, value


@triton.jit
def _logits_kernel(
    input_ptr, target_ptr, labels_ptr, count_ptr, upstream_ptr, out_ptr, stats_ptr, grad_input_ptr, grad_target_ptr,
    inner, V, input_outer, input_inner, target_outer, target_inner, up_stride,
    ignore_index, inv_temperature, beta, scale,
    KIND: tl.constexpr, HAS_LABELS: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_UPSTREAM: tl.constexpr,
    WRITE_SUM: tl.constexpr, WRITE_STATS: tl.constexpr, GRAD_INPUT: tl.constexpr, GRAD_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row // inner * input_outer + row % inner * input_inner
    target_ptr += row // inner * target_outer + row % inner * target_inner
    grad_input_ptr += row * V
    grad_target_ptr += row * V
    stats_ptr += row * 4
    lanes = tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.float32)
    if HAS_LABELS:
        if tl.load(labels_ptr + row) == ignore_index:
            if WRITE_SUM:
                tl.store(out_ptr + row, 0.0)
            for start in range(0, V, BLOCK):
                if GRAD_INPUT:
                    tl.store(grad_input_ptr + start + lanes, zero, mask=start + lanes < V)
                if GRAD_TARGET:
                    tl.store(grad_target_ptr + start + lanes, zero, mask=start + lanes < V)
            return
    factor = scale
    if HAS_COUNT:
        factor = scale / tl.load(count_ptr).to(tl.float32)

    if WRITE_SUM:
        s_top, t_top = zero - 1e30, zero - 1e30
        s_total, t_total, t_ratio = zero, zero, zero
        for start in range(0, V, BLOCK):
            cols = start + lanes
            s = _load_logits(input_ptr, cols, cols < V, inv_temperature)
            t = _load_logits(target_ptr, cols, cols < V, inv_temperature)
            s_top, s_total, _ = fold(s, s_top, s_total, zero, zero)
            t_top, t_total, t_ratio = fold(t, t_top, t_total, t_ratio, t - s)
        s_max = tl.max(s_top, 0)
        t_max = tl.max(t_top, 0)
        t_share = tl.exp(t_top - t_max)
        s_log = tl.log(tl.sum(s_total * tl.exp(s_top - s_max), 0))
        t_sum = tl.sum(t_total * t_share, 0)
        t_log = tl.log(t_sum)
        s_lse = s_max + s_log
        t_lse = t_max + t_log
        if KIND == "kl_log":  # maxima and logarithms are subtracted apart: exact where both sides agree
            value = tl.sum(t_ratio * t_share, 0) / t_sum - (t_max - s_max) - (t_log - s_log)
            value = tl.where(value > 1e20, float("inf"), value)  # the target has mass where the input is -inf
            r_mean, r_target_mean = value, value
        else:
            values, r_sum, r_target_sum = zero, zero, zero
            for start in range(0, V, BLOCK):
                cols = start + lanes
                log_q = _load_logits(input_ptr, cols, cols < V, inv_temperature) - s_lse
                log_p = _load_logits(target_ptr, cols, cols < V, inv_temperature) - t_lse
                q, p, r, r_target, entry = _softmax_terms(log_q, log_p, beta, KIND)
                values += entry
                r_sum += q * r
                r_target_sum += p * r_target
            value = tl.sum(values, 0)
            r_mean = tl.sum(r_sum, 0)
            r_target_mean = tl.sum(r_target_sum, 0)
        tl.store(out_ptr + row, value * factor)
        if WRITE_STATS:
            tl.store(stats_ptr, s_lse)
            tl.store(stats_ptr + 1, t_lse)
            tl.store(stats_ptr + 2, r_mean)
            tl.store(stats_ptr + 3, r_target_mean)
    else:
        s_lse = tl.load(stats_ptr)
        t_lse = tl.load(stats_ptr + 1)
        r_mean = tl.load(stats_ptr + 2)
        r_target_mean = tl.load(stats_ptr + 3)

    if GRAD_INPUT or GRAD_TARGET:
        factor = factor * inv_temperature
        if HAS_UPSTREAM:
            factor = factor * tl.load(upstream_ptr + row * up_stride).to(tl.float32)
        for start in range(0, V, BLOCK):
            cols = start + lanes
            mask = cols < V
            log_q = _load_logits(input_ptr, cols, mask, inv_temperature) - s_lse
            log_p = _load_logits(target_ptr, cols, mask, inv_temperature) - t_lse
            if KIND == "kl_log":
                p = tl.exp(log_p)
                ds = tl.exp(log_q) - p
                dt = p * (log_p - log_q - r_target_mean)
            else:
                q, p, r, r_target, _ = _softmax_terms(log_q, log_p, beta, KIND)
                ds = q * (r - r_mean)
                dt = p * (r_target - r_target_mean)
            if GRAD_INPUT:
                tl.store(grad_input_ptr + cols, ds * factor, mask=mask)
            if GRAD_TARGET:
                tl.store(grad_target_ptr + cols, dt * factor, mask=mask)


def block_size(limit: int, V: int) -> int:
    return min(limit, 1 << max(V - 1, 0).bit_length())


def _layout(x: Tensor) -> tuple[Tensor, int, int]:
    """View x as (outer, inner, V) with adjacent columns; return (x, stride of outer rows, stride of inner rows)."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() > 3:
        x = x.flatten(0, -3)
    return x, x.stride(-3) if x.dim() > 2 else 0, x.stride(-2) if x.dim() > 1 else 0


def value_programs(shape: torch.Size) -> int:
    """Return how many programs `launch_given` starts."""
    return shape[:-1].numel() * -(-shape[-1] // block_size(GIVEN_BLOCK, shape[-1]))


@remembered
def _given_launch(
    shape: torch.Size, strides: tuple[int, ...], o: Call, there: tuple[bool, ...], tile: int, warps: int
) -> Launch:
    """Make the launch. there: which of labels, count, upstream, out and the gradients exist."""
    V, rows = shape[-1], shape[:-1].numel()
    block = block_size(tile, V)
    parts = -(-V // block)
    labels, count, upstream, out, grad_input, grad_target = there
    return Launch(
        _given_kernel, (rows * parts,), parts, shape[-2] if len(shape) > 1 else 1, V, *strides,
        o.ignore_index, o.beta, o.scaled(rows, V, count),
        KIND=o.kind, HAS_LABELS=labels, HAS_COUNT=count, HAS_UPSTREAM=upstream,
        WRITE_SUM=out and o.reduction != "none", WRITE_VALUES=out and o.reduction == "none",
        GRAD_INPUT=grad_input, GRAD_TARGET=grad_target, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def launch_given(x: Tensors, grads, out: Tensor | None, upstream: Tensor | None, o: Call) -> None:
    """Launch the kernel for entries that count for themselves.

    out: values of entries for reduction "none", else sums, one per program. upstream: a scalar, or shaped as the input.
    """
    input, *strides = _layout(x.input)
    target, *target_strides = _layout(x.target)
    up_strides = (0, 0, 0)
    if upstream is not None and upstream.dim():
        upstream = upstream.flatten(0, -3) if upstream.dim() > 3 else upstream
        up_strides = (0, 0, *upstream.stride())[-3:]
    optional = x.labels, x.count, upstream, out, *grads
    launch = _given_launch(
        x.input.shape, (*strides, *target_strides, *up_strides), o, tuple(y is not None for y in optional),
        GIVEN_BLOCK, GIVEN_WARPS,
    )  # fmt: skip
    launch(input, target, *optional)


@remembered
def _logits_launch(
    shape: torch.Size, strides: tuple[int, ...], o: Call, there: tuple[bool, ...], tile: int, warps: int
) -> Launch:
    """Make the launch. there: which of labels, count, upstream, out, stats and the gradients exist."""
    V, rows = shape[-1], shape[:-1].numel()
    labels, count, upstream, out, stats, grad_input, grad_target = there
    return Launch(
        _logits_kernel, (rows,), shape[-2] if len(shape) > 1 else 1, V, *strides,
        o.ignore_index, 1.0 / o.temperature, o.beta, o.scaled(rows, V, count),
        KIND=o.kind, HAS_LABELS=labels, HAS_COUNT=count, HAS_UPSTREAM=upstream, WRITE_SUM=out,
        WRITE_STATS=out and stats, GRAD_INPUT=grad_input, GRAD_TARGET=grad_target,
        BLOCK=block_size(tile, V), num_warps=warps,
    )  # fmt: skip


def launch_logits(x: Tensors, grads, out: Tensor | None, stats: Tensor | None, upstream: Tensor | None, o: Call):
    """Launch the kernel for logits. out: sums, one per row; if None, stats (rows, 4) are read. upstream: a scalar, or
    one number per row.
    """
    input, *strides = _layout(x.input)
    target, *target_strides = _layout(x.target)
    up_stride = 0 if upstream is None or upstream.dim() == 0 else 1
    optional = x.labels, x.count, upstream, out, stats, *grads
    launch = _logits_launch(
        x.input.shape, (*strides, *target_strides, up_stride), o, tuple(y is not None for y in optional),
        LOGITS_BLOCK, LOGITS_WARPS,
    )  # fmt: skip
    labels, count, upstream, out, *others = optional
    launch(input, target, labels, count, upstream, out, *(input if y is None else y for y in others))


EARLY_ROW_BYTES = SHAPES.EARLY_ROW_BYTES  # of both sides together

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
