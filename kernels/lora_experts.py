"""Gated experts, stacked and frozen, with LoRA adapters of each expert:

    y_n = sum_k w_nk down_e(gate(gate_up_e(x_n))),  e = index_nk
    gate_up_e(x) = x W_e^T + b_e + (x A_e^T) B_e^T, and down_e alike

Shapes    x: (N, H)  index, w: (N, K)  gate_up: W (E, 2I, H), A (E, R, H), B (E, 2I, R)  down: W (E, H, I)  y: (N, H)
Method    The pairs of token and expert are sorted by expert. Base and adapters are grouped products of the sorted rows:
          W + B A, as large as all experts together, never exists, and W has no gradient. The low-rank terms are added
          in place. Forward and backward gather by the order and its inverse, so nothing is scattered.
          The forward keeps x, the packed gate_up(x) and two matrices of the rank. The kernel of the gate makes its
          output again in the backward, over its gradient, and the gradient of gate_up(x) over gate_up(x), unless the
          graph is kept. The router's gradient needs no down(h): dy . down(h) = (dy W) . h.
Rows      Four functions compute on rows s that are sorted by expert, `ends` (E,) int32 saying where each expert's end:
          grouped   y_s = x_s M_e              outer    G_e = sum over the rows s of e of x_s^T y_s
          add       y_s += t_s B_e^T + bias_e  combine  out_n = sum_k w_nk y_(place_nk)
          bf16 products on a GPU are torch's grouped product, which reads `ends` on the device, so that the host never
          waits. Others run one after the other. `add` goes tile by tile: a program finds its tile's expert from `ends`.
Numerics  in the dtype of the base weights, as transformers' grouped product: the adapters are cast to it. The gate is
          fp32 inside and rounded once; so is the sum over k.
Traffic   add: 1 read and 1 write of S N; combine: 1 read of S H and 1 write of N H
Source    Hu et al. 2021, arXiv:2106.09685; Gale et al. 2022, arXiv:2211.15841
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes, first_order, graph_is_kept
from ._gated import ACTIVATIONS, runs_plain
from ._packed_gate import LAYOUTS, Gate, backward, forward, gate_reference
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES

ROWS, COLUMNS, WARPS = SHAPES.EXPERTS_ADD  # the tile of `add`
COMBINED = SHAPES.EXPERTS_COMBINE  # columns of a program of `combine`


def _runs_grouped(x: Tensor, y: Tensor, *sizes: int) -> bool:
    """Whether torch's grouped product takes these: bf16 on a GPU since Ampere, sizes that 8 divides (16 bytes)."""
    if not x.is_cuda or torch.version.hip or not hasattr(F, "grouped_mm") or not len(x):
        return False
    if torch.cuda.get_device_capability(x.device) < (8, 0):  # torch's grouped product needs bf16 tensor cores
        return False
    return x.dtype == y.dtype == torch.bfloat16 and not any(size % 8 for size in sizes)


def _spans(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with its rows. The host waits for `ends`."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return x_s M_e. matrices: (E, K, N), of any strides, in x's dtype."""
    if _runs_grouped(x, matrices, *matrices.shape[1:]):
        return F.grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(len(x), matrices.shape[2])
    for expert, rows in _spans(ends):
        torch.mm(x[rows], matrices[expert], out=out[rows])
    return out


def outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Return (E, K, N): x^T y over the rows of each expert, 0 for one without rows."""
    if _runs_grouped(x, y, x.shape[1], y.shape[1]):
        out = F.grouped_mm(x.t(), y, offs=ends)  # (E, K, N)
        # torch leaves the memory of experts without rows as it was.
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return out.masked_fill_(empty[:, None, None], 0)
    out = x.new_zeros(len(ends), x.shape[1], y.shape[1])
    for expert, rows in _spans(ends):
        torch.mm(x[rows].t(), y[rows], out=out[expert])
    return out


@triton.jit
def _add_kernel(
    y_ptr, t_ptr, b_ptr, bias_ptr, ends_ptr, N, R, E, stride_expert, stride_row, stride_rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, COLUMNS)
    tile, cols = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    # Every program works out by itself which tile it has: how many tiles an expert has is known only on the device.
    experts = tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + experts, mask=experts < E, other=0)
    begin = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, 0)  # tiles of the experts up to each
    mine = (tile >= upto - tiles) & (tile < upto)  # at most one expert's
    expert = tl.sum(tl.where(mine, experts, 0), 0).to(tl.int64)
    stop = tl.sum(tl.where(mine, end, 0), 0)  # a sum with one term picks it
    first = tl.sum(tl.where(mine, begin + (tile - (upto - tiles)) * ROWS, 0), 0)
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    mask = (rows[:, None] < stop) & (cols[None, :] < N)
    at = y_ptr + rows[:, None] * N + cols[None, :]  # a program without a tile has stop = 0, and writes nothing
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if t_ptr is not None:
        ranks = tl.arange(0, RANK)
        t = tl.load(
            t_ptr + rows[:, None] * R + ranks[None, :], mask=(rows[:, None] < stop) & (ranks[None, :] < R), other=0.0
        )
        b = tl.load(
            b_ptr + expert * stride_expert + cols[None, :] * stride_row + ranks[:, None] * stride_rank,
            mask=(cols[None, :] < N) & (ranks[:, None] < R), other=0.0,
        )  # fmt: skip
        y += tl.dot(t, b, input_precision="ieee")
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * N + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(at, y, mask=mask)


@remembered
def _add_launch(rows: int, N: int, R: int, E: int, strides: tuple[int, int, int], tile: tuple[int, int, int]) -> Launch:
    height, width, warps = tile
    grid = ((-(-rows // height) + E) * -(-N // width),)  # each expert may leave one tile unfinished
    return Launch(
        _add_kernel, grid, N, R, E, *strides, ROWS=height, COLUMNS=width,
        RANK=max(16, triton.next_power_of_2(R)), EXPERTS=triton.next_power_of_2(E), num_warps=warps,
    )  # fmt: skip


def add(y: Tensor, t: Tensor | None, b: Tensor | None, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Add t_s B_e^T and bias_e to y in place, and return y.

    Args:
        y: (S, N), contiguous.
        t: (S, R), contiguous, in y's dtype, or None to add only the bias.
        b: (E, N, R), of any strides, or None as t.
        bias: (E, N) or None.
    """
    if not len(y) or (t is None and bias is None):
        return y
    if use_triton(y):
        R, strides = (0, (0, 0, 0)) if t is None or b is None else (t.shape[1], b.stride())
        bias = None if bias is None else bias.contiguous()
        _add_launch(*y.shape, R, len(ends), strides, (ROWS, COLUMNS, WARPS))(y, t, b, bias, ends)
        return y
    for expert, rows in _spans(ends):
        if t is not None and b is not None:
            y[rows].addmm_(t[rows], b[expert].t())
        if bias is not None:
            y[rows] += bias[expert]
    return y


@triton.jit
def _combine_kernel(y_ptr, place_ptr, weight_ptr, ends_ptr, out_ptr, H, E, TOP: tl.constexpr, BLOCK: tl.constexpr):
    blocks, stop = tl.cdiv(H, BLOCK), tl.load(ends_ptr + E - 1)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP):
        row = tl.load(place_ptr + token * TOP + k).to(tl.int64)
        # Rows from `stop` on are of no expert: their memory was never written.
        y = tl.load(y_ptr + row * H + cols, mask=cols < tl.where(row < stop, H, 0), other=0.0).to(tl.float32)
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + token * TOP + k).to(tl.float32)
        total += y
    tl.store(out_ptr + token * H + cols, total, mask=cols < H)


@remembered
def _combine_launch(tokens: int, H: int, E: int, top: int, width: int) -> Launch:
    block = min(width, triton.next_power_of_2(H))
    return Launch(_combine_kernel, (tokens * -(-H // block),), H, E, TOP=top, BLOCK=block, num_warps=4)


def combine(y: Tensor, place: Tensor, weights: Tensor | None, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (N, H): each token's sum over its rows of y, weighted if `weights` are given.

    Args:
        y: (S, H), contiguous; rows from ends[-1] on belong to no expert, and count as 0.
        place: (N, top) int64, where each token's rows are.
        weights: (N, top) or None.
    """
    tokens, top = place.shape
    if use_triton(y):
        out = y.new_empty(tokens, y.shape[1], dtype=dtype)
        if out.numel():
            weights = None if weights is None else weights.contiguous()
            _combine_launch(tokens, y.shape[1], len(ends), top, COMBINED)(y, place, weights, ends, out)
        return out
    wide = torch.promote_types(y.dtype, torch.float32)
    rows = y[place].to(wide).where((place < ends[-1]).unsqueeze(-1), 0)
    return (rows if weights is None else rows * weights.to(wide).unsqueeze(-1)).sum(1).to(dtype)


SILU = Gate()


@dataclass(frozen=True, eq=False)
class StackedProjection:
    """Frozen linear layers of all experts, and one low-rank term for each.

    Attributes:
        weight: (E, O, K), of any strides, or a function that returns it. Forward and backward both call the function,
            so that a dequantised weight is never stored.
        bias: (E, O) or None.
        a, b: (E, R, K) and (E, O, R), or None. Several adapters are one of their ranks together; scales are in b.
    """

    weight: Tensor | Callable[[], Tensor]
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None

    def dense(self) -> Tensor:
        return self.weight if isinstance(self.weight, Tensor) else self.weight()


class _Low(NamedTuple):
    """Adapters in the dtype of the products, their rank filled up to a multiple of 8."""

    a: Tensor | None
    b: Tensor | None

    @classmethod
    def of(cls, layer: StackedProjection, dtype: torch.dtype) -> "_Low":
        if layer.a is None or layer.b is None:
            return cls(None, None)
        # grouped products read 16 bytes at a time
        missing = -layer.a.shape[1] % 8 if dtype == torch.bfloat16 else 0
        a, b = _cast(layer.a, dtype), _cast(layer.b, dtype)
        return cls(F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else cls(a, b)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x contiguous in the dtype, copied at most once, without its graph."""
    x = x.detach()
    return x if x.dtype == dtype and x.is_contiguous() else x.new_empty(x.shape, dtype=dtype).copy_(x)


class _Order(NamedTuple):
    """The pairs of token and expert, sorted by expert."""

    token: Tensor  # (S,), each row's token
    pair: Tensor  # (S,), each row's place among the pairs in the order of tokens
    place: Tensor  # (N, K), each pair's row
    ends: Tensor  # (E,) int32, the number of rows of the experts up to each

    @classmethod
    def of(cls, index: Tensor, experts: int) -> "_Order":
        # stable: the same order, and so the same sums, every time
        ids, pair = torch.sort(index.flatten().to(torch.int32), stable=True)
        place = torch.empty_like(pair).scatter_(0, pair, torch.arange(len(pair), device=pair.device))
        # One search counts the rows of every expert; `bincount` would make the host wait.
        last = torch.arange(experts, dtype=torch.int32, device=ids.device)
        ends = torch.searchsorted(ids, last, right=True, out_int32=True)
        return cls(pair // max(index.shape[1], 1), pair, place.view(index.shape), ends)


def lora_experts_reference(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: StackedProjection, down: StackedProjection, *, gate: Gate = SILU
) -> Tensor:
    """Compute `lora_experts` in plain torch, expert by expert."""
    first, last = gate_up.dense(), down.dense()
    dtype, wide = first.dtype, torch.promote_types(first.dtype, torch.float32)
    out = x.new_zeros(x.shape, dtype=wide)
    with torch.autocast(x.device.type, enabled=False):
        for e in index[index < len(first)].unique().tolist() or [0]:  # without rows, gradients are 0
            token, k = torch.where(index == e)
            h = gate_reference(_linear(x[token].to(dtype), gate_up, first, e), None, gate)
            y = _linear(h, down, last, e)
            out = out.index_add(0, token, y.to(wide) * weights[token, k, None].to(wide))
    return out.to(x.dtype)


def _linear(x: Tensor, layer: StackedProjection, weight: Tensor, expert: int) -> Tensor:
    y = F.linear(x, weight[expert], None if layer.bias is None else layer.bias[expert].to(x.dtype))
    if layer.a is None or layer.b is None:
        return y
    return y + F.linear(F.linear(x, layer.a[expert].to(x.dtype)), layer.b[expert].to(x.dtype))


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, low: _Low, ends: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (the layer's output for sorted rows, x A^T for the backward)."""
    y = grouped(x, weight.transpose(1, 2), ends)
    t = None if low.a is None else grouped(x, low.a.transpose(1, 2), ends)
    return add(y, t, low.b, None if bias is None else bias.to(y.dtype), ends), t


def _input_gradient(dy: Tensor, weight: Tensor, low: _Low, ends: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (the gradient of the layer's input, dy B, which is the gradient of x A^T)."""
    dx = grouped(dy, weight, ends)
    if low.a is None or low.b is None:
        return dx, None
    g = grouped(dy, low.b, ends)
    return add(dx, g, low.a.transpose(1, 2), None, ends), g


class LoraExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, weights, gate_up, down, gate, a1, b1, a2, b2):
        weight = gate_up.dense()
        order, lows = _Order.of(index, len(weight)), [_Low.of(layer, weight.dtype) for layer in (gate_up, down)]
        with torch.autocast(x.device.type, enabled=False):
            rows = x.to(weight.dtype).index_select(0, order.token)  # (S, H), sorted by expert
            packed, t = _project(rows, weight, gate_up.bias, lows[0], order.ends)
            del rows, weight  # a dequantised weight must not outlive its product
            y, u = _project(forward(packed, None, gate), down.dense(), down.bias, lows[1], order.ends)
        ctx.save_for_backward(x, index, weights, packed, t, u, *order, *lows[0], *lows[1])
        ctx.layers, ctx.gate = [replace(layer, a=None, b=None) for layer in (gate_up, down)], gate
        ctx.adapters = [None if p is None else (p.shape, p.dtype) for p in (a1, b1, a2, b2)]
        return combine(y, order.place, weights, order.ends, x.dtype)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, index, weights, packed, t, u, *rest = ctx.saved_tensors
        order, low_up, low_down = _Order(*rest[:4]), _Low(*rest[4:6]), _Low(*rest[6:])
        need_x, _, need_w, _, _, _, *need_low = ctx.needs_input_grad
        gate_up, down = ctx.layers
        dy = dy.to(packed.dtype)
        dys = dy.index_select(0, order.token)  # not weighted yet: dw needs it so
        factors = weights.flatten()[order.pair]  # (S,), of the sorted rows
        dh, du = _input_gradient(dys, down.dense(), low_down, order.ends)
        keeps = graph_is_kept()
        # the graph is kept: another backward will read `packed`
        dpacked = torch.empty_like(packed) if keeps else packed
        h = dh if need_low[2] else None  # written over dh, by threads that have read it
        dw_rows = backward(dh, packed, None, ctx.gate, dpacked, None, factors, h)
        da2, db2 = _adapter_gradients(du, h, dys, u, factors, order.ends, need_low[2:])
        del dys, dh, h  # of S rows each: free before the next products
        dweights = _router_gradient(dw_rows, dy, down.bias, index, order, weights.dtype) if need_w else None
        dx = da1 = db1 = None
        if need_x:
            dxs, dt = _input_gradient(dpacked, gate_up.dense(), low_up, order.ends)
            dx = combine(dxs, order.place, None, order.ends, x.dtype)
            del dxs
        else:
            dt = None if low_up.b is None or not need_low[0] else grouped(dpacked, low_up.b, order.ends)
        rows = x.to(packed.dtype).index_select(0, order.token) if need_low[0] else None
        da1, db1 = _adapter_gradients(dt, rows, dpacked, t, None, order.ends, need_low[:2])
        lows = (
            # without the filled-up ranks, in the parameter's dtype
            None if g is None or p is None else g[:, : p[0][1], : p[0][2]].to(p[1])
            for g, p in zip((da1, db1, da2, db2), ctx.adapters, strict=True)
        )
        return dx, None, dweights, None, None, None, *lows


def _adapter_gradients(
    g: Tensor | None, x: Tensor | None, dy: Tensor, t: Tensor | None, factors: Tensor | None, ends: Tensor, needs: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dA, dB) where needed: sums over each expert's rows of (w g)^T x and dy^T (w t)."""
    da = db = None
    if needs[0] and g is not None and x is not None:
        da = outer(g if factors is None else _weighted(g, factors), x, ends)
    if needs[1] and t is not None:
        db = outer(dy, t if factors is None else _weighted(t, factors), ends)
    return da, db


def _weighted(rows: Tensor, factors: Tensor) -> Tensor:
    return (rows * factors.unsqueeze(1)).to(rows.dtype)


def _router_gradient(
    dw_rows: Tensor, dy: Tensor, bias: Tensor | None, index: Tensor, order: _Order, dtype: torch.dtype
) -> Tensor:
    """Return (N, K): dy . down(h) of each pair, the bias of down with it."""
    gradient, has_expert = dw_rows[order.place], order.place < order.ends[-1]
    if bias is not None:
        of_bias = dy @ bias.to(dy.dtype).t()
        gradient = gradient + of_bias.gather(1, index.clamp(max=len(bias) - 1)).to(gradient.dtype)
    return gradient.where(has_expert, 0).to(dtype)


def lora_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: StackedProjection, down: StackedProjection, *, gate: Gate = SILU
) -> Tensor:
    """Compute each token's weighted sum over its experts, which are frozen, with or without LoRA adapters.

    Differentiable once, in x, weights and the adapters. bf16 experts on a GPU are grouped products, and the host never
    waits. For other dtypes, and for sizes that 8 does not divide, the experts run one after the other, and the number
    of rows of each is fetched from the GPU. On a CPU, and while torch.compile traces, it is computed in plain torch.

    Args:
        x: (N, H), fp32, fp16, bf16 or fp64.
        index: (N, K) integers, each token's experts, in [0, E); one of E or more is no expert, and adds nothing.
        weights: (N, K), their weights.
        gate_up: (E, 2I, H).
        down: (E, H, I).
        gate: what is between the two.

    Returns:
        (N, H), in x's dtype.

    Raises:
        ValueError: if shapes don't fit, the gate is unknown, or a base weight or bias requires a gradient.
    """
    check_dtypes(x=x, weights=weights)
    _check(x, index, weights, gate_up, down, gate)
    if runs_plain(x):
        return lora_experts_reference(x, index, weights, gate_up, down, gate=gate)
    adapters = (gate_up.a, gate_up.b, down.a, down.b)
    return LoraExpertsFunction.apply(x, index, weights, gate_up, down, gate, *adapters)


def _check(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: StackedProjection, down: StackedProjection, gate: Gate
) -> None:
    if gate.activation not in ACTIVATIONS[:3] or gate.layout not in LAYOUTS:
        raise ValueError(
            f"The gate must be one of {', '.join(ACTIVATIONS[:3])}, laid out as one of {', '.join(LAYOUTS)}: "
            f"it is {gate.activation!r}, {gate.layout!r}."
        )
    if gate.alpha != 1.0 and gate.activation != "silu":
        raise ValueError(f"alpha is silu's; the gate is {gate.activation!r} with alpha={gate.alpha}.")
    if x.dim() != 2 or index.dim() != 2 or weights.shape != index.shape or len(index) != len(x):
        raise ValueError(
            f"lora_experts takes x (N, H), index and weights (N, K): got {tuple(x.shape)}, {tuple(index.shape)}, "
            f"{tuple(weights.shape)}."
        )
    _check_layer("gate_up", gate_up, x.shape[1])
    _check_layer("down", down, None)


def _check_layer(name: str, layer: StackedProjection, columns: int | None) -> None:
    weight, bias, a, b = layer.weight, layer.bias, layer.a, layer.b
    if isinstance(weight, Tensor):
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            raise ValueError(f"lora_experts computes no gradient of {name} and its bias: freeze them.")
        if weight.dim() != 3 or columns not in (None, weight.shape[2]):
            raise ValueError(f"{name} must be (E, O, {columns or 'K'}), the columns of its input: {_shape(weight)}.")
        if bias is not None and bias.shape != weight.shape[:2]:
            raise ValueError(f"The bias of {name} must be {_shape(weight)[:2]}: it is {_shape(bias)}.")
    if (a is None) != (b is None):
        raise ValueError(f"{name} has one of a and b without the other.")
    if a is None or b is None:
        return
    fits = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] and a.shape[1] == b.shape[2]
    if isinstance(weight, Tensor):
        fits = fits and (a.shape[0], b.shape[1], a.shape[2]) == tuple(weight.shape)
    if not fits:
        raise ValueError(f"The adapters of {name} must be a (E, R, K) and b (E, O, R): {_shape(a)} and {_shape(b)}.")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
