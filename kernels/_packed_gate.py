"""Gates on rows, with limits and with a factor for each row: what experts compute between their products.

    h = a(g) (u + shift),  g = min(gate, limit),  u = clamp(up, -limit, limit)

    with dh of the row's own factor w (1 without one):
    d up = w dh a(g) where |up| <= limit    d gate = w dh (u + shift) a'(g) where gate <= limit    dw = dh . h

    a is silu, x s(alpha x), or one of the GELUs of _gated.py

Shapes    gate, up, h: (S, I), or gate and up packed in one tensor (S, 2I): halves of it, or its even and odd columns.
          w, dw: (S,)
Numerics  fp32 inside, rounded once on the way out
Traffic   forward: 2 reads and 1 write of S I elements; backward: 3 reads and 2 writes, 3 with h
Source    GLUs: Shazeer 2020, arXiv:2002.05202; with limits and shift: OpenAI's gpt-oss model card, 2025,
          arXiv:2508.10925
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._gated import activate, activation_reference
from ._triton import Launch, remembered, tl, triton
from ._tuning import SHAPES

LAYOUTS = ("gate first", "up first", "interleaved")  # of a packed tensor; interleaved: gate in the even columns
BLOCK = SHAPES.PACKED_GATE


class Gate(NamedTuple):
    """The gate h = act(gate) * up, with what some models add to it.

    Attributes:
        activation: "silu", "gelu_tanh" or "gelu".
        layout: one of LAYOUTS.
        limit: clamps gate from above, and up to both sides.
        alpha: silu is x * sigmoid(alpha * x).
        shift: added to up.
    """

    activation: str = "silu"
    layout: str = "gate first"
    limit: float | None = None
    alpha: float = 1.0
    shift: float = 0.0

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return views (gate, up) of a packed tensor."""
        if self.layout == "interleaved":
            return packed[..., ::2], packed[..., 1::2]
        first, second = packed.chunk(2, -1)
        return (first, second) if self.layout == "gate first" else (second, first)


def gate_reference(gate: Tensor, up: Tensor | None, form: Gate) -> Tensor:
    """Return h in plain torch. If up is None, gate is packed."""
    gate, up = form.split(gate) if up is None else (gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    gate, up = gate.to(wide), up.to(wide)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    if form.alpha == 1.0:
        value = activation_reference(gate, form.activation)
    else:
        value = gate * torch.sigmoid(form.alpha * gate)
    return (value * (up + form.shift)).to(dtype)


@triton.jit
def _gate_and_up(gate, up, limit, alpha, shift, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr):
    """Return (a(g), a'(g), u + shift)."""
    if LIMITED:  # gate has no lower limit: its activation goes to 0 there
        gate = tl.where(gate > limit, limit, gate)  # unlike a minimum, keeps NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACTIVATION == "silu":
        s = tl.sigmoid(alpha * gate)
        value = gate * s
        slope = s + alpha * value * (1.0 - s)
    else:
        value, slope = activate(gate, ACTIVATION)
    return value, slope, up + shift


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, h_ptr, columns, stride_gate, stride_up, gate_at, up_at, limit, alpha, shift,
    STEP: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < columns
        gate = tl.load(gate_ptr + row * stride_gate + gate_at + cols * STEP, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * stride_up + up_at + cols * STEP, mask=mask, other=0.0).to(tl.float32)
        value, _, shifted = _gate_and_up(gate, up, limit, alpha, shift, ACTIVATION, LIMITED)
        tl.store(h_ptr + row * columns + cols, value * shifted, mask=mask)


@triton.jit
def _backward_kernel(
    dh_ptr, gate_ptr, up_ptr, w_ptr, dgate_ptr, dup_ptr, h_ptr, dw_ptr,
    columns, stride_dh, stride_gate, stride_up, gate_at, up_at, limit, alpha, shift,
    STEP: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = 1.0  # the row's weight in the sum over its token's experts
    if w_ptr is not None:
        factor = tl.load(w_ptr + row).to(tl.float32)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < columns
        at_gate, at_up = row * stride_gate + gate_at + cols * STEP, row * stride_up + up_at + cols * STEP
        dh = tl.load(dh_ptr + row * stride_dh + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + at_gate, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at_up, mask=mask, other=0.0).to(tl.float32)
        value, slope, shifted = _gate_and_up(gate, up, limit, alpha, shift, ACTIVATION, LIMITED)
        dot += dh * value * shifted  # the gradient of that weight is dh . h
        dgate, dup = dh * factor * shifted * slope, dh * factor * value
        if LIMITED:
            dgate = tl.where(gate > limit, 0.0, dgate)  # a clamped number has no slope
            dup = tl.where((up > limit) | (up < -limit), 0.0, dup)
        if dgate_ptr is not None:
            tl.store(dgate_ptr + at_gate, dgate, mask=mask)
        if dup_ptr is not None:
            tl.store(dup_ptr + at_up, dup, mask=mask)
        if h_ptr is not None:
            tl.store(h_ptr + row * columns + cols, value * shifted, mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + row, tl.sum(dot, 0))


def _numbers(gate: Tensor, up: Tensor | None, form: Gate) -> tuple[int, tuple[float, ...], int]:
    """Return (columns, strides and places of gate and up with the gate's own numbers, step between columns)."""
    own = (form.limit or 0.0, form.alpha, form.shift)  # without a limit 0 is passed, and not read: LIMITED is False
    if up is not None:
        return gate.shape[-1], (gate.shape[-1], up.shape[-1], 0, 0, *own), 1
    width = gate.shape[-1]
    places = {"gate first": (0, width // 2, 1), "up first": (width // 2, 0, 1), "interleaved": (0, 1, 2)}
    gate_at, up_at, step = places[form.layout]
    return width // 2, (width, width, gate_at, up_at, *own), step


@remembered
def _launch(kernel, rows: int, columns: int, numbers: tuple[float, ...], step: int, form: Gate, block: int) -> Launch:
    block = min(block, triton.next_power_of_2(columns))
    return Launch(
        kernel, (rows,), columns, *numbers, STEP=step, ACTIVATION=form.activation, LIMITED=form.limit is not None,
        BLOCK=block, num_warps=4 if block > 256 else 1,
    )  # fmt: skip


def forward(gate: Tensor, up: Tensor | None, form: Gate) -> Tensor:
    """Return h (S, I), contiguous. gate, up: contiguous rows; if up is None, gate is packed."""
    columns, numbers, step = _numbers(gate, up, form)
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    h = gate.new_empty(len(gate), columns, dtype=dtype)
    if h.numel():
        _launch(_forward_kernel, len(gate), columns, numbers, step, form, BLOCK)(gate, gate if up is None else up, h)
    return h


def backward(
    dh: Tensor, gate: Tensor, up: Tensor | None, form: Gate, dgate: Tensor | None, dup: Tensor | None,
    weights: Tensor | None = None, h: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fill the gradients and h, except those that are None, and return dw.

    Args:
        dh: (S, I), adjacent columns. h may be dh, and a gradient may be what it is the gradient of, where the dtypes
            are equal: then each thread reads exactly what it overwrites.
        gate, up, dgate, dup: as in `forward`; if up is None, dgate is packed and dup None.
        weights: (S,), the factor of each row, or None for 1.

    Returns:
        (S,) in fp32; empty without weights.
    """
    columns, numbers, step = _numbers(gate, up, form)
    dw = gate.new_empty(0 if weights is None else len(gate), dtype=torch.float32)
    if gate.numel():
        up, dup = (gate, dgate) if up is None else (up, dup)  # packed: both halves lie in one tensor, at other places
        launch = _launch(_backward_kernel, len(gate), columns, (dh.stride(0), *numbers), step, form, BLOCK)
        launch(dh, gate, up, weights, dgate, dup, h, None if weights is None else dw)
    return dw
