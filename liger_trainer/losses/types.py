"""What a list `losses` may hold, as data: each type, the options its entries take, the scalars that change it.

Imports no torch, so that a configuration is checked without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..common.value_rules import Rule, complaints, did_you_mean, read
from ..kernels.divergence_kinds import KINDS

NUMBER: Rule = {"type": "number"}
SHARE: Rule = {"type": "number", "minimum": 0, "maximum": 1}
BELOW_ONE: Rule = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
LAYERS: Rule = {"type": ["array", "string"], "items": {"type": "array", "items": {"type": "integer"}}}
LAYOUTS = ("uniform", "last")  # of hidden losses' layers, instead of pairs


@dataclass(frozen=True)
class LossType:
    """One type of loss.

    Attributes:
        family: "divergence", of next-token distributions; "uld", of those of two tokenizers; "ce"; or "hidden",
            between blocks' outputs.
        options: what an entry may say beside type and weight, as rules of `config_types`.
        own: {option: scalar}: the options that stand for a scalar of the whole configuration.
        scalars: the scalars that its value depends on.
    """

    family: str
    options: Mapping[str, Rule] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()


_SKEWED = LossType("divergence", {"alpha": BELOW_ONE}, {"alpha": "skew_alpha"}, ("temperature", "skew_alpha"))
_HIDDEN = LossType("hidden", {"layers": LAYERS, "projector": {"type": "boolean"}})
LOSS_TYPES: dict[str, LossType] = {
    **{kind: LossType("divergence", scalars=("temperature",)) for kind in KINDS},
    "jsd": LossType("divergence", {"beta": SHARE}, {"beta": "beta"}, ("temperature", "beta")),
    "skew_kl": _SKEWED,
    "skew_reverse_kl": _SKEWED,
    "uld": LossType("uld", scalars=("temperature",)),
    "ce": LossType("ce"),
    "hidden_mse": _HIDDEN,
    "hidden_cosine": _HIDDEN,
}


@dataclass(frozen=True)
class LossTerm:
    """One entry of `losses`."""

    type: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return LOSS_TYPES[self.type].family


def entry_rule(types: Mapping[str, LossType] = LOSS_TYPES) -> Rule:
    """The rule of an entry of one of these types; of several, with the options of all."""
    options = {name: rule for kind in types.values() for name, rule in kind.options.items()}
    return {
        "type": "object",
        "properties": {"type": {"enum": list(types)}, "weight": NUMBER, **options},
        "required": ["type"],
        "additionalProperties": False,
    }


def listed_terms(losses: Any) -> tuple[LossTerm, ...]:
    """The terms of a `losses` list. Raises ValueError for what it does not understand."""
    if not isinstance(losses, list) or not losses:
        raise ValueError(f"losses must be a list such as [{{type: forward_kl, weight: 1.0}}], got {losses!r}.")
    terms: list[LossTerm] = []
    for entry in losses:
        term = _term(entry)
        if term.type in [other.type for other in terms]:
            raise ValueError(f"losses names {term.type} twice.")
        terms.append(term)
    return tuple(terms)


def _term(entry: Any) -> LossTerm:
    kind = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in LOSS_TYPES:
        hint = did_you_mean(kind, LOSS_TYPES) if isinstance(kind, str) else ""
        raise ValueError(f"Each of losses needs a type out of {', '.join(LOSS_TYPES)}; got {entry!r}.{hint}")
    rule = entry_rule({kind: LOSS_TYPES[kind]})
    for path, message in complaints(read(entry, rule), rule):
        raise ValueError(f"losses: {kind}: {'.'.join(map(str, path))}: {message}")
    options = dict(read(entry, rule))
    layers = options.get("layers")
    if layers is not None:
        _check_layers(kind, layers)
    del options["type"]
    return LossTerm(kind, float(options.pop("weight", 1.0)), options)


def _check_layers(kind: str, layers: Any) -> None:
    pairs = isinstance(layers, list) and layers and all(len(pair) == 2 for pair in layers)
    if not pairs and layers not in LAYOUTS:
        raise ValueError(
            f"losses: {kind}: layers: expected pairs [student layer, teacher layer] or one of {', '.join(LAYOUTS)}, "
            f"got {layers!r}."
        )
