"""The 2-norm of all gradients of a model, as one vector, in one launch and a sum.

Shapes    any; a () result
Method    each program adds the squares of CHUNK numbers of one tensor, found in a table of addresses. The sums of all
          programs are added in one order, so that the same gradients give the same norm.
Numerics  fp32 from the first square to the root. torch rounds the norm of each tensor to its dtype, such as bf16
Traffic   read every gradient once
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ._triton import Launch, tl, triton, use_triton
from ._tuning import SHAPES
from .adamw import are_aligned, chunks_of, in_one_order, table_of

CHUNK, BLOCK, WARPS = SHAPES.GRADIENT_NORM


def gradient_norm_reference(grads: Sequence[Tensor]) -> Tensor:
    """Compute `gradient_norm` in plain torch."""
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    norms = [torch.linalg.vector_norm(g) for g in wide]  # the norm of norms is the norm of all
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


@triton.jit
def _kernel(
    table_ptr, chunks_ptr, out_ptr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the squares of one chunk. table_ptr: int64, for each tensor its address and numel."""
    program = tl.program_id(0).to(tl.int64)
    row = table_ptr + tl.load(chunks_ptr + 2 * program).to(tl.int64) * 2
    start = tl.load(chunks_ptr + 2 * program + 1).to(tl.int64) * CHUNK
    numel = tl.load(row + 1)
    g_ptr = tl.load(row).to(tl.pointer_type(GRAD))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    total = tl.zeros((BLOCK,), tl.float32)  # a sum a lane; lanes are added once, at the end
    at = start + tl.arange(0, BLOCK)
    if start + CHUNK <= numel:  # a mask would keep loads from being 16 bytes wide
        for block in range(0, CHUNK, BLOCK):
            g = tl.load(g_ptr + at + block).to(tl.float32)
            total += g * g
    else:
        for block in range(0, CHUNK, BLOCK):
            g = tl.load(g_ptr + at + block, mask=at + block < numel, other=0.0).to(tl.float32)
            total += g * g
    tl.store(out_ptr + program, tl.sum(total, 0))


def gradient_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all numbers of grads, (): fp32 (fp64 if a gradient is).

    Args:
        grads: one or more tensors on one device, any shapes, fp32, fp16, bf16 (fp64: torch). Those with gaps in memory
            are copied.

    Raises:
        ValueError: there is no gradient.
    """
    if not grads:
        raise ValueError("grads must hold at least one tensor.")
    if not all(map(use_triton, grads)):
        return gradient_norm_reference(grads)
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for g in grads:
        kinds.setdefault(g.dtype, []).append(g)
    sums = [_squares(dtype, tensors) for dtype, tensors in kinds.items()]
    return torch.cat(sums).sum().sqrt()  # one order of adding: the same gradients give the same bits


def _squares(dtype: torch.dtype, grads: list[Tensor]) -> Tensor:
    """Return the sums of squares of each program."""
    device = grads[0].device
    # any order will do, but no gaps
    dense = [g if g.is_contiguous() or in_one_order([g]) else g.contiguous() for g in grads]
    numels, addresses = tuple(g.numel() for g in dense), [g.data_ptr() for g in dense]
    chunks = chunks_of(numels, CHUNK, device)
    out = torch.empty(len(chunks), device=device)
    if len(chunks):
        table = table_of(itertools.chain.from_iterable(zip(addresses, numels, strict=True)), device)
        kind = getattr(tl, str(dtype).removeprefix("torch."))
        launch = Launch(
            _kernel, (len(chunks),), GRAD=kind, ALIGNED=are_aligned([addresses]), CHUNK=CHUNK, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
        if not launch(table, chunks, out, has_twin=True):
            return gradient_norm_reference(dense).square()[None]
    return out
