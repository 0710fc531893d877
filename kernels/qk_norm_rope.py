"""RMSNorm of queries and keys, then their rotary embedding: one launch for both tensors and both steps.

    y = x * rstd * (offset + w),  rstd = 1 / sqrt(mean(x^2) + eps),  then rope.py's rotation of y's pairs of columns

Shapes    q: (B, S, Hq, D)  k: (B, S, Hk, D)  cos, sin: (B or 1, S, R), R <= D
          weights (D,), one norm per head (Qwen 3, Gemma 3), or (Hq D,) and (Hk D,), one over all heads (OLMo 2)
          out: (B, H, S, D), views of memory in the order of q and k
Method    a program normalizes and rotates a tile of tokens x heads. In the backward it walks over many tiles and keeps
          its share of the weights' gradients in registers; a second kernel adds the shares in a fixed order.
Numerics  fp32 inside, rounded once on the way out. With cast_before_weight, x * rstd is rounded to x's dtype before it
          meets the weight, as in models that do so; the gradient passes through that rounding unchanged.
Traffic   forward 2 (Hq + Hk) D elements a token, backward 3; the forward saves q, k and rstd
Source    Henry et al. 2020, arXiv:2010.04245 (queries and keys normed), Su et al. 2021, arXiv:2104.09864
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import check_dtypes, first_order, stats_dtype, vector
from ._norm import multiprocessors, programs_for, sum_programs
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES
from .rope import (
    Angles,
    angle_strides,
    angles_of,
    check_angles,
    dense_columns,
    head_tile,
    load_angles,
    load_pairs,
    locate,
    rotate,
    same_strides,
    store_pairs,
    take_angles,
)

FORWARD_TILE, FORWARD_PER_WARP = SHAPES.QK_NORM_FORWARD  # elements of a program's tile, and of a warp's part
BACKWARD_TILE, BACKWARD_PER_WARP = SHAPES.QK_NORM_BACKWARD
PROGRAMS = SHAPES.QK_NORM_PROGRAMS  # per multiprocessor, in the backward of trainable weights
STAGES = SHAPES.QK_NORM_STAGES  # prefetch stages of that backward's loop


class Norm(NamedTuple):
    """Scalars of one call; `qk_norm_rope` explains them."""

    eps: float
    offset: float
    cast: bool
    over_heads: bool


def qk_norm_rope_reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6,
    offset: float = 0.0, cast_before_weight: bool = False, norm_over_heads: bool = False, interleaved: bool = False,
    mrope_section: Sequence[int] | None = None, half_width: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    norm = Norm(eps, offset, cast_before_weight, norm_over_heads)
    angles = angles_of(cos, interleaved, mrope_section, half_width)
    c, s = (x.unsqueeze(2) for x in take_angles(cos, sin, angles, stats_dtype(q.dtype)))
    turned = [
        rotate(_normed(x, w, norm), c, s, interleaved).to(_out_dtype(x, w, norm))
        for x, w in ((q, q_weight), (k, k_weight))
    ]
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def _normed(x: Tensor, w: Tensor, norm: Norm) -> Tensor:
    wide = x.to(stats_dtype(x.dtype))
    squares = wide.square().mean((-2, -1) if norm.over_heads else -1, keepdim=True)
    normed = wide * torch.rsqrt(squares + norm.eps)
    if norm.cast:
        normed = normed.to(x.dtype).to(wide.dtype)
    return normed * (norm.offset + w.to(wide.dtype).view(x.shape[-2:] if norm.over_heads else -1))


def _out_dtype(x: Tensor, w: Tensor, norm: Norm) -> torch.dtype:
    return torch.promote_types(x.dtype, w.dtype) if norm.cast else x.dtype


@triton.jit
def _load_weight(
    w_ptr, head, offset, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVER_HEADS: tl.constexpr,
):  # fmt: skip
    """Return offset + weight as (1, HEADS or 1, BLOCK), for the first and the second column of each pair."""
    at = head * D if OVER_HEADS else tl.zeros((1, 1, 1), tl.int64)  # one weight for all heads: no offset
    a, b = load_pairs(w_ptr + at, at < H * D, D, PAIRS, BLOCK, INTERLEAVED)
    return a + offset, b + offset


@triton.jit
def _row_mean(x, H: tl.constexpr, D: tl.constexpr, OVER_HEADS: tl.constexpr):
    """Return means over the columns of one head, or of all: (TOKENS, HEADS or 1, 1). x holds the sums of pairs."""
    total = tl.sum(x, 2, keep_dims=True)
    if OVER_HEADS:
        total = tl.sum(total, 1, keep_dims=True) / H
    return total / D


@triton.jit
def _norm_rotate_tile(
    x_ptr, w_ptr, y_ptr, rstd_ptr, cos_ptr, sin_ptr, block, T, S, eps, offset,
    x_batch, x_position, x_head, y_batch, y_position, y_head, cos_axis, cos_batch, cos_position, cos_pair,
    H: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr, INTERLEAVED: tl.constexpr,
    OVER_HEADS: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    token, head = locate(block, H, TOKENS, HEADS)
    batch, position = (token // S).to(tl.int64), (token % S).to(tl.int64)  # int64: times a stride passes 2^31
    inside, live = token < T, (token < T) & (head < H)
    rows = x_ptr + batch * x_batch + position * x_position + head * x_head
    a, b = load_pairs(rows, live, D, PAIRS, BLOCK, INTERLEAVED)
    rstd = tl.rsqrt(_row_mean(a * a + b * b, H, D, OVER_HEADS) + eps)
    if OVER_HEADS:
        tl.store(rstd_ptr + token, rstd, mask=inside)
    else:
        tl.store(rstd_ptr + token.to(tl.int64) * H + head, rstd, mask=live)
    a, b = a * rstd, b * rstd
    if CAST:
        # as models that round before the weight
        a, b = a.to(x_ptr.dtype.element_ty).to(tl.float32), b.to(x_ptr.dtype.element_ty).to(tl.float32)
    w_a, w_b = _load_weight(w_ptr, head, offset, H, D, PAIRS, BLOCK, INTERLEAVED, OVER_HEADS)
    a, b = a * w_a, b * w_b
    cos, sin = load_angles(
        cos_ptr, sin_ptr, batch, position, inside, cos_axis, cos_batch, cos_position, cos_pair,
        PAIRS, END_0, END_1, BLOCK,
    )  # fmt: skip
    rows = y_ptr + batch * y_batch + position * y_position + head * y_head
    store_pairs(rows, a * cos - b * sin, b * cos + a * sin, live, D, PAIRS, BLOCK, INTERLEAVED)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, rstd_ptr, cos_ptr, sin_ptr,
    T, S, k_rstd, eps, offset, q_batch, q_position, q_head, k_batch, k_position, k_head,
    q_out_batch, q_out_position, q_out_head, k_out_batch, k_out_position, k_out_head,
    cos_axis, cos_batch, cos_position, cos_pair,
    HQ: tl.constexpr, TOKENS_Q: tl.constexpr, HEADS_Q: tl.constexpr,
    HK: tl.constexpr, TOKENS_K: tl.constexpr, HEADS_K: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVER_HEADS: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    q_blocks = tl.cdiv(T, TOKENS_Q) * tl.cdiv(HQ, HEADS_Q)  # the first programs have q's tiles, the others k's
    if block < q_blocks:
        _norm_rotate_tile(
            q_ptr, q_weight_ptr, q_out_ptr, rstd_ptr, cos_ptr, sin_ptr, block, T, S, eps, offset,
            q_batch, q_position, q_head, q_out_batch, q_out_position, q_out_head,
            cos_axis, cos_batch, cos_position, cos_pair,
            HQ, TOKENS_Q, HEADS_Q, D, PAIRS, BLOCK, END_0, END_1, INTERLEAVED, OVER_HEADS, CAST,
        )  # fmt: skip
    else:
        _norm_rotate_tile(
            k_ptr, k_weight_ptr, k_out_ptr, rstd_ptr + k_rstd, cos_ptr, sin_ptr, block - q_blocks, T, S, eps, offset,
            k_batch, k_position, k_head, k_out_batch, k_out_position, k_out_head,
            cos_axis, cos_batch, cos_position, cos_pair,
            HK, TOKENS_K, HEADS_K, D, PAIRS, BLOCK, END_0, END_1, INTERLEAVED, OVER_HEADS, CAST,
        )  # fmt: skip


@triton.jit
def _backward_tiles(
    x_ptr, w_ptr, dy_ptr, dx_ptr, share_ptr, rstd_ptr, cos_ptr, sin_ptr, first, T, S, offset,
    x_batch, x_position, x_head, dy_batch, dy_head, dy_position, dx_batch, dx_position, dx_head,
    cos_axis, cos_batch, cos_position, cos_pair,
    H: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVER_HEADS: tl.constexpr, CAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # xhat = x * rstd, g = dy rotated back
    # dx = rstd * (w g - xhat * mean(w g xhat)),  dw = sum over rows of g * xhat
    # Once for all tiles: one weight serves all heads, or every tile holds all heads.
    _, head = locate(first, H, TOKENS, HEADS)
    w_a, w_b = _load_weight(w_ptr, head, offset, H, D, PAIRS, BLOCK, INTERLEAVED, OVER_HEADS)
    dw_a = tl.zeros((TOKENS, HEADS, BLOCK), tl.float32)
    dw_b = tl.zeros((TOKENS, HEADS, BLOCK), tl.float32)
    blocks = tl.cdiv(T, TOKENS) * tl.cdiv(H, HEADS)
    for block in tl.range(first, blocks, tl.num_programs(0), num_stages=STAGES):
        token, head = locate(block, H, TOKENS, HEADS)
        batch, position = (token // S).to(tl.int64), (token % S).to(tl.int64)
        inside, live = token < T, (token < T) & (head < H)
        # 0 beyond the end: there x * rstd is 0, and adds nothing to a weight's gradient
        if OVER_HEADS:
            rstd = tl.load(rstd_ptr + token, mask=inside, other=0.0)
        else:
            rstd = tl.load(rstd_ptr + token.to(tl.int64) * H + head, mask=live, other=0.0)
        rows = x_ptr + batch * x_batch + position * x_position + head * x_head
        a, b = load_pairs(rows, live, D, PAIRS, BLOCK, INTERLEAVED)
        a, b = a * rstd, b * rstd
        cos, sin = load_angles(
            cos_ptr, sin_ptr, batch, position, inside, cos_axis, cos_batch, cos_position, cos_pair,
            PAIRS, END_0, END_1, BLOCK,
        )  # fmt: skip
        rows = dy_ptr + batch * dy_batch + head * dy_head + position * dy_position
        dy_a, dy_b = load_pairs(rows, live, D, PAIRS, BLOCK, INTERLEAVED)
        g_a, g_b = dy_a * cos + dy_b * sin, dy_b * cos - dy_a * sin  # the inverse rotation: its transpose
        if DW:
            if CAST:  # the weight met the rounded numbers
                dw_a += g_a * a.to(x_ptr.dtype.element_ty).to(tl.float32)
                dw_b += g_b * b.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                dw_a += g_a * a
                dw_b += g_b * b
        if DX:
            g_a, g_b = g_a * w_a, g_b * w_b
            mean = _row_mean(g_a * a + g_b * b, H, D, OVER_HEADS)
            rows = dx_ptr + batch * dx_batch + position * dx_position + head * dx_head
            store_pairs(rows, rstd * (g_a - a * mean), rstd * (g_b - b * mean), live, D, PAIRS, BLOCK, INTERLEAVED)
    if DW:
        dw_a, dw_b = tl.sum(dw_a, 0, keep_dims=True), tl.sum(dw_b, 0, keep_dims=True)
        if OVER_HEADS:
            store_pairs(share_ptr + head * D, dw_a, dw_b, head < H, D, PAIRS, BLOCK, INTERLEAVED)
        else:
            dw_a, dw_b = tl.sum(dw_a, 1, keep_dims=True), tl.sum(dw_b, 1, keep_dims=True)
            at = tl.zeros((1, 1, 1), tl.int64)
            # one head stands for all: they share the weight
            store_pairs(share_ptr + at, dw_a, dw_b, at == 0, D, PAIRS, BLOCK, INTERLEAVED)


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, dq_out_ptr, dk_out_ptr, dq_ptr, dk_ptr, share_ptr, rstd_ptr,
    cos_ptr, sin_ptr, T, S, k_rstd, share_width, k_share, offset,
    q_batch, q_position, q_head, k_batch, k_position, k_head,
    dq_out_batch, dq_out_head, dq_out_position, dk_out_batch, dk_out_head, dk_out_position,
    dq_batch, dq_position, dq_head, dk_batch, dk_position, dk_head,
    cos_axis, cos_batch, cos_position, cos_pair,
    HQ: tl.constexpr, TOKENS_Q: tl.constexpr, HEADS_Q: tl.constexpr,
    HK: tl.constexpr, TOKENS_K: tl.constexpr, HEADS_K: tl.constexpr,
    DQ: tl.constexpr, DK: tl.constexpr, DWQ: tl.constexpr, DWK: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVER_HEADS: tl.constexpr, CAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    share_ptr += program.to(tl.int64) * share_width  # q and k lie in one row of shares
    first = program
    if DQ or DWQ:
        _backward_tiles(
            q_ptr, q_weight_ptr, dq_out_ptr, dq_ptr, share_ptr, rstd_ptr, cos_ptr, sin_ptr, first, T, S, offset,
            q_batch, q_position, q_head, dq_out_batch, dq_out_head, dq_out_position, dq_batch, dq_position, dq_head,
            cos_axis, cos_batch, cos_position, cos_pair,
            HQ, TOKENS_Q, HEADS_Q, DQ, DWQ, D, PAIRS, BLOCK, END_0, END_1, INTERLEAVED, OVER_HEADS, CAST, STAGES,
        )  # fmt: skip
        # k's tiles continue where q's ended, so that no program gets two more than another.
        first = (program + programs - tl.cdiv(T, TOKENS_Q) * tl.cdiv(HQ, HEADS_Q) % programs) % programs
    if DK or DWK:
        _backward_tiles(
            k_ptr, k_weight_ptr, dk_out_ptr, dk_ptr, share_ptr + k_share, rstd_ptr + k_rstd, cos_ptr, sin_ptr,
            first, T, S, offset,
            k_batch, k_position, k_head, dk_out_batch, dk_out_head, dk_out_position, dk_batch, dk_position, dk_head,
            cos_axis, cos_batch, cos_position, cos_pair,
            HK, TOKENS_K, HEADS_K, DK, DWK, D, PAIRS, BLOCK, END_0, END_1, INTERLEAVED, OVER_HEADS, CAST, STAGES,
        )  # fmt: skip


@functools.cache
def _config(hq: int, hk: int, D: int, angles: Angles, norm: Norm, tile: int, per_warp: int) -> dict:
    width = triton.next_power_of_2(D)
    if norm.over_heads:  # a tile holds all heads of its tokens; k's is as large as q's, so both have the same warps
        heads_q, heads_k = triton.next_power_of_2(hq), triton.next_power_of_2(hk)
        tile = max(tile, width * max(heads_q, heads_k))
        tokens_q, tokens_k = tile // (heads_q * width), tile // (heads_k * width)
    else:
        (tokens_q, heads_q), (tokens_k, heads_k) = head_tile(hq, D, tile), head_tile(hk, D, tile)
    return dict(
        HQ=hq, TOKENS_Q=tokens_q, HEADS_Q=heads_q, HK=hk, TOKENS_K=tokens_k, HEADS_K=heads_k,
        # BLOCK: half of a head's columns, since they are loaded as pairs
        D=D, PAIRS=angles.pairs, BLOCK=triton.next_power_of_2(D // 2), END_0=angles.ends[0], END_1=angles.ends[1],
        INTERLEAVED=angles.interleaved, OVER_HEADS=norm.over_heads, CAST=norm.cast,
        num_warps=min(16, max(1, tile // per_warp)),
    )  # fmt: skip


def _blocks(T: int, config: dict) -> tuple[int, int]:
    """Return the numbers of tiles of q and of k."""
    q = -(-T // config["TOKENS_Q"]) * -(-config["HQ"] // config["HEADS_Q"])
    return q, -(-T // config["TOKENS_K"]) * -(-config["HK"] // config["HEADS_K"])


@remembered
def _forward_launch(
    q: torch.Size, hk: int, strides: tuple, angles: Angles, norm: Norm, tile: int, per_warp: int
) -> Launch:
    B, S, hq, D = q
    T = B * S
    config = _config(hq, hk, D, angles, norm, tile, per_warp)
    k_rstd = T if norm.over_heads else T * hq  # where k's begin, behind q's
    return Launch(_forward_kernel, (sum(_blocks(T, config)),), T, S, k_rstd, norm.eps, norm.offset, *strides, **config)


def _forward(q, k, q_weight, k_weight, cos, sin, angles: Angles, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q and k, normalized and rotated, as (B, S, H, D); rstd of q's rows, then of k's)."""
    (B, S, hq, _), hk = q.shape, k.shape[2]
    q_out = torch.empty_like(q, dtype=_out_dtype(q, q_weight, norm))
    k_out = torch.empty_like(k, dtype=_out_dtype(k, k_weight, norm))
    rstd = vector(B * S * (2 if norm.over_heads else hq + hk), q)
    strides = (*q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *angle_strides(cos, angles))
    launch = _forward_launch(q.shape, hk, strides, angles, norm, FORWARD_TILE, FORWARD_PER_WARP)
    launch(q, k, q_weight, k_weight, q_out, k_out, rstd, cos, sin)
    return q_out, k_out, rstd


@remembered
def _backward_launch(
    q: torch.Size, hk: int, widths: tuple[int, int], strides: tuple, angles: Angles, norm: Norm,
    needs: tuple[bool, ...], tile: int, per_warp: int, stages: int, limit: int,
) -> Launch:  # fmt: skip
    """Make the launch. limit: of programs, if a weight's gradient is needed."""
    B, S, hq, D = q
    T = B * S
    config = _config(hq, hk, D, angles, norm, tile, per_warp)
    # of q and of k, where needed
    tiles = sum(n if needs[i] or needs[2 + i] else 0 for i, n in enumerate(_blocks(T, config)))
    programs = programs_for(tiles, limit) if needs[2] or needs[3] else tiles
    return Launch(
        _backward_kernel, (programs,), T, S, T if norm.over_heads else T * hq, sum(widths), widths[0], norm.offset,
        *strides, DQ=needs[0], DK=needs[1], DWQ=needs[2], DWK=needs[3], STAGES=stages, **config,
    )  # fmt: skip


def _backward(upstream, saved, needs: tuple[bool, ...], strides, angles: Angles, norm: Norm) -> list[Tensor | None]:
    """Return gradients of q, k and both weights, None where not needed. upstream: two (B, H, S, D), None if unused."""
    q, k, q_weight, k_weight, cos, sin, rstd = saved
    dy = [None if x is None else dense_columns(x) for x in upstream]
    dx = [x.new_empty_strided(x.shape, strides[i]) if needs[i] else None for i, x in enumerate((q, k))]
    widths = q_weight.shape[0] if needs[2] else 0, k_weight.shape[0] if needs[3] else 0
    some = [next(x for x in pair if x is not None) for pair in (dy, (*dx, q))]  # stand-ins for what isn't computed
    dy_q, dy_k = (some[0] if x is None else x for x in dy)
    dq, dk = (some[1] if x is None else x for x in dx)
    all_strides = (
        *q.stride()[:3], *k.stride()[:3], *dy_q.stride()[:3], *dy_k.stride()[:3], *dq.stride()[:3], *dk.stride()[:3],
        *angle_strides(cos, angles),
    )  # fmt: skip
    launch = _backward_launch(
        q.shape, k.shape[2], widths, all_strides, angles, norm, needs, BACKWARD_TILE, BACKWARD_PER_WARP, STAGES,
        multiprocessors(q.device) * PROGRAMS,
    )  # fmt: skip
    shares = vector(launch.grid[0] * sum(widths), q) if any(widths) else rstd  # a pointer that is not read, else
    launch(q, k, q_weight, k_weight, dy_q, dy_k, dq, dk, shares, rstd, cos, sin)
    return [*dx, *_weight_gradients(shares, widths, q_weight, k_weight)]


def _weight_gradients(
    shares: Tensor, widths: tuple[int, int], q_weight: Tensor, k_weight: Tensor
) -> list[Tensor | None]:
    if not any(widths):
        return [None, None]
    same = q_weight.dtype == k_weight.dtype  # else summed in fp32, and rounded for each
    total = sum_programs(shares, sum(widths), q_weight.dtype if same else torch.float32)[0]
    parts = zip(total.split(widths), (q_weight, k_weight), strict=True)
    return [part.to(w.dtype) if len(part) else None for part, w in parts]


class QKNormRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, angles, norm):
        q, k, (cos, sin) = dense_columns(q), dense_columns(k), same_strides(cos, sin)
        q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
        q_out, k_out, rstd = _forward(q, k, q_weight, k_weight, cos, sin, angles, norm)
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin, rstd)
        # q's own strides may leave gaps in memory; its gradient gets those of the output, in the same order
        ctx.strides, ctx.angles, ctx.norm = (q_out.stride(), k_out.stride()), angles, norm
        ctx.set_materialize_grads(False)  # an output without a gradient stays None, and its half is skipped
        outputs = q_out.transpose(1, 2), k_out.transpose(1, 2)
        needs = ctx.needs_input_grad
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if not (needs[i] or needs[2 + i])))
        return outputs

    @staticmethod
    @first_order
    def backward(ctx, *upstream):
        needs = tuple(needed and upstream[i % 2] is not None for i, needed in enumerate(ctx.needs_input_grad[:4]))
        gradients = [None] * 4
        if any(needs):
            gradients = _backward(upstream, ctx.saved_tensors, needs, ctx.strides, ctx.angles, ctx.norm)
        return *gradients, None, None, None, None


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6,
    offset: float = 0.0, cast_before_weight: bool = False, norm_over_heads: bool = False, interleaved: bool = False,
    mrope_section: Sequence[int] | None = None, half_width: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Apply RMSNorm, then rotary embedding, to queries and keys; differentiable in q, k and the weights.

    Args:
        q: (B, S, Hq, D), fp32, fp16 or bf16 (fp64: torch): the projection's output, viewed as heads. Any strides;
            copied if its columns are not consecutive.
        k: (B, S, Hk, D), like q.
        q_weight: (D,), or (Hq * D,) with norm_over_heads; any float dtype. A frozen one costs nothing.
        k_weight: (D,), or (Hk * D,).
        cos: cosines, constants, (B or 1, S, R). `rope` explains layouts, `interleaved`, `mrope_section`, `half_width`.
        sin: sines, like cos.
        eps: added to the mean square, before the root.
        offset: added to the weights. 1 for Gemma, whose weights are stored as w - 1.
        cast_before_weight: round the normalized values to their dtype before they meet the weight (Qwen 3). The
            result's dtype is then what that product promotes to, else the dtype of q or k.
        norm_over_heads: one norm over all heads of a token (OLMo 2), instead of one for each head.

    Returns:
        q (B, Hq, S, D) and k (B, Hk, S, D), the shapes that attention takes. Their memory, and the inputs'
        gradients, is ordered like the inputs'.

    Raises:
        ValueError: if shapes don't fit.
    """
    check_dtypes(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    angles = angles_of(cos, interleaved, mrope_section, half_width)
    _check(q, k, q_weight, k_weight, norm_over_heads)
    check_angles(cos, sin, angles, q.shape[0], q.shape[1], q.shape[3])
    if torch.compiler.is_compiling() or not use_triton(q):
        return qk_norm_rope_reference(
            q, k, q_weight, k_weight, cos, sin, eps=eps, offset=offset, cast_before_weight=cast_before_weight,
            norm_over_heads=norm_over_heads, interleaved=interleaved, mrope_section=mrope_section,
            half_width=half_width,
        )  # fmt: skip
    norm = Norm(float(eps), float(offset), cast_before_weight, norm_over_heads)
    return QKNormRopeFunction.apply(q, k, q_weight, k_weight, cos, sin, angles, norm)


def _check(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, over_heads: bool) -> None:
    if q.dim() != 4 or k.dim() != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(
            f"q (B, S, Hq, D) and k (B, S, Hk, D) must share B, S and D: q is {tuple(q.shape)}, k is {tuple(k.shape)}."
        )
    for name, x, w in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        width = x.shape[2] * x.shape[3] if over_heads else x.shape[3]
        if w.shape != (width,):
            raise ValueError(
                f"{name} must hold {width} numbers, {'H * D as norm_over_heads' if over_heads else 'one per column'}: "
                f"it is {tuple(w.shape)}, and {name[0]} is {tuple(x.shape)}."
            )
