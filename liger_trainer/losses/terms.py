"""From the loss that a configuration describes to the one that a batch is given."""

from collections.abc import Mapping
from typing import Any

from .plan import LossPlan
from .spec import Distillation


def distillation_of(plan: LossPlan, scale_by_temperature_squared: bool) -> Distillation:
    """The loss as configured, before any schedule."""
    return Distillation(
        scale_by_temperature_squared=scale_by_temperature_squared,
        terms=tuple(term.type for term in plan.terms),
        **distillation_fields(plan, {}),
    )


def distillation_fields(plan: LossPlan, moved: Mapping[str, float]) -> dict[str, Any]:
    """The fields of `Distillation` that scalars decide: those of the plan, with `moved` in the place of some."""
    scalars = {**plan.scalars, **moved}

    def weights(family: str) -> dict[str, float]:
        return {term.type: scalars[f"{term.type}_weight"] for term in plan.of(family)}

    return {
        "weights": weights("divergence"),
        "ce_weight": weights("ce").get("ce", 0.0),
        "uld_weight": weights("uld").get("uld", 0.0),
        "hidden_weights": weights("hidden"),
        **{name: scalars[name] for name in ("temperature", "beta", "skew_alpha")},
    }


_FIELD_OF = {"divergence": "weights", "ce": "ce_weight", "uld": "uld_weight", "hidden": "hidden_weights"}


def moved_fields(plan: LossPlan, moved: Mapping[str, float]) -> dict[str, Any]:
    """The fields of `Distillation` that `moved` scalars change, and no others."""
    fields = distillation_fields(plan, moved)
    of_weights = {f"{term.type}_weight": _FIELD_OF[term.family] for term in plan.terms}
    names = [of_weights.get(name, name) for name in moved]
    return {name: fields[name] for name in names if name in fields}


def final_fields(plan: LossPlan) -> dict[str, Any]:
    """What evaluations change of the loss: scheduled scalars have their final values, whatever the step."""
    share = {} if plan.taid is None else {"teacher_share": plan.taid.end}
    return {**moved_fields(plan, plan.final()), **share, "measure_jsd": True}
