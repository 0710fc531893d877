"""What autograd functions of this folder need: memory, and a backward that knows what it must not do."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


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
