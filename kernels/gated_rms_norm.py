"""RMSNorm with a gate, over groups of columns:

    norm first   y = xhat * w * a(z)       xhat = x * rstd       rstd = 1 / sqrt(mean(x^2) + eps)
    gate first   y = vhat * w              v = x * a(z)          a(z) is z s(z) (silu) or s(z) (sigmoid)

    norm first   g = dy * w * a(z),  dx = rstd * (g - xhat * mean(g * xhat)),  dz = dy * w * xhat * a'(z)
    gate first   g = dy * w,  dv = rstd * (g - vhat * mean(g * vhat)),  dx = dv * a(z),  dz = dv * x * a'(z)
    dw = sum over rows of dy * xhat * a(z), or dy * vhat

Shapes    x, z, y: (..., H), in the kernels (N, H)    w: (H,)    rstd: (N, groups) fp32; means over H / groups
Method    as rms_norm.py: the forward saves x, z and rstd, a few programs per multiprocessor walk over the rows and keep
          their share of dw in registers. A group is a separate row, with its own part of w.
Numerics  fp32 inside, rounded once on the way out; with gate_first vhat is rounded to x's dtype before it meets w, as
          Mamba-2 has it, and the gradients ignore that rounding. With the norm first, models round xhat and xhat * w
          too.
Traffic   forward 3NH elements, backward 5NH, and 2PH fp32 numbers for dw, P programs
Source    Dao & Gu 2024, arXiv:2405.21060 (Mamba-2); Yang et al. 2024, arXiv:2412.06464 (gated DeltaNet)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes, empty, first_order, vector
from ._norm import (
    backward_config,
    check_columns,
    forward_config,
    multiprocessors,
    programs_for,
    rows_of,
    sum_programs,
    tile_mask,
)
from ._triton import Launch, remembered, tl, triton, use_triton

ACTIVATIONS = ("silu", "sigmoid")


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, *, activation: str = "silu", gate_first: bool = False,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Compute `gated_rms_norm` in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    z = gate.to(wide)
    factor = F.silu(z) if activation == "silu" else torch.sigmoid(z)
    rows = x.to(wide) * factor if gate_first else x.to(wide)
    parts = rows.unflatten(-1, (groups, -1))
    normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)  # each group by itself
    y = (normed.to(x.dtype) if gate_first else normed) * weight.to(wide)
    return (y if gate_first else y * factor).to(_out_dtype(x, weight, gate_first))


def _out_dtype(x: Tensor, weight: Tensor, gate_first: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if gate_first else x.dtype


@triton.jit
def _gate(z, SILU: tl.constexpr):
    """Return (a(z), a'(z))."""
    s = tl.sigmoid(z)
    if SILU:
        value = z * s
        slope = s + value * (1.0 - s)
    else:
        value = s
        slope = s * (1.0 - s)
    return value, slope


@triton.jit
def _forward_kernel(
    x_ptr, z_ptr, w_ptr, y_ptr, rstd_ptr, stride_x, stride_z, stride_y, N, G, eps,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_G)
    mask = tile_mask(rows, cols, N, G, ROWS, BLOCK_G, EXACT)
    at = group * G + cols
    x = tl.load(x_ptr + rows[:, None] * stride_x + at[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + rows[:, None] * stride_z + at[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=cols < G, other=0.0).to(tl.float32)
    factor, _ = _gate(z, SILU)
    if GATE_FIRST:
        x *= factor  # (ROWS, BLOCK_G)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / G + eps)
    tl.store(rstd_ptr + rows * tl.num_programs(1) + group, rstd, mask=rows < N)
    y = x * rstd[:, None]
    if GATE_FIRST:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)  # rounded before the weight, as Mamba-2's layers do
    y *= w[None, :]
    if not GATE_FIRST:
        y *= factor
    tl.store(y_ptr + rows[:, None] * stride_y + at[None, :], y, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, z_ptr, w_ptr, rstd_ptr, dx_ptr, dz_ptr, share_ptr,
    stride_dy, stride_x, stride_z, stride_out, N, G,
    SILU: tl.constexpr, GATE_FIRST: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    pid, group, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    cols = tl.arange(0, BLOCK_G)
    at = group * G + cols
    w = tl.load(w_ptr + at, mask=cols < G, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK_G), tl.float32)
    for start in range(pid * ROWS, N, tl.num_programs(0) * ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = tile_mask(rows, cols, N, G, ROWS, BLOCK_G, EXACT)
        x = tl.load(x_ptr + rows[:, None] * stride_x + at[None, :], mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + rows[:, None] * stride_z + at[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * stride_dy + at[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows * groups + group, mask=rows < N, other=0.0)[:, None]
        factor, slope = _gate(z, SILU)
        g = dy * w[None, :]
        if GATE_FIRST:
            xhat = x * factor * rstd
            dw += dy * xhat
            dv = rstd * (g - xhat * (tl.sum(g * xhat, 1) / G)[:, None])  # of the gated x, v = x a(z)
            dx, dz = dv * factor, dv * x * slope  # through the product v
        else:
            xhat = x * rstd
            dw += dy * xhat * factor  # the gate multiplies what the weight has scaled
            dz = g * xhat * slope  # the gate multiplies what was normed and weighted
            g *= factor  # now of xhat
            dx = rstd * (g - xhat * (tl.sum(g * xhat, 1) / G)[:, None])
        if dx_ptr is not None:
            tl.store(dx_ptr + rows[:, None] * stride_out + at[None, :], dx, mask=mask)
        if dz_ptr is not None:
            tl.store(dz_ptr + rows[:, None] * stride_out + at[None, :], dz, mask=mask)
    if share_ptr is not None:
        tl.store(share_ptr + pid * groups * G + at, tl.sum(dw, 0), mask=cols < G)


@remembered
def _forward_launch(
    N: int, H: int, groups: int, strides: tuple[int, int], eps: float, silu: bool, gate_first: bool, config: tuple
) -> Launch:
    block, tile, warps = config
    G = H // groups
    return Launch(
        _forward_kernel, (-(-N // tile), groups), *strides, H, N, G, eps, SILU=silu, GATE_FIRST=gate_first,
        EXACT=block == G and N % tile == 0, ROWS=tile, BLOCK_G=block, num_warps=warps,
    )  # fmt: skip


@remembered
def _backward_launch(
    N: int, H: int, groups: int, strides: tuple[int, int, int], silu: bool, gate_first: bool, needs_dw: bool,
    config: tuple, multiprocessors: int,
) -> Launch:  # fmt: skip
    block, tile, warps, per_multiprocessor = config
    tiles, G = -(-N // tile), H // groups
    limit = max(1, multiprocessors * per_multiprocessor // groups)  # a program for each group
    programs = programs_for(tiles, limit) if needs_dw else tiles  # few programs, few shares of dw to sum
    return Launch(
        _backward_kernel, (programs, groups), *strides, H, N, G, SILU=silu, GATE_FIRST=gate_first,
        EXACT=block == G and N % tile == 0, ROWS=tile, BLOCK_G=block, num_warps=warps,
    )  # fmt: skip


def _config_of_backward(G: int, itemsize: int, device: torch.device) -> tuple[int, int, int, int]:
    """Return (columns, rows, warps, programs per multiprocessor): half of a plain norm's rows, as it reads twice."""
    block, tile, warps, per_multiprocessor, _ = backward_config(G, itemsize, device)
    return block, max(1, tile // 2), warps, 2 * per_multiprocessor


class GatedRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, silu, gate_first, groups):
        H, N = x.shape[-1], x.numel() // x.shape[-1]
        (x_rows, stride_x), (z_rows, stride_z) = rows_of(x), rows_of(gate)
        y = empty(x, _out_dtype(x, weight, gate_first))
        rstd = vector(N * groups, x)
        launch = _forward_launch(N, H, groups, (stride_x, stride_z), eps, silu, gate_first, forward_config(H // groups))
        launch(x_rows, z_rows, weight.contiguous(), y, rstd)
        ctx.save_for_backward(x_rows, z_rows, weight, rstd)
        ctx.form = silu, gate_first, groups
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, z, weight, rstd = ctx.saved_tensors
        silu, gate_first, groups = ctx.form
        need_x, need_z, need_w = ctx.needs_input_grad[:3]
        H, N = dy.shape[-1], rstd.shape[0] // groups
        (dy_rows, stride_dy), (x, stride_x), (z, stride_z) = rows_of(dy), rows_of(x), rows_of(z)
        dx = empty(dy, x.dtype) if need_x else None
        dz = empty(dy, z.dtype) if need_z else None
        launch = _backward_launch(
            N, H, groups, (stride_dy, stride_x, stride_z), silu, gate_first, need_w,
            _config_of_backward(H // groups, x.element_size(), dy.device), multiprocessors(dy.device),
        )  # fmt: skip
        shares = vector(launch.grid[0] * H, dy) if need_w else None
        launch(dy_rows, x, z, weight.contiguous(), rstd, dx, dz, shares)
        dw = None if shares is None else sum_programs(shares, H, weight.dtype)[0]
        return dx, dz, dw, None, None, None, None


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, *, activation: str = "silu", gate_first: bool = False,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Compute rms_norm(x) * weight * act(gate), or rms_norm(x * act(gate)) * weight, over the last dimension.

    Differentiable once, in x, gate and weight.

    Args:
        x: (..., H), fp32, fp16, bf16 (fp64: torch). Any strides; copied only if one stride cannot lead over its rows.
        gate: like x, in any float dtype.
        weight: (H,), any float dtype. Frozen if it requires no gradient.
        eps: added to the mean square, before the root.
        activation: "silu" or "sigmoid".
        gate_first: x is gated before it is normalised (Mamba-2), not after (Qwen3-Next).
        groups: each H / groups columns are normalised by themselves.

    Returns:
        (..., H) in x's dtype; with gate_first in the dtype that torch promotes x and weight to.

    Raises:
        ValueError: shapes don't fit, the activation is unknown, or groups do not divide the columns.
    """
    check_columns(x, weight)
    check_dtypes(gate=gate)
    if gate.shape != x.shape:
        raise ValueError(f"gate must have x's shape {tuple(x.shape)}, got {tuple(gate.shape)}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if groups < 1 or x.shape[-1] % groups:
        raise ValueError(f"groups must divide the {x.shape[-1]} columns of x, got {groups}.")
    if torch.compiler.is_compiling() or not use_triton(x) or not x.numel():
        return gated_rms_norm_reference(
            x, gate, weight, eps, activation=activation, gate_first=gate_first, groups=groups
        )
    return GatedRMSNormFunction.apply(x, gate, weight, eps, activation == "silu", gate_first, groups)
