"""Generalised Jensen-Shannon divergence of given distributions: input q (student), target p (teacher).

    beta KL(p || m) + (1 - beta) KL(q || m),  m = (1 - beta) q + beta p       beta 0: KL(p || q), beta 1: KL(q || p)

    given   an entry: beta p log p/m + (1 - beta) q log q/m
                d/d log q = (1 - beta) q log q/m                              d/d log p = beta p log p/m
    logits  the sum over a row, q = softmax(input / T), p = softmax(target / T)
                d/d input = (1 - beta) q (log q/m - KL(q || m)) / T           d/d target: the same with beta, p

Shapes    input, target: (..., V), labels: (...)
Zeros     for 0 < beta < 1: finite, whatever underflows, also where log-probabilities or logits are -inf. At 0 and 1: as
          in kl_div.py.
Numerics  log-ratios to m come from log p - log q, so that neither m nor its logarithm is rounded on its own: where both
          sides agree, value and gradient are exactly 0. fp32 inside; sums and values of rows in fp32, gradients rounded
          once to their input's dtype.
Traffic   in elements of one side, NV. Given: 2 reads, and 1 write for each gradient. Logits: 4 reads for the value (2
          of them from the L2 cache if rows are short), 2 reads and 1 write for each gradient. See kl_div.py.
Source    Agarwal et al. 2023 (GKD), arXiv:2306.13649, in the convention of TRL and Liger-Kernel (beta on the teacher)
"""

import torch
from torch import Tensor

from ._divergence_reference import kl_values
from ._unfused_divergence import Call, check, given_rows, prepare, reduced, takes_reference


def jsd_values(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """Return the value of every entry, in plain torch."""
    if beta == 0:
        return kl_values(log_q, log_p, log_target=True)
    if beta == 1:
        return kl_values(log_p, log_q, log_target=True)
    log_q, log_p = (x.masked_fill(x < -1e30, -1e30) for x in (log_q, log_p))  # -inf - -inf would be NaN
    d = log_p - log_q
    larger = d > 0  # p is the larger; the ratios use m / max(p, q)
    share = torch.where(larger, 1 - beta, beta).to(d.dtype)
    log_m = torch.log1p(share * torch.expm1(torch.where(larger, -d, d)))
    q_ratio, p_ratio = torch.where(larger, -d, 0.0) - log_m, torch.where(larger, 0.0, d) - log_m
    return beta * log_p.exp() * p_ratio + (1 - beta) * log_q.exp() * q_ratio


def jsd_reference(
    input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: str = "batchmean", from_logits: bool = False,
    temperature: float = 1.0, scale_by_temperature_squared: bool = True, labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    log_q, log_p, keep = prepare(input, target, from_logits, temperature, labels, ignore_index)
    scale = temperature**2 if scale_by_temperature_squared else 1.0
    return reduced(jsd_values(log_q, log_p, beta), input, target, keep, reduction, from_logits, scale)


def jsd(
    input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: str = "batchmean", from_logits: bool = False,
    temperature: float = 1.0, scale_by_temperature_squared: bool = True, labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Compute the generalised Jensen-Shannon divergence over the last dimension, differentiable in both sides.

    Args:
        input: (..., V) the student's log-probabilities, or logits; fp32, fp16, bf16 (fp64 takes plain torch). Any
            strides; copied only if the last dimension's is not 1.
        target: (..., V) the teacher's. Its dtype may differ.
        beta: in [0, 1], the teacher's share of m. 0 means KL(target || input), 1 means KL(input || target): the limits
            after division by beta, and by 1 - beta.
        reduction: "batchmean" divides the sum by the number of rows over all leading dimensions; with labels, by the
            number of rows that take part (Liger-Kernel's JSD). "mean" averages over entries for log-probabilities, over
            rows for logits. "sum" adds. "none" returns (..., V) from log-probabilities, (...) from logits.
        from_logits: input and target are logits; their softmax is computed on the way and never stored.
        temperature: divides both sides' logits.
        scale_by_temperature_squared: multiply value and gradients by temperature^2, see `kl_div`.
        labels: (...) int64. Rows with ignore_index take no part in value, gradients and means, and are not read.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs), 0 if no row takes part. For "none", values of rows have that dtype too;
        values of entries have the dtype that input and target promote to.

    Raises:
        ValueError: if shapes don't fit, a reduction is unknown, an option is out of range, or temperature lacks logits.
    """
    check("jsd", input, target, labels, reduction, from_logits, temperature)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in [0, 1], got {beta}.")
    if takes_reference(input, target):
        return jsd_reference(
            input, target, beta=beta, reduction=reduction, from_logits=from_logits, temperature=temperature,
            scale_by_temperature_squared=scale_by_temperature_squared, labels=labels, ignore_index=ignore_index,
        )  # fmt: skip
    if beta == 1:
        input, target = target, input
    return given_rows(input, target, labels, Call(
        "jsd" if 0 < beta < 1 else "kl_log", reduction, from_logits, float(beta), float(temperature),
        float(temperature**2 if scale_by_temperature_squared else 1.0), ignore_index,
    ))  # fmt: skip
