"""The divergences of linear_divergence.py by name. A new one is a row of `TABLE` and its formulas in three more files,
which docs/extending/loss.md names. Imports no torch, so that a configuration is checked without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """A divergence.

    Attributes:
        options: which of beta and alpha its value depends on.
        sum_of: {row kind: share} that it is the sum of. Empty for a row kind, which the row kernels compute.
        second_pass: whether it needs the log-partitions first, so the kernel reads the row once more for it.
    """

    name: str
    options: tuple[str, ...] = ()
    sum_of: Mapping[str, float] = field(default_factory=dict)
    second_pass: bool = False


# Row kinds of the second pass come last of the row kinds: the kernels walk over them by number.
TABLE = (
    Kind("forward_kl"),
    Kind("reverse_kl"),
    Kind("jsd", ("beta",), second_pass=True),
    Kind("skew_kl", ("alpha",), second_pass=True),
    Kind("skew_reverse_kl", ("alpha",), second_pass=True),
    Kind("symmetric_kl", sum_of={"forward_kl": 0.5, "reverse_kl": 0.5}),
    Kind("tvd", second_pass=True),
)
OF_NAME = {kind.name: kind for kind in TABLE}
KINDS = tuple(OF_NAME)
ROW_KINDS = tuple(kind.name for kind in TABLE if not kind.sum_of)
SECOND_PASS = tuple(kind.name for kind in TABLE if kind.second_pass)
BITS = {name: 1 << number for number, name in enumerate(ROW_KINDS)}  # in the kernels' MEASURED, GRADED and KIND
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


def parts(name: str, beta: float, alpha: float) -> Mapping[str, float]:
    """Return {row kind: share} of a kind. At the ends of beta and alpha that is the KL which the kind tends to.

    The JSD tends to a KL after division by beta, or by 1 - beta; skewed KLs tend to one directly.
    """
    if name == "jsd" and beta in (0, 1):
        return {"reverse_kl" if beta else "forward_kl": 1.0}
    if name in ("skew_kl", "skew_reverse_kl") and alpha == 0:
        return {"forward_kl" if name == "skew_kl" else "reverse_kl": 1.0}
    return OF_NAME[name].sum_of or {name: 1.0}


def divergence_weights(kind: str | Mapping[str, float], beta: float, alpha: float = 0.1) -> dict[str, float]:
    """Return {row kind: weight} of all kinds in `kind`, including those of weight 0, which are only measured."""
    weights: dict[str, float] = {}
    for name, weight in named(kind).items():
        for part, share in parts(name, beta, alpha).items():
            weights[part] = weights.get(part, 0.0) + share * weight
    return weights
