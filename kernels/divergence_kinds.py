"""The divergences of linear_divergence.py by name: what a caller asks for, and what the row kernels compute of it."""

from collections.abc import Mapping

KINDS = (
    "forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "symmetric_kl", "tvd", "adaptive_kl",
)  # fmt: skip
ROW_KINDS = tuple(kind for kind in KINDS if kind != "symmetric_kl")  # what the row kernels know


def named(kind: str | Mapping[str, float]) -> dict[str, float]:
    """{kind: weight}, as the caller names them. Raises ValueError for no kind, or an unknown one."""
    weights = {kind: 1.0} if isinstance(kind, str) else {name: float(weight) for name, weight in kind.items()}
    if not weights or set(weights) - set(KINDS):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, or a mapping of these to weights; got {kind!r}.")
    return weights


def parts(name: str, beta: float, alpha: float) -> dict[str, float]:
    """{row kind: share} that a kind is made of. At the ends of beta and alpha it is the KL that it tends to there.

    The JSD tends to a KL after division by beta, or by 1 - beta; skewed KLs do so as they are.
    """
    if name == "symmetric_kl":
        return {"forward_kl": 0.5, "reverse_kl": 0.5}
    if name == "jsd" and beta in (0, 1):
        return {"reverse_kl" if beta else "forward_kl": 1.0}
    if name in ("skew_kl", "skew_reverse_kl") and alpha == 0:
        return {"forward_kl" if name == "skew_kl" else "reverse_kl": 1.0}
    return {name: 1.0}


def divergence_weights(kind: str | Mapping[str, float], beta: float, alpha: float = 0.1) -> dict[str, float]:
    """{row kind: weight} of all that kind names, also of what it gives the weight 0 and is measured alone."""
    weights: dict[str, float] = {}
    for name, weight in named(kind).items():
        for part, share in parts(name, beta, alpha).items():
            weights[part] = weights.get(part, 0.0) + share * weight
    return weights
