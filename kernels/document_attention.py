"""Causal attention within documents that lie end to end, packed or all of one length, without a mask: with windows,
sinks and capped scores.

    u_ij = scale * q_i k_j, or softcap * tanh(that / softcap)
    p_ij = exp(u_ij) / (exp(sink) + sum over j of exp(u_ij)),   o_i = sum over j of p_ij v_j
    j from the document's first token, or i - window + 1, to i; without a sink no exp(sink)

    d sink = - sum over i of exp(sink) / (...) * delta_i,   delta_i = o_i . do_i;   du_ij = p_ij (do_i . v_j - delta_i)

Shapes    q, o: (T, Hq, D)   k, v: (T, Hk, D), Hq a multiple of Hk   sinks: (Hq,)   bounds: (2, T) int32
          lse, delta: (Hq, T) fp32
Method    each token knows where its document begins and ends (`document_bounds`, or by division where all have one
          length), so the grid depends only on T and a CUDA graph serves any number of documents. A program has BLOCK_M
          queries of one head and walks over the keys from the first that one of them sees; blocks that all its queries
          see whole take no mask. A sink is what the sum begins with. Backward: one kernel for dq and o . do, one for dk
          and dv that walks over the queries of all heads of a key's group, so that nothing is added by atomics and
          results are the same every time. Where this leaves multiprocessors idle, a group's heads are shared among
          programs, whose fp32 parts are added up in one order. Beyond 256 columns dk and dv no longer lie in registers
          side by side, and each has its own kernel.
Numerics  scores, softmax and sums in fp32, base 2; probabilities and their gradients are cast to the inputs' dtype for
          the matrix products, as FlashAttention does
Traffic   forward (2 Hq + 2 Hk) D elements a token, backward twice that; q, k, v, o and lse are saved
Source    FlashAttention-2 (Dao 2023, arXiv:2307.08691), whose variable-length form counts documents in its grid;
          sinks: Xiao et al. 2023, arXiv:2309.17453, learned as in gpt-oss; capped scores: Gemma 2, arXiv:2408.00118
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._autograd import check_dtypes, first_order, stats_dtype
from ._logits import LOG2E, transformed
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES, Architecture, architecture_of

WIDEST = 512  # D
NARROW = 256  # a window up to which most blocks of dk and dv are masked ones
TOGETHER = 256  # D up to which dk and dv lie in registers side by side
BOUNDS_BLOCK, SINKS_BLOCK, PROGRAMS = SHAPES.ATTENTION_BOUNDS, SHAPES.ATTENTION_SINKS, SHAPES.ATTENTION_PROGRAMS


class Tiles(NamedTuple):
    """Queries and keys of a block, and how a kernel is compiled."""

    m: int
    n: int
    warps: int
    stages: int


def document_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | int, *, scale: float | None = None, window: int | None = None,
    sinks: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return in plain torch what the op must equal, with a mask of T x T. Tests and benchmarks import this."""
    T, dtype = q.shape[0], stats_dtype(q.dtype)
    at = torch.arange(T, device=q.device)
    first = at // ends * ends if isinstance(ends, int) else document_bounds_reference(ends, T)[0]
    seen = (at >= first[:, None]) & (at <= at[:, None])
    if window is not None:
        seen &= at > at[:, None] - window
    queries, keys, values = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (keys, values))
    scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)  # (Hq, T, T)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:  # the score of a key without a value
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, T, 1)], -1)
    return (scores.softmax(-1)[..., :T] @ values).transpose(0, 1).to(q.dtype)


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
def _first_seen(bounds_ptr, rows, T, length, window, WINDOW: tl.constexpr):
    """Return the first key that each query sees. Queries beyond T see keys beyond T."""
    if bounds_ptr is None:
        first = rows // length * length  # T is a multiple of it
    else:
        first = tl.load(bounds_ptr + rows, mask=rows < T, other=2147483647)
    if WINDOW:  # a token is the last of the `window` that it sees
        first = tl.maximum(first, rows - window + 1)
    return tl.minimum(first, rows)


@triton.jit
def _document_end(bounds_ptr, at, T, length):
    if bounds_ptr is None:
        return (at // length + 1) * length
    else:
        return tl.load(bounds_ptr + T + at)


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
def _scores(q, k, rows, keys, first, scale, softcap, CAP: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """Return scores in base 2, (queries, keys), and what a softcap leaves of the products' gradient."""
    s, slope = transformed(_product(q, tl.trans(k), EXACT), scale, softcap, CAP, True)
    if MASKED:
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= rows[:, None])
        s = tl.where(seen, s, float("-inf"))  # after the softcap, whose slope stays finite
    return s, slope


@triton.jit
def _attend(
    acc, top, total, q, k_base, v_base, k_row, v_row, begin, end, rows, first, scale, softcap, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    for n0 in range(begin, end, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        k = _load_rows(k_base, keys, k_row, T, D, BLOCK_D)
        s, _ = _scores(q, k, rows, keys, first, scale, softcap, CAP, MASKED, EXACT)
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
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, bounds_ptr,
    T, q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, length, scale, softcap, window,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    rows = m0 + tl.arange(0, BLOCK_M)
    first = _first_seen(bounds_ptr, rows, T, length, window, WINDOW)
    begin, whole, past, end = _key_ranges(first, m0, T, BLOCK_M, BLOCK_N)
    q = _load_rows(q_ptr + head * q_head, rows, q_row, T, D, BLOCK_D)
    k_base, v_base = k_ptr + head // GROUP * k_head, v_ptr + head // GROUP * v_head
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if sinks_ptr is None:
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
    else:  # as if the sink were the first key, one without a value
        top = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
    acc, top, total = _attend(
        acc, top, total, q, k_base, v_base, k_row, v_row, begin, whole, rows, first, scale, softcap, T,
        D, BLOCK_D, BLOCK_N, CAP, True, EXACT,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_base, v_base, k_row, v_row, whole, past, rows, first, scale, softcap, T,
        D, BLOCK_D, BLOCK_N, CAP, False, EXACT,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_base, v_base, k_row, v_row, past, end, rows, first, scale, softcap, T,
        D, BLOCK_D, BLOCK_N, CAP, True, EXACT,
    )  # fmt: skip
    total = tl.where(rows < T, total, 1.0)  # rows beyond T have no keys, and are not stored: avoid 0 / 0
    _store_rows(o_ptr + head * o_head, acc / total[:, None], rows, o_row, T, D, BLOCK_D)
    tl.store(lse_ptr + head * T + rows, top + tl.log2(total), mask=rows < T)


@triton.jit
def _add_dq(
    dq, q, do, lse, delta, k_base, v_base, k_row, v_row, begin, end, rows, first, scale, softcap, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    for n0 in range(begin, end, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        k = _load_rows(k_base, keys, k_row, T, D, BLOCK_D)
        v = _load_rows(v_base, keys, v_row, T, D, BLOCK_D)
        s, slope = _scores(q, k, rows, keys, first, scale, softcap, CAP, MASKED, EXACT)
        ds = tl.exp2(s - lse[:, None]) * (_product(do, tl.trans(v), EXACT) - delta[:, None])  # softmax's backward
        if CAP:
            ds *= slope
        dq += _product(ds.to(k.dtype), k, EXACT)
    return dq


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, bounds_ptr,
    T, q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, do_row, do_head, dq_row, dq_head, length,
    scale, softcap, window,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    rows = m0 + tl.arange(0, BLOCK_M)
    first = _first_seen(bounds_ptr, rows, T, length, window, WINDOW)
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
        dq, q, do, lse, delta, k_base, v_base, k_row, v_row, begin, whole, rows, first, scale, softcap, T,
        D, BLOCK_D, BLOCK_N, CAP, True, EXACT,
    )  # fmt: skip
    dq = _add_dq(
        dq, q, do, lse, delta, k_base, v_base, k_row, v_row, whole, past, rows, first, scale, softcap, T,
        D, BLOCK_D, BLOCK_N, CAP, False, EXACT,
    )  # fmt: skip
    dq = _add_dq(
        dq, q, do, lse, delta, k_base, v_base, k_row, v_row, past, end, rows, first, scale, softcap, T,
        D, BLOCK_D, BLOCK_N, CAP, True, EXACT,
    )  # fmt: skip
    if not CAP:  # whose slope holds the scale
        dq *= scale
    _store_rows(dq_ptr + head * dq_head, dq, rows, dq_row, T, D, BLOCK_D)


@triton.jit
def _add_dkdv(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, bounds_ptr, q_row, do_row, begin, end, keys, length, scale,
    softcap, window, T,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    for m0 in range(begin, end, BLOCK_M):
        rows = m0 + tl.arange(0, BLOCK_M)
        q = _load_rows(q_base, rows, q_row, T, D, BLOCK_D)
        do = _load_rows(do_base, rows, do_row, T, D, BLOCK_D)
        lse = tl.load(lse_base + rows, mask=rows < T, other=0.0)
        # (keys, queries), so that what comes out is the first operand of the next product as it is
        s, slope = transformed(_product(k, tl.trans(q), EXACT), scale, softcap, CAP, True)
        if MASKED:
            first = _first_seen(bounds_ptr, rows, T, length, window, WINDOW)
            seen = (keys[:, None] >= first[None, :]) & (keys[:, None] <= rows[None, :])
            s = tl.where(seen, s, float("-inf"))
        p = tl.exp2(s - lse[None, :])
        if VALUES:
            dv += _product(p.to(do.dtype), do, EXACT)
        if KEYS:
            delta = tl.load(delta_base + rows, mask=rows < T, other=0.0)
            ds = p * (_product(v, tl.trans(do), EXACT) - delta[None, :])
            if CAP:
                ds *= slope
            dk += _product(ds.to(q.dtype), q, EXACT)
    return dk, dv


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, bounds_ptr,
    T, q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head, dk_row, dk_head, dv_row, dv_head, part_numbers,
    length, scale, softcap, window,
    GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BLOCK_N
    group, part = tl.program_id(1).to(tl.int64) // PARTS, tl.program_id(1).to(tl.int64) % PARTS
    keys = n0 + tl.arange(0, BLOCK_N)
    k = _load_rows(k_ptr + group * k_head, keys, k_row, T, D, BLOCK_D)
    v = k  # not read where only dv is computed
    if KEYS:
        v = _load_rows(v_ptr + group * v_head, keys, v_row, T, D, BLOCK_D)
    # queries that see the last key, and those that see all keys of the block
    end = _document_end(bounds_ptr, tl.minimum(n0 + BLOCK_N, T) - 1, T, length)
    past = _document_end(bounds_ptr, n0, T, length)
    if WINDOW:
        end = tl.minimum(end, n0 + BLOCK_N - 1 + window)
        past = tl.minimum(past, n0 + window)
    begin = n0 // BLOCK_M * BLOCK_M
    whole = (n0 + BLOCK_N - 1 + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    past = tl.maximum(past // BLOCK_M * BLOCK_M, begin)
    whole = tl.minimum(tl.maximum(whole, begin), past)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # The query heads that share this key head, or this program's part of them, one after the other: so no atomics, and
    # one order of sums.
    for i in range(GROUP // PARTS):
        head = group * GROUP + part * (GROUP // PARTS) + i
        q_base, do_base = q_ptr + head * q_head, do_ptr + head * do_head
        lse_base, delta_base = lse_ptr + head * T, delta_ptr + head * T
        dk, dv = _add_dkdv(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, bounds_ptr, q_row, do_row, begin, whole, keys, length,
            scale, softcap, window, T, D, BLOCK_D, BLOCK_M, KEYS, VALUES, WINDOW, CAP, True, EXACT,
        )  # fmt: skip
        dk, dv = _add_dkdv(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, bounds_ptr, q_row, do_row, whole, past, keys, length,
            scale, softcap, window, T, D, BLOCK_D, BLOCK_M, KEYS, VALUES, WINDOW, CAP, False, EXACT,
        )  # fmt: skip
        dk, dv = _add_dkdv(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, bounds_ptr, q_row, do_row, past, end, keys, length,
            scale, softcap, window, T, D, BLOCK_D, BLOCK_M, KEYS, VALUES, WINDOW, CAP, True, EXACT,
        )  # fmt: skip
    if KEYS:
        if not CAP:  # whose slope holds the scale
            dk *= scale
        _store_rows(dk_ptr + part * part_numbers + group * dk_head, dk, keys, dk_row, T, D, BLOCK_D)
    if VALUES:
        _store_rows(dv_ptr + part * part_numbers + group * dv_head, dv, keys, dv_row, T, D, BLOCK_D)


@triton.jit
def _sinks_kernel(sinks_ptr, lse_ptr, delta_ptr, dsinks_ptr, T, BLOCK: tl.constexpr):
    """Add up, over a head's queries, what the sink took of the weights, times delta."""
    head = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, T, BLOCK):
        at = start + tl.arange(0, BLOCK)
        lse = tl.load(lse_ptr + head * T + at, mask=at < T, other=float("inf"))
        delta = tl.load(delta_ptr + head * T + at, mask=at < T, other=0.0)
        total += tl.exp2(sink - lse) * delta
    tl.store(dsinks_ptr + head, -tl.sum(total, 0))


def tiles_of(kind: str, D: int, exact: bool, architecture: Architecture, window: int | None = None) -> Tiles:
    """Return the tiles of a kernel: "forward", "dq", "dkdv" up to TOGETHER columns, "dk" and "dv" beyond."""
    table = architecture.attention_exact if exact else architecture.attention
    narrow = kind == "dkdv" and not exact and window is not None and window <= NARROW
    of_width = table["narrow"] if narrow and D <= max(table["narrow"]) else table[kind]
    return Tiles(*of_width[next(width for width in of_width if D <= width)])


def parts_of(kind: str, key_heads: int, call: "_Call") -> int:
    """Return among how many programs the query heads of a key head are shared: as few as give every multiprocessor its
    programs."""
    tiles = tiles_of(kind, call.D, call.exact, call.architecture, call.window)
    programs = -(-call.T // tiles.n) * key_heads
    divisors = [parts for parts in range(1, call.group + 1) if call.group % parts == 0]
    return next((parts for parts in divisors if programs * parts >= PROGRAMS), call.group)


class _Call(NamedTuple):
    T: int
    group: int  # query heads of a key head
    D: int
    length: int  # of all documents; 0: they have bounds
    scale: float
    softcap: float | None
    window: int | None
    exact: bool  # fp32
    architecture: Architecture


@remembered
def _launch(kind: str, heads: int, call: _Call, strides: tuple[int, ...], parts: int = 1) -> Launch:
    kernel = {"forward": _forward_kernel, "dq": _dq_kernel}.get(kind, _dkdv_kernel)
    tiles, constants = tiles_of(kind, call.D, call.exact, call.architecture, call.window), {}
    if kernel is _dkdv_kernel:
        constants = {"PARTS": parts, "KEYS": kind != "dv", "VALUES": kind != "dk"}
    programs = -(-call.T // (tiles.n if constants else tiles.m))  # of dk and dv by keys, the others by queries
    return Launch(
        kernel, (programs, heads), call.T, *strides, call.length, call.scale, call.softcap or 0.0, call.window or 0,
        **constants, GROUP=call.group, D=call.D, BLOCK_D=max(16, triton.next_power_of_2(call.D)), BLOCK_M=tiles.m,
        BLOCK_N=tiles.n, WINDOW=call.window is not None, CAP=call.softcap is not None, EXACT=call.exact,
        num_warps=tiles.warps, num_stages=tiles.stages,
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


def _key_gradients(kind: str, call: _Call, *tensors: Tensor, bounds: Tensor | None) -> list[Tensor]:
    """Return dk and dv (kind "dkdv"), or the one of them, from q, k, v, do, lse and delta."""
    q, k, v, do, *_ = tensors
    parts = parts_of(kind, k.shape[1], call)
    made = [
        torch.empty_like(x) if parts == 1 else x.new_empty(parts, *x.shape, dtype=torch.float32)
        for x in ((k, v) if kind == "dkdv" else (k,))
    ]
    dk, dv = made[0], made[-1]
    of_part = [x if parts == 1 else x[0] for x in (dk, dv)]
    strides = (*_strides(q, k, v, do, *of_part), k.numel())
    _launch(kind, k.shape[1] * parts, call, strides, parts)(*tensors, dk, dv, bounds)
    return made if parts == 1 else [x.sum(0).to(k.dtype) for x in made]


@remembered
def _sinks_launch(heads: int, T: int) -> Launch:
    return Launch(_sinks_kernel, (heads,), T, BLOCK=SINKS_BLOCK)


class DocumentAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, bounds, length, scale, softcap, window):
        q, k, v = _dense(q), _dense(k), _dense(v)
        sinks = None if sinks is None else sinks.contiguous()
        T, heads, D = q.shape
        exact, architecture = q.dtype == torch.float32, architecture_of(q.device)
        ctx.call = _Call(T, heads // k.shape[1], D, length, scale, softcap, window, exact, architecture)
        o, lse = q.new_empty(q.shape), q.new_empty(heads, T, dtype=torch.float32)
        if T:
            _launch("forward", heads, ctx.call, _strides(q, k, v, o))(q, k, v, o, lse, sinks, bounds)
        ctx.save_for_backward(q, k, v, o, lse, sinks, bounds)
        return o

    @staticmethod
    @first_order
    def backward(ctx, do):
        q, k, v, o, lse, sinks, bounds = ctx.saved_tensors
        call, do, delta, dq = ctx.call, _dense(do), torch.empty_like(lse), torch.empty_like(q)
        dk, dv, dsinks = torch.empty_like(k), torch.empty_like(v), None
        if call.T:
            _launch("dq", q.shape[1], call, _strides(q, k, v, o, do, dq))(q, k, v, o, do, lse, delta, dq, bounds)
            kinds = ("dkdv",) if call.D <= TOGETHER else ("dk", "dv")
            dk, dv = (x for kind in kinds for x in _key_gradients(kind, call, q, k, v, do, lse, delta, bounds=bounds))
        if ctx.needs_input_grad[3]:
            dsinks = torch.empty_like(sinks)
            _sinks_launch(*lse.shape)(sinks, lse, delta, dsinks)  # without a token: zeros
        return dq, dk, dv, dsinks, *[None] * 5


def launches(q: Tensor) -> bool:
    """Return whether the op launches its kernels for q: without Triton, and while torch.compile traces, it makes a
    mask of T x T."""
    return not torch.compiler.is_compiling() and use_triton(q)


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | int, *, scale: float | None = None, window: int | None = None,
    sinks: Tensor | None = None, softcap: float | None = None, bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute causal attention within documents, differentiable in q, k, v and sinks.

    Args:
        q: (T, Hq, D), fp32, fp16 or bf16 (fp64: torch), D at most 512. Any strides with consecutive columns.
        k, v: (T, Hk, D), in the dtype of q; Hk divides Hq.
        ends: (documents + 1,) int32: where documents begin and end, from 0 to T. Or a number: the tokens of each
            document, such as the length of rows laid end to end; it divides T.
        scale: of the scores; D ** -0.5 unless given.
        window: how many tokens each sees, itself among them.
        sinks: (Hq,) in any dtype of floats: for each head the score of one more key, which has no value.
        softcap: scores become softcap * tanh(score / softcap).
        bounds: `document_bounds(ends, T)`, where it is known.

    Returns:
        (T, Hq, D), contiguous.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    """
    check_dtypes(q=q, k=k, v=v, sinks=sinks)
    if q.dim() != 3 or k.shape != v.shape or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(
            "q (T, Hq, D), k and v (T, Hk, D) must share T and D: "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}."
        )
    if q.shape[1] % k.shape[1] or q.shape[2] > WIDEST:
        raise ValueError(f"Hk must divide Hq, and D be at most {WIDEST}: q is {tuple(q.shape)}, k {tuple(k.shape)}.")
    if {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(f"q, k and v must share their dtype: {q.dtype}, {k.dtype}, {v.dtype}.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must be ({q.shape[1]},), one for each head of queries, got {tuple(sinks.shape)}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}.")
    if isinstance(ends, int) and (ends < 1 or q.shape[0] % ends):
        raise ValueError(f"Documents of {ends} tokens do not make up {q.shape[0]}.")
    how = {"scale": q.shape[2] ** -0.5 if scale is None else scale, "window": window, "softcap": softcap}
    if not launches(q):
        return document_attention_reference(q, k, v, ends, sinks=sinks, **how)
    if isinstance(ends, int):
        return DocumentAttentionFunction.apply(q, k, v, sinks, None, ends, how["scale"], softcap, window)
    bounds = document_bounds(ends, q.shape[0]) if bounds is None else bounds
    return DocumentAttentionFunction.apply(q, k, v, sinks, bounds, 0, how["scale"], softcap, window)
