"""Configurations of other tools: `convert` turns one into ours, with a table per tool that maps its keys.

A table (`Tool`) is data: keys whose values stay the same, functions where units or meaning differ, keys that need no
counterpart and why, and the tool's own defaults where ours would give another run. Keys that no table covers are
reported, never dropped silently.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ...common.value_rules import kinds, read
from ...errors import ConfigError
from ...trainers.sampling_config import ELSEWHERE
from ..conflicts import FORMER, GONE, renamed
from ..schema import shipped_schema
from ..settings import Finding, Setting
from ..yaml_reader import read_settings

Settings = dict[str, Any]


class NotHere(Exception):
    """A value has no counterpart here; the message says what to do instead."""


@dataclass
class ForeignConfig:
    """The other tool's configuration: every value by its dotted name, and notes about the conversion."""

    values: dict[str, Any]
    places: dict[str, str]
    label: str
    notes: list[Finding] = field(default_factory=list)
    reading: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value by its dotted name; null counts as absent."""
        value = self.values.get(name)
        return default if value is None else value

    def note(self, message: str) -> None:
        """Add a note to check by hand, about the key that is being read."""
        self.notes.append(Finding(self.places.get(self.reading, self.label), self.reading, message))


@dataclass(frozen=True)
class Tool:
    """How to read one tool's configuration.

    Attributes:
        name: for messages.
        names: {their key: ours}, where the value stays the same.
        values: {their key: function of value and source that returns our settings}; it may raise NotHere.
        unneeded: {their key, or a prefix ending in ".": why nothing is lost without it}.
        unsupported: {their key, or a prefix: why it has no counterpart, and what to do}.
        passes: prefixes under which our own names are used; "" is the top level.
        defaults: function of the source that returns the tool's own defaults for keys that it leaves out.
        differences: function of the source that yields sentences about what only one of the two tools learns.
    """

    name: str
    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Callable[[Any, ForeignConfig], Settings]] = field(default_factory=dict)
    unneeded: Mapping[str, str] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    passes: tuple[str, ...] = ()
    defaults: Callable[[ForeignConfig], Settings] = lambda source: {}
    differences: Callable[[ForeignConfig], Iterator[str]] = lambda source: iter(())


@dataclass(frozen=True)
class Converted:
    """The result: our settings; lost keys, each with place and reason; keys that need no counterpart; notes to check;
    which tokens are supervised, and how that differs from the other tool."""

    tool: str
    label: str
    settings: Settings
    lost: list[Finding]
    unneeded: list[Finding]
    notes: list[Finding]
    supervised: list[str]

    def to_yaml(self) -> str:
        """Return our YAML: comments at the start say what is supervised, at the end what could not be converted."""
        order = list(shipped_schema().keys)
        settings = dict(sorted(self.settings.items(), key=lambda item: order.index(item[0])))
        text = f"# Converted from {self.tool}: {self.label}\n" + "".join(f"# {line}\n" for line in self.supervised)
        text += yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120)
        not_needed: dict[str, list[str]] = {}
        for finding in self.unneeded:
            not_needed.setdefault(finding.message, []).append(finding.key)
        comments = {
            "Not converted": [str(finding) for finding in self.lost],
            "To check": [str(finding) for finding in self.notes],
            "Not needed": [f"{', '.join(names)}: {reason}" for reason, names in not_needed.items()],
        }
        for title, lines in comments.items():
            if lines:
                text += f"\n# {title}:\n" + "".join(f"#   {line}\n" for line in lines)
        return text


def convert(text: str, label: str, tool: Tool) -> Converted:
    """Convert another tool's configuration `text`; messages call it `label`.

    Raises:
        ConfigError: if it is no YAML mapping, or holds nothing that the tool's table knows.
    """
    settings, findings = read_settings(text, label)
    source = ForeignConfig(dict(_flat(settings, tool)), dict(_flat_places(settings)), label)
    source.values = {name: _interpolated(value, source.values) for name, value in source.values.items()}
    here: Settings = {}
    lost, unneeded = list(findings), []
    for name, value in source.values.items():
        source.reading = name
        try:
            here.update(_converted(name, value, source, tool))
        except NotHere as reason:
            lost.append(Finding(source.places[name], name, f"{_short(value)}: {reason}"))
        except ConfigError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a value of another form
            reason = f"not what {tool.name} has here ({type(error).__name__}: {error})."
            lost.append(Finding(source.places[name], name, f"{_short(value)}: {reason}"))
        except _Unneeded as reason:
            unneeded.append(Finding(source.places[name], name, str(reason)))
    source.reading = ""
    if not here:
        raise ConfigError(f"{label}: nothing in it is known as a setting of {tool.name}.")
    here = {**tool.defaults(source), **here}
    keys = shipped_schema().keys
    here = {key: read(value, keys[key].rule) for key, value in here.items()}
    learned = [supervised(here), *tool.differences(source)]
    return Converted(tool.name, label, here, lost, unneeded, source.notes, learned)


def supervised(settings: Settings) -> str:
    """Say in one sentence which tokens the loss of a run is on."""
    sampled = settings.get("lmbda")
    if sampled == 1:
        return "Supervised: the completions that the student samples."
    last, answers = settings.get("last_turn_only"), settings.get("assistant_only_loss")
    part = settings.get("supervised_part")
    with_part = {"message": " with their headers", "content": " without their headers"}.get(part or "", "")
    whole = f"the messages{with_part}" if part else "every token"
    answered = f"the assistant's messages{with_part}"
    of_chats = "the last message" if last else answered if answers else whole
    every = settings.get("completion_only_loss") is False
    of_pairs = (answered if answers else whole) if every else "the completion"
    also = " Of completions that are sampled, every token." if sampled or settings.get("seq_kd") else ""
    return f"Supervised: of chats {of_chats}, of prompt and completion {of_pairs}, of text every token.{also}"


class _Unneeded(Exception):
    pass


def _converted(name: str, value: Any, source: ForeignConfig, tool: Tool) -> Settings:
    if name in tool.values:
        return tool.values[name](value, source)
    if value is None:  # a key without a value
        return {}
    if name in tool.names:
        return {tool.names[name]: value}
    for table, outcome in ((tool.unneeded, _Unneeded), (tool.unsupported, NotHere)):
        for known, reason in table.items():
            if name == known or (known.endswith(".") and name.startswith(known)):
                if outcome is NotHere and not value:  # switched off
                    return {}
                raise outcome(reason)
    own = next((name.removeprefix(prefix) for prefix in tool.passes if name.startswith(prefix)), "")
    if own in GONE:
        raise _Unneeded(f"{GONE[own]}.")
    if own in FORMER:
        now, setting, _ = renamed(own, Setting(value, ""))
        return {now: setting.value}
    if own not in shipped_schema().keys:
        raise NotHere("no counterpart is known.")
    if shipped_schema().keys[own].section == "elsewhere":
        raise NotHere(f"{ELSEWHERE.get(own, 'nothing here reads it')}.")
    return {own: value}


def _flat(settings: Mapping[str, Setting], tool: Tool) -> Iterator[tuple[str, Any]]:
    """Yield values by their dotted names. Lists stay whole, and so do mappings that the table reads whole."""
    mappings = {name for name, key in shipped_schema().keys.items() if "object" in kinds(key.rule)}
    whole = {*tool.names, *tool.values, *(prefix + name for prefix in tool.passes for name in mappings)}

    def walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value and name not in whole:
            for key, item in value.items():
                yield from walk(f"{name}.{key}", item)
        else:
            yield name, value

    for key, setting in settings.items():
        yield from walk(key, setting.value)


def _flat_places(settings: Mapping[str, Setting]) -> Iterator[tuple[str, str]]:
    for key, setting in settings.items():
        yield key, setting.where
        yield from ((".".join(map(str, (key, *path))), where) for path, where in setting.inside.items())


def _interpolated(value: Any, values: Mapping[str, Any]) -> Any:
    """Resolve OmegaConf's `${output_dir}/logs`, as far as it names values of the file."""
    if not isinstance(value, str):
        return value
    for _ in range(len(values)):  # references to references; the limit ends a circle
        found = re.search(r"\$\{([\w.]+)\}", value)
        if found is None or values.get(found[1]) is None:
            break
        value = value.replace(found[0], str(values[found[1]]))
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
