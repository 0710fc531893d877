"""The loss that a configuration describes: its terms, its scalars, and how these change.

`LOSS_TYPES` is the table of what a list `losses` may hold. This file imports no torch, so that a configuration is
checked without it.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..common.options import (
    ABOVE_ZERO,
    BELOW_ONE,
    NUMBER,
    SHARE,
    Rule,
    check_values,
    complaints,
    did_you_mean,
    option,
    read,
)
from ..kernels.divergence_kinds import REMOVED, TABLE
from .schedules import Schedule, Taid, schedules_of, taid_of

SKEW_ALPHA = 0.1


@dataclass
class LossConfig:
    """The fields of LigerDistillConfig about what a student minimises. docs/losses.md has the types of losses.

    Args:
        beta: as in TRL's DistillationConfig.
        losses: replaces `beta` when given: a list such as
            `[{"type": "forward_kl", "weight": 1.0}, {"type": "ce", "weight": 0.1}]`. The default weight is 1.
        schedules: {name: {from, to, kind, warmup_steps, steps}} of temperature, beta, skew_alpha, lmbda,
            max_completion_length or the weight of a loss, `<type>_weight`.
        taid: the teacher's share in what the student is held against, see `schedules.Taid`; {} for the defaults.
        scale_loss_by_temperature_squared: as Hinton et al. 2015 do.
    """

    beta: float = option(
        0.0, "0: forward KL, 1: reverse KL, between: generalised Jensen-Shannon divergence.", ge=0, le=1
    )
    losses: list[dict[str, Any]] | str | None = option(
        None, "Weighted losses instead of beta, e.g. [{type: forward_kl}, {type: ce, weight: 0.1}]."
    )
    skew_alpha: float = option(SKEW_ALPHA, "Share of the other side in the mixture of the skewed KLs.", ge=0, lt=1)
    schedules: dict[str, Any] | str | None = option(
        None, "Scalars of the loss that change, e.g. {temperature: {to: 1.0, kind: cosine}}."
    )
    taid: dict[str, Any] | str | None = option(
        None, "Teacher's share, rising with the steps: {start, end, adaptive, alpha, beta}."
    )
    temperature: float = option(1.0, "Divides the logits in the divergences, and those that are sampled from.", gt=0)
    kd_temperature: float | None = option(None, "Temperature of the divergences; default: temperature.", gt=0)
    scale_loss_by_temperature_squared: bool = option(True, "Multiply the divergences by temperature squared.")


LAYERS: Rule = {"type": ["array", "string"], "items": {"type": "array", "items": {"type": "integer"}}}
ALM_TAU = 100.0  # the paper's
LAYOUTS = ("uniform", "last")  # named choices of blocks for hidden-state losses, instead of pairs


@dataclass(frozen=True)
class LossType:
    """One type of loss.

    Attributes:
        family: "divergence", of next-token distributions; "uld" and "alm", of a teacher of another tokenizer; "ce"; or
            "hidden", between blocks' outputs.
        options: what an entry may say besides type and weight, as rules of `value_rules`.
        common: {option: scalar}: these options set a scalar of the whole configuration.
        scalars: the value of the loss depends on these.
    """

    family: str
    options: Mapping[str, Rule] = field(default_factory=dict)
    common: Mapping[str, str] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()


# What the divergences' options are: their rule in an entry, and the scalar of the whole configuration that they set.
_OPTIONS: dict[str, tuple[Rule, str]] = {"beta": (SHARE, "beta"), "alpha": (BELOW_ONE, "skew_alpha")}


def _divergence(names: tuple[str, ...]) -> LossType:
    rules, scalars = {name: _OPTIONS[name][0] for name in names}, {name: _OPTIONS[name][1] for name in names}
    return LossType("divergence", rules, scalars, ("temperature", *scalars.values()))


_HIDDEN = LossType("hidden", {"layers": LAYERS, "projector": {"type": "boolean"}})
LOSS_TYPES: dict[str, LossType] = {
    **{kind.name: _divergence(kind.options) for kind in TABLE},
    "uld": LossType("uld", scalars=("temperature",)),
    "alm": LossType("alm", {"tau": ABOVE_ZERO}, {"tau": "alm_tau"}, ("alm_tau",)),
    "ce": LossType("ce"),
    "hidden_mse": _HIDDEN,
    "hidden_cosine": _HIDDEN,
}
OTHER_TOKENS = ("uld", "alm")  # families that compare models of different tokenizers


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
    """Return the rule of an entry of one of these types; of several, with the options of all."""
    options = {name: rule for kind in types.values() for name, rule in kind.options.items()}
    return {
        "type": "object",
        "properties": {"type": {"enum": list(types)}, "weight": NUMBER, **options},
        "required": ["type"],
        "additionalProperties": False,
    }


def listed_terms(losses: Any) -> tuple[LossTerm, ...]:
    """Return the terms of a `losses` list. Raises ValueError for what it does not understand."""
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
    if isinstance(kind, str) and kind in REMOVED:
        raise ValueError(f"losses: {kind} was removed: {REMOVED[kind]}.")
    if not isinstance(kind, str) or kind not in LOSS_TYPES:
        hint = did_you_mean(kind, LOSS_TYPES) if isinstance(kind, str) else ""
        raise ValueError(f"Each of losses needs a type out of {', '.join(LOSS_TYPES)}; got {entry!r}.{hint}")
    rule = entry_rule({kind: LOSS_TYPES[kind]})
    for path, message in complaints(read(entry, rule), rule):
        raise ValueError(f"losses: {kind}: {'.'.join(map(str, path))}: {message}")
    options = dict(read(entry, rule))
    layers = options.get("layers")
    pairs = isinstance(layers, list) and layers and all(len(pair) == 2 for pair in layers)
    if layers is not None and not pairs and layers not in LAYOUTS:
        raise ValueError(
            f"losses: {kind}: layers: expected pairs [student layer, teacher layer] or one of {', '.join(LAYOUTS)}, "
            f"got {layers!r}."
        )
    del options["type"]
    return LossTerm(kind, float(options.pop("weight", 1.0)), options)


# the keys of a configuration that decide its loss
FIELDS = (
    "losses", "schedules", "taid", "beta", "skew_alpha", "temperature", "kd_temperature", "teacher", "cache_kind",
    "cache_tail_draws", "lmbda", "max_completion_length", "seq_kd",
)  # fmt: skip
# of them those that are no part of a loss, and that a schedule can move: whose tokens it is of, and how many
OF_SAMPLING = ("lmbda", "max_completion_length")


@dataclass(frozen=True)
class LossPlan:
    """What a student minimises in each step.

    Attributes:
        terms: the list of losses.
        scalars: {name: value} as configured: the loss's temperature, beta, skew_alpha, alm_tau, <type>_weight of each
            term, and those `OF_SAMPLING` that the configuration has.
        schedules: those of scheduled scalars, by name.
        taid: the teacher's share over the steps, or None.
    """

    terms: tuple[LossTerm, ...]
    scalars: Mapping[str, float]
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    taid: Taid | None = None

    @property
    def moves(self) -> bool:
        return bool(self.schedules) or self.taid is not None

    @property
    def used(self) -> set[str]:
        """The scalars, weights aside, that change the value of some term."""
        return {name for term in self.terms for name in LOSS_TYPES[term.type].scalars}

    @property
    def other_tokens(self) -> str:
        """The type of the loss that is for a teacher of another tokenizer; empty without one."""
        return next((term.type for term in self.terms if term.family in OTHER_TOKENS), "")

    def at(self, step: int, max_steps: int) -> dict[str, float]:
        """Return the scheduled scalars in the step after `step` steps of `max_steps`."""
        return {name: schedule.at(step, max_steps) for name, schedule in self.schedules.items()}

    def final(self) -> dict[str, float]:
        """Return the final values of the scheduled scalars. Evaluations use these throughout."""
        return {name: schedule.end for name, schedule in self.schedules.items()}

    def of(self, family: str) -> tuple[LossTerm, ...]:
        return tuple(term for term in self.terms if term.family == family)


def plan_of(fields: Mapping[str, Any]) -> LossPlan:
    """Return the plan of the `FIELDS` of a configuration. Missing ones, and None, have their defaults.

    Raises:
        ValueError: a value out of range, an unknown loss, option or schedule, or some that do not go together.
    """
    values = {name: _parsed(name, fields[name]) for name in FIELDS if fields.get(name) is not None}
    scalars = _scalars(values)
    if "losses" in values:
        terms = listed_terms(values["losses"])
    else:
        kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(scalars["beta"]), "jsd")
        terms = (LossTerm(kind),)
    scalars |= _entries_scalars(terms, scalars) | {f"{term.type}_weight": term.weight for term in terms}
    plan = LossPlan(terms, scalars, taid=taid_of(values["taid"]) if "taid" in values else None)
    if "schedules" in values:
        # Only scalars that some term reads: a schedule of any other would change nothing, silently.
        movable = {k: x for k, x in scalars.items() if k in plan.used or k.endswith("_weight") or k in OF_SAMPLING}
        plan = replace(plan, schedules=schedules_of(values["schedules"], movable))
        _check_lengths(plan, values)
    if not any(term.weight for term in terms) and not any(name.endswith("_weight") for name in plan.schedules):
        raise ValueError("losses: every weight is 0, so nothing would be learned. Give one of them another.")
    # TAID mixes the teacher into the student's logits, which only divergences read.
    if plan.taid is not None and not plan.of("divergence"):
        raise ValueError("taid: it changes what the divergences hold the student against, and losses has none of them.")
    if plan.other_tokens:
        _check_other_tokens(plan, values)
    if knows_few_tokens(values):
        _check_sparse(plan, values)
    elif values.get("teacher") == "cache" and plan.of("hidden"):
        raise ValueError(
            f"losses: {plan.of('hidden')[0].type} compares the outputs of layers, and a cache of hidden states has "
            "only what the teacher's head reads. Take the teacher itself, teacher: model."
        )
    return plan


def knows_few_tokens(fields: Mapping[str, Any]) -> bool:
    """Whether the teacher of a configuration is known at a few tokens of the vocabulary, not at all of them."""
    return fields.get("teacher") in _SPARSE and (fields["teacher"] != "cache" or fields.get("cache_kind") != "hidden")


def lumps_the_rest(fields: Mapping[str, Any]) -> bool:
    """Whether a teacher known at few tokens tells the mass of the others as one, so that any divergence is known."""
    draws = fields.get("cache_tail_draws")
    return fields["teacher"] == "server" or (fields.get("cache_kind", "topk") == "topk" and draws == 0)


def without_effect(plan: LossPlan, fields: Mapping[str, Any], given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys in `given` that do not change the plan, each with the reason.

    `beta` is not among them, because `losses` may be given in its place.
    """
    for key, scalar in (("skew_alpha", "skew_alpha"), ("kd_temperature", "temperature")):
        if key in given and scalar not in plan.used:
            yield key, "has no effect: nothing in the loss depends on it."
    if "lmbda" in given and fields["lmbda"] == 1.0 and "lmbda" not in plan.schedules and plan.of("ce"):
        yield (
            "lmbda",
            (
                "is 1.0, so that the student samples every completion, and ce in losses has no effect: it is of given "
                "completions, not of the student's own samples. Take ce out, or lower lmbda."
            ),
        )
    if fields.get("label_smoothing_factor") and knows_few_tokens(fields):
        yield "label_smoothing_factor", f"is not part of the loss against {_SPARSE[fields['teacher']]}: leave it at 0."
    elif fields.get("label_smoothing_factor") and plan.of("alm"):
        yield "label_smoothing_factor", "is not part of the loss with alm: leave it at 0."
    elif fields.get("label_smoothing_factor") and not plan.of("ce"):
        yield "label_smoothing_factor", "has no effect: it is of the cross-entropy, and there is no ce in losses."


def _check_lengths(plan: LossPlan, values: Mapping[str, Any]) -> None:
    """Refuse a schedule of max_completion_length that changes nothing, or exceeds what memory is planned for."""
    schedule, most = plan.schedules.get("max_completion_length"), plan.scalars.get("max_completion_length")
    if schedule is None:
        return
    if not (values.get("lmbda") or values.get("seq_kd") or "lmbda" in plan.schedules):
        raise ValueError(
            "schedules: max_completion_length: nothing is sampled: set lmbda or seq_kd, or leave the schedule out."
        )
    assert most is not None
    if max(schedule.start, schedule.end) > most:
        raise ValueError(
            f"schedules: max_completion_length: from {schedule.start:g} to {schedule.end:g} goes beyond "
            f"max_completion_length, {most:g}, by which positions are checked: raise it, or lower the schedule."
        )


def _check_other_tokens(plan: LossPlan, values: Mapping[str, Any]) -> None:
    """Refuse what does not go with a teacher that has another tokenizer."""
    name, teacher = plan.other_tokens, values.get("teacher", "model")
    divergences = [term.type for term in plan.terms if term.family == "divergence"]
    if divergences:
        raise ValueError(
            f"losses: {', '.join(divergences)} and {name} do not go together: {name} is for a teacher of another "
            f"tokenizer, and these are over one vocabulary. Next to {name} there may be ce and losses between hidden "
            "states."
        )
    if plan.of("uld") and plan.of("alm"):
        raise ValueError("losses: uld and alm do not go together: each reads the teacher's rows its own way. Take one.")
    if teacher != "model":
        raise ValueError(f"losses: {name} needs the model of a teacher with its own tokenizer; teacher is {teacher}.")
    if plan.of("alm") and values.get("seq_kd"):
        raise ValueError(
            "seq_kd: the teacher's completions would be tokens that the student does not have. Leave it at false; with "
            "lmbda the student samples them, and alm reads them in the teacher's tokens."
        )


_SPARSE = {"cache": "a teacher cache", "server": "a teacher's server"}


def _check_sparse(plan: LossPlan, values: Mapping[str, Any]) -> None:
    """Refuse what a teacher that is known at a few tokens of the vocabulary cannot do."""
    teacher = values["teacher"]
    if plan.taid is not None:
        raise ValueError(f"taid: it mixes logits of the whole vocabulary, which teacher: {teacher} does not have.")
    if plan.of("hidden"):
        raise ValueError(f"losses: {plan.of('hidden')[0].type} needs the teacher's model; teacher: {teacher} has none.")
    key, asked = "losses" if "losses" in values else "beta", sorted(term.type for term in plan.of("divergence"))
    if not any(term.weight or f"{term.type}_weight" in plan.schedules for term in plan.of("divergence")):
        raise ValueError(f"{key}: the loss asks for no divergence, and {_SPARSE[teacher]} teaches by one.")
    if not lumps_the_rest(values) and asked != ["forward_kl"]:
        raise ValueError(
            f"{key}: {_SPARSE[teacher]} with draws from the rest determines only the forward KL, with or without ce "
            f"next to it; the loss asks for {', '.join(asked)}. Use beta=0, or losses with forward_kl and ce. With "
            "cache_tail_draws: 0 a cache serves every divergence on the tokens that it lists, with cache_kind: hidden "
            "on all tokens."
        )
    if "temperature" in plan.schedules:
        raise ValueError(f"schedules: temperature: what teacher: {teacher} answers is of one temperature.")
    if teacher == "server" and plan.scalars["temperature"] != 1.0:
        raise ValueError(
            f"{'kd_temperature' if 'kd_temperature' in values else 'temperature'}: a server's log-probabilities are of "
            f"temperature 1, the loss is of {plan.scalars['temperature']}: what the tokens beyond its list have at "
            "another temperature cannot be known. Use temperature 1, or a teacher in this process or in a cache."
        )
    weight = plan.schedules.get("forward_kl_weight")
    if weight is not None and 0 in (weight.start, weight.end) and not lumps_the_rest(values):
        raise ValueError("schedules: forward_kl_weight must stay above 0 with draws in a teacher cache.")


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    beta, alpha = values.get("beta", 0.0), values.get("skew_alpha", SKEW_ALPHA)
    check_values(values, LossConfig)
    temperature = values.get("kd_temperature", values.get("temperature", 1.0))
    sampling = {name: values[name] for name in OF_SAMPLING if name in values}
    return {"temperature": temperature, "beta": beta, "skew_alpha": alpha, "alm_tau": ALM_TAU, **sampling}


def _entries_scalars(terms: tuple[LossTerm, ...], scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the scalars that entries of the list set by their options."""
    entries: dict[str, float] = {}
    # The kernels take one beta and one alpha a call, so entries cannot each have their own.
    for term in terms:
        for name, scalar in LOSS_TYPES[term.type].common.items():
            value = term.options.get(name, scalars[scalar])
            if entries.setdefault(scalar, value) != value:
                raise ValueError(
                    f"losses: {name} is {entries[scalar]} for one of them and {value} for {term.type}; they share "
                    f"it: set {scalar} instead."
                )
    if "beta" in entries and entries["beta"] in (0, 1):
        limit = "reverse_kl" if entries["beta"] else "forward_kl"
        raise ValueError(
            f"losses: jsd: beta is {entries['beta']}, where it would be the {limit.replace('_kl', ' KL')}. Give it one "
            f"between 0 and 1, such as {{type: jsd, beta: 0.5}}, or name {limit}."
        )
    return entries


def _parsed(name: str, value: Any) -> Any:
    """Parse a mapping or list that came as JSON text, as it does from TRL's command line."""
    if name not in ("losses", "schedules", "taid") or not isinstance(value, str):
        return value
    if name == "losses" and not value.lstrip().startswith("["):
        example = value if value in LOSS_TYPES else "forward_kl"
        hint = did_you_mean(value, LOSS_TYPES) if value not in LOSS_TYPES else ""
        raise ValueError(f"losses: expected a list such as [{{type: {example}}}], got {value!r}.{hint}")
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        kind = "list" if name == "losses" else "mapping"
        raise ValueError(f"{name}: expected a {kind}, got text that is no JSON: {error}") from error
