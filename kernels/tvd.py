"""Total variation distance of given distributions, sum |q - p| / 2: input q, target p.

    given   an entry: |q - p| / 2              d/dq = sign(q - p) / 2,  0 where both agree
    logits  the sum over a row, q = softmax(input / T), p = softmax(target / T)
                d/d input_j = q_j (sign(q_j - p_j) - sum_k q_k sign(q_k - p_k)) / 2T

Shapes    input, target: (..., V), labels: (...)
Numerics  fp32 inside; sums and values of rows in fp32, gradients rounded once to their input's dtype. The gradient
          jumps where q and p cross: where softmaxes differ by less than their rounding errors, its sign is random, as
          in plain torch. It is exactly 0 where both sides agree.
Traffic   in elements of one side, NV. Given: 2 reads, and 1 write for each gradient. Logits: as in jsd.py.
"""

from torch import Tensor

from ._unfused_divergence import Call, check, given_rows, prepare, reduced, takes_reference


def tvd_reference(
    input: Tensor, target: Tensor, *, reduction: str = "batchmean", from_logits: bool = False,
    temperature: float = 1.0, scale_by_temperature_squared: bool = True, labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    q, p, keep = prepare(input, target, from_logits, temperature, labels, ignore_index)
    values = ((q.exp() - p.exp()) if from_logits else (q - p)).abs() * 0.5  # `prepare` made logarithms of logits
    scale = temperature**2 if scale_by_temperature_squared else 1.0
    return reduced(values, input, target, keep, reduction, from_logits, scale)


def tvd(
    input: Tensor, target: Tensor, *, reduction: str = "batchmean", from_logits: bool = False,
    temperature: float = 1.0, scale_by_temperature_squared: bool = True, labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Compute the total variation distance over the last dimension, differentiable in both sides.

    Args:
        input: (..., V) probabilities, or logits; fp32, fp16, bf16 (fp64 takes plain torch). Any strides; copied only if
            the last dimension's is not 1.
        target: (..., V), the other distribution, in the same form. Its dtype may differ.
        reduction: "batchmean" divides the sum by the number of rows over all leading dimensions. "mean" averages over
            entries for probabilities, over rows for logits. "sum" adds. "none" returns (..., V) from probabilities,
            (...) from logits.
        from_logits: input and target are logits; their softmax is computed on the way and never stored.
        temperature: divides both sides' logits.
        scale_by_temperature_squared: multiply value and gradients by temperature^2, see `kl_div`.
        labels: (...) int64. Rows with ignore_index take no part in value, gradients and means, and are not read.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs), 0 if no row takes part. For "none", values of rows have that dtype too;
        values of entries have the dtype that input and target promote to.

    Raises:
        ValueError: if shapes don't fit, a reduction is unknown, or temperature lacks logits.
    """
    check("tvd", input, target, labels, reduction, from_logits, temperature)
    if takes_reference(input, target):
        return tvd_reference(
            input, target, reduction=reduction, from_logits=from_logits, temperature=temperature,
            scale_by_temperature_squared=scale_by_temperature_squared, labels=labels, ignore_index=ignore_index,
        )  # fmt: skip
    return given_rows(input, target, labels, Call(
        "tvd", reduction, from_logits, temperature=float(temperature),
        scale=float(temperature**2 if scale_by_temperature_squared else 1.0), ignore_index=ignore_index,
    ))  # fmt: skip
