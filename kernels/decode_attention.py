"""Attention of one new token a row over the keys and values that its row has kept; the new ones are kept too.

    o = sum over j of softmax(scale * q k_j) v_j,   j from 0, or length - window + 1, to length

Queries and new keys may come as they were before their RMSNorm and their rotation (qk_norm_rope.py, rope.py).

Shapes    q, o: (B, Hq, D)   k, v: (B, Hk, D), Hq a multiple of Hk   keys, values: (slots, Hk, longest, D)
          slots, lengths: (B,) int32: where a row's keys are, and how many it has. The new ones become number `length`
          cos, sin: (B, R), R <= D
Method    a program has the queries of one key head of one row, padded to 16 for the tensor cores. It writes the new key
          and value, takes them from its registers, and walks over the others. Where keys and values lie is read from
          `places` on the device: a CUDA graph of the op serves them wherever they are when it is replayed.
Numerics  scores, softmax and sums in fp32; probabilities are cast to the values' dtype for the product, as in
          FlashAttention
Traffic   every kept key and value once
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import stats_dtype
from ._logits import transformed
from ._triton import Launch, kept_launch, tl, triton, use_triton
from ._tuning import SHAPES
from .qk_norm_rope import qk_norm_rope_reference
from .rope import rope_reference

WIDEST = 256  # D


class QKNorm(NamedTuple):
    """RMSNorms of queries and keys, head by head: weights (D,), and what `qk_norm_rope` says of the rest."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float
    cast_before_weight: bool


class Rotation(NamedTuple):
    """Angles, a pair for each row: cosines and sines (B, R), the R/2 values and then the same again; norms before."""

    cos: Tensor
    sin: Tensor
    norm: QKNorm | None = None


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, *, scale: float,
    softcap: float | None = None, window: int | None = None, rotation: Rotation | None = None,
) -> Tensor:  # fmt: skip
    """Return in plain torch what the op must equal, and keep the new keys and values."""
    if rotation is not None:
        cos, sin = rotation.cos[:, None], rotation.sin[:, None]
        if rotation.norm is None:
            turned = rope_reference(q[:, :, None], k[:, :, None], cos, sin)
        else:
            q_weight, k_weight, *_ = norm = rotation.norm
            how = {"eps": norm.eps, "offset": norm.offset, "cast_before_weight": norm.cast_before_weight}
            turned = qk_norm_rope_reference(q[:, None], k[:, None], q_weight, k_weight, cos, sin, **how)
        q, k = (x[:, :, 0].to(q.dtype) for x in turned)
    slots, lengths = slots.long(), lengths.long()
    keys[slots, :, lengths], values[slots, :, lengths] = k.to(keys.dtype), v.to(values.dtype)
    dtype, group = stats_dtype(q.dtype), q.shape[1] // k.shape[1]
    kept = (x[slots].to(dtype).repeat_interleave(group, 1) for x in (keys, values))
    of_rows, to_add = kept
    scores = torch.einsum("bhd,bhnd->bhn", q.to(dtype), of_rows) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at, last = torch.arange(keys.shape[2], device=q.device), lengths[:, None]
    seen = at <= last
    if window is not None:
        seen &= at > last - window
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    to_add = to_add.masked_fill(~seen[:, None, :, None], 0.0)  # what is behind the last key may be anything
    return torch.einsum("bhn,bhnd->bhd", weights, to_add).to(q.dtype)


@triton.jit
def _turned(
    rows, live, d, w_ptr, eps, offset, cos_ptr, sin_ptr, D: tl.constexpr, R: tl.constexpr, CAST: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Return rows of queries or keys, normed and rotated. rows: pointers to their first columns, (ROWS, 1)."""
    x = tl.load(rows + d[None, :], mask=live & (d < D)[None, :], other=0.0)
    if R > 0:
        first = d < R // 2
        partner = tl.where(first, d + R // 2, d - R // 2)
        other = tl.load(rows + partner[None, :], mask=live & (d < R)[None, :], other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        if w_ptr is not None:
            rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            x, other = x * rstd, other * rstd
            if CAST:  # as models that round before the weight
                x, other = x.to(KEPT).to(tl.float32), other.to(KEPT).to(tl.float32)
            x *= (tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32) + offset)[None, :]
            other *= (tl.load(w_ptr + partner, mask=d < R, other=0.0).to(tl.float32) + offset)[None, :]
        cos = tl.load(cos_ptr + d, mask=d < R, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + d, mask=d < R, other=0.0).to(tl.float32)
        x = (x * cos[None, :] + other * tl.where(first, -sin, sin)[None, :]).to(KEPT)
    return x


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, places_ptr, slots_ptr, lengths_ptr, o_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, scale, softcap, window, eps, offset, angles, R: tl.constexpr,
    CAST: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, KEPT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """places_ptr: int64, the addresses of keys and values, and `longest`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    d, query = tl.arange(0, BLOCK_D), tl.arange(0, QUERIES)
    columns = d < D
    live = query[:, None] < GROUP
    ours = live & columns[None, :]
    heads = head * GROUP + query[:, None]
    if R > 0:
        cos_ptr, sin_ptr = cos_ptr + row * angles, sin_ptr + row * angles
    rows = q_ptr + row * q_row + heads * q_head
    q = _turned(rows, live, d, q_weight_ptr, eps, offset, cos_ptr, sin_ptr, D, R, CAST, KEPT)
    one = tl.zeros((1, 1), tl.int32)
    rows = k_ptr + row * k_row + head * k_head + one
    k_new = _turned(rows, one == 0, d, k_weight_ptr, eps, offset, cos_ptr, sin_ptr, D, R, CAST, KEPT)
    k_new = tl.reshape(k_new, (BLOCK_D,))
    v_new = tl.load(v_ptr + row * v_row + head * v_head + d, mask=columns, other=0.0)
    first_key = (slot * HEADS + head) * tl.load(places_ptr + 2) * D
    # A load through a table has lost what Triton knows of alignment, without which it reads 2 bytes at a time.
    keys = tl.multiple_of(tl.load(places_ptr).to(tl.pointer_type(KEPT)), 16) + first_key
    values = tl.multiple_of(tl.load(places_ptr + 1).to(tl.pointer_type(KEPT)), 16) + first_key
    tl.store(keys + length.to(tl.int64) * D + d, k_new.to(KEPT), mask=columns)
    tl.store(values + length.to(tl.int64) * D + d, v_new.to(KEPT), mask=columns)
    # The new key is taken from registers: other threads of the program may not see yet what one has stored.
    new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1)
    most = transformed(new, scale, softcap, SOFTCAP, True)[0]
    total = tl.full((QUERIES,), 1.0, tl.float32)
    o = tl.zeros((QUERIES, BLOCK_D), tl.float32) + v_new.to(tl.float32)[None, :]
    first = 0
    if WINDOW:
        first = tl.maximum(length - window + 1, 0) // BLOCK_N * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    for start in tl.range(first, length, BLOCK_N, num_stages=STAGES):
        at = start + n
        seen = at < length
        if WINDOW:
            seen = seen & (at > length - window)
        k = tl.load(keys + at[None, :] * D + d[:, None], mask=seen[None, :] & columns[:, None], other=0.0)
        scores = transformed(tl.dot(q, k, input_precision=PRECISION), scale, softcap, SOFTCAP, True)[0]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        weights, kept = tl.exp2(scores - more[:, None]), tl.exp2(most - more)
        v = tl.load(values + at[:, None] * D + d[None, :], mask=seen[:, None] & columns[None, :], other=0.0)
        o = o * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * kept + tl.sum(weights, 1)
        most = more
    out = o_ptr + (row * HEADS * GROUP + heads) * D + d[None, :]
    tl.store(out, (o / total[:, None]).to(o_ptr.dtype.element_ty), mask=ours)


def places_of(keys: Tensor, values: Tensor) -> list[int]:
    """Return what `places` holds for keys and values of one layer."""
    return [keys.data_ptr(), values.data_ptr(), keys.shape[2]]


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, *, scale: float,
    softcap: float | None = None, window: int | None = None, places: Tensor | None = None,
    rotation: Rotation | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention of one new token a row, without gradients, and keep its key and value.

    Args:
        q: (B, Hq, D), fp32, fp16 or bf16 (fp64: torch), D at most 256. Any strides with consecutive columns.
        k, v: (B, Hk, D), of the new tokens; Hk divides Hq.
        keys, values: (slots, Hk, longest, D), contiguous, in the dtype of q. Entry `lengths` of a row's
            slot is written.
        slots: (B,) int32; rows that share one write over each other.
        lengths: (B,) int32, below `longest`: the keys that a row has kept.
        scale: of the scores.
        softcap: scores become softcap * tanh(score / softcap).
        window: how many tokens each sees, itself among them.
        places: (3,) int64 on the device, `places_of(keys, values)` of whatever keys and values a replay is to use.
        rotation: of q and k; None: they are rotated already, or not to be.

    Returns:
        (B, Hq, D), contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    B, heads, D = q.shape
    if k.shape != v.shape or k.shape[::2] != (B, D) or keys.shape != values.shape or keys.shape[1::2] != k.shape[1:]:
        raise ValueError(
            "q (B, Hq, D), k and v (B, Hk, D), keys and values (slots, Hk, longest, D) must share B, Hk and D: "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, {tuple(keys.shape)}, {tuple(values.shape)}."
        )
    if heads % k.shape[1] or D > WIDEST or q.dtype != keys.dtype:
        raise ValueError(
            f"Hk must divide Hq, D be at most {WIDEST}, and keys have the dtype of q: q is {tuple(q.shape)} {q.dtype}, "
            f"keys {tuple(keys.shape)} {keys.dtype}."
        )
    if rotation is not None and (rotation.cos.shape != rotation.sin.shape or rotation.cos.shape[1] > D):
        shapes = tuple(rotation.cos.shape), tuple(rotation.sin.shape)
        raise ValueError(f"cos and sin must be (B, R) with R at most the {D} columns of q: they are {shapes}.")
    how = {"scale": scale, "softcap": softcap, "window": window, "rotation": rotation}
    if not use_triton(q):
        return decode_attention_reference(q, k, v, keys, values, slots, lengths, **how)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    o = q.new_empty(q.shape)
    places = torch.tensor(places_of(keys, values), device=q.device) if places is None else places
    cos, sin, norm = rotation or (None, None, None)
    if cos is not None and sin is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
    if B:
        launch = _launch(q, k, v, keys.dtype, scale, softcap, window, 0 if cos is None else cos.shape[1], norm)
        launch(q, k, v, places, slots, lengths, o, *((None, None) if norm is None else norm[:2]), cos, sin)
    return o


def _launch(
    q: Tensor, k: Tensor, v: Tensor, kept: torch.dtype, scale: float, softcap: float | None, window: int | None,
    turned: int, norm: QKNorm | None,
) -> Launch:  # fmt: skip
    B, heads, D = q.shape
    group = heads // k.shape[1]
    block, warps, stages = next(shape for most, shape in SHAPES.DECODE_ATTENTION.items() if D <= most)
    if D * q.element_size() > 512:  # more does not fit into shared memory
        block //= 2
    return kept_launch(
        _kernel, (B, k.shape[1]), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        scale, softcap or 1.0, window or 0, *((0.0, 0.0) if norm is None else norm[2:4]), turned, R=turned,
        CAST=norm is not None and norm.cast_before_weight, GROUP=group, HEADS=k.shape[1], D=D,
        BLOCK_D=max(16, triton.next_power_of_2(D)), QUERIES=max(16, triton.next_power_of_2(group)), BLOCK_N=block,
        KEPT=getattr(tl, str(kept).removeprefix("torch.")), SOFTCAP=softcap is not None, WINDOW=window is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
