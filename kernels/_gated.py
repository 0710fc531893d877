"""Gated activations h = act(gate) * up: the code that swiglu, geglu, relu2 and gated_linear share.

    d up = dh * act(gate)        d gate = dh * up * act'(gate)

    silu       x s(x), s the sigmoid                             s + x s (1 - s)
    gelu_tanh  x s(2u), 2u = sqrt(8/pi) (x + 0.044715 x^3)       s + x s (1 - s) 2u'
    gelu       x P(x), P the normal distribution function        P + x P'
    relu2      max(x, 0)^2                                       2 max(x, 0)

Shapes    gate, up, h: (..., I), or gate and up as the halves of one packed tensor (..., 2I)
Numerics  fp32 inside, rounded once on the way out. Hugging Face's layers round act(gate) before they multiply by up.
          0.5 (1 + tanh u) is computed as s(2u): one exponential, and no cancellation where tanh is near -1.
Traffic   forward: 2 reads and 1 write of N I elements; backward: 3 reads and 2 writes, or 3 writes with h
Source    Shazeer 2020, arXiv:2002.05202; SiLU: Elfwing et al. 2017, arXiv:1702.03118; GELU: Hendrycks & Gimpel 2016,
          arXiv:1606.08415; squared ReLU: So et al. 2021, arXiv:2109.08668
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes, empty, first_order
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")
FORWARD = BACKWARD = SHAPES.GATED


def activation_reference(x: Tensor, activation: str) -> Tensor:
    """Return act(x) in x's dtype."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_reference(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Return act(gate) * up in plain torch. If up is None, gate is packed."""
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.promote_types(dtype, torch.float32)  # fp64 stays fp64
    return (activation_reference(gate.to(wide), activation) * up.to(wide)).to(dtype)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return (act(x), act'(x)). For "relu2_output", x is relu2's output, and only the slope has a meaning."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(x)
        value = x * s
        slope = s + value * (1.0 - s)
    elif ACTIVATION == "gelu_tanh":
        square = x * x  # 2u = x (1.5957 + 0.0713 x^2): sqrt(8/pi), and 0.044715 of it
        s = tl.sigmoid(x * (1.5957691216057308 + 0.07135481282053 * square))
        value = x * s
        slope = s + value * (1.0 - s) * (1.5957691216057308 + 0.21406443846159 * square)
    elif ACTIVATION == "gelu":
        cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # 1 / sqrt(2)
        value = x * cdf
        slope = cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))  # 1 / sqrt(2 pi): the normal density
    elif ACTIVATION == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)  # unlike a maximum, keeps NaN
        value = positive * positive
        slope = 2.0 * positive
    else:
        tl.static_assert(ACTIVATION == "relu2_output")
        value = x
        slope = 2.0 * tl.sqrt(x)  # x is max(input, 0)^2, whose slope is 2 max(input, 0)
    return value, slope


@triton.jit
def _forward_tile(
    gate_ptr, gate_at, up_ptr, up_at, h_ptr, h_at, left,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK elements from the given offsets on, or `left` of them unless EVEN. up_ptr None: h = act(gate)."""
    lanes = tl.arange(0, BLOCK)
    mask = None if EVEN else lanes < left
    h, _ = activate(tl.load(gate_ptr + gate_at + lanes, mask=mask).to(tl.float32), ACTIVATION)
    if up_ptr is not None:  # decided when the kernel is compiled: Triton takes None for a constant
        # masked lanes hold anything: they are not stored
        h *= tl.load(up_ptr + up_at + lanes, mask=mask).to(tl.float32)
    tl.store(h_ptr + h_at + lanes, h, mask=mask)


@triton.jit
def _backward_tile(
    dh_ptr, dh_at, gate_ptr, gate_at, up_ptr, up_at, dgate_ptr, dup_ptr, grad_at, h_ptr, h_at, left,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Like `_forward_tile` for the gradients. A result whose pointer is None isn't written; h may overwrite dh."""
    lanes = tl.arange(0, BLOCK)
    mask = None if EVEN else lanes < left
    dh = tl.load(dh_ptr + dh_at + lanes, mask=mask).to(tl.float32)
    h, slope = activate(tl.load(gate_ptr + gate_at + lanes, mask=mask).to(tl.float32), ACTIVATION)
    dgate = dh * slope
    if up_ptr is not None:
        up = tl.load(up_ptr + up_at + lanes, mask=mask).to(tl.float32)
        if dup_ptr is not None:
            tl.store(dup_ptr + grad_at + lanes, dh * h, mask=mask)
        dgate *= up  # after dup, which takes act(gate) without it
        h *= up
    if dgate_ptr is not None:
        tl.store(dgate_ptr + grad_at + lanes, dgate, mask=mask)
    if h_ptr is not None:
        tl.store(h_ptr + h_at + lanes, h, mask=mask)


@triton.jit
def _forward_flat_kernel(gate_ptr, up_ptr, h_ptr, n, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK
    _forward_tile(gate_ptr, at, up_ptr, at, h_ptr, at, n - at, ACTIVATION, EVEN, BLOCK)


@triton.jit
def _backward_flat_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr, n,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK
    _backward_tile(
        dh_ptr, at, gate_ptr, at, up_ptr, at, dgate_ptr, dup_ptr, at, h_ptr, at, n - at, ACTIVATION, EVEN, BLOCK
    )


@triton.jit
def _place(inner, columns, BLOCK: tl.constexpr):
    """Return this program's (row, its two indices, first column). Programs go row by row, in blocks of columns."""
    program, blocks = tl.program_id(0), tl.cdiv(columns, BLOCK)
    row = program // blocks
    return row.to(tl.int64), (row // inner).to(tl.int64), (row % inner).to(tl.int64), (program % blocks) * BLOCK


@triton.jit
def _forward_rows_kernel(
    gate_ptr, up_ptr, h_ptr, inner, columns, gate_outer, gate_inner, up_outer, up_inner,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, i, j, column = _place(inner, columns, BLOCK)
    _forward_tile(
        gate_ptr, i * gate_outer + j * gate_inner + column, up_ptr, i * up_outer + j * up_inner + column,
        h_ptr, row * columns + column, columns - column, ACTIVATION, EVEN, BLOCK,
    )  # fmt: skip


@triton.jit
def _backward_rows_kernel(
    dh_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr, inner, columns,
    dh_outer, dh_inner, gate_outer, gate_inner, up_outer, up_inner, stride_grad,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, i, j, column = _place(inner, columns, BLOCK)
    _backward_tile(
        dh_ptr, i * dh_outer + j * dh_inner + column, gate_ptr, i * gate_outer + j * gate_inner + column,
        up_ptr, i * up_outer + j * up_inner + column, dgate_ptr, dup_ptr, row * stride_grad + column,
        h_ptr, row * columns + column, columns - column, ACTIVATION, EVEN, BLOCK,
    )  # fmt: skip


def _flat(*tensors: Tensor | None) -> bool:
    for x in tensors:
        if x is not None and not x.is_contiguous():
            return False
    return True


def _rows(x: Tensor | None) -> tuple[Tensor | None, int, int]:
    """View x as (outer, inner, columns) and return (x, outer stride, inner stride). Copy only if strides force it.

    They do if the last stride is not 1, or if the leading dimensions of a tensor with four or more don't fold into one.
    """
    if x is None:
        return None, 0, 0
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() > 3:
        x = x.flatten(0, -3)
    return x, x.stride(0) if x.dim() == 3 else 0, x.stride(-2) if x.dim() > 1 else 0  # in numbers


def _tile(columns: int, tile: tuple[int, int]) -> tuple[int, int, bool]:
    """Return (BLOCK, warps, whether BLOCK divides the columns). Halve the block while one half holds all columns."""
    block, warps = tile
    while block >= 2 * columns and block > 32:  # short rows: idle lanes cost
        block, warps = block // 2, max(warps // 2, 1)
    return block, warps, columns % block == 0


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return (rows, size of the innermost leading dimension, columns)."""
    columns = x.shape[-1]
    return x.numel() // columns, x.shape[-2] if x.dim() > 1 else 1, columns


@remembered
def _flat_launch(kernel, n: int, activation: str, tile: tuple[int, int]) -> Launch:
    block, warps, even = _tile(n, tile)
    return Launch(kernel, (-(-n // block),), n, ACTIVATION=activation, EVEN=even, BLOCK=block, num_warps=warps)


@remembered
def _rows_launch(kernel, sizes: tuple[int, int, int], strides: tuple, activation: str, tile: tuple[int, int]) -> Launch:
    rows, inner, columns = sizes
    block, warps, even = _tile(columns, tile)
    return Launch(
        kernel, (rows * -(-columns // block),), inner, columns, *strides,
        ACTIVATION=activation, EVEN=even, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def forward(gate: Tensor, up: Tensor | None, activation: str, dtype: torch.dtype) -> Tensor:
    """Return act(gate) * up in `dtype`, contiguous; act(gate) if up is None."""
    h = empty(gate, dtype)
    n = h.numel()
    if n == 0:
        return h
    # One dimension and no strides: the common case, with the fewest instructions for addresses.
    if _flat(gate, up):
        _flat_launch(_forward_flat_kernel, n, activation, FORWARD)(gate, up, h)
        return h
    (gate_rows, *gate_strides), (up_rows, *up_strides) = _rows(gate), _rows(up)
    launch = _rows_launch(_forward_rows_kernel, _sizes(gate), (*gate_strides, *up_strides), activation, FORWARD)
    launch(gate_rows, up_rows, h)
    return h


def backward(
    dh: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None, activation: str,
    h: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill dgate, dup and h, except those that are None: the gradients, and act(gate) * up again.

    dgate and dup must be contiguous, or halves of one contiguous packed tensor. h must be contiguous. h may be dh if dh
    is contiguous and dh, gate and up have one dtype: then each thread reads exactly what it overwrites.
    """
    n = gate.numel()
    if n == 0:
        return
    if _flat(dh, gate, up, dgate, dup):  # as in `forward`
        _flat_launch(_backward_flat_kernel, n, activation, BACKWARD)(dh, gate, up, dgate, dup, h)
        return
    (dh_rows, *dh_strides), (gate_rows, *gate_strides), (up_rows, *up_strides) = _rows(dh), _rows(gate), _rows(up)
    strides = (*dh_strides, *gate_strides, *up_strides, _rows(dup if dgate is None else dgate)[2])
    launch = _rows_launch(_backward_rows_kernel, _sizes(gate), strides, activation, BACKWARD)
    launch(dh_rows, gate_rows, up_rows, dgate, dup, h)


def promoted(gate: Tensor, up: Tensor) -> torch.dtype:
    return gate.dtype if gate.dtype == up.dtype else torch.promote_types(gate.dtype, up.dtype)


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (gate, up); if up is None, they are views of packed gate."""
    if up is None:
        gate, up = gate.chunk(2, -1)  # their rows have gaps: kernels get strides
    return gate, up


def input_gradients(
    dh: Tensor,
    gate: Tensor,
    up: Tensor | None,
    needs: Sequence[bool],
    activation: str,
    h: Tensor | None = None,
    *,
    overwrite: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of gate and up where needed, or one packed gradient if up is None. Fill h if given.

    `overwrite`: they take the memory of gate and up, which must be contiguous.
    """
    memory = (lambda x: x) if overwrite else empty
    if up is None:
        packed = memory(gate)  # one tensor, of which both gradients are halves
        backward(dh, *halves(gate, None), *halves(packed, None), activation, h)
        return packed, None
    dgate = memory(gate) if needs[0] else None
    dup = memory(up) if needs[1] else None
    backward(dh, gate, up, dgate, dup, activation, h)
    return dgate, dup


class GatedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)  # not h: the backward has act(gate) in registers
        ctx.activation = activation
        gate, up = halves(gate, up)
        return forward(gate, up, activation, promoted(gate, up))

    @staticmethod
    @first_order
    def backward(ctx, dh):
        gate, up = ctx.saved_tensors
        return *input_gradients(dh, gate, up, ctx.needs_input_grad, ctx.activation), None


def runs_plain(x: Tensor) -> bool:
    """Return whether ops on x take their plain form: under torch.compile (which fuses too), without Triton, in fp64."""
    return torch.compiler.is_compiling() or not use_triton(x) or x.dtype == torch.float64


def check_gated(op: str, gate: Tensor, up: Tensor | None) -> None:
    check_dtypes(gate=gate, up=up)
    if up is not None and gate.shape != up.shape:
        raise ValueError(f"{op} needs gate and up of one shape: gate is {tuple(gate.shape)}, up is {tuple(up.shape)}.")
    if gate.dim() == 0 or (up is None and gate.shape[-1] % 2):
        raise ValueError(
            f"{op} needs gate of shape (..., I), or packed [gate | up] of shape (..., 2 I) with up=None: "
            f"gate is {tuple(gate.shape)}."
        )


def gated(op: str, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Check the arguments and compute act(gate) * up for the public function `op`."""
    check_gated(op, gate, up)
    if runs_plain(gate):
        return gated_reference(gate, up, activation)
    return GatedFunction.apply(gate, up, activation)
