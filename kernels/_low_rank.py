"""Linear layers with low-rank adapters that read one x, forward and backward, on matrices: the code of the LoRA ops.

    y_i = x W_i^T + b_i + sum_j s_j (x A_j^T) B_j^T        for the layers i that read one x, and the adapters j of each
    values_j = s_j x A_j^T    g_j = s_j dy_i B_j    dB_j = dy_i^T values_j    dA_j = g_j^T x
    dx = sum_i dy_i W_i + sum_j g_j A_j

Shapes    x: (N, K)  W: (O, K)  A: (r, K)  B: (O, r)  y: (N, O)  values, g: (N, slots, r)
Method    The A of all adapters are one matrix, so x is read once for them, and once for dA. The products themselves add
          the terms of y and dx (addmm_), so nothing else of their size is made. Where y or dx is larger than a GPU's
          cache, the term comes first and the base product adds itself: as it is written, it reads what is there. s_j is
          in x A_j^T and g_j. W and b are frozen: W has no gradient. Under autocast A and B are cast by one launch in
          the forward, and again in the backward: no copies are kept. An x that an RMSNorm made of rows u, x = rstd *
          u * w, is not made again for dA in bf16: dA = ((g * rstd)^T u) * w.
Numerics  y and dx are in the dtype of the base product; each term is rounded as it is added. If adapters have that
          dtype, or under autocast, everything has it. By default PEFT makes adapters wider than x (fp32 over a bf16
          base). Then x A^T, g and the gradients have the adapters' precision, as in PEFT's own forward, but x is not
          stored in fp32 for it. For bf16 x on CUDA, an fp32 matrix v is the sum of three bf16 matrices, h + m + l,
          exact except for underflow. As columns of one product with fp32 results, the three cost little more than
          one: r is so small that reading x takes most of the time. Where two such matrices u and v meet, in y and
          dx, [h m l h] of u times [h h h m] of v is their product to 2^-16. On other devices x is cast.
Dropout   An adapter reads m_j * x / (1 - p_j), with its own mask m_j: x A_j^T, dA_j and its part of dx. See
          _dropout.py. Where Triton does not run, m_j * x is made for one adapter at a time.
Source    Hu et al. 2021, arXiv:2106.09685; sums of bf16 matrices: Henry et al. 2019, arXiv:1904.06376
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import Scaled, Source, copy_all
from ._dropout import LEVELS, Run, add_gradients, draw_seed, kept, runs_of, threshold_of, values_of_kept
from ._triton import Launch, remembered, tl, triton, use_triton
from ._tuning import SHAPES
from ._workspace import SharedUnpack

BLOCK, WARPS = SHAPES.SPLIT
TERM_FIRST = SHAPES.TERM_FIRST


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
            layer is never stored. A `SharedUnpack` has it in memory that other weights take after it.
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

    @contextmanager
    def dense(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Lend (O, K), which is read before the next projection's is lent."""
        if isinstance(self.unpack, SharedUnpack):
            with self.unpack.lent(self.weight) as weight:
                yield weight.to(dtype)
        else:
            yield (self.weight if self.unpack is None else self.unpack(self.weight)).to(dtype)


@dataclass(frozen=True)
class Numerics:
    """Dtypes of one call.

    Attributes:
        compute: of x, the base weights and the results.
        rank: of the products with A and B: as wide or wider.
        split: a product with A or B (a "value") is stored as three bf16 matrices that sum to it.
        wide: the gradients of A and B are fp32, as these are, where everything else is in half precision (autocast).
    """

    compute: torch.dtype
    rank: torch.dtype
    split: bool = False
    wide: bool = False

    @classmethod
    def of(cls, x: Tensor, adapters: Iterable[Adapter]) -> "Numerics":
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            wide = any(adapter.a.dtype == torch.float32 for adapter in adapters) and _has_wide_results(x)
            return cls(dtype, dtype, wide=wide and dtype.itemsize == 2)
        rank = x.dtype
        for adapter in adapters:
            # The widest of x and all adapters: one product computes the terms of several, so it has one dtype.
            rank = torch.promote_types(torch.promote_types(rank, adapter.a.dtype), adapter.b.dtype)
        return cls(x.dtype, rank, rank == torch.float32 and x.dtype == torch.bfloat16 and _has_wide_results(x))


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
    # The parts are columns of one product with h, m and l: their sum is the fp32 value.
    value = tl.load(parts_ptr + row * (PARTS * width) + column, mask=mask)
    for part in tl.static_range(1, PARTS):
        value += tl.load(parts_ptr + row * (PARTS * width) + part * width + column, mask=mask)
    value *= scale
    out = out_ptr + row * stride_row + column
    high = value.to(out_ptr.dtype.element_ty)  # the 8 leading bits; `middle` has the next 8, `low` the rest
    value -= high.to(tl.float32)
    middle = value.to(out_ptr.dtype.element_ty)
    low = (value - middle.to(tl.float32)).to(out_ptr.dtype.element_ty)  # differences of floats this close are exact
    tl.store(out, high, mask=mask)
    if FORM == "hhhm":  # the right factor: what h, m, l and h of the left one meet
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
        return split_rows(factor.t(), form).t()
    out = factor.new_empty(rows, len(form), width, dtype=torch.bfloat16)
    return split(factor.contiguous().view(rows, 1, width), form, out).view(rows, -1)


def split_rows(factor: Tensor, form: str) -> Tensor:
    """Return the slots of a contiguous factor (rows, width), stacked in rows."""
    out = factor.new_empty(1, len(form), factor.numel(), dtype=torch.bfloat16)
    return split(factor.view(1, 1, -1), form, out).view(-1, factor.shape[1])


def new_values(m: Tensor, width: int, numerics: Numerics) -> Tensor:
    """Return memory (N, slots, R) for values: four slots "hmlh" if split, else one."""
    dtype = numerics.compute if numerics.split else numerics.rank
    return m.new_empty(m.shape[0], 4 if numerics.split else 1, width, dtype=dtype)


def multiply(m: Tensor, factor: Tensor, values: Tensor, scale: float, numerics: Numerics) -> None:
    """Compute values = scale * m factor. m: (N, columns) in `compute`; factor: (columns, r) in `rank`."""
    if numerics.split:
        products = _wide_product(m, _columns(factor, "hml"))  # (N, 3 r): m times h, m and l
        split(products.view(-1, 3, factor.shape[1]), "hmlh", values, scale)
    else:
        values[:, 0].addmm_(m.to(numerics.rank), factor, beta=0, alpha=scale)


def add(y: Tensor, values: Tensor, factor: Tensor, numerics: Numerics) -> None:
    """Add values factor to y. y: (N, columns) in `compute`; factor: (r, columns) in `rank`."""
    if numerics.split:
        # h h + m h + l h + h m: all products of the parts above 2^-16 of the largest.
        y.addmm_(values.flatten(1), _columns(factor.t(), "hhhm").t())
    elif numerics.rank == numerics.compute:
        y.addmm_(values[:, 0], factor)
    else:
        y.add_(values[:, 0] @ factor)  # in the wider dtype, rounded as it is added


def a_gradient(g: Tensor, x: Tensor | Scaled, numerics: Numerics) -> Tensor:
    """Return g^T x (R, K) in `rank`, or in fp32 if `wide`."""
    if isinstance(x, Scaled):
        return _a_gradient_of_scaled(g[:, 0], x, numerics)
    if numerics.split:
        return _wide_product(g[:, :3].flatten(1).t(), x).view(3, -1, x.shape[1]).sum(0)  # h + m + l of g, each times x
    return _wide_product(g[:, 0].t(), x) if numerics.wide else g[:, 0].t() @ x.to(numerics.rank)


def _a_gradient_of_scaled(g: Tensor, x: Scaled, numerics: Numerics) -> Tensor:
    """As `a_gradient`: the rows' scale is a factor of g, which is small, and the columns' one of the result."""
    g = torch.mul(g, x.scale[:, None], out=torch.empty_like(g))
    da = _wide_product(g.t(), x.rows) if _has_wide_results(g) else g.t() @ x.rows
    da = da if x.factor is None else da.mul_(x.factor)
    return da if numerics.wide else da.to(numerics.rank)


def b_gradient(dy: Tensor, values: Tensor, numerics: Numerics) -> Tensor:
    """Return dy^T values (O, r) in `rank`, or in fp32 if `wide`."""
    if numerics.split:
        # dy times h, m and l
        return _wide_product(dy.t(), values[:, :3].flatten(1)).view(-1, 3, values.shape[2]).sum(1)
    return _wide_product(dy.t(), values[:, 0]) if numerics.wide else dy.t().to(numerics.rank) @ values[:, 0]


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


def input_of_a(source: Source, tensors: Sequence[Tensor], numerics: Numerics, seed: Tensor | None) -> Tensor | Scaled:
    """Return the x (N, K) that dA is made from, of what the forward saved for it. seed: of the dropout.

    In fp16 the scale of small rows could exceed the range that g has room for. In fp32 products take most of the time.
    """
    dtypes = {numerics.rank, numerics.compute, tensors[0].dtype}
    if source.scaled is not None and seed is None and dtypes == {torch.bfloat16}:
        return source.scaled(*tensors)
    return as_matrix(source.make(*tensors), numerics.compute)


Layout = tuple[tuple[tuple[tuple[float, float], ...], Callable[[Tensor], Tensor] | None], ...]


class Masks(NamedTuple):
    """The masks of the adapters of layers that read one x: its dropout, or none."""

    seed: Tensor | None  # (1,), None without dropout
    stream: int = 0  # number of the first of the adapters that share the seed

    @classmethod
    def of(cls, x: Tensor, projections: Iterable[Projection]) -> "Masks":
        """Draw a seed if an adapter has a dropout."""
        # a tiny dropout may round to none
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


def with_biases(stack: Stack, biases: Sequence[Tensor | None]) -> Stack:
    """Return a stack of what `restored` has rebuilt, with the biases of its projections."""
    projections = tuple(replace(p, bias=b) for p, b in zip(stack.projections, biases, strict=True))
    return stack._replace(projections=projections)


def stacked(groups: Sequence[Sequence[Projection]], numerics: Numerics) -> list[Stack]:
    """Return each group with its adapters cast and its A stacked, all by one launch."""
    sources: list[Tensor] = []
    copies: list[Tensor] = []

    def copied(tensors: Sequence[Tensor]) -> Tensor:
        first, rows = tensors[0], sum(len(t) for t in tensors)
        # as the backward needs it: no copy
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
        copy_all(copies, sources)  # one launch for all adapters of the layers
    return stacks


def _with_adapters(projections: Sequence[Projection], a: Tensor | None, bs: Sequence[Tensor]) -> Stack:
    parts = iter(() if a is None else a.split([b.shape[1] for b in bs]))  # views of the stacked A
    remaining = iter(bs)
    return Stack(
        tuple(
            replace(p, adapters=tuple(x._replace(a=next(parts), b=next(remaining)) for x in p.adapters))
            for p in projections
        ),
        a,
    )


def leaves_of(projections: Iterable[Projection]) -> list[Tensor]:
    """Return A and B of each adapter in turn."""
    return [leaf for adapter in adapters_of(projections) for leaf in adapter[:2]]


def tensors_of(projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Return what `restored` takes: weights and leaves, as they are. Copies in another dtype would be kept."""
    return *(p.weight for p in projections), *leaves_of(projections)


def layout_of(projections: Sequence[Projection]) -> Layout:
    """Return what `restored` needs besides the tensors."""
    return tuple((tuple(adapter[2:] for adapter in p.adapters), p.unpack) for p in projections)


def restored(layout: Layout, tensors: Sequence[Any]) -> list[Projection]:
    """Rebuild projections, without biases, from the results of `layout_of` and `tensors_of`."""
    leaves = iter(tensors[len(layout) :])
    return [
        Projection(w, None, tuple(Adapter(next(leaves), next(leaves), *numbers) for numbers in adapters), unpack)
        for w, (adapters, unpack) in zip(tensors, layout, strict=False)
    ]


def adapters_of(projections: Iterable[Projection]) -> list[Adapter]:
    return [adapter for p in projections for adapter in p.adapters]


def _runs(stack: Stack, masks: Masks, slots: int) -> tuple[Run, ...]:
    kinds = tuple((adapter.b.shape[1], threshold_of(adapter.dropout), adapter.factor) for adapter in stack.adapters)
    return runs_of(kinds, masks.stream, slots)


def _adapter_columns(stack: Stack) -> Iterator[tuple[Adapter, slice]]:
    """Yield each adapter with its columns of R."""
    start = 0
    for adapter, rank in zip(stack.adapters, stack.ranks, strict=True):
        yield adapter, slice(start, start + rank)
        start += rank


def _each(stack: Stack, masks: Masks, shape: torch.Size) -> Iterator[tuple[Adapter, slice, Tensor]]:
    """Yield each adapter with its columns of R and its mask (N, K)."""
    assert masks.seed is not None
    for i, (adapter, columns) in enumerate(_adapter_columns(stack)):
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
    a = split_rows(stack.a, "hhhm") if numerics.split else stack.a  # g is "hmlh"
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
            dx += term.where(mask, 0)  # the adapter's own mask
        if x is not None:
            das.append(a_gradient(g[..., columns], x.where(mask, 0), numerics))
    return torch.cat(das) if das else None


def project(x: Tensor, stack: Stack, values: Tensor | None, numerics: Numerics) -> list[Tensor]:
    """Return y of each projection, with the terms of all adapters if there are values. x: (N, K) in `compute`."""
    outputs, columns = [], _adapter_columns(stack)
    for p in stack.projections:
        terms = () if values is None else p.adapters
        with p.dense(numerics.compute) as w:
            is_last = bool(terms) and p.bias is None and _is_term_first(len(x) * len(w), numerics)
            y = None if is_last else F.linear(x, w, None if p.bias is None else p.bias.to(numerics.compute))
            for _ in terms:
                adapter, place = next(columns)  # this adapter's columns of R
                assert values is not None
                if y is None:
                    y = values[:, 0, place] @ adapter.b.t()
                else:
                    add(y, values[..., place], adapter.b.t(), numerics)
            assert y is not None
            outputs.append(y.addmm_(x, w.t()) if is_last else y)
        del w  # before the next one is there
    return outputs


def _is_term_first(numbers: int, numerics: Numerics) -> bool:
    """Whether an adapter's term of so many numbers is written before the base product is added to it."""
    return numerics.rank == numerics.compute and numbers >= TERM_FIRST


def values_of(x: Tensor, stack: Stack, masks: Masks, numerics: Numerics) -> Tensor | None:
    """Return s x A^T of all adapters, which the backward reads too. x: (N, K) in `compute`."""
    if stack.a is None:
        return None
    # one product, if all scales are the same
    values, factors = new_values(x, len(stack.a), numerics), {adapter.factor for adapter in stack.adapters}
    if masks.seed is not None:
        _multiply_kept(x, stack, values, masks, numerics)
    elif len(factors) == 1:
        multiply(x, stack.a.t(), values, factors.pop(), numerics)
    else:
        for adapter, columns in _adapter_columns(stack):
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
    for dy, (adapter, columns), needed in zip(dy_of_each, _adapter_columns(stack), needs_b, strict=True):
        if g is not None:
            multiply(dy, adapter.b, g[..., columns], adapter.factor, numerics)
        gradients.append(b_gradient(dy, values[..., columns], numerics) if needed else None)
    return g, gradients


def input_gradient(dys: Sequence[Tensor], stack: Stack, numerics: Numerics, dx: Tensor | None = None) -> Tensor:
    """Return the base layers' part of dx (N, K), the gradient of `project`'s input, added to `dx` if it is given."""
    for dy, p in zip(dys, stack.projections, strict=True):
        with p.dense(numerics.compute) as w:
            # Adds in place: a sum of separate tensors would read and write dx twice more.
            dx = dy @ w if dx is None else dx.addmm_(dy, w)
        del w  # before the next one is there
    assert dx is not None
    return dx


def input_and_a_gradients(
    dys: Sequence[Tensor], g: Tensor | None, x: Tensor | Scaled | None, stack: Stack, masks: Masks, numerics: Numerics,
    need_x: bool,
) -> tuple[Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
    """Return (dx (N, K), if needed; dA of each adapter, unless x is None)."""
    term = None
    if need_x and g is not None and stack.a is not None and masks.seed is None:
        term = g[:, 0] @ stack.a if _is_term_first(len(g) * stack.a.shape[1], numerics) else None
    dx = input_gradient(dys, stack, numerics, term) if need_x else None
    return dx, a_gradients(g, x, dx if term is None else None, stack, masks, numerics)


def a_gradients(
    g: Tensor | None, x: Tensor | Scaled | None, dx: Tensor | None, stack: Stack, masks: Masks, numerics: Numerics
) -> tuple[Tensor, ...]:
    """Add the adapters' part to dx, unless it is None, and return dA of each adapter, unless x is None."""
    if g is None or stack.a is None or (x is None and dx is None):
        return ()
    if masks.seed is not None:
        assert not isinstance(x, Scaled)
        das = _add_kept(dx, g, stack, x, masks, numerics)
    else:
        if dx is not None:
            add(dx, g, stack.a, numerics)
        das = None if x is None else a_gradient(g, x, numerics)
    return () if das is None else das.split(stack.ranks)  # one dA for each adapter
