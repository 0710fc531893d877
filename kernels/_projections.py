"""Linear layers with low-rank adapters that read one x, forward and backward, on matrices: the code of the LoRA ops.

    y_i = x W_i^T + b_i + sum_j s_j (x A_j^T) B_j^T        for the layers i that read one x, and the adapters j of each

    g_j = s_j dy_i B_j    dB_j = s_j dy_i^T (x A_j^T)    dA_j = g_j^T x    dx = sum_i dy_i W_i + sum_j g_j A_j

Shapes    x: (N, K)  W: (O, K)  A: (r, K)  B: (O, r)  y: (N, O)
Method    The A of all adapters are one matrix, so x is read once for them, and once for dA. The products themselves add
          the terms of y and dx (addmm_), so nothing of their size is made beside them. W and b are frozen: W has no
          gradient.
Numerics  see _low_rank.py
Dropout   An adapter reads m_j * x / (1 - p_j), with a mask m_j of its own: x A_j^T, dA_j and its part of dx. See
          _dropout.py. Where Triton does not run, m_j * x is made for one adapter at a time.
Source    Hu et al. 2021, arXiv:2106.09685
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dropout import add_gradients, draw_seed, kept, runs_of, threshold_of, values_of_kept
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


class Masks(NamedTuple):
    """The masks of the adapters of layers that read one x: its dropout, or none."""

    seed: Tensor | None  # (1,), None without dropout
    stream: int = 0  # number of the first of the adapters that share the seed

    @classmethod
    def of(cls, x: Tensor, projections: Iterable[Projection]) -> "Masks":
        """Draw a seed if an adapter has a dropout."""
        drops = any(threshold_of(adapter.dropout) for p in projections for adapter in p.adapters)
        return cls(draw_seed(x) if drops else None)

    def after(self, projections: Iterable[Projection]) -> "Masks":
        """Return those of the adapters that follow."""
        return Masks(self.seed, self.stream + sum(len(p.adapters) for p in projections))


def _stacked_a(projections: Sequence[Projection], numerics: Numerics) -> Tensor:
    """Return the A of all adapters (R, K) in `rank`."""
    parts = [adapter.a for adapter in adapters_of(projections)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(numerics.rank).contiguous()


def adapters_of(projections: Iterable[Projection]) -> list[Adapter]:
    return [adapter for p in projections for adapter in p.adapters]


def _runs(projections: Iterable[Projection], masks: Masks, slots: int) -> tuple:
    sizes = tuple((adapter.a.shape[0], threshold_of(adapter.dropout)) for adapter in adapters_of(projections))
    return runs_of(sizes, masks.stream, slots)


def _each(
    projections: Iterable[Projection], masks: Masks, shape: torch.Size
) -> Iterator[tuple[slice, Adapter, Tensor]]:
    """Yield (its columns of R, adapter, its mask (N, K))."""
    start = 0
    assert masks.seed is not None
    for i, adapter in enumerate(adapters_of(projections)):
        mask = kept(masks.seed, masks.stream + i, (shape[0], shape[1]), threshold_of(adapter.dropout))
        yield slice(start, start + adapter.a.shape[0]), adapter, mask
        start += adapter.a.shape[0]


def _multiply_kept(
    x: Tensor, projections: Sequence[Projection], values: Tensor, masks: Masks, numerics: Numerics
) -> None:
    """Compute values_j = (m_j * x) A_j^T, as `multiply` does without masks."""
    if not use_triton(x):
        for columns, adapter, mask in _each(projections, masks, x.shape):
            multiply(x.where(mask, 0), adapter.a.t(), values[..., columns], 1.0, numerics)
        return
    assert masks.seed is not None
    a = _stacked_a(projections, numerics)
    if not numerics.split:
        values_of_kept(x, a, masks.seed, _runs(projections, masks, 1), 1, values)
        return
    products = x.new_empty(x.shape[0], 3, a.shape[0], dtype=torch.float32)
    values_of_kept(x, split_rows(a, "hml"), masks.seed, _runs(projections, masks, 3), 3, products)
    split(products, "hmlh", values)


def _add_kept(
    dx: Tensor | None, g: Tensor, projections: Sequence[Projection], x: Tensor | None, masks: Masks, numerics: Numerics
) -> Tensor | None:
    """Add sum_j m_j * (g_j A_j) to dx, and return dA (R, K) in at least `rank`; each only with dx and x."""
    some = x if dx is None else dx
    assert some is not None and masks.seed is not None
    if not use_triton(some):
        return _add_kept_plainly(dx, g, projections, x, masks, numerics)
    a, slots = _stacked_a(projections, numerics), g.shape[1]
    rows = split_rows(a, "hhhm") if numerics.split else a
    parts = add_gradients(g, rows, masks.seed, _runs(projections, masks, slots), slots, x, dx)
    if parts is None:
        return None
    return parts.view(len(parts), slots, *a.shape)[:, :3].sum((0, 1))  # h + m + l, where split


def _add_kept_plainly(
    dx: Tensor | None, g: Tensor, projections: Sequence[Projection], x: Tensor | None, masks: Masks, numerics: Numerics
) -> Tensor | None:
    some = x if dx is None else dx
    assert some is not None
    das = []
    for columns, adapter, mask in _each(projections, masks, some.shape):
        if dx is not None:
            term = torch.zeros_like(dx)
            add(term, g[..., columns], adapter.a, 1.0, numerics)
            dx += term.where(mask, 0)
        if x is not None:
            das.append(a_gradient(g[..., columns], x.where(mask, 0), numerics))
    return torch.cat(das) if das else None


def project(
    x: Tensor, projections: Sequence[Projection], masks: Masks, numerics: Numerics
) -> tuple[list[Tensor], Tensor | None]:
    """Return (y of each projection, x A^T of all adapters for the backward). x: (N, K) in `compute`."""
    values, rank = None, sum(adapter.a.shape[0] for adapter in adapters_of(projections))
    if rank:
        values = new_values(x, rank, numerics)
        if masks.seed is None:
            multiply(x, _stacked_a(projections, numerics).t(), values, 1.0, numerics)
        else:
            _multiply_kept(x, projections, values, masks, numerics)
    outputs, start = [], 0
    for p in projections:
        y = F.linear(x, p.dense(numerics.compute), None if p.bias is None else p.bias.to(numerics.compute))
        for adapter in p.adapters:
            assert values is not None
            columns = slice(start, start + adapter.a.shape[0])
            add(y, values[..., columns], adapter.b.t(), adapter.factor, numerics)
            start = columns.stop
        outputs.append(y)
    return outputs, values


def rank_gradients(
    dys: Sequence[Tensor], xa: Tensor | None, projections: Sequence[Projection], needs_b: Sequence[bool],
    needs_g: bool, numerics: Numerics,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """Return (g of all adapters, dB of each). dys: (N, O) each; xa: as `project` returned it."""
    if xa is None:
        return None, []
    g = new_values(xa, xa.shape[-1], numerics) if needs_g else None
    gradients, start = [], 0
    for dy, p in zip(dys, projections, strict=True):
        for adapter in p.adapters:
            columns = slice(start, start + adapter.a.shape[0])
            if g is not None:
                multiply(dy, adapter.b, g[..., columns], adapter.factor, numerics)
            needed = needs_b[len(gradients)]
            gradients.append(b_gradient(dy, xa[..., columns], adapter.factor, numerics) if needed else None)
            start = columns.stop
    return g, gradients


def input_gradient(dys: Sequence[Tensor], projections: Sequence[Projection], numerics: Numerics) -> Tensor:
    """Return the base layers' part of dx (N, K), the gradient of `project`'s input."""
    first, *rest = zip(dys, projections, strict=True)
    dx = first[0] @ first[1].dense(numerics.compute)
    for dy, p in rest:
        dx.addmm_(dy, p.dense(numerics.compute))
    return dx


def a_gradients(
    g: Tensor | None, x: Tensor | None, dx: Tensor | None, projections: Sequence[Projection], masks: Masks,
    numerics: Numerics,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Add the adapters' part to dx, unless it is None, and return dA of each adapter, unless x is None."""
    if g is None or (x is None and dx is None):
        return ()
    if masks.seed is not None:
        das = _add_kept(dx, g, projections, x, masks, numerics)
    else:
        if dx is not None:
            add(dx, g, _stacked_a(projections, numerics), 1.0, numerics)
        das = None if x is None else a_gradient(g, x, numerics)
    return () if das is None else das.split([adapter.a.shape[0] for adapter in adapters_of(projections)])
