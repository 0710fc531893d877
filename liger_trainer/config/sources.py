"""Where configuration values come from: a YAML file (with line numbers) and the command line.

Scalars follow YAML 1.2: `2e-4` is a number and `no` is a string (so `eval_strategy: no` means what it says); where a
switch is wanted, `yes`, `no`, `on` and `off` are understood as such later, by the type of the key.
"""

import importlib.resources
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..common.value_rules import did_you_mean
from ..errors import ConfigError

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


class Settings(NamedTuple):
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


def read_settings(text: str, label: str) -> Settings:
    """The top-level keys of a YAML mapping, and the findings about keys that are given twice or are no names.

    Args:
        text: the YAML document.
        label: its name in messages, as in "label:3".

    Raises:
        ConfigError: not valid YAML, or not a mapping.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Settings({}, [])
        if not isinstance(node, yaml.MappingNode):
            kind = type(node).__name__.removesuffix("Node").lower()
            raise ConfigError(f"{label}: expected `key: value` lines, got a YAML {kind}.")
        findings = list(_given_twice(node, label))
        places = dict(_places(loader, node, label))
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{label}:{mark.line + 1 if mark else 1}: {error.problem or 'not valid YAML'}.") from None
    except (yaml.YAMLError, ValueError) as error:  # a date that is none is a ValueError
        raise ConfigError(f"{label}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    settings = {}
    for key, value in values.items():
        where = places[(str(key),)]
        if isinstance(key, str):
            inside = {path[1:]: place for path, place in places.items() if path[0] == key and len(path) > 1}
            settings[key] = Setting(value, where, inside)
        else:
            findings.append(Finding(where, "", f"expected a name before the colon, got {key!r}."))
    return Settings(settings, findings)


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


def parse_overrides(arguments: list[str]) -> Settings:
    """Command-line settings: `key=value`, `--key value`, `--key=value`, `--key` (true), `--key a b` (a list), `~key`.

    Values are read as YAML, so `key=null`, `key=[a, b]` and `key=2e-4` mean what they mean in the file; a value may
    contain `=`. `~key` gives DROPPED. The last setting of a key wins. An argument in none of these forms and a value
    that is no YAML become findings.
    """
    parsed = Settings({}, [])
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        texts = None
        if re.match(r"^~[A-Za-z_][\w-]*$", argument):
            parsed.values[argument[1:].replace("-", "_")] = Setting(DROPPED, COMMAND_LINE)
            continue
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
            values = [yaml.load(text, _Loader) for text in texts]
        except (yaml.YAMLError, ValueError):
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


def _values_of_flag(arguments: list[str], start: int) -> list[str]:
    taken: list[str] = []
    for text in arguments[start:]:
        # the word right after a flag is its value whatever it holds; further words only if they can be nothing else
        if text.startswith("--") or (taken and re.match(r"^([A-Za-z_]\w*=|~[A-Za-z_])", text)):
            break
        taken.append(text)
    return taken


def built_in_configs() -> dict[str, Any]:
    """Name ("smollm2/distill_layerdrop") -> readable resource of every configuration shipped with the package."""
    found = {}
    for family in importlib.resources.files("liger_trainer").joinpath("configs").iterdir():
        if family.is_dir():
            for resource in family.iterdir():
                if resource.name.endswith(".yaml"):
                    found[f"{family.name}/{resource.name.removesuffix('.yaml')}"] = resource
    return dict(sorted(found.items()))


def find_config(name: str) -> tuple[str, str]:
    """Text and label of a configuration: a path to a YAML file, or the name of a built-in one.

    Raises:
        ConfigError: neither, or a file that cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), name
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: cannot be read as UTF-8 text: {error}") from None
    known = built_in_configs()
    wanted = name.removesuffix(".yaml").removesuffix(".yml")
    if wanted in known:
        return known[wanted].read_text(encoding="utf-8"), f"{wanted}.yaml"
    hint = did_you_mean(wanted, known) or " `liger-trainer ls` lists the built-in ones."
    raise ConfigError(f"{name}: neither a file nor a built-in configuration.{hint}")
