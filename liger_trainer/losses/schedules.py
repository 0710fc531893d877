"""Scalars of a loss that change while a student trains: linear, cosine, constant after a warm-up, and TAID's share.

Each is a function of only the step, so a resumed training continues with the same values. TAID's adaptive share
follows the loss and is in trainers/loss_schedule.py. This file imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.options import ABOVE_ZERO, BELOW_ONE, NUMBER, SHARE, Rule, complaints, did_you_mean, read

CURVES = ("linear", "cosine", "constant")
SCHEDULE: Rule = {
    "type": "object",
    "properties": {
        "from": NUMBER, "to": NUMBER, "kind": {"enum": list(CURVES)}, "warmup_steps": ABOVE_ZERO, "steps": ABOVE_ZERO,
    },
    "additionalProperties": False,
}  # fmt: skip
SCHEDULES: Rule = {"type": ["object", "string", "null"], "additionalProperties": SCHEDULE}
# The values that a schedule may have. At 0 and 1 the JSD is 0 and a KL takes its place, so the loss would jump there.
LIMITS: dict[str, Rule] = {
    "temperature": ABOVE_ZERO,
    "beta": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "skew_alpha": BELOW_ONE,
    "alm_tau": ABOVE_ZERO,
    "lmbda": SHARE,
    "max_completion_length": {"type": "number", "minimum": 1},
}
_TAID_KEYS: dict[str, Rule] = {
    "start": SHARE, "end": SHARE, "adaptive": {"type": "boolean"}, "alpha": SHARE, "beta": BELOW_ONE,
}  # fmt: skip
TAID: Rule = {"type": ["object", "string", "null"], "properties": _TAID_KEYS, "additionalProperties": False}


@dataclass(frozen=True)
class Schedule:
    """A scalar from `start` to `end`.

    Attributes:
        kind: "linear" or "cosine": at `start` for `warmup_steps`, then on to `end`, which is reached at `steps`.
            "constant": from `start` to `end` over the warm-up, and constant from then on.
        warmup_steps, steps: a number of steps, or below 1 a share of all steps. steps None: all.
    """

    start: float
    end: float
    kind: str = "linear"
    warmup_steps: float = 0
    steps: float | None = None

    def at(self, step: int, max_steps: int) -> float:
        """Return the value in the step after `step` steps of `max_steps`."""
        first, last = _count(self.warmup_steps, max_steps), _count(self.steps or max_steps, max_steps)
        if self.kind == "constant":
            first, last = 0, first
        share = min(max(step - first, 0) / max(last - first, 1), 1.0)
        if share == 1:
            return self.end
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + (self.end - self.start) * share


def _count(steps: float, max_steps: int) -> int:
    return math.ceil(steps * max_steps) if steps < 1 else int(steps)


def schedules_of(entries: Any, configured: Mapping[str, float]) -> dict[str, Schedule]:
    """Return the schedules of a configuration.

    Args:
        entries: {name: {from, to, kind, warmup_steps, steps}}.
        configured: {name: value} of the scalars that can be scheduled.

    Raises:
        ValueError: an unknown name or key, or an impossible value.
    """
    if not isinstance(entries, dict):
        raise ValueError(f"schedules must be a mapping such as {{temperature: {{to: 1.0}}}}, got {entries!r}.")
    for name in entries:
        if name not in configured:
            hint = did_you_mean(name, configured) if isinstance(name, str) else ""
            raise ValueError(f"schedules: {name!r} is no scalar of this loss; it has {', '.join(configured)}.{hint}")
    return {name: _schedule(name, value, configured[name]) for name, value in entries.items()}


def _schedule(name: str, entry: Any, configured: float) -> Schedule:
    entry = read(entry, SCHEDULE)
    for path, message in complaints(entry, SCHEDULE):
        raise ValueError(f"schedules: {'.'.join([name, *map(str, path)])}: {message}")
    kind = entry.get("kind", "linear")
    needed, useless = ("warmup_steps", "steps") if kind == "constant" else ("to", None)
    if needed not in entry:
        raise ValueError(f"schedules: {name}: {needed} is missing, without which a {kind} schedule changes nothing.")
    if useless in entry:
        raise ValueError(f"schedules: {name}: {useless} has no effect on a {kind} schedule; its warm-up ends it.")
    start = entry.get("from", 0.0 if kind == "constant" else configured)
    schedule = Schedule(start, entry.get("to", configured), kind, entry.get("warmup_steps", 0), entry.get("steps"))
    for key in ("warmup_steps", "steps"):
        count = entry.get(key)
        if count is not None and count >= 1 and count != int(count):
            raise ValueError(f"schedules: {name}: {key}: expected whole steps or a share below 1, got {count}.")
    if "steps" in entry and "warmup_steps" in entry and entry["warmup_steps"] >= entry["steps"]:
        raise ValueError(f"schedules: {name}: warmup_steps must be below steps, got {entry}.")
    for value in (schedule.start, schedule.end):
        for _, message in complaints(value, LIMITS.get(name, NUMBER)):
            raise ValueError(f"schedules: {name}: {message}")
    return schedule


@dataclass(frozen=True)
class Taid:
    """The teacher's share t in TAID (Shing et al. 2025, arXiv:2501.16937), from `start` to `end`.

    Attributes:
        adaptive: t rises faster while the loss falls, and never less than linearly in the steps. Else it is linear.
        alpha: size of the adaptive update. beta: momentum of the loss's relative change.
    """

    start: float = 0.4
    end: float = 1.0
    adaptive: bool = True
    alpha: float = 5e-4
    beta: float = 0.99

    def linear(self, step: int, max_steps: int) -> float:
        return Schedule(self.start, self.end).at(step, max_steps)


def taid_of(entry: Any) -> Taid:
    """Return the options that a configuration gives. Raises ValueError for an unknown key or an impossible value."""
    rule = {**TAID, "type": "object"}
    entry = read(entry, rule)
    for path, message in complaints(entry, rule):
        raise ValueError(f"taid: {'.'.join(map(str, path))}{': ' if path else ''}{message}")
    taid = Taid(**entry)
    if taid.start > taid.end:
        raise ValueError(f"taid: the teacher's share rises; start is {taid.start}, end {taid.end}.")
    if not taid.adaptive and {"alpha", "beta"} & entry.keys():
        raise ValueError("taid: alpha and beta have no effect with adaptive: false.")
    return taid
