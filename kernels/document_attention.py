"""Causal attention within documents that lie end to end: packed rows without a mask, whatever their number.

    o_i = sum over j of softmax(scale * q_i k_j) v_j,   j from the document's first token, or i - window + 1, to i

Shapes    q, o: (T, Hq, D)   k, v: (T, Hk, D), Hq a multiple of Hk   bounds: (2, T) int32   lse, delta: (Hq, T) fp32
Method    each token knows where its document begins and ends (`document_bounds`), so the grid depends only on T and a
          CUDA graph serves any number of documents. A program has BLOCK_M queries of one head and walks over the keys
          from the first document that begins in or before the block; blocks that all its queries see whole take no
          mask. Backward: one kernel for dq and o . do, one for dk and dv that walks over the queries of all heads of a
          key's group, so that nothing is added by atomics and results are the same every time.
Numerics  scores, softmax and sums in fp32, base 2; probabilities and their gradients are cast to the inputs' dtype for
          the matrix products, as FlashAttention does
Traffic   forward (2 Hq + 2 Hk) D elements a token, backward twice that; q, k, v, o and lse are saved
Source    FlashAttention-2 (Dao 2023, arXiv:2307.08691), whose variable-length form counts documents in its grid
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import check_dtypes, first_order, stats_dtype
from ._logits import LOG2E
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES, Architecture, architecture_of

WIDEST = 256  # D
BOUNDS_BLOCK = SHAPES.ATTENTION_BOUNDS


class Tiles(NamedTuple):
    """Queries and keys of a block, and how a kernel is compiled."""

    m: int
    n: int
    warps: int
    stages: int


def document_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Return in plain torch what the op must equal, with a mask of T x T. Tests and benchmarks import this."""
    first, _ = document_bounds_reference(ends, q.shape[0])
    at = torch.arange(q.shape[0], device=q.device)
    seen = (at >= first[:, None]) & (at <= at[:, None])
    if window is not None:
        seen &= at > at[:, None] - window
    dtype = stats_dtype(q.dtype)
    queries, keys, values = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (keys, values))
    scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)  # (Hq, T, T)
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(0, 1).to(q.dtype)


def document_bounds_reference(ends: Tensor, T: int) -> Tensor:
    at = torch.arange(T, device=ends.device, dtype=ends.dtype)
    document = torch.searchsorted(ends, at, right=True)
    return torch.stack([ends[document - 1], ends[document]]).int()


@triton.jit
def _bounds_kernel(ends_ptr, bounds_ptr, T, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Find for each token the last end at or before it, and the next one, by bisection."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + n  # ends[low] <= at < ends[high]
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = tl.load(ends_ptr + middle) <= at  # per lane: each token has its own interval
        low = tl.where(before & (middle > low), middle, low)
        high = tl.where(before, high, middle)
    tl.store(bounds_ptr + at, tl.load(ends_ptr + low).to(tl.int32), mask=at < T)
    tl.store(bounds_ptr + T + at, tl.load(ends_ptr + high).to(tl.int32), mask=at < T)


@triton.jit
def _load_rows(base, rows, stride, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load (rows, BLOCK_D); zeros beyond T and D."""
    columns = tl.arange(0, BLOCK_D)
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(base + at, mask=(rows < T)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _store_rows(base, x, rows, stride, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(base + at, x.to(base.dtype.element_ty), mask=(rows < T)[:, None] & (columns < D)[None, :])


@triton.jit
def _first_seen(bounds_ptr, rows, T, window, WINDOW: tl.constexpr):
    """Return the first key that each query sees. Queries beyond T see themselves."""
    first = tl.load(bounds_ptr + rows, mask=rows < T, other=2147483647)
    if WINDOW:  # a token is the last of the `window` that it sees
        first = tl.maximum(first, rows - window + 1)
    return tl.minimum(first, rows)


@triton.jit
def _key_ranges(first, m0, T, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where the keys of a block of queries begin, the range that all of them see whole, and the end."""
    begin = tl.min(first, 0) // BLOCK_N * BLOCK_N  # down to a block of keys, whose first ones may be unseen
    end = tl.minimum(m0 + BLOCK_M, T)
    # from here on every query of the block sees whole blocks
    whole = (tl.max(first, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    past = (m0 + 1) // BLOCK_N * BLOCK_N  # up to here every key lies at or before the first query
    past = tl.maximum(past, begin)
    whole = tl.minimum(tl.maximum(whole, begin), past)
    return begin, whole, past, end


@triton.jit
def _product(a, b, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _scores(q, k, rows, keys, first, scale, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """Return scores in base 2, (queries, keys)."""
    s = _product(q, tl.trans(k), EXACT) * scale  # scale holds log2 e
    if MASKED:
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= rows[:, None])
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _attend(
    acc, top, total, q, k_base, v_base, k_row, v_row, begin, end, rows, first, scale, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    for n0 in range(begin, end, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        k = _load_rows(k_base, keys, k_row, T, D, BLOCK_D)
        s = _scores(q, k, rows, keys, first, scale, MASKED, EXACT)
        higher = tl.maximum(top, tl.max(s, 1))
        shift = higher  # what is subtracted from the scores
        if MASKED:
            # a query that has seen no key yet: -inf - -inf would be NaN
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(top - shift)  # of what was summed under the former maximum
        total = total * shrink + tl.sum(p, 1)
        v = _load_rows(v_base, keys, v_row, T, D, BLOCK_D)
        acc = acc * shrink[:, None] + _product(p.to(v.dtype), v, EXACT)
        top = higher
    return acc, top, total


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bounds_ptr,
    T, q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, scale, window,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    rows = m0 + tl.arange(0, BLOCK_M)
    first = _first_seen(bounds_ptr, rows, T, window, WINDOW)
    begin, whole, past, end = _key_ranges(first, m0, T, BLOCK_M, BLOCK_N)
    q = _load_rows(q_ptr + head * q_head, rows, q_row, T, D, BLOCK_D)
    k_base, v_base = k_ptr + head // GROUP * k_head, v_ptr + head // GROUP * v_head
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc, top, total = _attend(
        acc, top, total, q, k_base, v_base, k_row, v_row, begin, whole, rows, first, scale, T,
        D, BLOCK_D, BLOCK_N, True, EXACT,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_base, v_base, k_row, v_row, whole, past, rows, first, scale, T,
        D, BLOCK_D, BLOCK_N, False, EXACT,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_base, v_base, k_row, v_row, past, end, rows, first, scale, T,
        D, BLOCK_D, BLOCK_N, True, EXACT,
    )  # fmt: skip
    total = tl.where(rows < T, total, 1.0)  # rows beyond T have no keys, and are not stored: avoid 0 / 0
    _store_rows(o_ptr + head * o_head, acc / total[:, None], rows, o_row, T, D, BLOCK_D)
    tl.store(lse_ptr + head * T + rows, top + tl.log2(total), mask=rows < T)


@triton.jit
def _add_dq(
    dq, q, do, lse, delta, k_base, v_base, k_row, v_row, begin, end, rows, first, scale, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    for n0 in range(begin, end, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        k = _load_rows(k_base, keys, k_row, T, D, BLOCK_D)
        v = _load_rows(v_base, keys, v_row, T, D, BLOCK_D)
        p = tl.exp2(_scores(q, k, rows, keys, first, scale, MASKED, EXACT) - lse[:, None])
        ds = p * (_product(do, tl.trans(v), EXACT) - delta[:, None])  # softmax's backward
        dq += _product(ds.to(k.dtype), k, EXACT)
    return dq


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, bounds_ptr,
    T, q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, do_row, do_head, dq_row, dq_head, scale, window,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    rows = m0 + tl.arange(0, BLOCK_M)
    first = _first_seen(bounds_ptr, rows, T, window, WINDOW)
    begin, whole, past, end = _key_ranges(first, m0, T, BLOCK_M, BLOCK_N)
    o = _load_rows(o_ptr + head * o_head, rows, o_row, T, D, BLOCK_D).to(tl.float32)
    do = _load_rows(do_ptr + head * do_head, rows, do_row, T, D, BLOCK_D)
    delta = tl.sum(o * do.to(tl.float32), 1)  # what softmax's backward subtracts
    tl.store(delta_ptr + head * T + rows, delta, mask=rows < T)
    q = _load_rows(q_ptr + head * q_head, rows, q_row, T, D, BLOCK_D)
    lse = tl.load(lse_ptr + head * T + rows, mask=rows < T, other=0.0)
    k_base, v_base = k_ptr + head // GROUP * k_head, v_ptr + head // GROUP * v_head
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dq = _add_dq(
        dq, q, do, lse, delta, k_base, v_base, k_row, v_row, begin, whole, rows, first, scale, T,
        D, BLOCK_D, BLOCK_N, True, EXACT,
    )  # fmt: skip
    dq = _add_dq(
        dq, q, do, lse, delta, k_base, v_base, k_row, v_row, whole, past, rows, first, scale, T,
        D, BLOCK_D, BLOCK_N, False, EXACT,
    )  # fmt: skip
    dq = _add_dq(
        dq, q, do, lse, delta, k_base, v_base, k_row, v_row, past, end, rows, first, scale, T,
        D, BLOCK_D, BLOCK_N, True, EXACT,
    )  # fmt: skip
    _store_rows(dq_ptr + head * dq_head, dq * (scale / LOG2E), rows, dq_row, T, D, BLOCK_D)


@triton.jit
def _add_dkdv(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, bounds_ptr, q_row, do_row, begin, end, keys, scale, window, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    for m0 in range(begin, end, BLOCK_M):
        rows = m0 + tl.arange(0, BLOCK_M)
        q = _load_rows(q_base, rows, q_row, T, D, BLOCK_D)
        do = _load_rows(do_base, rows, do_row, T, D, BLOCK_D)
        lse = tl.load(lse_base + rows, mask=rows < T, other=0.0)
        delta = tl.load(delta_base + rows, mask=rows < T, other=0.0)
        # (keys, queries), so that what comes out is the first operand of the next product as it is
        s = _product(k, tl.trans(q), EXACT) * scale
        if MASKED:
            first = _first_seen(bounds_ptr, rows, T, window, WINDOW)
            seen = (keys[:, None] >= first[None, :]) & (keys[:, None] <= rows[None, :])
            s = tl.where(seen, s, float("-inf"))
        p = tl.exp2(s - lse[None, :])
        dv += _product(p.to(do.dtype), do, EXACT)
        ds = p * (_product(v, tl.trans(do), EXACT) - delta[None, :])
        dk += _product(ds.to(q.dtype), q, EXACT)
    return dk, dv


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, bounds_ptr,
    T, q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head, dk_row, dk_head, dv_row, dv_head, scale, window,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BLOCK_N
    group = tl.program_id(1).to(tl.int64)
    keys = n0 + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr + group * k_head, keys, k_row, T, D, BLOCK_D)
    v = _load_rows(v_ptr + group * v_head, keys, v_row, T, D, BLOCK_D)
    # queries that see the last key, and those that see all keys of the block
    end = tl.load(bounds_ptr + T + tl.minimum(n0 + BLOCK_N, T) - 1)  # the end of the last key's document
    past = tl.load(bounds_ptr + T + n0)  # the end of the first key's
    if WINDOW:
        end = tl.minimum(end, n0 + BLOCK_N - 1 + window)
        past = tl.minimum(past, n0 + window)
    begin = n0 // BLOCK_M * BLOCK_M
    whole = (n0 + BLOCK_N - 1 + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    past = tl.maximum(past // BLOCK_M * BLOCK_M, begin)
    whole = tl.minimum(tl.maximum(whole, begin), past)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # All query heads that share this key head, one after the other: so no atomics, and one order of sums.
    for i in range(GROUP):
        head = group * GROUP + i
        q_base, do_base = q_ptr + head * q_head, do_ptr + head * do_head
        lse_base, delta_base = lse_ptr + head * T, delta_ptr + head * T
        dk, dv = _add_dkdv(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, bounds_ptr, q_row, do_row, begin, whole, keys, scale,
            window, T, D, BLOCK_D, BLOCK_M, WINDOW, True, EXACT,
        )  # fmt: skip
        dk, dv = _add_dkdv(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, bounds_ptr, q_row, do_row, whole, past, keys, scale,
            window, T, D, BLOCK_D, BLOCK_M, WINDOW, False, EXACT,
        )  # fmt: skip
        dk, dv = _add_dkdv(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, bounds_ptr, q_row, do_row, past, end, keys, scale,
            window, T, D, BLOCK_D, BLOCK_M, WINDOW, True, EXACT,
        )  # fmt: skip
    _store_rows(dk_ptr + group * dk_head, dk * (scale / LOG2E), keys, dk_row, T, D, BLOCK_D)
    _store_rows(dv_ptr + group * dv_head, dv, keys, dv_row, T, D, BLOCK_D)


def tiles_of(kind: str, D: int, exact: bool, architecture: Architecture) -> Tiles:
    """Return the tiles of a kernel: "forward", "dq" or "dkdv"."""
    of_width = architecture.attention_exact if exact else architecture.attention[kind]
    return Tiles(*of_width[next(width for width in of_width if D <= width)])


class _Call(NamedTuple):
    T: int
    group: int  # query heads of a key head
    D: int
    scale: float
    window: int | None
    exact: bool  # fp32
    architecture: Architecture


@remembered
def _launch(kind: str, heads: int, call: _Call, strides: tuple[int, ...]) -> Launch:
    kernel = {"forward": _forward_kernel, "dq": _dq_kernel, "dkdv": _dkdv_kernel}[kind]
    tiles = tiles_of(kind, call.D, call.exact, call.architecture)
    programs = -(-call.T // (tiles.n if kind == "dkdv" else tiles.m))  # dkdv: by keys, the others by queries
    return Launch(
        kernel, (programs, heads), call.T, *strides, call.scale * math.log2(math.e), call.window or 0,
        GROUP=call.group, D=call.D, BLOCK_D=max(16, triton.next_power_of_2(call.D)), BLOCK_M=tiles.m, BLOCK_N=tiles.n,
        WINDOW=call.window is not None, EXACT=call.exact, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@remembered
def _bounds_launch(T: int, n: int) -> Launch:
    steps = max(1, n.bit_length())  # halvings until one document is left
    return Launch(_bounds_kernel, (-(-T // BOUNDS_BLOCK),), T, n, BLOCK=BOUNDS_BLOCK, STEPS=steps)


def document_bounds(ends: Tensor, T: int) -> Tensor:
    """Return where each token's document begins and ends, (2, T) int32.

    Args:
        ends: (documents + 1,) int32, from 0 to T; equal ones are documents without tokens.
        T: tokens.
    """
    if not use_triton(ends.new_empty(0, dtype=torch.float32)):
        return document_bounds_reference(ends, T)
    bounds = ends.new_empty(2, T, dtype=torch.int32)
    _bounds_launch(T, ends.shape[0] - 1)(ends, bounds)
    return bounds


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class DocumentAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bounds, scale, window):
        q, k, v = _dense(q), _dense(k), _dense(v)
        T, heads, D = q.shape
        exact, architecture = q.dtype == torch.float32, architecture_of(q.device)
        ctx.call = _Call(T, heads // k.shape[1], D, scale, window, exact, architecture)
        o, lse = q.new_empty(q.shape), q.new_empty(heads, T, dtype=torch.float32)
        if T:
            _launch("forward", heads, ctx.call, _strides(q, k, v, o))(q, k, v, o, lse, bounds)
        ctx.save_for_backward(q, k, v, o, lse, bounds)
        return o

    @staticmethod
    @first_order
    def backward(ctx, do):
        q, k, v, o, lse, bounds = ctx.saved_tensors
        do, delta = _dense(do), torch.empty_like(lse)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        if ctx.call.T:
            strides = _strides(q, k, v, o, do, dq)
            _launch("dq", q.shape[1], ctx.call, strides)(q, k, v, o, do, lse, delta, dq, bounds)
            strides = _strides(q, k, v, do, dk, dv)
            _launch("dkdv", k.shape[1], ctx.call, strides)(q, k, v, do, lse, delta, dk, dv, bounds)
        return dq, dk, dv, None, None, None


def launches(q: Tensor) -> bool:
    """Return whether the op launches its kernels for q: without Triton, and while torch.compile traces, it makes a
    mask of T x T."""
    return not torch.compiler.is_compiling() and use_triton(q)


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute causal attention within documents, differentiable in q, k and v.

    Args:
        q: (T, Hq, D), fp32, fp16 or bf16 (fp64: torch), D at most 256. Any strides with consecutive columns.
        k, v: (T, Hk, D), in the dtype of q; Hk divides Hq.
        ends: (documents + 1,) int32: where documents begin and end, from 0 to T.
        scale: of the scores; D ** -0.5 unless given.
        window: how many tokens each sees, itself among them.
        bounds: `document_bounds(ends, T)`, where it is known.

    Returns:
        (T, Hq, D), contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_dtypes(q=q, k=k, v=v)
    if q.dim() != 3 or k.shape != v.shape or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(
            "q (T, Hq, D), k and v (T, Hk, D) must share T and D: "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}."
        )
    if q.shape[1] % k.shape[1] or q.shape[2] > WIDEST:
        raise ValueError(f"Hk must divide Hq, and D be at most {WIDEST}: q is {tuple(q.shape)}, k {tuple(k.shape)}.")
    if {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(f"q, k and v must share their dtype: {q.dtype}, {k.dtype}, {v.dtype}.")
    if not launches(q):
        return document_attention_reference(q, k, v, ends, scale=scale, window=window)
    bounds = document_bounds(ends, q.shape[0]) if bounds is None else bounds
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return DocumentAttentionFunction.apply(q, k, v, bounds, scale, window)
