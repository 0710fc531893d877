"""Configurations of other tools: `convert` turns one into ours, with a table per tool that maps its keys.

A table (`Tool`) is data: keys whose values stay the same, functions where units or meaning differ, keys that need no
counterpart and why, and the tool's own defaults where ours would give another run. A file is taken apart key by key, at
every depth: what a table names or a function takes is gone, and what is left is reported by its full path.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import yaml

from ...common.options import complaints, read
from ...config.conflicts import FORMER, GONE, renamed
from ...config.schema import SECTIONS, shipped_schema
from ...config.yaml_reader import Finding, Setting, in_order, read_settings
from ...errors import ConfigError
from ...trainers.options import ELSEWHERE

Settings = dict[str, Any]
Default = tuple[str, Any, str]
"""A key of the other tool, its default there, and our key."""

HELD_OUT = (
    "no rows are held out there. A run here is always evaluated: on the split dataset_test_split if there is one, else "
    "on holdout_fraction, 5 %, of the training rows, which are not trained on."
)
_SECRET = re.compile(r"api_?key|secret|password|(hub|auth)_token", re.IGNORECASE)


class NotHere(Exception):
    """A value has no counterpart here; the message says what to do instead."""


class NotNeeded(Exception):
    """A value needs no counterpart here; the message says why."""


@dataclass
class ForeignConfig:
    """The other tool's configuration, taken apart.

    Attributes:
        nodes: every value by its dotted name, items of lists by their number: `datasets.0.path`. Mappings, and lists of
            mappings, stand before what they hold.
        left: the names of single values that nobody has taken yet.
        places: the line of each name.
        label: what messages call the file.
        notes: what is to check by hand.
        reading: the name that is being read.
    """

    nodes: dict[str, Any]
    left: dict[str, None]
    places: dict[str, str]
    label: str
    notes: list[Finding] = field(default_factory=list)
    reading: str = ""

    def add(self, name: str, value: Any, place: str) -> None:
        """Add a value, and all that it holds."""
        for inner, item in _nodes(name, value):
            self.nodes[inner] = item
            # the first place counts: a value's own line, before its mapping's
            self.places.setdefault(inner, place)
            if not _holds_names(item):
                self.left[inner] = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, which others read too; null counts as absent."""
        value = self.nodes.get(name)
        return default if value is None else value

    def take(self, name: str, default: Any = None) -> Any:
        """Return a value, with all that it holds, and count it as converted; null counts as absent."""
        for inner in self.under(name):
            del self.left[inner]
        return self.get(name, default)

    def under(self, name: str) -> list[str]:
        """Return the names of values at or in `name` that are left."""
        return [inner for inner in self.left if inner == name or inner.startswith(f"{name}.")]

    def entries(self, name: str) -> list[str]:
        """Return the names of the mappings that `name` is, or lists."""
        value = self.nodes.get(name)
        return [f"{name}.{i}" for i in range(len(value))] if isinstance(value, list) else [name]

    def note(self, message: str, name: str | None = None) -> None:
        """Add a note to check by hand, about the key `name`, or the one that is being read."""
        name = self.reading if name is None else name
        self.notes.append(Finding(self.places.get(name, self.label), name, message))


Reader = Callable[[Any, ForeignConfig], Settings]


@dataclass(frozen=True)
class Tool:
    """How to read one tool's configuration. In names of keys, except those of `values`, `*` stands for anything.

    Attributes:
        name: for messages.
        names: {their key: ours}, where the value stays the same.
        values: {their key: function of value and source that returns our settings}; it may raise NotHere or NotNeeded.
            It is called in this order. Of a mapping it takes what it reads from the source, key by key.
        unneeded: {their key: why nothing is lost without it}.
        same: {their key: (values that mean what happens here anyway, or a pattern of them; what to say of others)}.
        unsupported: {their key: why it has no counterpart, and what to do}; nothing is said where it is switched off.
        passes: {prefix: sections of our keys that the tool has by the same name under it}; "" is the top level.
        nulls: whether a null is a value like others; else it counts as absent.
        defaults: function of the source that yields the tool's own defaults where ours can differ.
        differences: function of the source that yields sentences about what only one of the two tools learns.
    """

    name: str
    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Reader] = field(default_factory=dict)
    unneeded: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, tuple[tuple[Any, ...] | re.Pattern[str], str]] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    passes: Mapping[str, Iterable[str]] = field(default_factory=dict)
    nulls: bool = False
    defaults: Callable[[ForeignConfig], Iterable[Default]] = lambda source: ()
    differences: Callable[[ForeignConfig], Iterator[str]] = lambda source: iter(())


OF_TRANSFORMERS = ("model", "training")
"""Sections of the keys that other tools have from transformers and PEFT."""
ALL = tuple(SECTIONS)


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
        # in the order of docs/configs.md, whatever order the other tool's file has
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
    source = ForeignConfig({}, {}, dict(_flat_places(settings)), label)
    raw = {key: setting.value for key, setting in settings.items()}
    written = {name: value for key, value in raw.items() for name, value in _nodes(key, value)}
    for key, value in raw.items():
        source.add(key, _interpolated(value, written), settings[key].where)
    here: Settings = {}
    lost, unneeded = list(findings), []
    for name, function in _readers(source, tool):
        source.reading = name
        try:
            # later functions win: a tool's table is in that order
            here.update(_checked(function(source.nodes[name], source), lost, source))
        except NotHere as reason:
            lost.append(_finding(source, str(reason)))
        except NotNeeded as reason:
            unneeded.append(Finding(source.places[name], name, str(reason)))
        except ConfigError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a value of another form
            reason = f"not what {tool.name} has here ({type(error).__name__}: {error})."
            lost.append(_finding(source, reason))
    if not here:
        raise ConfigError(f"{label}: nothing in it is known as a setting of {tool.name}.")
    # what the file says goes before the tool's defaults, which go before ours
    here = {"recipe": "sft", **{ours: default for _, default, ours in tool.defaults(source)}, **here}
    if not here.keys() & {"holdout_fraction", "dataset_test_split", "test_split_size"}:
        source.note(HELD_OUT, "")
    learned = [supervised(here), *tool.differences(source)]
    return Converted(tool.name, label, here, in_order(lost), unneeded, in_order(source.notes), learned)


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


def _readers(source: ForeignConfig, tool: Tool) -> Iterator[tuple[str, Reader]]:
    """Yield names with what reads them: first the tool's functions, then, for what they left, the tables."""
    for name, function in tool.values.items():
        if name in source.nodes:
            if name in source.left:
                source.take(name)
            yield name, function
    for name in list(source.nodes):
        if source.under(name):
            whole = _whole(name, tool)
            if whole or name in source.left:
                source.take(name)
                yield name, lambda value, source, name=name: _by_table(name, value, tool)


def _whole(name: str, tool: Tool) -> bool:
    """Whether a mapping is the value of a key, rather than a group of keys."""
    own = _own(name, tool)
    in_table = any(_found(table, name) is not None for table in (tool.unneeded, tool.same, tool.unsupported))
    return name in tool.names or (own in shipped_schema().keys and not in_table)


def _own(name: str, tool: Tool) -> str:
    """Return our key of the same name, under a prefix of the tool's; "" if there is none."""
    for prefix, sections in tool.passes.items():
        own = name.removeprefix(prefix)
        key = shipped_schema().keys.get(own)
        if name.startswith(prefix) and (own in GONE or own in FORMER or (key and key.section in sections)):
            return own
    return ""


def _found(table: Mapping[str, Any], name: str) -> Any:
    # exact names go before patterns
    return table.get(name) or next((table[key] for key in table if "*" in key and fnmatchcase(name, key)), None)


def _by_table(name: str, value: Any, tool: Tool) -> Settings:
    if value is None and not tool.nulls:
        return {}
    if ours := _found(tool.names, name):
        return {} if value is None else {ours: value}
    if reason := _found(tool.unneeded, name):
        raise NotNeeded(reason)
    if same := _found(tool.same, name):
        meant, reason = same
        fits = meant.fullmatch(str(value)) if isinstance(meant, re.Pattern) else value in meant
        if fits or value is None:
            raise NotNeeded("that is what happens here.")
        raise NotHere(reason)
    if reason := _found(tool.unsupported, name):
        if value:
            raise NotHere(reason)
        raise NotNeeded("switched off.")
    own = _own(name, tool)
    if not own:
        raise NotHere("no counterpart is known.")
    if own in GONE:
        raise NotNeeded(f"{GONE[own]}.")
    # a key that transformers has renamed since the file was written
    if own in FORMER:
        now, setting, _ = renamed(own, Setting(value, ""))
        return {now: setting.value}
    if shipped_schema().keys[own].section == "elsewhere":
        raise NotHere(f"{ELSEWHERE.get(own, 'nothing here reads it')}.")
    return {own: value}


def _checked(settings: Settings, lost: list[Finding], source: ForeignConfig) -> Settings:
    """Return the settings as their rules mean them; add to `lost` what is no value of ours."""
    found, keys = {}, shipped_schema().keys
    for key, value in settings.items():
        value = read(value, keys[key].rule)
        wrong = next((message for _, message in complaints(value, keys[key].rule)), None)
        if wrong is None:
            found[key] = value
        else:
            lost.append(_finding(source, f"{key}: {wrong}"))
    return found


def _finding(source: ForeignConfig, reason: str) -> Finding:
    name = source.reading
    # a report is often pasted somewhere
    text = "(a secret)" if _SECRET.search(name) else repr(source.nodes[name])
    return Finding(source.places[name], name, f"{text if len(text) <= 60 else f'{text[:57]}...'}: {reason}")


def _holds_names(value: Any) -> bool:
    """Whether a value is a group of keys: a mapping, or a list with mappings."""
    return bool(value) and (isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_names, value))))


def _nodes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if _holds_names(value):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _nodes(f"{name}.{key}", item)


def _flat_places(settings: Mapping[str, Setting]) -> Iterator[tuple[str, str]]:
    for key, setting in settings.items():
        yield key, setting.where
        yield from ((".".join(map(str, (key, *path))), where) for path, where in setting.inside.items())


def _interpolated(value: Any, values: Mapping[str, Any]) -> Any:
    """Resolve OmegaConf's `${output_dir}/logs`, as far as it names values of the file."""
    if isinstance(value, dict):
        return {key: _interpolated(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, values) for item in value]
    if not isinstance(value, str):
        return value
    for _ in range(len(values)):  # references to references; the limit ends a circle
        # what the file does not name, such as an environment variable, stays as it is
        found = re.search(r"\$\{([\w.]+)\}", value)
        if found is None or values.get(found[1]) is None:
            break
        value = value.replace(found[0], str(values[found[1]]))
    return value
