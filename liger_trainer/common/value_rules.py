"""Rules for configuration values, as JSON Schema writes them: how text is read, and what is wrong with a value.

A rule is the part of JSON Schema that the keys need: type, enum, minimum, maximum and their exclusive forms, items,
properties, required, additionalProperties, pattern. We use no library because values are also read (`"2e-4"` is a
number, `yes` is true), integers are strict (2.0 is not one), and a complaint says what to write instead.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

Rule = dict[str, Any]
NUMBER: Rule = {"type": "number"}
SHARE: Rule = {"type": "number", "minimum": 0, "maximum": 1}
ABOVE_ZERO: Rule = {"type": "number", "exclusiveMinimum": 0}
BELOW_ONE: Rule = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_WORDS = {
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_ITEMS = {
    "string": "text",
    "integer": "integers",
    "number": "numbers",
    "object": "mappings",
    "boolean": "true and false",
}
LIMIT_NAMES = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_BOUNDS = (
    ("minimum", "of at least", float.__ge__),
    ("exclusiveMinimum", "above", float.__gt__),
    ("maximum", "of at most", float.__le__),
    ("exclusiveMaximum", "below", float.__lt__),
)
_SWITCHES = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_INTEGER, _NUMBER = re.compile(r"[-+]?\d+"), re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def kinds(rule: Rule) -> tuple[str, ...]:
    """Return the JSON types that a rule allows: all of them if it names none."""
    if "enum" in rule:
        return tuple(dict.fromkeys(_kind(option) for option in rule["enum"]))
    allowed = rule.get("type", list(_WORDS))
    return (allowed,) if isinstance(allowed, str) else tuple(allowed)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    exact = _KINDS.get(type(value))  # bool is an int for isinstance
    near = (name for kind, name in _KINDS.items() if isinstance(value, kind))  # np.float64 is a float
    return exact or next(near, type(value).__name__)


def words(rule: Rule) -> str:
    """Return what a rule expects, in words: "an integer or null"."""
    parts = []
    if "enum" in rule:
        parts.append("one of " + ", ".join(str(option) for option in rule["enum"] if option is not None))
        return " or ".join([*parts, "null"] if None in rule["enum"] else parts)
    for kind in kinds(rule):
        items = kinds(rule["items"]) if kind == "array" and "items" in rule else ()
        parts.append(f"a list of {_ITEMS[items[0]]}" if items and items[0] in _ITEMS else _WORDS[kind])
    return " or ".join(parts)


def got(value: Any) -> str:
    """Return a value as a complaint quotes it: 2.5 (a number)."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kind = _kind(value)
    return f"{value!r} ({_WORDS.get(kind, kind)})"


def read(value: Any, rule: Rule) -> Any:
    """Return the value as its rule means it.

    Where a rule does not allow text, text such as "2" becomes a number, as it must for arguments of a command line, and
    YAML 1.1's words become true or false. Where only lists of text are allowed, text becomes a list of one. Everything
    else stays as it is, for `complaints` to judge.
    """
    allowed = kinds(rule)
    if isinstance(value, list) and "array" in allowed:
        return [read(item, rule.get("items", {})) for item in value]
    if isinstance(value, dict) and "object" in allowed:
        properties = rule.get("properties", {})
        return {key: read(item, properties.get(key, {})) for key, item in value.items()}
    if isinstance(value, str) and set(allowed) <= {"array", "null"} and rule.get("items") == {"type": "string"}:
        return [value]
    if not isinstance(value, str) or "string" in allowed:
        return value
    if "boolean" in allowed and value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    text = value.strip()
    if ("integer" in allowed or "number" in allowed) and _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if "number" in allowed and _NUMBER.fullmatch(text) else value


def complaints(value: Any, rule: Rule, path: tuple = ()) -> Iterator[tuple[tuple, str]]:
    """Yield what is wrong with a value: the path of the part, and a sentence."""
    kind, allowed = _kind(value), kinds(rule)
    fits = kind in allowed or (kind == "integer" and "number" in allowed)
    if "enum" in rule:
        fits = any(value == option and type(value) is type(option) for option in rule["enum"])
    if not fits:
        yield path, f"expected {words(rule)}, got {got(value)}.{_hint(value, rule)}"
    elif kind in ("integer", "number"):
        yield from ((path, text) for text in _outside(value, rule))
    elif kind == "array":
        for index, item in enumerate(value):
            yield from complaints(item, rule.get("items", {}), (*path, index))
    elif kind == "object":
        yield from _inside_mapping(value, rule, path)
    elif kind == "string" and not re.search(rule.get("pattern", ""), value):
        yield path, f"expected {rule['patternErrorMessage']}, got {value!r}."
    elif kind == "string" and "object" in allowed and value.lstrip().startswith("{"):
        try:
            json.loads(value)
        except json.JSONDecodeError as error:
            yield path, f"expected a mapping, got text that is no JSON: {error}"


def _hint(value: Any, rule: Rule) -> str:
    if isinstance(value, float) and value.is_integer() and "integer" in kinds(rule):
        return f" Write {int(value)}."
    return did_you_mean(value, [option for option in rule.get("enum", ()) if isinstance(option, str)])


def _outside(value: float, rule: Rule) -> Iterator[str]:
    if not math.isfinite(value):
        yield f"expected a finite number, got {value}."
        return
    for name, word, holds in _BOUNDS:
        if name in rule and not holds(float(value), float(rule[name])):
            yield f"expected a number {word} {rule[name]:g}, got {value}."


def _inside_mapping(value: dict, rule: Rule, path: tuple) -> Iterator[tuple[tuple, str]]:
    properties, rest = rule.get("properties", {}), rule.get("additionalProperties", True)
    for key, item in value.items():
        if key in properties:
            yield from complaints(item, properties[key], (*path, key))
        elif rest is False:
            yield (
                (*path, key),
                f"unknown key.{did_you_mean(key, properties) or ' Known: ' + ', '.join(properties) + '.'}",
            )
        elif isinstance(rest, dict):
            yield from complaints(item, rest, (*path, key))
    for key in rule.get("required", ()):
        if key not in value:
            yield path, f"{key} is missing."


def did_you_mean(word: Any, options: Iterable[str]) -> str:
    """Return ` Did you mean ...?` with the option nearest to `word`, or an empty text."""
    close = difflib.get_close_matches(word, list(options), n=1) if isinstance(word, str) else []
    return f" Did you mean {close[0]}?" if close else ""
