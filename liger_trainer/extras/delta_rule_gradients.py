"""The step of the gated delta rule's backward that fla-core refuses on Hopper, by products of torch.

A chunk of up to C tokens begins with the state S (K, V), and reads queries q, keys k, values v, decays g, base-2
logarithms that are summed up from the chunk's first token on, and w, by which v was made: v = u - w S. Its results are

    o_i = s 2^(g_i) q_i S + s sum over j <= i of (q_i k_j) 2^(g_i - g_j) v_j       s: the scale
    S' = 2^(g_C) S + sum over j of 2^(g_C - g_j) k_j^T v_j                         S': the next chunk's

From their gradients do and dS', and dv:

    P_ij = s (do_i v_j) 2^(g_i - g_j) for j <= i, else 0
    dq_i = s 2^(g_i) do_i S^T + sum of P_ij k_j        dk_j = 2^(g_C - g_j) v_j dS'^T + sum over i of P_ij q_i
    dw_i = -dv_i S^T
    dg_i = q_i dq_i - k_i dk_i, and of the last token 2^(g_C) <S, dS'> + sum over j of 2^(g_C - g_j) k_j (v_j dS'^T);
           of g as a natural logarithm, as fla-core goes on with it

All chunks are computed at once, products in the inputs' dtype, with sums in fp32. Nothing is read on the host.

Source    chunks of the gated delta rule: Yang et al. 2024, arXiv:2412.06464
"""

import inspect
from typing import Any

import torch
from torch import Tensor


def register_gradients() -> bool:
    """Have fla-core call `chunk_gradients` for gated rules; return whether it knows how."""
    try:
        from fla.backends import BaseBackend, register  # pyright: ignore[reportMissingImports]
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    known = {*inspect.signature(chunk_gradients).parameters, "g_gamma"}
    if set(inspect.signature(inspect.unwrap(chunk_bwd_dqkwg)).parameters) != known:  # of a release that we do not know
        return False

    @register("common")
    class OwnGradients(BaseBackend):
        backend_type = "liger_trainer"

        def chunk_bwd_dqkwg(self, *args: Any, g_gamma: None = None, **how: Any) -> tuple[Tensor, ...]:
            return chunk_gradients(*args, **how)

        def verify(self, function_name: str, *args: Any, **how: Any) -> tuple[bool, str | None]:
            """Whether it is a gated delta rule's step: a call without w is of another model."""
            gated = all(how.get(name) is not None for name in ("w", "g", "dv")) and how.get("g_gamma") is None
            return function_name == "chunk_bwd_dqkwg" and gated, "liger-trainer has gated delta rules only"

    return True


def chunk_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Tensor, g: Tensor, dv: Tensor,
    scale: float, state_v_first: bool = False, cu_seqlens: Tensor | None = None, chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dw and dg, as fla-core's `chunk_bwd_dqkwg` does, whose arguments these are.

    Args:
        q, k: (B, T, H, K). v, do, dv: (B, T, heads of values, V), whose number is a multiple of H.
        h, dh: (1 or B, chunks, heads of values, K, V), S and dS' of each chunk; with `state_v_first` (..., V, K).
        w: (B, T, heads of values, K).
        g: (B, T, heads of values), fp32.
        cu_seqlens: (documents + 1,), where documents begin and end; B is 1 then.
        chunk_indices: (chunks, 2), the document of a chunk, and its number there.

    Returns:
        dq, dk, as q and k; dw, as w; dg, as g.
    """
    B, T, H, K = k.shape
    heads = v.shape[2]
    at, is_token = _tokens_of_chunks(B, T, cu_seqlens, chunk_size, chunk_indices, k.device)
    is_row = is_token[:, None].expand(-1, heads, -1).flatten(0, 1)  # (chunks x heads, C), as all from here on
    read, write = _by_chunks(at, is_row, B, T, H, heads)

    def of_keys(x: Tensor, like: Tensor) -> Tensor:
        return write(x).view(B, T, H, heads // H, K).sum(3).to(like.dtype)

    # All chunks together have a gigabyte of these at 8,192 tokens: each goes as soon as it has been read.
    queries, keys = read(q), read(k)
    values, outputs = read(v), read(do)
    h, dh = (x.flatten(0, 2) for x in (h, dh))
    of_states = product(h.flatten(1)[:, None], dh.to(h.dtype).flatten(1)[..., None])[:, 0, 0]
    h, dh = (x if state_v_first else x.mT for x in (h, dh))  # (chunks x heads, V, K)
    decay = read(g[..., None])[..., 0]
    last = (is_row.sum(1, keepdim=True) - 1).clamp(min=0)
    final = decay.gather(1, last)

    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=k.device).tril() & is_row[..., None]
    between = torch.exp2(decay[:, :, None] - decay[:, None]).where(causal, 0).mul_(scale)
    pairs = (product(outputs, values.mT) * between).to(k.dtype)
    del causal, between
    dq = product(outputs, h.to(do.dtype)).mul_((torch.exp2(decay) * scale)[..., None])
    dq += product(pairs, keys)
    del outputs
    dg = (dq * queries).sum(-1)
    dq = of_keys(dq, like=q)
    dk = product(values, dh.to(v.dtype)).mul_(torch.exp2(final - decay).where(is_row, 0)[..., None])
    del values
    of_last = torch.exp2(final[:, 0]) * of_states + (dk * keys).sum((1, 2))
    dk += product(pairs.mT, queries)
    del pairs, queries
    dg = (dg - (dk * keys).sum(-1)).scatter_add_(1, last, of_last[:, None])
    del keys
    dk = of_keys(dk, like=k)
    dw = write(product(read(dv).to(v.dtype), h.to(v.dtype)).neg_().to(w.dtype))
    return dq, dk, dw, write(dg[..., None])[..., 0]


def _by_chunks(at: Tensor, is_row: Tensor, B: int, T: int, H: int, heads: int) -> tuple[Any, Any]:
    """Return what reads (B, T, H or heads, width) as (chunks x heads, C, width), and what writes it back."""
    head = torch.arange(heads, device=at.device)[:, None]
    rows = {n: (at[:, None] * n + head * n // heads).flatten(0, 1) for n in {H, heads}}
    places = rows[heads].masked_fill(~is_row, B * T * heads).flatten()  # what is no token goes to one row behind

    def read(x: Tensor) -> Tensor:
        """0 for what is no token of the chunk. Of fewer heads each is read several times."""
        return x.reshape(-1, x.shape[-1])[rows[x.shape[2]]].masked_fill_(~is_row[..., None], 0)

    def write(x: Tensor) -> Tensor:
        flat = x.new_empty(B * T * heads + 1, x.shape[-1])
        return flat.index_copy_(0, places, x.flatten(0, 1))[:-1].view(B, T, heads, -1)

    return read, write


def _tokens_of_chunks(
    B: int, T: int, cu_seqlens: Tensor | None, size: int, chunk_indices: Any, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return for each chunk the place of its tokens among all B x T, and whether there is a token: (chunks, size)."""
    if cu_seqlens is None:
        chunks = -(-T // size)
        begins = torch.arange(B, device=device).repeat_interleave(chunks)[:, None] * T
        lengths, numbers = T, torch.arange(chunks, device=device).repeat(B)[:, None]
    else:
        documents, numbers = chunk_indices.long().unbind(1)
        ends = cu_seqlens.long()
        begins, numbers = ends[documents][:, None], numbers[:, None]
        lengths = ends.diff()[documents][:, None]
    within = numbers * size + torch.arange(size, device=device)
    is_token = within < lengths
    return torch.where(is_token, begins + within, 0), is_token


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of batches of matrices of one dtype, in fp32 at least."""
    if a.is_cuda and a.dtype.itemsize == 2:
        return torch.bmm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)
