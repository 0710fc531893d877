"""Products with low-rank adapters, on matrices: the adapters, dtypes, and products of the LoRA ops.

    values = s x A^T        y += values B^T        g = s dy B        dA = g^T x        dB = dy^T values

Shapes    x: (N, K)  A: (r, K)  B: (O, r)  y: (N, O)  values, g: (N, slots, r)
Numerics  y and dx are in the dtype of the base product; each term is rounded as it is added. If adapters have that
          dtype, or under autocast, everything has it. By default PEFT makes adapters wider than x (fp32 over a bf16
          base). Then x A^T, g and the gradients have the adapters' precision, as in PEFT's own forward, but x is not
          stored in fp32 for it. For bf16 x on CUDA, an fp32 matrix v is the sum of three bf16 matrices, h + m + l,
          exact except for underflow. As columns of one product with fp32 results, the three cost little more than
          one: r is so small that reading x takes most of the time. Where two such matrices u and v meet, in y and
          dx, [h m l h] of u times [h h h m] of v is their product to 2^-16. On other devices x is cast.
Source    Hu et al. 2021, arXiv:2106.09685; sums of bf16 matrices: Henry et al. 2019, arXiv:1904.06376
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ._dropout import LEVELS, threshold_of
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
        products = _wide_product(m, _columns(factor, "hml"))
        split(products.view(-1, 3, factor.shape[1]), "hmlh", values, scale)
    else:
        values[:, 0].addmm_(m.to(numerics.rank), factor, beta=0, alpha=scale)


def add(y: Tensor, values: Tensor, factor: Tensor, numerics: Numerics) -> None:
    """Add values factor to y. y: (N, columns) in `compute`; factor: (r, columns) in `rank`."""
    if numerics.split:
        y.addmm_(values.flatten(1), _columns(factor.t(), "hhhm").t())
    elif numerics.rank == numerics.compute:
        y.addmm_(values[:, 0], factor)
    else:
        y.add_(values[:, 0] @ factor)


def a_gradient(g: Tensor, x: Tensor, numerics: Numerics) -> Tensor:
    """Return g^T x (R, K) in `rank`, or in fp32 if `wide`."""
    if numerics.split:
        return _wide_product(g[:, :3].flatten(1).t(), x).view(3, -1, x.shape[1]).sum(0)
    return _wide_product(g[:, 0].t(), x) if numerics.wide else g[:, 0].t() @ x.to(numerics.rank)


def b_gradient(dy: Tensor, values: Tensor, numerics: Numerics) -> Tensor:
    """Return dy^T values (O, r) in `rank`, or in fp32 if `wide`."""
    if numerics.split:
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
