"""How ops of the layers are checked: every output and gradient against fp64, within twice the error of plain torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from kernel_checks import assert_within_plain_error
from torch import Tensor

Tensors = Mapping[str, Tensor | None]


def outputs_and_grads(
    op: Callable, tensors: Tensors, leaves: Sequence[str], rounded: torch.dtype, **options: Any
) -> dict[str, Tensor]:
    """Every differentiable output of op as out0, out1, ..., and the gradient of each leaf as d_<name>.

    The outputs' own gradients are random, rounded to `rounded`, so that every dtype gets the same. Leaves keep their
    strides; one that is None has no gradient.
    """
    inputs = {k: x if x is None else x.detach().requires_grad_(k in leaves) for k, x in tensors.items()}
    result = op(**inputs, **options)
    outputs = [x for x in ([result] if isinstance(result, Tensor) else result) if x.requires_grad]
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(x.shape, generator=generator).to(rounded).to(x.device, x.dtype) for x in outputs]
    given = {f"d_{k}": inputs[k] for k in leaves if inputs[k] is not None}
    grads = torch.autograd.grad(outputs, list(given.values()), upstream)
    return {f"out{i}": x.detach() for i, x in enumerate(outputs)} | dict(zip(given, grads, strict=True))


def check_op(op: Callable, reference: Callable, tensors: Tensors, leaves: Sequence[str], **options: Any) -> dict:
    """Compare every output and gradient of op with its reference in fp64; return what op gave."""
    double = {k: x.double() if x is not None and x.is_floating_point() else x for k, x in tensors.items()}
    dtype = next(x.dtype for k, x in tensors.items() if k in leaves and x is not None)
    got = outputs_and_grads(op, tensors, leaves, dtype, **options)
    plain = outputs_and_grads(reference, tensors, leaves, dtype, **options)
    truth = outputs_and_grads(reference, double, leaves, dtype, **options)
    assert got.keys() == plain.keys() == truth.keys()
    for name in truth:
        assert got[name].dtype == plain[name].dtype, f"{name} is {got[name].dtype}, expected {plain[name].dtype}"
        assert_within_plain_error(name, got[name], plain[name], truth[name], dtype)
    return got
