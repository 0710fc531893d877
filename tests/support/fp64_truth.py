"""An op in fp32 beside plain torch in fp64: outputs and all gradients, under random upstream gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def assert_true(op: Callable, truth: Callable, *tensors: Tensor, tolerance: float = 3e-6) -> None:
    """op(*tensors) and its gradients for all of them are the truth's, to `tolerance` of the largest entry."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    _compare(op(*leaves), leaves, truth, tolerance)


def assert_layer_true(layer: nn.Module, truth: Callable, *inputs: Tensor, tolerance: float = 3e-6) -> None:
    """As `assert_true`, for inputs and parameters: truth(*inputs, *parameters). The parameters change at random."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    _compare(layer(*inputs), [*inputs, *layer.parameters()], truth, tolerance)


def _compare(outputs: Tensor | Sequence[Tensor], leaves: list[Tensor], truth: Callable, tolerance: float) -> None:
    exact = [x.detach().double().requires_grad_() for x in leaves]
    pairs = [[y] if isinstance(y, Tensor) else list(y) for y in (outputs, truth(*exact))]
    upstream = [torch.randn_like(y) for y in pairs[0]]
    got = [*pairs[0], *torch.autograd.grad(pairs[0], leaves, upstream)]
    wanted = [*pairs[1], *torch.autograd.grad(pairs[1], exact, [u.double() for u in upstream])]
    for i, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert ours.shape == theirs.shape
        atol = tolerance * max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=atol, msg=lambda m, i=i: f"result {i}: {m}")
