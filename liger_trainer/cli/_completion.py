"""What the shell offers for CONFIG and for settings, by typer's completion. Imports no torch.

bash splits words at `=`, so the value of `key=va` comes as a word of its own, behind `key` and `=`; zsh and fish hand
over the whole word.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

YAML = (".yaml", ".yml")


def config_names(incomplete: str) -> list[str]:
    """Return the built-in configurations, YAML files and folders that begin so."""
    from ..config.catalogue import built_in_configs

    folder, start = Path(incomplete).parent, incomplete.rpartition("/")[2]
    if incomplete.endswith("/"):
        folder = Path(incomplete)
    names = [name for name in built_in_configs() if name.startswith(incomplete)]
    shown = incomplete.removesuffix(start)
    try:
        inside = sorted(folder.expanduser().iterdir())
    except OSError:
        inside = []
    for path in inside:
        if path.name.startswith(start) and not path.name.startswith("."):
            if path.is_dir():
                names.append(f"{shown}{path.name}/")
            elif path.suffix in YAML:
                names.append(f"{shown}{path.name}")
    return names


def settings(context: typer.Context, incomplete: str) -> list[str]:
    """Return keys in the form that was begun: `key=`, `--key` or `~key`; behind a key, its values."""
    from ..config.schema import shipped_schema

    keys = shipped_schema().keys
    before = list(context.params.get("overrides") or [])
    if before[-1:] == ["="] and len(before) > 1:  # bash: key, =, the value so far
        before.pop()
    last = before[-1].removeprefix("--") if before else ""
    if last in keys:
        return [value for value in _values(keys[last]) if value.startswith(incomplete)]
    key, equals, _ = incomplete.removeprefix("--").partition("=")
    if equals and key in keys:
        start = incomplete.partition("=")[0]
        return _beginning(incomplete, (f"{start}={value}" for value in _values(keys[key])))
    if incomplete.startswith(("-", "~")):
        mark = "~" if incomplete.startswith("~") else "--"
        return _beginning(incomplete, (f"{mark}{name}" for name in keys))
    matching = [name for name in keys if name.startswith(incomplete)]
    if len(matching) == 1:  # two and more, so that the shell adds no space behind the =
        return [f"{matching[0]}={value}" for value in ["", *_values(keys[matching[0]])]]
    return [f"{name}=" for name in matching]


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _values(key: Any) -> list[str]:
    """Return the values of a key that has few, or its default."""
    choices = key.rule.get("enum") or ([False, True] if "boolean" in str(key.rule.get("type")) else [])
    plain = [value for value in (choices or [key.default]) if isinstance(value, (str, int, float))]
    return [value if isinstance(value, str) else json.dumps(value) for value in plain]


class SettingsCommand(TyperCommand):
    """A command with settings: after `--` the shell offers its options and the keys."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        keys = next(parameter for parameter in self.params if parameter.name == "overrides")
        return [*super().shell_complete(ctx, incomplete), *keys.shell_complete(ctx, incomplete)]
