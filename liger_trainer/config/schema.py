"""What comes with the package: the keys that a configuration may have, in schema.json, and configurations.

Nothing of TRL or torch is imported. schema.json is a JSON Schema, for editors too, written by `liger-trainer schema
--write` from the dataclasses of TRL and ours (`extras.schema_writer`). It holds the keys of the TRL and transformers it
was written with; where others are installed, the writer reads their dataclasses instead, at the price of importing
them.
"""

import difflib
import importlib.resources
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..common.options import Rule, did_you_mean, words
from ..errors import ConfigError

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
    "mtp": "the head for multi-token prediction",
    "non_finite": "numbers that are not finite",
    "training": "TRL's SFTConfig and transformers' TrainingArguments",
    "distillation": "LigerDistillConfig",
    "sampling": "completions that are sampled in training",
    "elsewhere": "the rest of TRL's DistillationConfig",
}
# Sections whose keys only `recipe: distill` knows.
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
        # Our own entries in the schema; what is left is the rule.
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


# Finds a configuration: a file, or one of those that come with the package, with what it promises to need.
MAX_BYTES = 100_000
# tests/extras/test_promises.py compares this promise with `estimate`.
_NEEDS = re.compile(r"^# Needs (?:(\d+) GPUs?, about (\d+) GB(?: each)?|two CPU cores, (\d+) GB)[;, ]", re.M)


@dataclass(frozen=True)
class Hardware:
    """What a configuration needs by its second line: `# Needs 2 GPUs, about 40 GB each`, or `two CPU cores, 4 GB`."""

    gpus: int  # how many; 0: none
    memory_gb: int  # of each GPU, or of the machine without one: what `estimate --gpu 40GB` finds to be enough


def needs_of(text: str) -> Hardware | None:
    """Read what a configuration promises to need; None if it does not say it in that form."""
    line = _NEEDS.search(text)
    return None if line is None else Hardware(int(line[1] or 0), int(line[2] or line[3]))


def built_in_configs() -> dict[str, Any]:
    """Name ("smollm2/distill_pruned") -> readable resource of every configuration shipped with the package."""
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
        # A file of data named by mistake would be parsed for minutes.
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name}: larger than {MAX_BYTES // 1000} kB, which is no configuration.")
        try:
            return path.read_text(encoding="utf-8"), name
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name}: cannot be read as UTF-8 text: {error}") from None
    known = built_in_configs()
    # `ls` prints names without the suffix, and people type it.
    wanted = name.removesuffix(".yaml").removesuffix(".yml")
    if wanted in known:
        return known[wanted].read_text(encoding="utf-8"), f"{wanted}.yaml"
    if path.is_dir():
        raise ConfigError(f"{name}: expected a file or a built-in configuration, got a folder.")
    hint = _meant(path, wanted, known) or " `liger-trainer ls` lists the built-in ones."
    raise ConfigError(f"{name}: neither a file nor a built-in configuration.{hint}")


def _meant(path: Path, wanted: str, known: Iterable[str]) -> str:
    """Say which file in the folder, or which built-in configuration, has nearly that name."""
    here = {file.stem: file for file in sorted(path.parent.glob("*.y*ml"))} if path.parent.is_dir() else {}
    stem = path.name.removesuffix(".yaml").removesuffix(".yml")
    if close := difflib.get_close_matches(stem, here, n=1, cutoff=0.7):
        return f" Did you mean {here[close[0]]}?"
    wanted = Path(wanted).as_posix()  # without the ./ that a shell's completion may add
    # `qwen3/sft_lora` is all of a name but the size.
    of_sizes = [name for name in known if name.startswith(f"{wanted}_")]
    return f" Did you mean {' or '.join(of_sizes)}?" if of_sizes else did_you_mean(wanted, known)
