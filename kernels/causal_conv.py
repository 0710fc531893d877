"""Causal depthwise convolution over the tokens of rows or of documents, each channel by itself:

    z_t = b + sum over k < W of w_k x_(t - W + 1 + k),   terms before the document's first token left out
    y = z, or silu(z) = z s(z)

    dz = dy, or dy silu'(z)       dx_t = sum over k of w_k dz_(t + W - 1 - k), of tokens of the same document
    dw_k = sum over t of dz_t x_(t - W + 1 + k)       db = sum over t of dz_t

Shapes    x, y: (B, T, C)   w: (C, W)   b: (C,)   bounds: (2, BT) int32, where each token's document begins and ends
Method    a program has a tile of tokens and channels and reads the tokens around it again, which the cache holds.
          Channels are next to each other in memory, as projections leave them: nothing is transposed. The forward saves
          only x, and the backward computes z again. A few programs walk over the tokens of each block of channels and
          keep their share of dw and db in registers; a second kernel adds the shares in a fixed order.
Numerics  fp32 inside, rounded once on the way out
Traffic   forward 2 BTC elements, backward 3 BTC, and 2 P C (W + 1) fp32 numbers for dw and db, P programs
Source    short convolutions: Gu & Dao 2023, arXiv:2312.00752 (Mamba); within documents: Dao-AILab's causal-conv1d
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes, empty, first_order, vector
from ._norm import multiprocessors, programs_for, rows_of, sum_programs
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES
from .document_attention import document_bounds, document_bounds_reference

WIDEST = 16  # W
TILE = SHAPES.CAUSAL_CONV  # tokens, channels, warps


def causal_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None, *, silu: bool = False,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    (B, T, C), W = x.shape, weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    at = torch.arange(B * T, device=x.device)
    if ends is None:
        first = at // max(T, 1) * T
    else:
        first = document_bounds_reference(ends.to(x.device), B * T)[0] if bounds is None else bounds[0]
    rows, z = x.reshape(-1, C).to(wide), x.new_zeros((B * T, C), dtype=wide)
    for k in range(W):
        back = W - 1 - k
        before = F.pad(rows, (0, 0, back, 0))[: B * T]
        z = z + before.where((at - back >= first)[:, None], 0.0) * weight[:, k].to(wide)
    z = z if bias is None else z + bias.to(wide)
    return (F.silu(z) if silu else z).to(x.dtype).view(B, T, C)


@triton.jit
def _taps(x_ptr, w_ptr, b_ptr, rows, first, exists, cols, C, stride_x, W: tl.constexpr, TOKENS: tl.constexpr,
          CHANNELS: tl.constexpr):  # fmt: skip
    """Return z, (TOKENS, CHANNELS), of tokens that exist."""
    z = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if b_ptr is not None:
        z += tl.load(b_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(W):
        at = rows - (W - 1) + k
        mask = ((at >= first) & exists)[:, None] & (cols < C)[None, :]
        x = tl.load(x_ptr + at.to(tl.int64)[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
        w = tl.load(w_ptr + cols * W + k, mask=cols < C, other=0.0).to(tl.float32)
        z += x.to(tl.float32) * w[None, :]
    return z


@triton.jit
def _document(bounds_ptr, rows, N, length):
    """Return where the documents of tokens begin and end. Tokens that don't exist are in none."""
    if bounds_ptr is None:
        first = rows // length * length
        end = tl.where(rows < N, first + length, 0)
    else:
        first = tl.load(bounds_ptr + rows, mask=rows < N, other=0)
        end = tl.load(bounds_ptr + N + rows, mask=rows < N, other=0)
    return first, end


@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, b_ptr, bounds_ptr, y_ptr, N, C, length, stride_x,
    W: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    first, _ = _document(bounds_ptr, rows, N, length)
    z = _taps(x_ptr, w_ptr, b_ptr, rows, first, rows < N, cols, C, stride_x, W, TOKENS, CHANNELS)
    if SILU:
        z *= tl.sigmoid(z)
    mask = (rows < N)[:, None] & (cols < C)[None, :]
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], z, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, bounds_ptr, dx_ptr, dw_ptr, db_ptr, N, C, length, stride_dy, stride_x,
    W: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    taps = tl.arange(0, BLOCK_W)
    dw = tl.zeros((BLOCK_W, CHANNELS), tl.float32)
    db = tl.zeros((CHANNELS,), tl.float32)
    for start in range(pid * TOKENS, N, tl.num_programs(0) * TOKENS):
        rows = start + tl.arange(0, TOKENS)
        first, end = _document(bounds_ptr, rows, N, length)
        dx = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for j in tl.static_range(W):
            later = rows + j  # the tokens that read x of `rows`
            inside = later < end
            mask = inside[:, None] & (cols < C)[None, :]
            at = later.to(tl.int64)[:, None] * stride_dy + cols[None, :]
            dz = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if SILU:
                z = _taps(x_ptr, w_ptr, b_ptr, later, first, inside, cols, C, stride_x, W, TOKENS, CHANNELS)
                s = tl.sigmoid(z)
                dz *= s * (1.0 + z * (1.0 - s))
            w = tl.load(w_ptr + cols * W + (W - 1 - j), mask=cols < C, other=0.0).to(tl.float32)
            dx += dz * w[None, :]
            if j == 0:
                if dw_ptr is not None:
                    for k in tl.static_range(W):
                        seen = rows - (W - 1) + k
                        read = ((seen >= first) & inside)[:, None] & (cols < C)[None, :]
                        x_at = seen.to(tl.int64)[:, None] * stride_x + cols[None, :]
                        x = tl.load(x_ptr + x_at, mask=read, other=0.0).to(tl.float32)
                        dw += tl.where((taps == k)[:, None], tl.sum(dz * x, 0)[None, :], 0.0)
                if db_ptr is not None:
                    db += tl.sum(dz, 0)
        if dx_ptr is not None:
            mask = (rows < N)[:, None] & (cols < C)[None, :]
            tl.store(dx_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], dx, mask=mask)
    if dw_ptr is not None:
        share = dw_ptr + pid * C * W + cols[None, :] * W + taps[:, None]
        tl.store(share, dw, mask=(taps < W)[:, None] & (cols < C)[None, :])
    if db_ptr is not None:
        tl.store(db_ptr + pid * C + cols, db, mask=cols < C)


@remembered
def _forward_launch(N: int, C: int, length: int, stride: int, W: int, silu: bool, tile: tuple) -> Launch:
    tokens, channels, warps = tile
    return Launch(
        _forward_kernel, (-(-N // tokens), -(-C // channels)), N, C, length, stride,
        W=W, SILU=silu, TOKENS=tokens, CHANNELS=channels, num_warps=warps,
    )  # fmt: skip


@remembered
def _backward_launch(
    N: int, C: int, length: int, strides: tuple[int, int], W: int, silu: bool, sums: bool, tile: tuple,
    multiprocessors: int,
) -> Launch:  # fmt: skip
    tokens, channels, warps = tile
    tiles, blocks = -(-N // tokens), -(-C // channels)
    programs = programs_for(tiles, max(1, 8 * multiprocessors // blocks)) if sums else tiles  # few shares to sum
    return Launch(
        _backward_kernel, (programs, blocks), N, C, length, *strides,
        W=W, SILU=silu, TOKENS=tokens, CHANNELS=channels, BLOCK_W=triton.next_power_of_2(W), num_warps=warps,
    )  # fmt: skip


class CausalConvFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, bounds, silu):
        (B, T, C), W = x.shape, weight.shape[1]
        rows, stride = rows_of(x)
        y = empty(x)
        launch = _forward_launch(B * T, C, T, stride, W, silu, TILE)
        launch(rows, weight.contiguous(), bias, bounds, y)
        ctx.save_for_backward(rows, weight, bias, bounds)
        ctx.form = T, silu
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight, bias, bounds = ctx.saved_tensors
        (C, W), (T, silu) = weight.shape, ctx.form
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        dy_rows, stride_dy = rows_of(dy)
        N, stride_x = dy_rows.numel() // C, C if x.dim() == 3 else x.stride(0)
        launch = _backward_launch(
            N, C, T, (stride_dy, stride_x), W, silu, need_w or need_b, TILE, multiprocessors(dy.device)
        )
        dx = empty(dy, x.dtype) if need_x else None
        shares_w = vector(launch.grid[0] * C * W, dy) if need_w else None
        shares_b = vector(launch.grid[0] * C, dy) if need_b else None
        launch(dy_rows, x, weight.contiguous(), bias, bounds, dx, shares_w, shares_b)
        dw = None if shares_w is None else sum_programs(shares_w, C * W, weight.dtype)[0].view(C, W)
        db = None if shares_b is None else sum_programs(shares_b, C, bias.dtype)[0]
        return dx, dw, db, None, None


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: Tensor | None = None, *, silu: bool = False,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Convolve each channel over the tokens before, differentiable once in x, weight and bias.

    Args:
        x: (B, T, C), fp32, fp16, bf16 (fp64: torch). Any strides; copied only if no one stride leads over its rows, or
            channels are not next to each other.
        weight: (C, W), W at most 16, any float dtype; the last of the W meets the token itself.
        bias: (C,), any float dtype.
        ends: (documents + 1,) int32, where documents begin and end in the rows laid end to end, from 0 to B T; None:
            each row is one document.
        silu: y = silu(z).
        bounds: `document_bounds(ends, B * T)`, where it is known.

    Returns:
        (B, T, C) in x's dtype, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_dtypes(x=x, weight=weight, bias=bias)
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or not 0 < weight.shape[1] <= WIDEST:
        raise ValueError(
            f"x must be (B, T, C) and weight (C, W), W at most {WIDEST}: {tuple(x.shape)}, {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != x.shape[2:]:
        raise ValueError(f"bias must hold one number per channel of x: {tuple(x.shape)}, {tuple(bias.shape)}.")
    if torch.compiler.is_compiling() or not use_triton(x) or not x.numel():
        return causal_conv_reference(x, weight, bias, ends, silu=silu, bounds=bounds)
    if ends is not None and bounds is None:
        bounds = document_bounds(ends.to(x.device), x.shape[0] * x.shape[1])
    return CausalConvFunction.apply(x, weight, None if bias is None else bias.contiguous(), bounds, silu)
