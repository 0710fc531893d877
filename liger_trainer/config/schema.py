"""The keys a configuration may have: read from schema.json, so that nothing of TRL or torch is imported.

That file is a JSON Schema, for editors too, written by `liger-trainer schema --write` from the dataclasses of TRL and
ours (`schema_writer`). It holds the keys of the TRL and transformers it was written with; where others are installed,
`schema_writer.installed_schema` reads their dataclasses instead, at the price of importing them.
"""

import importlib.resources
import json
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..common.value_rules import Rule, words

FILE = "schema.json"
SECTIONS = {
    "run": "the run",
    "launch": "accelerate's launcher",
    "model": "TRL's ModelConfig",
    "dataset": "TRL's ScriptArguments",
    "mixture": "TRL's DatasetMixtureConfig",
    "rows": "what is learned of rows",
    "images": "rows with images, and models that read them",
    "step": "how a step is computed",
    "qat": "weights that will be used quantised",
    "non_finite": "numbers that are not finite",
    "training": "TRL's SFTConfig and transformers' TrainingArguments",
    "distillation": "LigerDistillConfig",
    "sampling": "completions that are sampled in training",
    "elsewhere": "the rest of TRL's DistillationConfig",
}
DISTILL_ONLY = ("distillation", "sampling", "elsewhere")
SOURCES = ("trl", "transformers")


@dataclass(frozen=True)
class Key:
    """One key: the section it belongs to, its default, the rule of its values and, for our own, what it means."""

    section: str
    default: Any
    rule: Rule
    description: str = ""

    @property
    def expects(self) -> str:
        return words(self.rule)


@dataclass(frozen=True)
class Schema:
    """The keys that can be set. `versions` are those of the packages they were read from."""

    keys: dict[str, Key]
    versions: dict[str, str]

    @cached_property
    def sft(self) -> "Schema":
        """Without the keys that only a distillation has."""
        keys = {name: key for name, key in self.keys.items() if key.section not in DISTILL_ONLY}
        return replace(self, keys=keys)

    def of(self, recipe: str) -> "Schema":
        return self.sft if recipe == "sft" else self

    def is_of_installed(self) -> bool:
        """Whether TRL and transformers are installed in the versions that this schema was read from."""
        return self.versions == installed_versions()


def from_json(document: dict[str, Any]) -> Schema:
    """The schema that a JSON Schema document of `schema_writer` describes."""
    keys = {}
    for name, rule in document["properties"].items():
        rule = dict(rule)
        section, default = rule.pop("x-section"), rule.pop("default")
        keys[name] = Key(section, default, rule, rule.pop("description", ""))
    return Schema(keys, document["x-generated-from"])


def shipped_text() -> str:
    """schema.json as text."""
    return importlib.resources.files("liger_trainer.config").joinpath(FILE).read_text(encoding="utf-8")


@lru_cache
def shipped_schema() -> Schema:
    """The schema that comes with the package."""
    return from_json(json.loads(shipped_text()))


def installed_versions() -> dict[str, str]:
    """Versions of the packages that keys come from; "" where one is not installed."""
    found = {}
    for package in SOURCES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
