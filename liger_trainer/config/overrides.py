"""Reads the settings of a command line."""

import json
import re

import yaml

from .settings import COMMAND_LINE, DROPPED, Finding, ParsedSettings, Setting
from .yaml_reader import parse_yaml


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
            values = [parse_yaml(text) for text in texts]
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
