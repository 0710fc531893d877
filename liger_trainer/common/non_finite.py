"""What is done about numbers that are not finite in training: the values of `on_non_finite`. Imports no torch."""

STOP, SKIP = "stop", "skip_step"
POLICIES = (STOP, SKIP)
HELP = "At a loss, gradient or weight that is NaN or infinite: stop, or skip_step, which leaves such steps out."


def check_policy(policy: str) -> str:
    """Return the policy. Raise ValueError for one that is not known."""
    if policy not in POLICIES:
        raise ValueError(f"on_non_finite must be one of {', '.join(POLICIES)}, got {policy!r}.")
    return policy
