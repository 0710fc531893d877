"""What every autograd function of this folder needs: a backward that says that it is no function to differentiate."""

import functools
from collections.abc import Callable

import torch


def first_order(backward: Callable) -> Callable:
    """A backward that refuses create_graph=True: what a kernel returns has no graph, and would count as a constant.

    torch's once_differentiable lets that pass where the gradient it is given is itself a constant, as that of a sum.
    """

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "This op has no second derivatives: differentiate it without create_graph=True, or call its form in "
                "plain torch, <op>_reference, instead."
            )
        return backward(ctx, *gradients)

    return checked
