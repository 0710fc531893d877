"""KL divergence of given distributions, KL(target || input).

    given   an entry: p (log p - x)                        x log-probability, p probability (or given as log p)
                d/dx = -p     d/dp = log p - x + 1         (d/d log p: p times that)
    logits  a row:    sum p (log p - log q),               q = softmax(input / T), p = softmax(target / T)
                d/d input = (q - p) / T                    d/d target = p (log p - log q - KL) / T

Shapes    input, target: (..., V), labels: (...)
Zeros     an entry with p = 0 has value 0 and gradients 0, whatever x is (torch gives NaN for x = -inf). If p > 0 and x
          is -inf, the divergence is infinite. From logits it is infinite if such entries have more than about 1e-10 of
          p's mass; less counts as none.
Numerics  fp32 inside; sums and values of rows in fp32, gradients rounded once to their input's dtype. From logits, a
          row that both sides share has exactly value 0 and gradient 0.
Traffic   in elements of one side, NV. Given: 2 reads, and 1 write for each gradient. Logits: 2 reads for the value, 2
          reads (from the L2 cache, if rows are short enough) and 1 write for each gradient. Nothing else of size NV is
          stored. If the forward wrote the gradients (_unfused_divergence.py) and the loss's own gradient is not 1,
          they are read and written once more.
Source    Hinton et al. 2015, arXiv:1503.02531, for temperature and its square; online softmax: Milakov & Gimelshein
          2018, arXiv:1805.02867; meaning and reductions: torch.nn.functional.kl_div
"""

from torch import Tensor

from ._divergence_reference import kl_values
from ._unfused_divergence import Call, check, given_rows, prepare, reduced, takes_reference


def kl_div_reference(
    input: Tensor, target: Tensor, *, reduction: str = "batchmean", log_target: bool = False,
    from_logits: bool = False, temperature: float = 1.0, scale_by_temperature_squared: bool = True,
    labels: Tensor | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    x, t, keep = prepare(input, target, from_logits, temperature, labels, ignore_index)
    scale = temperature**2 if scale_by_temperature_squared else 1.0
    batch = None if from_logits or labels is not None else input.shape[0]
    values = kl_values(x, t, log_target or from_logits)
    return reduced(values, input, target, keep, reduction, from_logits, scale, batch)


def kl_div(
    input: Tensor, target: Tensor, *, reduction: str = "batchmean", log_target: bool = False,
    from_logits: bool = False, temperature: float = 1.0, scale_by_temperature_squared: bool = True,
    labels: Tensor | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Compute KL(target || input) over the last dimension, differentiable in both sides.

    Without from_logits and labels, it means the same as torch.nn.functional.kl_div.

    Args:
        input: (..., V) log-probabilities, or logits; fp32, fp16, bf16 (fp64 takes plain torch). Any strides; copied
            only if the last dimension's is not 1.
        target: (..., V) probabilities, their logarithms (log_target), or logits. Its dtype may differ.
        reduction: "batchmean" (the default here, as in Liger-Kernel's KL loss; torch's own is "mean"), "mean", "sum" or
            "none". For probabilities, "none" returns (..., V), "mean" averages over all entries, and "batchmean"
            divides the sum by input.shape[0]. For logits, "none" returns one value per row (...), and both means are
            over rows.
        log_target: target holds log-probabilities.
        from_logits: input and target are logits; their softmax is computed on the way and never stored.
        temperature: divides both sides' logits.
        scale_by_temperature_squared: multiply value and gradients by temperature^2, so that gradients keep their size
            when the temperature changes (as in `linear_divergence`).
        labels: (...) int64. Rows with ignore_index take no part: they are not read, their values and gradients are 0.
            "mean" is then over the entries, and "batchmean" over the rows, of the others.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs), 0 if no row takes part. For "none", values of rows have that dtype too;
        values of entries have the dtype that input and target promote to.

    Raises:
        ValueError: if shapes don't fit, a reduction is unknown, or options exclude each other.
    """
    check("kl_div", input, target, labels, reduction, from_logits, temperature)
    if log_target and from_logits:
        raise ValueError("log_target says that target holds log-probabilities, from_logits that it holds logits.")
    if takes_reference(input, target):
        return kl_div_reference(
            input, target, reduction=reduction, log_target=log_target, from_logits=from_logits,
            temperature=temperature, scale_by_temperature_squared=scale_by_temperature_squared, labels=labels,
            ignore_index=ignore_index,
        )  # fmt: skip
    return given_rows(input, target, labels, Call(
        "kl_log" if log_target or from_logits else "kl", reduction, from_logits, temperature=float(temperature),
        scale=float(temperature**2 if scale_by_temperature_squared else 1.0), ignore_index=ignore_index,
        batch=None if from_logits or labels is not None else input.shape[0],
    ))  # fmt: skip
