"""A layer, function or loss against what it should be: outputs and all gradients, under random upstream gradients."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest entry


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def randomized(module: Any) -> Any:
    """A copy whose weights no initialisation gives; what is no module stays as it is."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters() if isinstance(module, nn.Module) else ()):
            parameter.add_(0.3 * random(*parameter.shape, seed=i + 1).to(parameter))
    return module


def results(op: Callable, inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> list[Tensor]:
    """The outputs of op, and the gradients of inputs and parameters."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = op(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    upstream = [1.5 + random(*y.shape, dtype=y.dtype, seed=9) for y in outputs]  # not 1, and other for each entry
    return [*outputs, *torch.autograd.grad(outputs, [*inputs, *parameters], upstream)]


def assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float | None = None) -> None:
    """Within a share of the largest entry, by default the dtype's. The truth may be in fp64."""
    for i, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert ours.dtype == theirs.dtype or theirs.dtype == torch.float64
        largest = theirs.double().abs().max().item() if theirs.numel() else 0.0
        atol = (tolerance or TOLERANCE[ours.dtype]) * largest + 1e-7
        how: dict[str, Any] = {"rtol": 0, "atol": atol, "msg": lambda m, i=i: f"result {i}: {m}"}
        torch.testing.assert_close(ours.double(), theirs.double(), **how)


def check(
    ours: Callable, theirs: Callable, *inputs: Tensor, dtype: torch.dtype | None = None, tolerance: float | None = None
) -> None:
    """`theirs`: a module, whose state dict fits both ways, or a formula of inputs and parameters, computed in fp64.

    dtype: of the parameters.
    """
    ours, theirs = randomized(ours), copy.deepcopy(theirs)
    parameters: list[Tensor] = []
    if isinstance(ours, nn.Module):
        parameters = list(ours.to(dtype).parameters())
    if isinstance(theirs, nn.Module) and isinstance(ours, nn.Module):
        theirs.to(dtype).load_state_dict(ours.state_dict(), strict=True)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        wanted = results(theirs, inputs, list(theirs.parameters()))
    else:
        wanted = results(theirs, [x.detach().double() for x in (*inputs, *parameters)])
    assert_same(results(ours, inputs, parameters), wanted, tolerance)
