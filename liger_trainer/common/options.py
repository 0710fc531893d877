"""Options, each declared once as a dataclass field: range, choices, what it needs and what it does not go with.

Three readers take the same declaration: `check_options` for a configuration in Python, `config.check` for YAML and the
command line, `extras.schema_writer` for the JSON Schema that editors read. Imports no torch.
"""

import dataclasses
import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, get_args

# Rules for configuration values, as JSON Schema writes them: how text is read, and what is wrong with a value.
#
# A rule is the part of JSON Schema that the keys need: type, enum, minimum, maximum and their exclusive forms, items,
# properties, required, additionalProperties, pattern. We use no library because values are also read (`"2e-4"` is a
# number, `yes` is true), integers are strict (2.0 is not one), and a complaint says what to write instead.


Rule = dict[str, Any]
NUMBER: Rule = {"type": "number"}
SHARE: Rule = {"type": "number", "minimum": 0, "maximum": 1}
ABOVE_ZERO: Rule = {"type": "number", "exclusiveMinimum": 0}
BELOW_ONE: Rule = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_WORDS = {
    "boolean": "true or false", "integer": "an integer", "number": "a number", "string": "text", "array": "a list",
    "object": "a mapping", "null": "null",
}  # fmt: skip
_ITEMS = dict(string="text", integer="integers", number="numbers", object="mappings", boolean="true and false")
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
        hint = did_you_mean(value, [option for option in rule.get("enum", ()) if isinstance(option, str)])
        if isinstance(value, float) and value.is_integer() and "integer" in allowed:
            hint = f" Write {int(value)}."
        yield path, f"expected {words(rule)}, got {got(value)}.{hint}"
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


def _outside(value: float, rule: Rule) -> Iterator[str]:
    if isinstance(value, int) and abs(value) >= 2**63:
        yield f"expected a number of 64 bits, got one of {len(str(value))} digits."
        return
    if not math.isfinite(value):
        yield f"expected a finite number, got {value}."
        return
    for name, word, holds in _BOUNDS:
        if name in rule and not holds(float(value), float(rule[name])):
            yield f"expected a number {word} {rule[name]:,}, got {value}."


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
    """Return ` Did you mean ...?` with the option nearest to `word`, or those that begin nearly so, or no text."""
    options = list(options)
    if not isinstance(word, str):
        return ""
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.75)
    if not close and len(word) >= 4:  # the beginning of a longer name
        begins = difflib.get_close_matches(word, {option[: len(word)] for option in options}, n=1, cutoff=0.75)
        close = [option for option in options if begins and option.startswith(begins[0])][:3]
    close = close or difflib.get_close_matches(word, options, n=1)
    return f" Did you mean {' or '.join(close)}?" if close else ""


NOTHING = (None, False, 0, "", [], {})
HTTP: Rule = {
    "pattern": r"^https?://([^\s/@]+@)?(\[[0-9a-fA-F:.]+\]|[^\s/:@?#\[\]]+)(:\d{1,5})?([/?#]\S*)?$",
    "patternErrorMessage": "an address such as http://localhost:8000/v1",
}
HTTP_SERVERS: Rule = {**HTTP, "items": {"type": "string", **HTTP}}  # one address, or a list of them


@dataclass(frozen=True)
class OptionValues:
    """Values with defaults filled in, and which of them the user gave."""

    values: Mapping[str, Any]
    given: Collection[str]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


@dataclass(frozen=True)
class Condition:
    """A condition on options, which Python evaluates and JSON Schema writes down."""

    reads: tuple[str, ...]  # the options that it looks at
    holds: Callable[[OptionValues], bool]  # whether it is so
    # the same for an editor; None where an editor cannot know, as of a file or an environment variable
    rule: Rule | None = None
    words: str = ""  # what to write to make it so, for messages

    def __and__(self, other: "Condition") -> "Condition":
        rule = {"allOf": [self.rule, other.rule]} if self.rule and other.rule else None
        return Condition(
            (*self.reads, *other.reads), lambda options: self.holds(options) and other.holds(options), rule
        )

    def __or__(self, other: "Condition") -> "Condition":
        rules = [rule for rule in (self.rule, other.rule) if rule]  # an editor sees the half that it can
        rule = {"anyOf": rules} if rules else None
        return Condition((*self.reads, *other.reads), lambda options: self.holds(options) or other.holds(options), rule)

    def __invert__(self) -> "Condition":
        return Condition(self.reads, lambda options: not self.holds(options), {"not": self.rule} if self.rule else None)


def given(key: str, words: str = "") -> Condition:
    """The user gave this option."""
    return Condition((key,), lambda options: key in options.given, {"required": [key]}, words or f"`{key}`")


def on(key: str) -> Condition:
    """This option is neither false nor 0 nor empty. Its default must be one of these."""
    rule = {"required": [key], "properties": {key: {"not": {"enum": list(NOTHING)}}}}
    return Condition((key,), lambda options: bool(options[key]), rule, f"`{key}: true`")


def equals(key: str, *values: Any) -> Condition:
    """This option has one of these values, none of which is its default."""
    rule = {"required": [key], "properties": {key: {"enum": list(values)}}}
    words = f"`{key}: {values[0]}`" + "".join(f" or `{value}`" for value in values[1:])
    return Condition((key,), lambda options: options[key] in values, rule, words)


def has_entry(key: str, entry: str) -> Condition:
    """This option is a mapping, or JSON text of one, with that entry."""

    def holds(options: OptionValues) -> bool:
        value = options[key]
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:  # another complaint's
            return False
        return isinstance(value, Mapping) and entry in value

    return Condition((key,), holds, {"required": [key], "properties": {key: {"type": "object", "required": [entry]}}})


@dataclass(frozen=True)
class Conflict:
    """Options that are fine by themselves and wrong, or without effect, together: reported at `key` if `when` holds."""

    key: str
    when: Condition
    message: str  # may contain {value}, the value of `key`
    missing: bool = False  # the conflict is that `key` has no value
    needs: str | None = None  # the option without which `key` must not be given, where that is all

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.key, *self.when.reads)


def without(key: str, needed: Condition) -> Conflict:
    """The conflict that `key` is given where nothing reads it."""
    only = needed.reads[0] if needed.rule == {"required": [needed.reads[0]]} else None
    return Conflict(key, given(key) & ~needed, f"has no effect without {needed.words}.", needs=only)


def missing(key: str, needed_by: Condition) -> Conflict:
    """The conflict that `key` has no value where something asks for it."""
    return Conflict(key, needed_by & ~on(key), f"missing; {needed_by.words} needs it.", missing=True)


class DeclaredField(Field):
    """A dataclass field with what `option` declares of it.

    That is no part of its `metadata`, since transformers' HfArgumentParser hands all of that to argparse.
    """

    __slots__ = ("declared",)


def declared(item: Field) -> Mapping[str, Any]:
    """Return what `option` declares of a field: choices, limits, text, needs, needed_by, conflicts."""
    return item.declared if isinstance(item, DeclaredField) else {}


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[Any] = (),
    text: Rule | None = None,
    needs: Condition | None = None,
    needed_by: Condition | None = None,
    conflicts: Iterable[tuple[Condition, str]] = (),
    **limits: float,
) -> Any:
    """Declare a dataclass field as an option.

    Args:
        text: the rule of its text, such as HTTP.
        needs: the fact without which nothing reads it.
        needed_by: the fact that asks for a value.
        conflicts: facts under which it is refused, each with the reason.
        limits: ge, gt, le, lt.
    """
    plain: Any = field(default=default, metadata={"help": help})
    item = DeclaredField(*(getattr(plain, name) for name in inspect.signature(Field).parameters))
    item.declared = {
        "choices": list(choices), "limits": limits, "text": text or {}, "needs": needs, "needed_by": needed_by,
        "conflicts": tuple(conflicts),
    }  # fmt: skip
    return item


def conflicts_of(cls: type) -> Iterator[Conflict]:
    """Yield the conflicts that the fields of a dataclass declare."""
    for item in dataclasses.fields(cls):
        if declared(item).get("needed_by"):
            yield missing(item.name, declared(item)["needed_by"])
        if declared(item).get("needs"):
            yield without(item.name, declared(item)["needs"])
        for when, message in declared(item).get("conflicts", ()):
            yield Conflict(item.name, when, message)


def limits_of(item: dataclasses.Field) -> Rule:
    """What a field's declaration says about its values, besides their type."""
    limits = {LIMIT_NAMES[name]: limit for name, limit in declared(item).get("limits", {}).items()}
    return {**limits, **declared(item).get("text", {})}


def clashes(
    options: OptionValues, conflicts: Iterable[Conflict], wrong: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield key and message of the conflicts that there are.

    Those that look at a key in `wrong`, or at one that this configuration does not have, are left out.
    """
    for conflict in conflicts:
        if all(key in options.values and key not in wrong for key in conflict.reads) and conflict.when.holds(options):
            yield conflict.key, conflict.message.format(value=options[conflict.key])


def check_values(values: Mapping[str, Any], cls: type) -> None:
    """Raise ValueError for the first value beyond the limits or choices that the fields of a dataclass declare.

    A field of integers takes no other number, with limits or without.
    """
    for item in dataclasses.fields(cls):
        for _, message in complaints(values[item.name], _python_rule(item)) if item.name in values else ():
            raise ValueError(f"{item.name}: {message}")


def check_options(config: Any, *classes: type) -> None:
    """Check the options of a dataclass instance that these of its base classes declare.

    Raises:
        ValueError: the first one that is wrong, as "key: what is wrong".
    """
    for cls in classes:
        check_values(vars(config), cls)
    changed = set()
    for item in dataclasses.fields(config):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if getattr(config, item.name) != default:
            changed.add(item.name)
    declared = [conflict for cls in classes for conflict in conflicts_of(cls)]
    for key, message in clashes(OptionValues(vars(config), changed), declared):
        raise ValueError(f"{key}: {message}")


def _python_rule(item: dataclasses.Field) -> Rule:
    """The rule of a value in Python: integers, limits and choices as in YAML; else anything, as in a dataclass."""
    limits, choices = limits_of(item), declared(item).get("choices")
    if choices:
        return {"enum": [*choices, *([None] if item.default is None else [])]}
    annotation: Any = item.type
    is_integer = int in get_args(annotation | None)
    kind = "integer" if is_integer else "string" if "pattern" in limits else "number"
    types = [kind, *(["array"] if "items" in limits else ()), *(["null"] if item.default is None else ())]
    return {"type": types, **limits} if limits or is_integer else {}
