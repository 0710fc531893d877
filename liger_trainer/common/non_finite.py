"""What is done about numbers that are not finite in training: the values of `on_non_finite`. Imports no torch."""

from dataclasses import dataclass

from .optimizers import UPDATING_IN_BACKWARD
from .options import equals, option

STOP, SKIP = "stop", "skip_step"
POLICIES = (STOP, SKIP)


@dataclass
class NonFiniteConfig:
    """The field of LigerConfig and LigerDistillConfig about numbers that are not finite.

    Args:
        on_non_finite: what is done about a loss, gradient norm, weight or teacher that is NaN or infinite: "stop", or
            "skip_step", which leaves such steps out.
    """

    on_non_finite: str = option(
        STOP,
        "At a loss, gradient or weight that is NaN or infinite: stop, or skip_step, which leaves such steps out.",
        choices=POLICIES,
        conflicts=[
            (
                equals("on_non_finite", SKIP) & equals("optim", *UPDATING_IN_BACKWARD),
                "skip_step leaves the optimizer's step out, but this optimizer updates weights in its backward; choose "
                "another `optim`, or stop.",
            )
        ],
    )


def check_policy(policy: str) -> str:
    """Return the policy. Raise ValueError for one that is not known."""
    if policy not in POLICIES:
        raise ValueError(f"on_non_finite must be one of {', '.join(POLICIES)}, got {policy!r}.")
    return policy
