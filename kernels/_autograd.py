"""What autograd functions of this folder need: memory, and a backward that knows what it must not do."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._triton import Launch, remembered, tl, triton, use_triton

RESCALED = 2**16  # numbers a program: most often it finds out that there is nothing to do, and even that takes time


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous memory of x's shape. (torch.empty keeps the host for twice as long.)"""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def vector(n: int, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for n numbers where x lies."""
    return x.new_empty(n, dtype=dtype)


def graph_is_kept() -> bool:
    """In a backward: whether the graph is wanted for another one (retain_graph=True)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def first_order(backward: Callable) -> Callable:
    """A backward that refuses create_graph=True: what a kernel returns has no graph, and would count as a constant.

    torch's once_differentiable lets that pass where the gradient it is given is itself a constant, as that of a sum.
    Where it is called under autocast, its products stay in the dtypes that the forward chose.
    """

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "This op has no second derivatives: differentiate it without create_graph=True, or call its form in "
                "plain torch, <op>_reference, instead."
            )
        device = next((x.device.type for x in gradients if x is not None), None)
        if device is None or not torch.is_autocast_enabled(device):
            return backward(ctx, *gradients)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *gradients)

    return checked


class Needs(NamedTuple):
    """Which gradients a call must produce, in the order of `LinearHead.tensors`."""

    hidden: bool
    weight: bool
    bias: bool
    low: bool = False
    low_weight: bool = False

    @classmethod
    def of(cls, *tensors: Tensor | None) -> "Needs":
        enabled = torch.is_grad_enabled()
        return cls(*(t is not None and enabled and t.requires_grad for t in tensors))

    @property
    def any(self) -> bool:
        return any(self)


@triton.jit
def _rescale_kernel(x_ptr, factor_ptr, columns, stride_row, stride_column, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        program, spans = tl.program_id(0).to(tl.int64), tl.cdiv(columns, SPAN)
        first = program % spans * SPAN
        for start in range(0, SPAN, BLOCK):
            cols = first + start + tl.arange(0, BLOCK)
            at = program // spans * stride_row + cols * stride_column
            x = tl.load(x_ptr + at, mask=cols < columns)
            tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x.dtype), mask=cols < columns)


@remembered
def _rescale_launch(rows: int, columns: int, strides: tuple[int, int], span: int) -> Launch:
    grid = (rows * -(-columns // span),)
    return Launch(_rescale_kernel, grid, columns, *strides, SPAN=span, BLOCK=4096, num_warps=8)


def rescale(gradients: Sequence[Tensor | None], factor: Tensor) -> Sequence[Tensor | None]:
    """In a backward: the gradients times that of the loss itself, `factor`, a scalar on their device.

    In place. Where the factor is 1 (a loss used as it is), a kernel finds out there and leaves, so nothing is moved and
    the host does not wait. A graph kept for another backward keeps its gradients too, and hands out copies.
    """
    if graph_is_kept():
        gradients = [None if x is None else x.clone() for x in gradients]
    multiply_(gradients, factor)
    return gradients


def multiply_(tensors: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiply (n,) or (n, m) in place by a scalar on their device; where it is 1, nothing is moved."""
    for x in tensors:
        if x is None or not x.numel():
            continue
        if use_triton(x):
            shape, strides = ((1, x.numel()), (0, 1)) if x.is_contiguous() else (x.shape, x.stride())
            _rescale_launch(*shape, strides, RESCALED)(x, factor)
        elif factor.item() != 1.0:
            x.mul_(factor.item())
