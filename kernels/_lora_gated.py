"""A gated activation between layers with adapters, in one pass with the adapters' terms: code of lora_mlp.py.

    gate = gate(x) + values_g B_g^T    up = up(x) + values_u B_u^T    h = act(gate) * up    values_d = s_d (m * h) A_d^T

    dh = dy W_d + m * (g_d A_d)        dgate = dh * up * act'(gate)     dup = dh * act(gate)
    dB_g = dgate^T values_g            dB_u = dup^T values_u            dA_d = g_d^T (m * h)

Shapes    gate(x), up(x), h, dh: (N, I)  values, g: (N, r)  B: (I, r)  A_d: (r, I), with r of each layer
Method    gate(x) and up(x) come without their adapters' terms, and dy W_d too: they are added in registers. A program
          of the forward walks along some rows, and sums up what its columns give values_d. A program of the backward
          walks down some columns, and sums up what its rows give dB and dA_d, from an h that is not stored. What the
          programs have is added afterwards, in one order. m is the dropout of down's adapter, from _dropout.py.
Numerics  sums in fp32. h, dgate and dup are rounded once, and the products read them as rounded.
Traffic   forward 2 reads and 1 write of N I elements, backward 3 reads and 2 writes: as without adapters, less the h
          that the backward would write. Passes of their own would read and write N I elements eleven times more.
Source    Hu et al. 2021, arXiv:2106.09685; Shazeer 2020, arXiv:2002.05202
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import empty
from ._dropout import _keep
from ._gated import activate
from ._triton import Launch, remembered, tl, triton
from ._tuning import SHAPES

MOST_RANK = 64  # beyond, the three factors' sums of a column do not fit into the backward's registers


# rows and columns of a tile, warps, tiles that are loaded ahead, and programs wanted
FORWARD, BACKWARD = SHAPES.LORA_GATED_FORWARD, SHAPES.LORA_GATED_BACKWARD


class Terms(NamedTuple):
    """The adapters of an MLP, as the kernels read them.

    Attributes:
        values: (N, R): those of gate and up one after the other, or of both packed, contiguous.
        gate_b, up_b: (I, r), contiguous.
        up_start: the first of up's columns of `values`.
        a: of down, (r, I), contiguous.
        seed: (1,), None without dropout of down's adapter.
        stream, threshold: of its mask.
    """

    values: Tensor
    gate_b: Tensor
    up_b: Tensor
    up_start: int
    a: Tensor
    seed: Tensor | None
    stream: int
    threshold: int

    @property
    def ranks(self) -> tuple[int, int, int]:
        return self.gate_b.shape[1], self.up_b.shape[1], self.a.shape[0]

    @property
    def width(self) -> int:
        """Return the numbers of r that the kernels compute."""
        return max(16, triton.next_power_of_2(max(self.ranks)))  # 16: the least that tensor cores take

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return what a launch is told of them."""
        return self.values.shape[1], *self.ranks, self.up_start, self.stream, self.threshold


@triton.jit
def _values(values_ptr, row, n, stride, start, rank, WIDTH: tl.constexpr):
    """Load (ROWS, WIDTH): an adapter's columns of values, and zeros."""
    lane = tl.arange(0, WIDTH)
    at = row.to(tl.int64)[:, None] * stride + start + lane[None, :]
    return tl.load(values_ptr + at, mask=(row < n)[:, None] & (lane < rank)[None, :], other=0.0)


@triton.jit
def _factor(factor_ptr, column, columns, rank, stride_column, stride_rank, WIDTH: tl.constexpr):
    """Load (WIDTH, COLUMNS): A, or B^T, and zeros."""
    lane = tl.arange(0, WIDTH)
    at = lane[:, None] * stride_rank + column[None, :] * stride_column
    return tl.load(factor_ptr + at, mask=(lane < rank)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, values_ptr, gate_b_ptr, up_b_ptr, a_ptr, seed_ptr, h_ptr, parts_ptr,
    n, columns, span, factor, stride_gate, stride_up,
    stride_values, gate_rank, up_rank, rank, up_start, stream, threshold,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute h, and a share of values_d, in ROWS rows and `span` columns."""
    row, split = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    at = row.to(tl.int64)[:, None]
    gate_values = _values(values_ptr, row, n, stride_values, 0, gate_rank, WIDTH)
    up_values = _values(values_ptr, row, n, stride_values, up_start, up_rank, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in tl.range(split * span, tl.minimum(split * span + span, columns), COLUMNS, num_stages=STAGES):
        column = first + tl.arange(0, COLUMNS)
        mask = (row < n)[:, None] & (column < columns)[None, :]
        gate = tl.load(gate_ptr + at * stride_gate + column[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at * stride_up + column[None, :], mask=mask, other=0.0).to(tl.float32)
        gate_b = _factor(gate_b_ptr, column, columns, gate_rank, gate_rank, 1, WIDTH)
        up_b = _factor(up_b_ptr, column, columns, up_rank, up_rank, 1, WIDTH)
        gate = tl.dot(gate_values, gate_b, gate, input_precision="ieee")
        up = tl.dot(up_values, up_b, up, input_precision="ieee")
        h, _ = activate(gate, ACTIVATION)
        h = (h * up).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at * columns + column[None, :], h, mask=mask)
        if seed_ptr is not None:
            group = first // 8 + tl.arange(0, COLUMNS // 8)
            h = tl.where(_keep(tl.load(seed_ptr), row, group, stream, threshold, ROWS, COLUMNS), h, 0.0)
        a = _factor(a_ptr, column, columns, rank, 1, columns, WIDTH)
        total = tl.dot(h, tl.trans(a), total, input_precision="ieee")
    lane = tl.arange(0, WIDTH)
    parts = parts_ptr + (split.to(tl.int64) * n + at) * rank + lane[None, :]
    tl.store(parts, total * factor, mask=(row < n)[:, None] & (lane < rank)[None, :])


@triton.jit
def _backward_kernel(
    dh_ptr, gate_ptr, up_ptr, values_ptr, g_ptr, gate_b_ptr, up_b_ptr, a_ptr, seed_ptr, dgate_ptr, dup_ptr, parts_ptr,
    n, columns, span, stride_gate, stride_up, stride_grad,
    stride_values, gate_rank, up_rank, rank, up_start, stream, threshold,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dgate and dup, and a share of dB and dA, in `span` rows and COLUMNS columns. They may overwrite gate, up.

    Programs that read the same rows follow each other.
    """
    blocks = tl.cdiv(columns, COLUMNS)
    first, split = tl.program_id(0) % blocks * COLUMNS, tl.program_id(0) // blocks
    column = first + tl.arange(0, COLUMNS)
    gate_b = _factor(gate_b_ptr, column, columns, gate_rank, gate_rank, 1, WIDTH)
    up_b = _factor(up_b_ptr, column, columns, up_rank, up_rank, 1, WIDTH)
    a = _factor(a_ptr, column, columns, rank, 1, columns, WIDTH)
    dgate_b = tl.zeros((COLUMNS, WIDTH), tl.float32)
    dup_b, da = dgate_b, dgate_b
    for top in tl.range(split * span, tl.minimum(split * span + span, n), ROWS, num_stages=STAGES):
        row = top + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        mask = (row < n)[:, None] & (column < columns)[None, :]  # beyond it all are 0, and so is what they give
        dh = tl.load(dh_ptr + at * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + at * stride_gate + column[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at * stride_up + column[None, :], mask=mask, other=0.0).to(tl.float32)
        gate_values = _values(values_ptr, row, n, stride_values, 0, gate_rank, WIDTH)
        up_values = _values(values_ptr, row, n, stride_values, up_start, up_rank, WIDTH)
        g = _values(g_ptr, row, n, rank, 0, rank, WIDTH)
        gate = tl.dot(gate_values, gate_b, gate, input_precision="ieee")
        up = tl.dot(up_values, up_b, up, input_precision="ieee")
        value, slope = activate(gate, ACTIVATION)
        h = (value * up).to(g.dtype)
        if seed_ptr is not None:
            group = first // 8 + tl.arange(0, COLUMNS // 8)
            keep = _keep(tl.load(seed_ptr), row, group, stream, threshold, ROWS, COLUMNS)
            dh += tl.where(keep, tl.dot(g, a, input_precision="ieee"), 0.0)
            h = tl.where(keep, h, 0.0)
        else:
            dh = tl.dot(g, a, dh, input_precision="ieee")
        dgate, dup = (dh * up * slope).to(g.dtype), (dh * value).to(g.dtype)
        tl.store(dgate_ptr + at * stride_grad + column[None, :], dgate, mask=mask)
        tl.store(dup_ptr + at * stride_grad + column[None, :], dup, mask=mask)
        dgate_b = tl.dot(tl.trans(dgate), gate_values, dgate_b, input_precision="ieee")
        dup_b = tl.dot(tl.trans(dup), up_values, dup_b, input_precision="ieee")
        da = tl.dot(tl.trans(h), g, da, input_precision="ieee")
    at, lane = column[:, None], tl.arange(0, WIDTH)[None, :]
    inside = at < columns
    parts = parts_ptr + split.to(tl.int64) * (gate_rank + up_rank + rank) * columns
    tl.store(parts + at * gate_rank + lane, dgate_b, mask=inside & (lane < gate_rank))
    parts += columns * gate_rank
    tl.store(parts + at * up_rank + lane, dup_b, mask=inside & (lane < up_rank))
    parts += columns * up_rank
    tl.store(parts + lane * columns + at, da, mask=inside & (lane < rank))


def forward(gate: Tensor, up: Tensor, terms: Terms, factor: float, activation: str) -> tuple[Tensor, Tensor]:
    """Return h (N, I) and values_d (N, 1, r), contiguous.

    Args:
        gate, up: (N, I) without their adapters' terms, any row stride.
        factor: s_d, divided by the share of h that is kept.
    """
    (n, columns), strides = gate.shape, (gate.stride(0), up.stride(0))
    rows, step, *_, wanted = FORWARD
    blocks = -(-n // rows)
    span, splits = _spans(columns, step, blocks, wanted)
    h, parts = empty(gate), gate.new_empty(splits, n, len(terms.a), dtype=torch.float32)
    if n:
        sizes = (n, columns, span, factor, *strides, *terms.numbers)
        launch = _launch(_forward_kernel, (blocks, splits), sizes, activation, terms.width, FORWARD)
        launch(gate, up, terms.values, terms.gate_b, terms.up_b, terms.a, terms.seed, h, parts)
    return h, parts.sum(0).to(gate.dtype).unsqueeze(1)


def backward(
    dh: Tensor, gate: Tensor, up: Tensor, g: Tensor, dgate: Tensor, dup: Tensor, terms: Terms, activation: str
) -> Tensor:
    """Fill dgate and dup, and return dB_g (I, r), dB_u (I, r) and dA_d (r, I) one after the other, in fp32.

    Args:
        dh: (N, I) without the adapter's term, contiguous.
        gate, up: as in `forward`.
        g: s_d dy B_d, (N, r), contiguous.
        dgate, dup: (N, I), with one row stride. They may be gate and up.
    """
    (n, columns), strides = gate.shape, (gate.stride(0), up.stride(0), dgate.stride(0))
    numbers, (step, width, *_, wanted) = sum(terms.ranks) * columns, BACKWARD
    if not n:
        return dh.new_zeros(numbers, dtype=torch.float32)
    blocks = -(-columns // width)
    span, splits = _spans(n, step, blocks, wanted)
    parts = dh.new_empty(splits, numbers, dtype=torch.float32)
    sizes = (n, columns, span, *strides, *terms.numbers)
    launch = _launch(_backward_kernel, (blocks * splits,), sizes, activation, terms.width, BACKWARD)
    launch(dh, gate, up, terms.values, g, terms.gate_b, terms.up_b, terms.a, terms.seed, dgate, dup, parts)
    return parts.sum(0)


def _spans(size: int, step: int, blocks: int, wanted: int) -> tuple[int, int]:
    """Return (rows or columns of a program, programs along them), so that with `blocks` about `wanted` run."""
    tiles = max(1, -(-size // step))
    span = -(-tiles // max(1, min(tiles, round(wanted / max(1, blocks)))))
    return span * step, -(-tiles // span)


@remembered
def _launch(kernel, grid: tuple[int, ...], sizes: tuple, activation: str, width: int, tile: tuple[int, ...]) -> Launch:
    rows, columns, warps, stages, _ = tile
    return Launch(
        kernel, grid, *sizes, ACTIVATION=activation, WIDTH=width, ROWS=rows, COLUMNS=columns, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
