"""The scan of Mamba-2's layers: states that decay, read and written by each token, in chunks of matrix products.

With a head's state h of (N, P), decays a_t = exp(A dt_t), and u_t = dt_t x_t:

    h_t = a_t h_{t-1} + B_t u_t'        y_t = C_t' h_t + D x_t

Within a chunk of Q tokens, y is a product of a matrix (Q, Q) with u, as attention is; what chunks hand on is a product
of a matrix (chunks, chunks) with the states behind each. Where a document ends, both matrices are zero, so that rows of
several documents are those documents one by one.

The largest temporaries are (tokens, Q, heads), computed again in backward, so that a layer keeps only its inputs.
Nothing waits for the device, so that CUDA graphs have it. Everything is in fp32, sums of logarithms in fp64.

Source    Dao & Gu 2024, arXiv:2405.21060 (Mamba-2), section 6 and listing 1
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus
from torch.utils.checkpoint import checkpoint

CHUNK = 64  # tokens; the matrices within chunks are then about as large as the states between them


def mamba_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, dt_bias: Tensor | None = None,
    document: Tensor | None = None, *, dt_softplus: bool = True, dt_limit: tuple[float, float] = (0.0, float("inf")),
    chunk: int = CHUNK,
) -> Tensor:  # fmt: skip
    """Return y, (rows, length, heads, P), fp32.

    Args:
        x: (rows, length, heads, P).
        dt: (rows, length, heads), before bias, softplus and limits.
        A: (heads,), negative.
        B, C: (rows, length, groups, N); heads are of groups in order, equally many of each.
        D, dt_bias: (heads,).
        document: (rows, length), ascending numbers of documents in each row; None: a row is one.
        dt_softplus: dt is softplus(dt + dt_bias), else dt + dt_bias.
        chunk: tokens that are computed at once.
    """
    scan = partial(_scan, softplus_of_dt=dt_softplus, dt_limit=dt_limit, chunk=chunk)
    if not torch.is_grad_enabled():
        return scan(x, dt, A, B, C, D, dt_bias, document)
    return checkpoint(scan, x, dt, A, B, C, D, dt_bias, document, use_reentrant=False, preserve_rng_state=False)


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    document: Tensor | None, softplus_of_dt: bool, dt_limit: tuple[float, float], chunk: int,
) -> Tensor:  # fmt: skip
    length, heads = x.shape[1:3]
    groups = B.shape[2]
    with torch.autocast(x.device.type, enabled=False):
        x, dt, B, C = x.float(), dt.float(), B.float(), C.float()
        if dt_bias is not None:
            dt = dt + dt_bias.float()
        dt = (softplus(dt) if softplus_of_dt else dt).clamp(*dt_limit)
        # rows b, chunks c, tokens l and earlier ones s of a chunk; heads are r of each group g
        split = partial(_in_chunks, chunk=chunk)
        u = split(x * dt[..., None]).unflatten(3, (groups, -1)).transpose(2, 3)  # b c g l r p
        decay = split(dt.double() * A.double()).cumsum(2).transpose(2, 3).unflatten(2, (groups, -1))  # b c g r l
        B, C = (split(t).transpose(2, 3) for t in (B, C))  # b c g l n
        numbers = None if document is None else split(document)
        inner, to_end, from_start, between = _decays(decay, numbers)

        within = (C @ B.transpose(-1, -2)).unsqueeze(3) * inner  # b c g r l s
        y = (within @ u.transpose(3, 4)).transpose(3, 4)
        written = u * to_end.transpose(3, 4)[..., None]
        states = (B.transpose(-1, -2) @ written.flatten(4)).unflatten(4, u.shape[4:])  # b c g n r p
        before = torch.einsum("bgrzc,bcgnrp->bzgnrp", between, states)
        y = y + (C @ before.flatten(4)).unflatten(4, u.shape[4:]) * from_start.transpose(3, 4)[..., None]

        y = y.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :length]
        return (y if D is None else y + x * D.float()[:, None]).contiguous()


def _in_chunks(tensor: Tensor, chunk: int) -> Tensor:
    """Return (rows, chunks, chunk, ...) of (rows, length, ...), with zeros behind it."""
    padding = -tensor.shape[1] % chunk
    return pad(tensor, (*([0, 0] * (tensor.dim() - 2)), 0, padding)).unflatten(1, (-1, chunk))


def _decays(decay: Tensor, document: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return how much is left of one thing at another.

    Args:
        decay: (b, c, g, r, l), logarithms since the chunk began, of this token too. fp64: they are sums, whose
            differences would be rounded.
        document: (b, c, l), numbers of documents.

    Returns:
        of a token at later ones of its chunk (b, c, g, r, l, s), and behind the chunk (b, c, g, r, l); of the state
        before a chunk at its tokens (b, c, g, r, l); of what a chunk writes before later chunks (b, g, r, later c, c).
    """
    tokens, chunks = decay.shape[-1], decay.shape[1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=decay.device).tril()
    after = torch.ones(chunks, chunks, dtype=torch.bool, device=decay.device).tril(-1)  # z, c: z comes after c
    whole = decay[..., -1].movedim(1, -1).cumsum(-1)  # b g r c: up to and with each chunk
    between = (pad(whole[..., :-1], (1, 0))[..., :, None] - whole[..., None, :]).float()
    inner = (decay[..., :, None] - decay[..., None, :]).float()
    to_end, from_start = (decay[..., -1:] - decay).float(), decay.float()
    if document is not None:
        seen = seen & (document[..., :, None] == document[..., None, :])[:, :, None, None]
        last = document[..., -1]
        first = pad(last[:, :-1], (1, 0), value=-1)  # of the state before each chunk
        after = after & (first[:, :, None] == last[:, None])[:, None, None]
        to_end = to_end.masked_fill((document != last[..., None])[:, :, None, None], -torch.inf)
        from_start = from_start.masked_fill((document != first[..., None])[:, :, None, None], -torch.inf)
    inner, between = inner.masked_fill(~seen, -torch.inf), between.masked_fill(~after, -torch.inf)
    return inner.exp(), to_end.exp(), from_start.exp(), between.exp()
