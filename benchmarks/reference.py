"""What is right: the losses in plain torch, their gradients at high precision, and the accuracy gate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from .cases import BETA, IGNORE_INDEX, Case, Inputs

# Added to twice plain torch's own error: below it, differences are rounding of the result itself.
FLOOR = {torch.bfloat16: 1e-4, torch.float16: 2e-5, torch.float32: 1e-6}


def loss_sum(
    case: Case,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    teacher_hidden: torch.Tensor | None,
    teacher_weight: torch.Tensor | None,
) -> torch.Tensor:
    """Sum of the per-token losses in plain torch: products in the inputs' dtype, softmax in at least fp32."""
    logits = at_least_fp32(hidden @ weight.T)
    if not case.is_divergence:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    assert teacher_hidden is not None and teacher_weight is not None
    log_q = logits.log_softmax(-1)
    log_p = at_least_fp32(teacher_hidden @ teacher_weight.T).log_softmax(-1)
    return (divergence(log_p, log_q, BETA[case.kind]) * (labels != IGNORE_INDEX)).sum()


def plain_loss(case: Case, x: Inputs) -> torch.Tensor:
    """The loss as one would write it without a fused op: whole logits in memory."""
    return loss_sum(case, *x) / (x.labels != IGNORE_INDEX).sum()


def divergence(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    """Per-token KL(p || q) at beta 0, KL(q || p) at 1, else beta KL(p || m) + (1 - beta) KL(q || m) with the
    mixture m = beta p + (1 - beta) q; p is the teacher."""

    def kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
        return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        return kl(log_p, log_q)
    if beta == 1.0:
        return kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Gradients:
    """Loss (scalar), dX (N, H) and dW (V, H; None with a frozen head)."""

    loss: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor | None


def evaluate(case: Case, x: Inputs, dtype: torch.dtype, rows: int = 1024) -> Gradients:
    """Loss and gradients of `case` by autograd through plain torch in `dtype`, `rows` tokens at a time so
    that they fit anywhere; sums over chunks are kept in at least fp32."""
    with exact_products():
        return _evaluate(case, x, dtype, rows)


@contextmanager
def exact_products() -> Iterator[None]:
    """TF32 is off, so fp32 is fp32."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def _evaluate(case: Case, x: Inputs, dtype: torch.dtype, rows: int) -> Gradients:
    wide = torch.promote_types(dtype, torch.float32)
    weight = x.weight.detach().to(dtype).requires_grad_(not case.frozen_head)
    teacher_weight = None if x.teacher_weight is None else x.teacher_weight.to(dtype)
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    d_hidden = torch.empty_like(x.hidden, dtype=wide)
    d_weight = None if case.frozen_head else torch.zeros_like(weight, dtype=wide)
    for start in range(0, case.tokens, rows):
        chunk = slice(start, start + rows)
        hidden = x.hidden[chunk].detach().to(dtype).requires_grad_()
        teacher_hidden = None if x.teacher_hidden is None else x.teacher_hidden[chunk].to(dtype)
        part = loss_sum(case, hidden, weight, x.labels[chunk], teacher_hidden, teacher_weight)
        part = part / (case.tokens - case.ignored_tokens)
        leaves = [hidden] if d_weight is None else [hidden, weight]
        grads = torch.autograd.grad(part * case.grad_output, leaves)
        loss += part.detach()
        d_hidden[chunk] = grads[0]
        if d_weight is not None:
            d_weight += grads[1]
    return Gradients(loss, d_hidden, d_weight)


@dataclass(frozen=True)
class Errors:
    """Relative L2 errors, `||value - truth|| / ||truth||`; weight is None with a frozen head."""

    loss: float
    hidden: float
    weight: float | None

    def exceeding(self, bound: Errors) -> list[str]:
        """Names and sizes of the errors that are not within `bound`; a NaN never is."""
        pairs = {name: (error, getattr(bound, name)) for name, error in asdict(self).items()}
        return [
            f"{name} error {error:.2e} exceeds {limit:.2e}"
            for name, (error, limit) in pairs.items()
            if limit is not None and not error <= limit
        ]


def errors(value: Gradients, truth: Gradients) -> Errors:
    return Errors(
        relative_l2(value.loss, truth.loss),
        relative_l2(value.hidden, truth.hidden),
        None if value.weight is None or truth.weight is None else relative_l2(value.weight, truth.weight),
    )


def error_bound(case: Case, x: Inputs, truth: Gradients) -> Errors:
    """The gate: twice the error of plain torch in the case's dtype, plus a floor."""
    plain = evaluate(case, x, case.dtype)
    weight = None if plain.weight is None else plain.weight.to(case.dtype)
    own = errors(Gradients(plain.loss, plain.hidden.to(case.dtype), weight), truth)
    floor = FLOOR[case.dtype]
    limit_weight = None if own.weight is None else 2 * own.weight + floor
    return Errors(2 * own.loss + floor, 2 * own.hidden + floor, limit_weight)


def relative_l2(value: torch.Tensor, truth: torch.Tensor, rows: int = 16384) -> float:
    """`||value - truth|| / ||truth||` summed in fp64, `rows` at a time to stay small in memory."""
    if value.shape != truth.shape:
        raise ValueError(f"expected a tensor of shape {tuple(truth.shape)}, got {tuple(value.shape)}")
    difference = torch.zeros((), dtype=torch.float64, device=truth.device)
    norm = torch.zeros_like(difference)
    values, truths = (torch.atleast_1d(tensor).split(rows) for tensor in (value, truth))
    for part, right in zip(values, truths, strict=True):
        right = right.double()
        difference += (part.double() - right).square().sum()
        norm += right.square().sum()
    return float((difference / norm).sqrt())
