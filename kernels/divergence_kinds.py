"""The divergences of linear_divergence.py by name, and the row kinds that each is computed from."""

from collections.abc import Mapping

KINDS = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "symmetric_kl", "tvd")
ROW_KINDS = tuple(kind for kind in KINDS if kind != "symmetric_kl")  # what the row kernels know
REMOVED = {"adaptive_kl": "use symmetric_kl, or forward_kl and reverse_kl with weights of your own"}


def named(kind: str | Mapping[str, float]) -> dict[str, float]:
    """Return {kind: weight} as the caller named them. Raise ValueError for no kind, or an unknown one."""
    weights = {kind: 1.0} if isinstance(kind, str) else {name: float(weight) for name, weight in kind.items()}
    for name in weights:
        if name in REMOVED:
            raise ValueError(f"{name} was removed: {REMOVED[name]}.")
    if not weights or set(weights) - set(KINDS):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, or a mapping of these to weights; got {kind!r}.")
    return weights


def parts(name: str, beta: float, alpha: float) -> dict[str, float]:
    """Return {row kind: share} of a kind. At the ends of beta and alpha that is the KL which the kind tends to.

    The JSD tends to a KL after division by beta, or by 1 - beta; skewed KLs tend to one directly.
    """
    if name == "symmetric_kl":
        return {"forward_kl": 0.5, "reverse_kl": 0.5}
    if name == "jsd" and beta in (0, 1):
        return {"reverse_kl" if beta else "forward_kl": 1.0}
    if name in ("skew_kl", "skew_reverse_kl") and alpha == 0:
        return {"forward_kl" if name == "skew_kl" else "reverse_kl": 1.0}
    return {name: 1.0}


def divergence_weights(kind: str | Mapping[str, float], beta: float, alpha: float = 0.1) -> dict[str, float]:
    """Return {row kind: weight} of all kinds in `kind`, including those of weight 0, which are only measured."""
    weights: dict[str, float] = {}
    for name, weight in named(kind).items():
        for part, share in parts(name, beta, alpha).items():
            weights[part] = weights.get(part, 0.0) + share * weight
    return weights
