"""Linear layers with low-rank adapters, forward and backward, on matrices: the code of lora_linear and lora_mlp.

    y_i = x W_i^T + b_i + sum_j s_j (x A_j^T) B_j^T        for the layers i that read one x, and the adapters j of each

    g_j = s_j dy_i B_j    dB_j = s_j dy_i^T (x A_j^T)    dA_j = g_j^T x    dx = sum_i dy_i W_i + sum_j g_j A_j

Shapes    x: (N, K)  W: (O, K)  A: (r, K)  B: (O, r)  y: (N, O)
Method    The A of all adapters are one matrix, so x is read once for them, and once for dA. The products themselves add
          the terms of y and dx (addmm_), so nothing of their size is made beside them. W and b are frozen: W has no
          gradient.
Numerics  y and dx are in the dtype of the base product; each term is rounded as it is added. If adapters have that
          dtype, or under autocast, everything has it. By default PEFT makes adapters wider than x (fp32 over a bf16
          base). Then x A^T, g and the gradients have the adapters' precision, as in PEFT's own forward, but x is not
          stored in fp32 for it. For bf16 x on CUDA, an fp32 matrix v is the sum of three bf16 matrices, h + m + l,
          exact except for underflow. As columns of one product with fp32 results, the three cost little more than
          one: r is so small that reading x takes most of the time. Where two such matrices u and v meet, in y and
          dx, [h m l h] of u times [h h h m] of v is their product to 2^-16. On other devices x is cast.
Dropout   An adapter reads m_j * x / (1 - p_j), with a mask m_j of its own: x A_j^T, dA_j and its part of dx. See
          _dropout.py. Where Triton does not run, m_j * x is made for one adapter at a time.
Source    Hu et al. 2021, arXiv:2106.09685; sums of bf16 matrices: Henry et al. 2019, arXiv:1904.06376
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dropout import LEVELS, add_gradients, draw_seed, kept, runs_of, threshold_of, values_of_kept
from ._triton import Launch, remembered, tl, triton, use_triton

BLOCK, WARPS = 1024, 4


class Adapter(NamedTuple):
    """The low-rank term scale * (dropout(x) a^T) b^T."""

    a: Tensor  # (r, K)
    b: Tensor  # (O, r)
    scale: float = 1.0
    dropout: float = 0.0  # probability, below 1; 0 outside of training

    @property
    def factor(self) -> float:
        """The scale, divided by the share of x that is kept."""
        return self.scale / (1 - threshold_of(self.dropout) / LEVELS)


@dataclass(frozen=True, eq=False)
class Projection:
    """A frozen linear layer and its adapters.

    Attributes:
        weight: (O, K), or the packed weight that `unpack` takes.
        bias: (O,) or None.
        adapters: empty for a layer without adapters.
        unpack: turns `weight` into (O, K). Forward and backward both call it, so that the dense weight of a quantised
            layer is never stored.
    """

    weight: Tensor
    bias: Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    unpack: Callable[[Tensor], Tensor] | None = None

    @property
    def shape(self) -> tuple[int, int] | None:
        """Return (O, K), or None for a packed weight without adapters, which doesn't tell."""
        if self.unpack is None:
            return self.weight.shape[0], self.weight.shape[-1]
        return (self.adapters[0].b.shape[0], self.adapters[0].a.shape[-1]) if self.adapters else None

    def dense(self, dtype: torch.dtype) -> Tensor:
        return (self.weight if self.unpack is None else self.unpack(self.weight)).to(dtype)


@dataclass(frozen=True)
class Numerics:
    """Dtypes of one call. split: a product with A or B (a "value") is stored as three bf16 matrices that sum to it."""

    compute: torch.dtype  # of x, the base weights and the results
    rank: torch.dtype  # of the products with A and B: as wide or wider
    split: bool

    @classmethod
    def of(cls, x: Tensor, adapters: Iterable[Adapter]) -> "Numerics":
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            return cls(dtype, dtype, False)
        rank = x.dtype
        for adapter in adapters:
            rank = torch.promote_types(torch.promote_types(rank, adapter.a.dtype), adapter.b.dtype)
        return cls(x.dtype, rank, rank == torch.float32 and x.dtype == torch.bfloat16 and _has_wide_results(x))


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


def _has_wide_results(x: Tensor) -> bool:
    """Return whether a product of bf16 matrices can return fp32."""
    return x.is_cuda and torch.version.hip is None and use_triton(x)


def _wide_product(m: Tensor, n: Tensor) -> Tensor:
    """Return the product m n of bf16 matrices in fp32."""
    return torch.mm(m, n, out_dtype=torch.float32)


@triton.jit
def _split_kernel(
    parts_ptr, out_ptr, n, width, stride_row, stride_slot, scale,
    PARTS: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `split`; n = rows * width."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    row, column = at // width, at % width
    value = tl.load(parts_ptr + row * (PARTS * width) + column, mask=mask)
    for part in tl.static_range(1, PARTS):
        value += tl.load(parts_ptr + row * (PARTS * width) + part * width + column, mask=mask)
    value *= scale
    out = out_ptr + row * stride_row + column
    high = value.to(out_ptr.dtype.element_ty)
    value -= high.to(tl.float32)
    middle = value.to(out_ptr.dtype.element_ty)
    low = (value - middle.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out, high, mask=mask)
    if FORM == "hhhm":
        tl.store(out + stride_slot, high, mask=mask)
        tl.store(out + 2 * stride_slot, high, mask=mask)
        tl.store(out + 3 * stride_slot, middle, mask=mask)
    else:
        tl.store(out + stride_slot, middle, mask=mask)
        tl.store(out + 2 * stride_slot, low, mask=mask)
        if FORM == "hmlh":
            tl.store(out + 3 * stride_slot, high, mask=mask)


def split(parts: Tensor, form: str, out: Tensor, scale: float = 1.0) -> Tensor:
    """Write scale * (sum of `parts`) as h + m + l, each in out's dtype, into the slots that `form` names.

    Args:
        parts: (rows, 1 or 3, width) fp32, contiguous.
        form: "hml", "hmlh" or "hhhm".
        out: (rows, slots, width), adjacent columns.
    """
    rows, count, width = parts.shape
    if rows * width:
        strides = out.stride(0), out.stride(1)
        _split_launch(rows * width, width, strides, scale, count, form, (BLOCK, WARPS))(parts, out)
    return out


@remembered
def _split_launch(
    n: int, width: int, strides: tuple[int, int], scale: float, count: int, form: str, tile: tuple[int, int]
) -> Launch:
    block, warps = tile
    return Launch(
        _split_kernel, (-(-n // block),), n, width, *strides, scale,
        PARTS=count, FORM=form, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _columns(factor: Tensor, form: str) -> Tensor:
    """Return [slot slot ...] of a factor (rows, width) in fp32; each slot is (rows, width) in bf16."""
    rows, width = factor.shape
    if not factor.is_contiguous() and factor.t().is_contiguous():  # split A^T as rows of A, without a copy
        return _rows(factor.t(), form).t()
    out = factor.new_empty(rows, len(form), width, dtype=torch.bfloat16)
    return split(factor.contiguous().view(rows, 1, width), form, out).view(rows, -1)


def _rows(factor: Tensor, form: str) -> Tensor:
    """Return the slots of a contiguous factor (rows, width), stacked in rows."""
    out = factor.new_empty(1, len(form), factor.numel(), dtype=torch.bfloat16)
    return split(factor.view(1, 1, -1), form, out).view(-1, factor.shape[1])


def _stacked_a(projections: Sequence[Projection], numerics: Numerics) -> Tensor:
    """Return the A of all adapters (R, K) in `rank`."""
    parts = [adapter.a for adapter in _adapters(projections)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(numerics.rank).contiguous()


def _new_values(m: Tensor, width: int, numerics: Numerics) -> Tensor:
    """Return memory (N, slots, R) for values: four slots "hmlh" if split, else one."""
    dtype = numerics.compute if numerics.split else numerics.rank
    return m.new_empty(m.shape[0], 4 if numerics.split else 1, width, dtype=dtype)


def _multiply(m: Tensor, factor: Tensor, values: Tensor, scale: float, numerics: Numerics) -> None:
    """Compute values = scale * m factor. m: (N, columns) in `compute`; factor: (columns, r)."""
    if numerics.split:
        products = _wide_product(m, _columns(factor.to(numerics.rank), "hml"))
        split(products.view(-1, 3, factor.shape[1]), "hmlh", values, scale)
    else:
        values[:, 0].addmm_(m.to(numerics.rank), factor.to(numerics.rank), beta=0, alpha=scale)


def _add(y: Tensor, values: Tensor, factor: Tensor, scale: float, numerics: Numerics) -> None:
    """Add scale * values factor to y. y: (N, columns) in `compute`; factor: (r, columns)."""
    if numerics.split:
        y.addmm_(values.flatten(1), _columns(factor.t().to(numerics.rank), "hhhm").t(), alpha=scale)
    elif numerics.rank == numerics.compute:
        y.addmm_(values[:, 0], factor.to(numerics.rank), alpha=scale)
    else:
        y.add_(values[:, 0] @ factor.to(numerics.rank), alpha=scale)


def _a_gradients(g: Tensor, x: Tensor, numerics: Numerics) -> Tensor:
    """Return g^T x (R, K) in `rank`."""
    if numerics.split:
        return _wide_product(g[:, :3].flatten(1).t(), x).view(3, -1, x.shape[1]).sum(0)
    return g[:, 0].t() @ x.to(numerics.rank)


def _b_gradient(dy: Tensor, xa: Tensor, scale: float, numerics: Numerics) -> Tensor:
    """Return scale * dy^T xa (O, r) in `rank`."""
    if numerics.split:
        return _wide_product(dy.t(), xa[:, :3].flatten(1)).view(-1, 3, xa.shape[2]).sum(1).mul_(scale)
    gradient = dy.new_empty(dy.shape[1], xa.shape[2], dtype=numerics.rank)
    return gradient.addmm_(dy.t().to(numerics.rank), xa[:, 0], beta=0, alpha=scale)


def _adapters(projections: Iterable[Projection]) -> list[Adapter]:
    return [adapter for p in projections for adapter in p.adapters]


def _runs(projections: Iterable[Projection], masks: Masks, slots: int) -> tuple:
    sizes = tuple((adapter.a.shape[0], threshold_of(adapter.dropout)) for adapter in _adapters(projections))
    return runs_of(sizes, masks.stream, slots)


def _each(
    projections: Iterable[Projection], masks: Masks, shape: torch.Size
) -> Iterator[tuple[slice, Adapter, Tensor]]:
    """Yield (its columns of R, adapter, its mask (N, K))."""
    start = 0
    assert masks.seed is not None
    for i, adapter in enumerate(_adapters(projections)):
        mask = kept(masks.seed, masks.stream + i, (shape[0], shape[1]), threshold_of(adapter.dropout))
        yield slice(start, start + adapter.a.shape[0]), adapter, mask
        start += adapter.a.shape[0]


def _multiply_kept(
    x: Tensor, projections: Sequence[Projection], values: Tensor, masks: Masks, numerics: Numerics
) -> None:
    """Compute values_j = (m_j * x) A_j^T, as `_multiply` does without masks."""
    if not use_triton(x):
        for columns, adapter, mask in _each(projections, masks, x.shape):
            _multiply(x.where(mask, 0), adapter.a.t(), values[..., columns], 1.0, numerics)
        return
    assert masks.seed is not None
    a = _stacked_a(projections, numerics)
    if not numerics.split:
        values_of_kept(x, a, masks.seed, _runs(projections, masks, 1), 1, values)
        return
    products = x.new_empty(x.shape[0], 3, a.shape[0], dtype=torch.float32)
    values_of_kept(x, _rows(a, "hml"), masks.seed, _runs(projections, masks, 3), 3, products)
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
    rows = _rows(a, "hhhm") if numerics.split else a
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
            _add(term, g[..., columns], adapter.a, 1.0, numerics)
            dx += term.where(mask, 0)
        if x is not None:
            das.append(_a_gradients(g[..., columns], x.where(mask, 0), numerics))
    return torch.cat(das) if das else None


def check_projection(op: str, name: str, projection: Projection, columns: int | None) -> None:
    """Refuse a base that needs a gradient, a wrong number of columns, and adapters that don't fit.

    Raises:
        ValueError: says what was expected and what came.
    """
    weight, bias = projection.weight, projection.bias
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError(f"{op} computes no gradient of {name} and its bias: freeze them, or use a plain linear layer.")
    if projection.shape is None:
        return
    rows, width = projection.shape
    if columns not in (None, width) or (projection.unpack is None and weight.dim() != 2):
        raise ValueError(f"{name} must be (O, K) with K = {columns}, the columns of its input: it is {_shape(weight)}.")
    for a, b, _, dropout in projection.adapters:
        if not 0 <= dropout < 1:
            raise ValueError(f"The dropout of an adapter of {name} must be from 0 to below 1, got {dropout}.")
        if a.shape != (b.shape[-1], width) or b.shape != (rows, a.shape[0]):
            raise ValueError(
                f"An adapter of {name} ({rows}, {width}) must be a (r, {width}) and b ({rows}, r): "
                f"a is {_shape(a)}, b is {_shape(b)}."
            )
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"The bias of {name} must be one per row, ({rows},): it is {_shape(bias)}.")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def as_matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(dtype)


def project(
    x: Tensor, projections: Sequence[Projection], masks: Masks, numerics: Numerics
) -> tuple[list[Tensor], Tensor | None]:
    """Return (y of each projection, x A^T of all adapters for the backward). x: (N, K) in `compute`."""
    values, rank = None, sum(adapter.a.shape[0] for adapter in _adapters(projections))
    if rank:
        values = _new_values(x, rank, numerics)
        if masks.seed is None:
            _multiply(x, _stacked_a(projections, numerics).t(), values, 1.0, numerics)
        else:
            _multiply_kept(x, projections, values, masks, numerics)
    outputs, start = [], 0
    for p in projections:
        y = F.linear(x, p.dense(numerics.compute), None if p.bias is None else p.bias.to(numerics.compute))
        for adapter in p.adapters:
            assert values is not None
            columns = slice(start, start + adapter.a.shape[0])
            _add(y, values[..., columns], adapter.b.t(), adapter.factor, numerics)
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
    g = _new_values(xa, xa.shape[-1], numerics) if needs_g else None
    gradients, start = [], 0
    for dy, p in zip(dys, projections, strict=True):
        for adapter in p.adapters:
            columns = slice(start, start + adapter.a.shape[0])
            if g is not None:
                _multiply(dy, adapter.b, g[..., columns], adapter.factor, numerics)
            needed = needs_b[len(gradients)]
            gradients.append(_b_gradient(dy, xa[..., columns], adapter.factor, numerics) if needed else None)
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
            _add(dx, g, _stacked_a(projections, numerics), 1.0, numerics)
        das = None if x is None else _a_gradients(g, x, numerics)
    return () if das is None else das.split([adapter.a.shape[0] for adapter in _adapters(projections)])
