"""Where configuration values come from: a YAML file (with line numbers) and the command line.

Scalars follow YAML 1.2: `2e-4` is a number and `no` is a string (so `eval_strategy: no` means what it says); where a
switch is wanted, `yes`, `no`, `on` and `off` are understood as such later, by the type of the key.
"""

import difflib
import importlib.resources
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One value and where it was set: "config.yaml:7", "command line" or "recipe default"."""

    value: Any
    where: str


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars, in which a key given twice is an error."""

    yaml_implicit_resolvers: dict = {}

    def construct_mapping(self, node, deep=False):
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} is given twice, first on line {seen[key]}",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


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


def read_settings(text: str, label: str) -> dict[str, Setting]:
    """The top-level keys of a YAML mapping.

    Args:
        text: the YAML document.
        label: its name in messages, as in "label:3".

    Raises:
        ConfigError: not valid YAML, not a mapping, a key that is no string or is given twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{label}: expected `key: value` lines, got a YAML {type(node).__name__.removesuffix('Node').lower()}."
            )
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{label}:{mark.line + 1 if mark else 1}: {error.problem or 'not valid YAML'}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{label}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    lines = {key_node.value: key_node.start_mark.line + 1 for key_node, _ in node.value}
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{label}:{lines.get(str(key), 1)}: expected a name before the colon, got {key!r}.")
    return {key: Setting(value, f"{label}:{lines[key]}") for key, value in values.items()}


def parse_overrides(arguments: list[str]) -> dict[str, Setting]:
    """Command-line settings: `key=value`, `--key value`, `--key=value`, `--key` (true) and `--key a b` (a list).

    Values are read as YAML, so `key=null`, `key=[a, b]` and `key=2e-4` mean what they mean in the file; a value may
    contain `=`. The last setting of a key wins.

    Raises:
        ConfigError: an argument in none of these forms, or a value that is no YAML.
    """
    settings: dict[str, Setting] = {}
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument.startswith("--") and "=" not in argument:
            taken = _values_of_flag(arguments, position)
            position += len(taken)
            parsed = [_parse_value(argument, text) for text in taken]
            value = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
            key = argument[2:]
        elif re.match(r"^(--)?[A-Za-z_][\w-]*=", argument):
            key, _, text = argument.removeprefix("--").partition("=")
            value = _parse_value(key, text)
        else:
            raise ConfigError(f"command line: expected key=value or --key value, got {argument!r}.")
        settings[key.replace("-", "_")] = Setting(value, "command line")
    return settings


def _values_of_flag(arguments: list[str], start: int) -> list[str]:
    taken: list[str] = []
    for text in arguments[start:]:
        # the word right after a flag is its value whatever it holds; further words only if they can be nothing else
        if text.startswith("--") or (taken and re.match(r"^[A-Za-z_]\w*=", text)):
            break
        taken.append(text)
    return taken


def _parse_value(key: str, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ConfigError(
            f"command line: {key}: {text!r} is no YAML value; put it in quotes: {key}='\"...\"'."
        ) from None


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
    close = difflib.get_close_matches(wanted, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Built-in ones: {', '.join(known)}."
    raise ConfigError(f"{name}: neither a file nor a built-in configuration. {hint}")
