"""What is right: a case in plain torch at high precision, and the accuracy gate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .operands import Operands, outputs_of

# Added to twice plain torch's own error: below it, differences are rounding of the result itself.
FLOOR = {torch.bfloat16: 1e-4, torch.float16: 2e-5, torch.float32: 1e-6}
ELEMENTS_AT_ONCE = 2**27  # of the logits that the truth of a loss is computed from
IGNORE_INDEX = -100
Errors = dict[str, float]
Values = dict[str, Tensor]


def at_least_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return KL(p || q) per token at beta 0, KL(q || p) at 1; p is the teacher.

    Between them it is beta KL(p || m) + (1 - beta) KL(q || m) with the mixture m = beta p + (1 - beta) q.
    """

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        return kl(log_p, log_q)
    if beta == 1.0:
        return kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


@contextmanager
def exact_products() -> Iterator[None]:
    """Turn TF32 off, so that fp32 is fp32."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def evaluate(case: Any, operands: Operands, dtype: torch.dtype) -> Values:
    """Return outputs and gradients by autograd through plain torch in `dtype`.

    A loss is taken some rows at a time, so that it fits anywhere; gradients of what all rows share are summed in at
    least fp32.
    """
    with exact_products():
        if case.is_loss:
            return _evaluate_loss(case, operands, dtype)
        tensors = {name: _leaf(case, name, x, dtype) for name, x in operands.tensors.items()}
        return _values(case, tensors, operands.upstream)


def _leaf(case: Any, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype if x.is_floating_point() else x.dtype).requires_grad_(name in case.leaves)


def _values(case: Any, tensors: dict[str, Tensor], upstream: list[Tensor]) -> Values:
    outputs = outputs_of(case.plain(**tensors))
    gradients = [g.to(x.dtype) for g, x in zip(upstream, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, [tensors[name] for name in case.leaves], gradients)
    values = [*(x.detach() for x in outputs), *gradients]
    return dict(zip(case.value_names(len(outputs)), values, strict=True))


def _evaluate_loss(case: Any, operands: Operands, dtype: torch.dtype) -> Values:
    rows = max(1, ELEMENTS_AT_ONCE // case.width)
    wide = torch.promote_types(dtype, torch.float32)
    split = {name: x for name, x in operands.tensors.items() if name not in case.shared}
    shared = {name: _leaf(case, name, operands.tensors[name], dtype) for name in case.shared}
    (loss_name, *names) = case.value_names(1)
    loss = torch.zeros((), dtype=torch.float64, device=operands.upstream[0].device)
    pieces: dict[str, list[Tensor]] = {name: [] for name in names}
    for start in range(0, case.tokens, rows):
        part = {name: x[start : start + rows] for name, x in split.items()}
        share = _count(part) / _count(split)  # of the mean over the supervised rows
        tensors = {
            name: shared[name] if name in shared else _leaf(case, name, part[name], dtype) for name in operands.tensors
        }
        values = _values(case, tensors, [share * operands.upstream[0].double()])
        loss += share * values.pop(loss_name)
        for leaf, (name, gradient) in zip(case.leaves, values.items(), strict=True):
            if leaf in shared and pieces[name]:
                pieces[name][0] += gradient
            else:
                pieces[name].append(gradient.to(wide) if leaf in shared else gradient)
    return {loss_name: loss, **{name: torch.cat(parts).to(dtype) for name, parts in pieces.items()}}


def _count(tensors: dict[str, Tensor]) -> int:
    """Return how many rows count in a loss: those whose label isn't ignored."""
    if "labels" in tensors:
        return int((tensors["labels"] != IGNORE_INDEX).sum())
    return len(next(iter(tensors.values())))


def compare(values: Values, truth: Values) -> Errors:
    """Return relative L2 errors."""
    if values.keys() != truth.keys():
        raise ValueError(f"expected {', '.join(truth)}, got {', '.join(values)}")
    return {name: relative_l2(values[name], x) for name, x in truth.items()}


def error_bound(case: Any, operands: Operands, truth: Values) -> Errors:
    """Return the gate: twice the error of plain torch in the case's dtype, plus a floor."""
    plain = compare(evaluate(case, operands, case.dtype), truth)
    return {name: 2 * error + FLOOR[case.dtype] for name, error in plain.items()}


def relative_l2(value: Tensor, truth: Tensor, elements: int = 2**26) -> float:
    """Return `||value - truth|| / ||truth||`, summed in fp64 over some elements at a time to stay small in memory."""
    if value.shape != truth.shape:
        raise ValueError(f"expected a tensor of shape {tuple(truth.shape)}, got {tuple(value.shape)}")
    difference = torch.zeros((), dtype=torch.float64, device=truth.device)
    norm = torch.zeros_like(difference)
    parts = (x.flatten().split(elements) for x in (value, truth))
    for part, right in zip(*parts, strict=True):
        right = right.double()
        difference += (part.double() - right).square().sum()
        norm += right.square().sum()
    return float((difference / norm).sqrt())
