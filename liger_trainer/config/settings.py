"""A setting with the place where it was set, a finding about one, and the outcome of checking all of them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .schema import Schema

COMMAND_LINE = "command line"
DROPPED = object()
"""The value of a key that the command line takes out of the file: `~key`."""


@dataclass(frozen=True)
class Setting:
    """One value and where it was set: "config.yaml:7", "command line" or "recipe default".

    `inside` has the places of what the value holds, by path: {(0, "split"): "config.yaml:9"}.
    """

    value: Any
    where: str
    inside: Mapping[tuple, str] = field(default_factory=dict, compare=False)

    def place(self, path: tuple) -> str:
        """Where the part of the value at `path` stands, or the nearest part around it whose place is known."""
        return next((self.inside[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.inside), self.where)


class Finding(NamedTuple):
    """Something to tell about a configuration: where, about which key, and what."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


class ParsedSettings(NamedTuple):
    """Settings by key, and what is wrong with how they are written."""

    values: dict[str, Setting]
    findings: list[Finding]


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """By line of the file, then the command line, then what has no place."""

    def place(finding: Finding) -> tuple[int, int]:
        line = re.search(r":(\d+)$", finding.where)
        return (0, int(line[1])) if line else (1 if finding.where == COMMAND_LINE else 2, 0)

    return sorted(findings, key=place)


@dataclass(frozen=True)
class Checked:
    """The outcome: values with defaults, the settings among them, what is wrong and what should be known."""

    recipe: str
    schema: Schema
    values: dict[str, Any]
    settings: dict[str, Setting]
    problems: list[Finding]
    notices: list[Finding]
