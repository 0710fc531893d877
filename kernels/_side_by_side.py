"""Matrices that lie side by side in one memory, so that one product reads them all.

    dx = dy_q W_q + dy_k W_k + dy_v W_v + g A = [dy_q | dy_k | dy_v | g] [W_q; W_k; W_v; A]

One product writes dx once; four write it four times and read it three times. The weights are laid side by side once,
with rows for A behind them; each is a view, and is used as before. The gradients are made by others: the op of the
layers asks for them on the memory of its outputs, the rotation of queries and keys gives theirs in one memory with free
columns behind them, and the layers' op writes there what is left. Where nobody hears, gradients lie apart, as ever.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

_NAME = "_liger_side_by_side"  # attribute of a memory (storage), which a tensor shares with its views
ALIGNED = 64  # columns: then each row begins at a line of a GPU's cache


class _Ask(NamedTuple):
    """What an op wants behind the gradients of its first two outputs: one object, by which they know each other."""

    columns: int


class _Room(NamedTuple):
    """What belongs to nobody in a memory: its first element, in the first row, and its rows or columns."""

    start: int
    size: int


def joined(a: Tensor, b: Tensor, dim: int) -> Tensor | None:
    """Return the matrix of which b's rows (dim 0) or columns (1) follow a's in one memory; None if they do not."""
    fits = (a.dtype, a.stride(), a.shape[1 - dim]) == (b.dtype, b.stride(), b.shape[1 - dim])
    if not fits or b.storage_offset() != _end(a, dim) or a.untyped_storage() is not b.untyped_storage():
        return None
    shape = (len(a) + len(b), a.shape[1]) if dim == 0 else (len(a), a.shape[1] + b.shape[1])
    return a.as_strided(shape, a.stride(), a.storage_offset())


def free_behind(a: Tensor, size: int, dim: int) -> Tensor | None:
    """Return so many rows (dim 0) or columns (1) behind a's, if they belong to nobody.

    Who writes there does not count as one who changes a: autograd may have saved it.
    """
    room: Any = getattr(a.untyped_storage(), _NAME, None)
    end, step = _end(a, dim), a.stride(dim)
    if not isinstance(room, _Room) or not room.start <= end <= room.start + (room.size - size) * step:
        return None
    shape = (size, a.shape[1]) if dim == 0 else (len(a), size)
    return a.data.as_strided(shape, a.stride(), end)


def _end(a: Tensor, dim: int) -> int:
    return int(a.storage_offset()) + a.shape[dim] * a.stride(dim)


def laid_side_by_side(weights: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    """Return copies of weights (O_i, K) in one memory, with so many free rows behind them."""
    sizes = [len(w) for w in weights]
    whole = weights[0].new_zeros(sum(sizes) + rows, weights[0].shape[1])
    copies = whole[: sum(sizes)].split(sizes)
    for copy, weight in zip(copies, weights, strict=True):
        copy.copy_(weight)
    setattr(whole.untyped_storage(), _NAME, _Room(_end(copies[-1], 0), rows))
    return copies


def ask_for_columns(outputs: Sequence[Tensor], columns: int) -> None:
    """Ask for gradients of the first two outputs in one memory, with so many free columns behind them."""
    ask = _Ask(columns)
    for y in outputs[:2]:
        setattr(y.untyped_storage(), _NAME, ask)


def columns_asked(q: Tensor, k: Tensor) -> int | None:
    """Return what the op of which q and k are the first two outputs has asked for, None for others."""
    first, second = (getattr(x.untyped_storage(), _NAME, None) for x in (q, k))
    return first.columns if isinstance(first, _Ask) and first is second else None


def gradients_side_by_side(q: Tensor, k: Tensor, columns: int) -> list[Tensor]:
    """Return memory for the gradients of q and k (B, S, H, D) in this order, with so many free columns behind them."""
    widths = [x.shape[2] * x.shape[3] for x in (q, k)]
    width = -(-(sum(widths) + columns) // ALIGNED) * ALIGNED
    whole = q.new_empty(*q.shape[:2], width)
    setattr(whole.untyped_storage(), _NAME, _Room(sum(widths), columns))
    parts = whole[..., : sum(widths)].split(widths, 2)
    return [part.unflatten(2, x.shape[2:]) for part, x in zip(parts, (q, k), strict=True)]
