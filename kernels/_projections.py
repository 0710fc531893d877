"""Linear layers with low-rank adapters that read one x, forward and backward, on matrices: the code of the LoRA ops.

    y_i = x W_i^T + b_i + sum_j s_j (x A_j^T) B_j^T        for the layers i that read one x, and the adapters j of each

    g_j = s_j dy_i B_j    dB_j = s_j dy_i^T (x A_j^T)    dA_j = g_j^T x    dx = sum_i dy_i W_i + sum_j g_j A_j

Shapes    x: (N, K)  W: (O, K)  A: (r, K)  B: (O, r)  y: (N, O)
Method    The A of all adapters are one matrix, so x is read once for them, and once for dA. The products themselves add
          the terms of y and dx (addmm_), so nothing of their size is made beside them. s_j is in x A_j^T and g_j. W and
          b are frozen: W has no gradient. Under autocast A and B are cast once, and kept for the backward.
Numerics  see _low_rank.py
Dropout   An adapter reads m_j * x / (1 - p_j), with a mask m_j of its own: x A_j^T, dA_j and its part of dx. See
          _dropout.py. Where Triton does not run, m_j * x is made for one adapter at a time.
Source    Hu et al. 2021, arXiv:2106.09685
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dropout import Run, add_gradients, draw_seed, kept, runs_of, threshold_of, values_of_kept
from ._low_rank import (
    Adapter,
    Numerics,
    Projection,
    a_gradient,
    add,
    b_gradient,
    multiply,
    new_values,
    split,
    split_rows,
)  # fmt: skip
from ._triton import use_triton

Layout = tuple[tuple[tuple[tuple[float, float], ...], Callable[[Tensor], Tensor] | None], ...]


class Masks(NamedTuple):
    """The masks of the adapters of layers that read one x: its dropout, or none."""

    seed: Tensor | None  # (1,), None without dropout
    stream: int = 0  # number of the first of the adapters that share the seed

    @classmethod
    def of(cls, x: Tensor, projections: Iterable[Projection]) -> "Masks":
        """Draw a seed if an adapter has a dropout."""
        drops = any(threshold_of(adapter.dropout) for p in projections for adapter in p.adapters)
        return cls(draw_seed(x) if drops else None)

    def after(self, stack: "Stack") -> "Masks":
        """Return those of the adapters that follow."""
        return Masks(self.seed, self.stream + len(stack.adapters))


class Stack(NamedTuple):
    """Projections that read one x, with adapters in the dtype of their products, and all their A in one matrix."""

    projections: tuple[Projection, ...]
    a: Tensor | None  # (R, K), None without adapters

    @property
    def adapters(self) -> list[Adapter]:
        return adapters_of(self.projections)

    @property
    def ranks(self) -> list[int]:
        return [adapter.b.shape[1] for adapter in self.adapters]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The weights, the A and each B: what `restored` takes."""
        return *(p.weight for p in self.projections), self.a, *(adapter.b for adapter in self.adapters)


def with_biases(stack: Stack, biases: Sequence[Tensor | None]) -> Stack:
    """Return a stack that `restored` has rebuilt, with the biases of its projections."""
    projections = tuple(replace(p, bias=b) for p, b in zip(stack.projections, biases, strict=True))
    return stack._replace(projections=projections)


def stacked(groups: Sequence[Sequence[Projection]], numerics: Numerics) -> list[Stack]:
    """Return each group with its adapters cast and its A stacked, all by one launch."""
    sources: list[Tensor] = []
    copies: list[Tensor] = []

    def copied(tensors: Sequence[Tensor]) -> Tensor:
        first, rows = tensors[0], sum(len(t) for t in tensors)
        if len(tensors) == 1 and first.dtype == numerics.rank and first.is_contiguous():
            return first
        copy = first.new_empty(rows, first.shape[1], dtype=numerics.rank)
        sources.extend(tensors)
        copies.extend(copy.split([len(t) for t in tensors]))
        return copy

    stacks = []
    for projections in groups:
        adapters = adapters_of(projections)
        a = copied([adapter.a for adapter in adapters]) if adapters else None
        stacks.append(_with_adapters(projections, a, [copied([adapter.b]) for adapter in adapters]))
    if sources:
        torch._foreach_copy_(copies, sources)
    return stacks


def _with_adapters(projections: Sequence[Projection], a: Tensor | None, bs: Sequence[Tensor]) -> Stack:
    parts = iter(() if a is None else a.split([b.shape[1] for b in bs]))
    remaining = iter(bs)
    return Stack(
        tuple(
            replace(p, adapters=tuple(x._replace(a=next(parts), b=next(remaining)) for x in p.adapters))
            for p in projections
        ),
        a,
    )


def layout_of(stack: Stack) -> Layout:
    """Return what `restored` needs beside the tensors."""
    return tuple((tuple(adapter[2:] for adapter in p.adapters), p.unpack) for p in stack.projections)


def restored(layout: Layout, tensors: Sequence[Any]) -> tuple[Stack, Sequence[Any]]:
    """Rebuild a stack, without biases, from the results of `layout_of` and `Stack.tensors`.

    Returns:
        (stack, the tensors behind its own).
    """
    weights, (a, *bs) = tensors[: len(layout)], tensors[len(layout) :]
    count = sum(len(adapters) for adapters, _ in layout)
    projections = [
        Projection(w, None, tuple(Adapter(w, w, *numbers) for numbers in adapters), unpack)
        for w, (adapters, unpack) in zip(weights, layout, strict=True)
    ]
    return _with_adapters(projections, a, bs[:count]), bs[count:]


def adapters_of(projections: Iterable[Projection]) -> list[Adapter]:
    return [adapter for p in projections for adapter in p.adapters]


def _runs(stack: Stack, masks: Masks, slots: int) -> tuple[Run, ...]:
    kinds = tuple((adapter.b.shape[1], threshold_of(adapter.dropout), adapter.factor) for adapter in stack.adapters)
    return runs_of(kinds, masks.stream, slots)


def _columns(stack: Stack) -> Iterator[tuple[Adapter, slice]]:
    """Yield each adapter with its columns of R."""
    start = 0
    for adapter, rank in zip(stack.adapters, stack.ranks, strict=True):
        yield adapter, slice(start, start + rank)
        start += rank


def _each(stack: Stack, masks: Masks, shape: torch.Size) -> Iterator[tuple[Adapter, slice, Tensor]]:
    """Yield each adapter with its columns of R and its mask (N, K)."""
    assert masks.seed is not None
    for i, (adapter, columns) in enumerate(_columns(stack)):
        yield adapter, columns, kept(masks.seed, masks.stream + i, shape, threshold_of(adapter.dropout))


def _multiply_kept(x: Tensor, stack: Stack, values: Tensor, masks: Masks, numerics: Numerics) -> None:
    """Compute values_j = s_j (m_j * x) A_j^T."""
    if not use_triton(x):
        for adapter, columns, mask in _each(stack, masks, x.shape):
            multiply(x.where(mask, 0), adapter.a.t(), values[..., columns], adapter.factor, numerics)
        return
    assert masks.seed is not None and stack.a is not None
    if not numerics.split:
        values_of_kept(x, stack.a, masks.seed, _runs(stack, masks, 1), 1, values)
        return
    products = x.new_empty(x.shape[0], 3, values.shape[2], dtype=torch.float32)
    values_of_kept(x, split_rows(stack.a, "hml"), masks.seed, _runs(stack, masks, 3), 3, products)
    split(products, "hmlh", values)


def _add_kept(
    dx: Tensor | None, g: Tensor, stack: Stack, x: Tensor | None, masks: Masks, numerics: Numerics
) -> Tensor | None:
    """Add sum_j m_j * (g_j A_j) to dx, and return dA (R, K) in at least `rank`; each only with dx and x."""
    some = x if dx is None else dx
    assert some is not None and masks.seed is not None and stack.a is not None
    if not use_triton(some):
        return _add_kept_plainly(dx, g, stack, x, masks, numerics)
    slots = g.shape[1]
    a = split_rows(stack.a, "hhhm") if numerics.split else stack.a
    parts = add_gradients(g, a, masks.seed, _runs(stack, masks, slots), slots, x, dx)
    if parts is None:
        return None
    return parts.view(len(parts), slots, *stack.a.shape)[:, :3].sum((0, 1))  # h + m + l, where split


def _add_kept_plainly(
    dx: Tensor | None, g: Tensor, stack: Stack, x: Tensor | None, masks: Masks, numerics: Numerics
) -> Tensor | None:
    some = x if dx is None else dx
    assert some is not None
    das = []
    for adapter, columns, mask in _each(stack, masks, some.shape):
        if dx is not None:
            term = torch.zeros_like(dx)
            add(term, g[..., columns], adapter.a, numerics)
            dx += term.where(mask, 0)
        if x is not None:
            das.append(a_gradient(g[..., columns], x.where(mask, 0), numerics))
    return torch.cat(das) if das else None


def project(x: Tensor, stack: Stack, masks: Masks, numerics: Numerics) -> tuple[list[Tensor], Tensor | None]:
    """Return (y of each projection, s x A^T of all adapters for the backward). x: (N, K) in `compute`."""
    values = None if stack.a is None else _values(x, stack, masks, numerics)
    outputs, columns = [], _columns(stack)
    for p in stack.projections:
        y = F.linear(x, p.dense(numerics.compute), None if p.bias is None else p.bias.to(numerics.compute))
        for _ in p.adapters:
            adapter, place = next(columns)
            assert values is not None
            add(y, values[..., place], adapter.b.t(), numerics)
        outputs.append(y)
    return outputs, values


def _values(x: Tensor, stack: Stack, masks: Masks, numerics: Numerics) -> Tensor:
    assert stack.a is not None
    values, factors = new_values(x, len(stack.a), numerics), {adapter.factor for adapter in stack.adapters}
    if masks.seed is not None:
        _multiply_kept(x, stack, values, masks, numerics)
    elif len(factors) == 1:
        multiply(x, stack.a.t(), values, factors.pop(), numerics)
    else:
        for adapter, columns in _columns(stack):
            multiply(x, adapter.a.t(), values[..., columns], adapter.factor, numerics)
    return values


def rank_gradients(
    dys: Sequence[Tensor], values: Tensor | None, stack: Stack, needs_b: Sequence[bool], needs_g: bool,
    numerics: Numerics,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """Return (g of all adapters, dB of each). dys: (N, O) each; values: as `project` returned them."""
    if values is None:
        return None, []
    g = new_values(values, values.shape[-1], numerics) if needs_g else None
    gradients: list[Tensor | None] = []
    dy_of_each = [dy for dy, p in zip(dys, stack.projections, strict=True) for _ in p.adapters]
    for dy, (adapter, columns), needed in zip(dy_of_each, _columns(stack), needs_b, strict=True):
        if g is not None:
            multiply(dy, adapter.b, g[..., columns], adapter.factor, numerics)
        gradients.append(b_gradient(dy, values[..., columns], numerics) if needed else None)
    return g, gradients


def input_gradient(dys: Sequence[Tensor], stack: Stack, numerics: Numerics) -> Tensor:
    """Return the base layers' part of dx (N, K), the gradient of `project`'s input."""
    first, *rest = zip(dys, stack.projections, strict=True)
    dx = first[0] @ first[1].dense(numerics.compute)
    for dy, p in rest:
        dx.addmm_(dy, p.dense(numerics.compute))
    return dx


def a_gradients(
    g: Tensor | None, x: Tensor | None, dx: Tensor | None, stack: Stack, masks: Masks, numerics: Numerics
) -> tuple[Tensor, ...]:
    """Add the adapters' part to dx, unless it is None, and return dA of each adapter, unless x is None."""
    if g is None or stack.a is None or (x is None and dx is None):
        return ()
    if masks.seed is not None:
        das = _add_kept(dx, g, stack, x, masks, numerics)
    else:
        if dx is not None:
            add(dx, g, stack.a, numerics)
        das = None if x is None else a_gradient(g, x, numerics)
    return () if das is None else das.split(stack.ranks)
