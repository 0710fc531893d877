"""Reads settings, from YAML and from a command line, and keeps the place of every value.

Scalars follow YAML 1.2: `2e-4` is a number and `no` is a string (so `eval_strategy: no` means what it says); where a
switch is wanted, `yes`, `no`, `on` and `off` are understood as such later, by the type of the key.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from ..errors import ConfigError

# A setting with the place where it was set, a finding about one, and the outcome of checking all of them.


COMMAND_LINE = "command line"
DROPPED = object()  # the value of a key that the command line takes out of the file: `~key`


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


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars."""

    yaml_implicit_resolvers: dict = {}

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """JSON, which is YAML, may write a character beyond 16 bits as two escapes."""
        node = super().compose_scalar_node(anchor)
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError):  # what PyYAML makes of `!!timestamp x` and `!!bool x`
            tag = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(problem=f"no value of type {tag}", problem_mark=node.start_mark) from None


for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$",
        list("-+0123456789."),
    ),
    ("merge", r"^(?:<<)$", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


# A configuration has far fewer. What has more is an attack or a mistake, and would take hours or the memory.
MAX_DEPTH, MAX_VALUES = 50, 10_000


def parse_yaml(text: str) -> Any:
    """Return the value that a piece of YAML stands for.

    Raises:
        yaml.YAMLError, ValueError: it is not valid YAML, or too much of it.
    """
    loader, node = _compose(text)
    return None if node is None else loader.construct_document(node)


def _compose(text: str) -> tuple[_Loader, yaml.Node | None]:
    depth = 0
    for event in yaml.parse(text, _Loader):  # events come one by one, where composing nodes would recurse
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            _refuse_deep(depth, event.start_mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is not None:
        _measure(node, {})
    return loader, node


def _refuse_deep(depth: int, mark: Any) -> None:
    if depth > MAX_DEPTH:
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels inside each other", problem_mark=mark)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return how many values a node stands for once its aliases are followed, and how deep they are nested."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise yaml.MarkedYAMLError(problem="an alias to what it is in", problem_mark=node.start_mark)
        return size
    known[id(node)] = None  # until its children are measured
    children = node.value if isinstance(node, yaml.SequenceNode) else ()
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    inside = [_measure(child, known) for child in children]
    count, depth = 1 + sum(n for n, _ in inside), 1 + max((d for _, d in inside), default=0)
    if count > MAX_VALUES:
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_VALUES:,} values", problem_mark=node.start_mark)
    _refuse_deep(depth - 1, node.start_mark)
    known[id(node)] = count, depth
    return count, depth


def read_settings(text: str, label: str) -> ParsedSettings:
    """The top-level keys of a YAML mapping, and the findings about keys that are given twice or are no names.

    Args:
        text: the YAML document.
        label: its name in messages, as in "label:3".

    Raises:
        ConfigError: not valid YAML, or not a mapping.
    """
    try:
        loader, node = _compose(text)
        if node is None:
            return ParsedSettings({}, [])
        if not isinstance(node, yaml.MappingNode):
            kind = type(node).__name__.removesuffix("Node").lower()
            raise ConfigError(f"{label}: expected `key: value` lines, got a YAML {kind}.")
        # PyYAML takes the last of two, silently.
        findings = list(_given_twice(node, label))
        places = dict(_places(loader, node, label))
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark else f"{label}:1"
        problem = error.problem or "not valid YAML"
        problem = "a tab stands here; YAML is indented with spaces" if r"'\t'" in problem else problem
        raise ConfigError(f"{place}: {problem}.") from None
    except yaml.reader.ReaderError as error:
        # This error has no mark, only how many characters came before.
        before = text[: error.position]
        place = f"{label}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        raise ConfigError(f"{place}: the character {chr(error.character)!r} is not allowed in YAML.") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # a date that is none is a ValueError
        raise ConfigError(f"{label}: not valid YAML: {error}") from None
    settings = {}
    for key, value in values.items():
        where = places[(str(key),)]
        if isinstance(key, str):
            inside = {path[1:]: place for path, place in places.items() if path[0] == key and len(path) > 1}
            settings[key] = Setting(value, where, inside)
        else:
            findings.append(Finding(where, "", f"expected a name before the colon, got {key!r}."))
    return ParsedSettings(settings, findings)


def _given_twice(node: yaml.Node, label: str) -> Iterator[Finding]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _given_twice(item, label)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in seen:
            yield Finding(f"{label}:{line}", "", f"the key {key!r} is given twice, first on line {seen[key]}.")
        seen.setdefault(key, line)
        yield from _given_twice(value_node, label)


def _places(loader: _Loader, node: yaml.Node, label: str, path: tuple = ()) -> Iterator[tuple[tuple, str]]:
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)  # `<<: *anchor`: its keys count as keys of this mapping
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, item, item) for index, item in enumerate(node.value)]
    else:
        children = []
    for step, marked, child in children:
        yield (*path, step), f"{label}:{marked.start_mark.line + 1}"
        yield from _places(loader, child, label, (*path, step))


# Reads the settings of a command line.


def parse_overrides(arguments: list[str]) -> ParsedSettings:
    """Command-line settings: `key=value`, `--key value`, `--key=value`, `--key` (true), `--key a b` (a list), `~key`.

    Values are read as YAML, so `key=null`, `key=[a, b]` and `key=2e-4` mean what they mean in the file; a value may
    contain `=`. `~key` gives DROPPED. The last setting of a key wins. An argument in none of these forms and a value
    that is no YAML become findings.
    """
    parsed = ParsedSettings({}, [])
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        texts = None
        if re.match(r"^~[A-Za-z_][\w-]*$", argument):
            parsed.values[argument[1:].replace("-", "_")] = Setting(DROPPED, COMMAND_LINE)
            continue
        # HfArgumentParser, which TRL's scripts use, takes `--key value`, so people have it in their shell history.
        if argument.startswith("--") and "=" not in argument:
            texts = _values_of_flag(arguments, position)
            position += len(texts)
            key = argument[2:]
        elif re.match(r"^(--)?[A-Za-z_][\w-]*=", argument):
            key, _, text = argument.removeprefix("--").partition("=")
            texts = [text]
        else:
            message = f"expected key=value, --key value or ~key, got {argument!r}."
            parsed.findings.append(Finding(COMMAND_LINE, "", message))
            continue
        try:
            values = [_of_words(text) for text in texts]
        except (yaml.YAMLError, ValueError):
            # An unquoted list comes in several words.
            split = " ".join(texts).lstrip()[:1] in ("[", "{")  # by the shell, at its first space
            quoted = f"'{key}=...'" if split else f"{key}='\"...\"'"
            message = f"{' '.join(texts)!r} is no YAML value; put it in quotes: {quoted}."
            parsed.findings.append(Finding(COMMAND_LINE, key, message))
            continue
        if any(isinstance(v, dict) and any(":" in str(k) and x is None for k, x in v.items()) for v in values):
            message = f"{' '.join(texts)!r}: in YAML a colon is followed by a space, as in {{a: 1}}."
            parsed.findings.append(Finding(COMMAND_LINE, key, message))
            continue
        value = True if not values else values[0] if len(values) == 1 else values
        parsed.values[key.replace("-", "_")] = Setting(value, COMMAND_LINE)
    return parsed


def _of_words(text: str) -> Any:
    """Return the value of an argument. Text has no comments and no anchors: a folder may be called `exp #2`."""
    value, text = parse_yaml(text), text.strip()
    if value is None:
        return None if text.partition(" #")[0].rstrip() in ("", "~", "null", "Null", "NULL") else text
    return text if isinstance(value, str) and text[0] not in "'\"|>!&*" else value


def inline(value: Any) -> str:
    """Return a value as YAML on one line; text is quoted where it would be read as something else."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def setting(key: str, value: object) -> str:
    """Return `key=value` for a command line, the value as text that YAML reads as it is: a folder may be called 1e3."""
    text = str(value)
    try:
        plain = parse_yaml(text) == text
    except (yaml.YAMLError, ValueError):
        plain = False
    return f"{key}={text if plain else json.dumps(text, ensure_ascii=False)}"


def _values_of_flag(arguments: list[str], start: int) -> list[str]:
    taken: list[str] = []
    for text in arguments[start:]:
        # the word right after a flag is its value whatever it holds; further words only if they can be nothing else
        if text.startswith("--") or (taken and re.match(r"^([A-Za-z_]\w*=|~[A-Za-z_])", text)):
            break
        taken.append(text)
    return taken
