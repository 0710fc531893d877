"""Finds a configuration: a file, or one of those that come with the package, with what it promises to need."""

import importlib.resources
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.value_rules import did_you_mean
from ..errors import ConfigError

MAX_BYTES = 100_000
_NEEDS = re.compile(r"^# Needs (?:(\d+) GPUs?, about (\d+) GB(?: each)?|two CPU cores, (\d+) GB)[;, ]", re.M)


@dataclass(frozen=True)
class Needs:
    """What a configuration needs by its second line: `# Needs 2 GPUs, about 40 GB each; MIT`, or `two CPU cores, 4 GB`.

    Attributes:
        gpus: how many; 0: none.
        memory_gb: of each GPU, or of the machine without one: what `estimate --gpu 40GB` finds to be enough.
    """

    gpus: int
    memory_gb: int


def needs_of(text: str) -> Needs | None:
    """Read what a configuration promises to need; None if it does not say it in that form."""
    line = _NEEDS.search(text)
    return None if line is None else Needs(int(line[1] or 0), int(line[2] or line[3]))


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
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name}: larger than {MAX_BYTES // 1000} kB, which is no configuration.")
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
