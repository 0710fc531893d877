"""What a student learns, as a configuration says it: `beta`, or a list `losses` of weighted terms."""

from typing import Any

from .kernels.linear_divergence import KINDS, divergence_weights
from .losses import Distillation


def distillation_of(
    losses: list[dict[str, Any]] | None, beta: float, temperature: float, scale_by_temperature_squared: bool
) -> Distillation:
    """The loss of these fields of `LigerDistillConfig`. Raises ValueError: a value out of range, an unknown loss."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in [0, 1], got {beta}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    weights = {"jsd": 1.0} if losses is None else weighted_losses(losses)
    ce_weight = weights.pop("ce", 0.0)
    return Distillation(
        weights=divergence_weights(weights, beta) if weights else {"forward_kl": 0.0},
        beta=beta,
        ce_weight=ce_weight,
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
    )


def weighted_losses(losses: Any) -> dict[str, float]:
    """{type: weight} of a `losses` list. Raises ValueError for what it does not understand."""
    known = (*KINDS, "ce")
    weights: dict[str, float] = {}
    if not isinstance(losses, list) or not losses:
        raise ValueError(f"losses must be a list such as [{{type: forward_kl, weight: 1.0}}], got {losses!r}.")
    for entry in losses:
        if not isinstance(entry, dict) or set(entry) - {"type", "weight"} or entry.get("type") not in known:
            raise ValueError(
                f"Each of losses needs a type out of {', '.join(known)} and may have a weight, got {entry!r}."
            )
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ValueError(f"The weight of a loss must be a number, got {weight!r} for {entry['type']}.")
        if entry["type"] in weights:
            raise ValueError(f"losses names {entry['type']} twice.")
        weights[entry["type"]] = float(weight)
    return weights
