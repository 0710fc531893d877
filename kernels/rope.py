"""Rotary position embedding of queries and keys, both in one launch.

    each pair of columns (a, b) rotates by its token's angle t:   a' = a cos t - b sin t,   b' = b cos t + a sin t

Shapes    q: (B, Hq, S, D)  k: (B, Hk, S, D)  cos, sin: (B or 1, S, R), R <= D columns rotate, the others pass through
Pairs     columns j and j + R/2 (Llama), or 2j and 2j + 1 if interleaved (Cohere, GLM, Llama 4)
Method    a program rotates a tile of tokens x heads, whatever the strides. q and k are mostly views (B, H, S, D) of
          projections (B, S, H, D); outputs, forward and backward, have the memory layout of the inputs, so that the
          projections' own backward reads whole lines. The backward is the same kernel, rotating back.
Numerics  fp32 inside, rounded once to the dtype of q or k. (transformers first rounds both products and the rotated
          half to that dtype.) Columns that pass through are exact. One copy of each cosine is read.
Traffic   2 (Hq + Hk) D elements a token, in forward and in backward; cos and sin once; only these two are saved
Source    Su et al. 2021, arXiv:2104.09864; sections of temporal, height and width positions: Qwen2-VL, Wang et al.
          2024, arXiv:2409.12191
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import check_dtypes, first_order, stats_dtype
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES

TILE, WARPS = SHAPES.ROPE  # elements of q or k per program


class Angles(NamedTuple):
    """Which columns rotate, and where their cosines and sines lie."""

    pairs: int  # R / 2
    step: int  # columns of cos from one pair's value to the next
    ends: tuple[int, int]  # where the second and the third mrope section begin; (pairs, pairs) without sections
    interleaved: bool


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x with its first 2 * cos.shape[-1] columns rotated, in cos' dtype. cos, sin: see `take_angles`."""
    turning = 2 * cos.shape[-1]
    wide = x[..., :turning].to(cos.dtype)
    # first and second columns of the pairs
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return y if turning == x.shape[-1] else torch.cat((y, x[..., turning:].to(y.dtype)), -1)


def take_angles(cos: Tensor, sin: Tensor, angles: Angles, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return one cosine and one sine per pair, (B or 1, S, R/2), as constants in `dtype`."""
    bounds = (0, *angles.ends, angles.pairs)
    taken = []
    for x in (cos.detach(), sin.detach()):
        x = x[..., : angles.pairs * angles.step : angles.step].to(dtype)
        if x.dim() == 4:
            # each section from its own positions
            x = torch.cat([x[axis, ..., bounds[axis] : bounds[axis + 1]] for axis in range(3)], -1)
        taken.append(x)
    return taken[0], taken[1]


def rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False,
    mrope_section: Sequence[int] | None = None, half_width: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    angles = angles_of(cos, interleaved, mrope_section, half_width)
    c, s = (x.unsqueeze(1) for x in take_angles(cos, sin, angles, stats_dtype(q.dtype)))
    return rotate(q, c, s, interleaved).to(q.dtype), rotate(k, c, s, interleaved).to(k.dtype)


@triton.jit
def locate(block, H: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Return tokens (TOKENS, 1, 1) and heads (1, HEADS, 1) of a tile. Tiles of the same tokens are adjacent."""
    head_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    token = block // head_blocks * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = block % head_blocks * HEADS + tl.arange(0, HEADS)[None, :, None]
    return token, head.to(tl.int64)


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, batch, position, inside, stride_axis, stride_batch, stride_position, stride_pair,
    PAIRS: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load cosines and sines, (TOKENS, 1, BLOCK) each. Columns that pass through get the angle 0."""
    pair = tl.arange(0, BLOCK)[None, None, :]
    at = batch * stride_batch + position * stride_position + pair * stride_pair
    if END_0 < PAIRS:
        # the axis is the number of ends passed
        at += ((pair >= END_0).to(tl.int64) + (pair >= END_1).to(tl.int64)) * stride_axis
    mask = inside & (pair < PAIRS)
    cos = tl.load(cos_ptr + at, mask=mask, other=1.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _columns(D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first and second column of each pair, not interleaved. Columns beyond 2 * PAIRS form pairs too."""
    pair = tl.arange(0, BLOCK)[None, None, :]
    first = pair
    second = pair + PAIRS
    if 2 * PAIRS < D:
        turns = pair < PAIRS
        first = tl.where(turns, pair, pair + PAIRS)
        second = tl.where(turns, pair + PAIRS, pair + D // 2)
    return first, second, pair < D // 2


@triton.jit
def load_pairs(rows, live, D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the first and second columns of D/2 pairs in fp32, (TOKENS, HEADS, BLOCK) each. rows: pointers."""
    if INTERLEAVED:  # read whole lines, then split them in registers
        cols = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.load(rows + cols, mask=live & (cols < D), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, x.shape[0], x.shape[1], BLOCK, 2))
    else:
        first, second, mask = _columns(D, PAIRS, BLOCK)
        a = tl.load(rows + first, mask=live & mask, other=0.0).to(tl.float32)
        b = tl.load(rows + second, mask=live & mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(rows, a, b, live, D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.reshape(tl.join(a, b), a.shape[0], a.shape[1], 2 * BLOCK)
        tl.store(rows + cols, x.to(rows.dtype.element_ty), mask=live & (cols < D))
    else:
        first, second, mask = _columns(D, PAIRS, BLOCK)
        tl.store(rows + first, a.to(rows.dtype.element_ty), mask=live & mask)
        tl.store(rows + second, b.to(rows.dtype.element_ty), mask=live & mask)


@triton.jit
def _rotate_tile(
    x_ptr, y_ptr, cos_ptr, sin_ptr, block, T, S, x_batch, x_head, x_position, y_batch, y_head, y_position,
    cos_axis, cos_batch, cos_position, cos_pair, sign,
    H: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token, head = locate(block, H, TOKENS, HEADS)
    batch, position = (token // S).to(tl.int64), (token % S).to(tl.int64)  # int64: times a stride passes 2^31
    live = (token < T) & (head < H)
    cos, sin = load_angles(
        cos_ptr, sin_ptr, batch, position, token < T, cos_axis, cos_batch, cos_position, cos_pair,
        PAIRS, END_0, END_1, BLOCK,
    )  # fmt: skip
    sin = sin * sign  # -1 turns back: the backward
    rows = x_ptr + batch * x_batch + head * x_head + position * x_position
    a, b = load_pairs(rows, live, D, PAIRS, BLOCK, INTERLEAVED)
    rows = y_ptr + batch * y_batch + head * y_head + position * y_position
    store_pairs(rows, a * cos - b * sin, b * cos + a * sin, live, D, PAIRS, BLOCK, INTERLEAVED)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, T, S,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    q_out_batch, q_out_head, q_out_position, k_out_batch, k_out_head, k_out_position,
    cos_axis, cos_batch, cos_position, cos_pair, sign,
    HQ: tl.constexpr, TOKENS_Q: tl.constexpr, HEADS_Q: tl.constexpr,
    HK: tl.constexpr, TOKENS_K: tl.constexpr, HEADS_K: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    q_blocks = tl.cdiv(T, TOKENS_Q) * (HQ // HEADS_Q)  # the first programs take q's tiles, the others k's
    if block < q_blocks:
        _rotate_tile(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, block, T, S, q_batch, q_head, q_position,
            q_out_batch, q_out_head, q_out_position, cos_axis, cos_batch, cos_position, cos_pair, sign,
            HQ, TOKENS_Q, HEADS_Q, D, PAIRS, BLOCK, END_0, END_1, INTERLEAVED,
        )  # fmt: skip
    else:
        _rotate_tile(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, block - q_blocks, T, S, k_batch, k_head, k_position,
            k_out_batch, k_out_head, k_out_position, cos_axis, cos_batch, cos_position, cos_pair, sign,
            HK, TOKENS_K, HEADS_K, D, PAIRS, BLOCK, END_0, END_1, INTERLEAVED,
        )  # fmt: skip


def head_tile(H: int, D: int, tile: int) -> tuple[int, int]:
    """Return (tokens, heads) of a tile of about `tile` elements. The heads divide H, so that no lane is idle."""
    width = triton.next_power_of_2(D)
    heads = min(H & -H, max(1, tile // width))  # H & -H: the largest power of two that divides H
    return max(1, tile // (heads * width)), heads


@functools.cache
def _config(hq: int, hk: int, D: int, angles: Angles, tile: int, warps: int) -> dict:
    (tokens_q, heads_q), (tokens_k, heads_k) = head_tile(hq, D, tile), head_tile(hk, D, tile)
    return dict(
        HQ=hq, TOKENS_Q=tokens_q, HEADS_Q=heads_q, HK=hk, TOKENS_K=tokens_k, HEADS_K=heads_k, num_warps=warps,
        D=D, PAIRS=angles.pairs, BLOCK=triton.next_power_of_2(D // 2), END_0=angles.ends[0], END_1=angles.ends[1],
        INTERLEAVED=angles.interleaved,
    )  # fmt: skip


@remembered
def _launch(
    shape: torch.Size, hk: int, sides: int, strides: tuple[int, ...], angles: Angles, sign: float, tile: int, warps: int
) -> Launch:
    B, hq, S, D = shape
    config = _config(hq, hk, D, angles, tile, warps)
    blocks = -(-B * S // config["TOKENS_Q"]) * (hq // config["HEADS_Q"])
    if sides == 2:
        blocks += -(-B * S // config["TOKENS_K"]) * (hk // config["HEADS_K"])
    return Launch(_rope_kernel, (blocks,), B * S, S, *strides, sign, **config)


def _rotate_triton(sides: list[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, angles: Angles, sign: float) -> None:
    """Rotate one or two tensors (B, H, S, D). sides: pairs (input, output)."""
    (q, q_out), (k, k_out) = sides[0], sides[-1]
    strides = (*q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *angle_strides(cos, angles))
    launch = _launch(q.shape, k.shape[1], len(sides), strides, angles, sign, TILE, WARPS)
    launch(q, k, q_out, k_out, cos, sin)


def angle_strides(cos: Tensor, angles: Angles) -> tuple[int, int, int, int]:
    """Return the elements from one (axis, batch row, position, pair) to the next."""
    axis = cos.stride(0) if cos.dim() == 4 else 0  # without sections all pairs are of one axis
    return axis, cos.stride(-3) if cos.shape[-3] > 1 else 0, cos.stride(-2), cos.stride(-1) * angles.step


def same_strides(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


def dense_columns(x: Tensor) -> Tensor:
    """Return x with consecutive columns. Copy only if they aren't, like the expanded gradient of a plain sum."""
    return x if x.stride(-1) == 1 else x.contiguous()


class RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, angles):
        q, k, (cos, sin) = dense_columns(q), dense_columns(k), same_strides(cos, sin)
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        sides = [(x, out) for x, out in ((q, q_out), (k, k_out)) if x.shape[1]]
        if sides:
            _rotate_triton(sides, cos, sin, angles, 1.0)
        ctx.save_for_backward(cos, sin)
        ctx.angles, ctx.strides = angles, (q_out.stride(), k_out.stride())
        ctx.set_materialize_grads(False)  # an output without a gradient stays None, and is not rotated back
        if not (ctx.needs_input_grad[0] and ctx.needs_input_grad[1]):
            # else autograd would expect a gradient of theirs
            frozen = zip((q_out, k_out), ctx.needs_input_grad, strict=False)
            ctx.mark_non_differentiable(*(x for x, needed in frozen if not needed))
        return q_out, k_out

    @staticmethod
    @first_order
    def backward(ctx, *grad_outputs):
        grads: list[Tensor | None] = [None, None]
        sides = []
        for i, upstream in enumerate(grad_outputs):
            if upstream is not None and ctx.needs_input_grad[i] and upstream.shape[1]:
                upstream = dense_columns(upstream)
                # in the order of the input: nobody copies it
                grad = upstream.new_empty_strided(upstream.shape, ctx.strides[i])
                sides.append((upstream, grad))
                grads[i] = grad
        if sides:
            cos, sin = ctx.saved_tensors
            _rotate_triton(sides, cos, sin, ctx.angles, -1.0)
        return *grads, None, None, None


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False,
    mrope_section: Sequence[int] | None = None, half_width: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate queries and keys by their positions' angles, differentiable in q and k.

    Args:
        q: (B, Hq, S, D), fp32, fp16 or bf16 (fp64: torch). Any strides; copied if its columns are not consecutive.
        k: (B, Hk, S, D), like q. No heads (Hk = 0) where only q is rotated.
        cos: cosines, constants, (B or 1, S, R) with R <= D even: the first R columns rotate, the others pass through.
            It holds each pair's cosine twice, as in transformers: the R/2 values, then the same again (Llama), or each
            next to its copy if interleaved (Cohere). With mrope_section (3, B or 1, S, R).
        sin: sines, like cos.
        interleaved: pairs are columns 2j and 2j + 1, instead of j and j + R/2.
        mrope_section: how many pairs take the angle of the first, the second and the third position (Qwen2-VL's
            time, height, width); they sum to R/2.
        half_width: cos and sin hold each pair's value once, (B or 1, S, R/2), as in GPT-OSS and in the real and
            imaginary parts of Llama 4's frequencies. For GLM (interleaved, with Llama's layout of cosines) pass
            cos[..., : R // 2] and this option.

    Returns:
        q and k, rotated, in their own dtypes. On the GPU, they and the gradients have the memory layouts of q and k.

    Raises:
        ValueError: if shapes don't fit.
    """
    check_dtypes(q=q, k=k, cos=cos, sin=sin)
    angles = angles_of(cos, interleaved, mrope_section, half_width)
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(
            f"q (B, Hq, S, D) and k (B, Hk, S, D) must share B, S and D: q is {tuple(q.shape)}, k is {tuple(k.shape)}."
        )
    check_angles(cos, sin, angles, q.shape[0], q.shape[2], q.shape[3])
    if torch.compiler.is_compiling() or not use_triton(q):
        return rope_reference(
            q, k, cos, sin, interleaved=interleaved, mrope_section=mrope_section, half_width=half_width
        )
    return RopeFunction.apply(q, k, cos, sin, angles)


def angles_of(cos: Tensor, interleaved: bool, mrope_section: Sequence[int] | None, half_width: bool) -> Angles:
    pairs = cos.shape[-1] if half_width else cos.shape[-1] // 2
    ends = (pairs, pairs)  # no section begins
    if mrope_section is not None:
        if len(mrope_section) != 3 or sum(mrope_section) != pairs or min(mrope_section) < 0:
            raise ValueError(f"mrope_section must be 3 numbers that sum to {pairs} pairs, got {list(mrope_section)}.")
        ends = (mrope_section[0], mrope_section[0] + mrope_section[1])
    if cos.dim() != (3 if mrope_section is None else 4):
        raise ValueError(
            f"cos must be (B or 1, S, R), or (3, B or 1, S, R) with mrope_section, here {mrope_section}: "
            f"it is {tuple(cos.shape)}."
        )
    return Angles(pairs, 2 if interleaved and not half_width else 1, ends, interleaved)


def check_angles(cos: Tensor, sin: Tensor, angles: Angles, B: int, S: int, D: int) -> None:
    leading = cos.shape[-3:-1]
    if cos.shape != sin.shape or leading not in ((1, S), (B, S)) or (cos.dim() == 4 and cos.shape[0] != 3):
        raise ValueError(
            f"cos and sin must be ({'3, ' * (cos.dim() == 4)}1 or {B}, {S}, R): "
            f"cos is {tuple(cos.shape)}, sin is {tuple(sin.shape)}."
        )
    if 2 * angles.pairs > D or D % 2 or cos.shape[-1] not in (angles.pairs, 2 * angles.pairs):
        raise ValueError(
            f"R must be even and at most the {D} (also even) columns of q and k: cos is {tuple(cos.shape)}, so R is "
            f"{cos.shape[-1] if angles.pairs < cos.shape[-1] else 2 * angles.pairs}."
        )
