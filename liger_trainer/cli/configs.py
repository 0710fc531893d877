"""`ls`, `cat` and `cp`: the built-in configurations."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..common.value_rules import did_you_mean
from ..config.catalogue import built_in_configs, find_config
from ..errors import ConfigError
from ._shared import AsJson, Config, Force, write_new

UNWRAPPED = 400  # columns, if the output goes into a file or a pipe


def ls(
    group: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE | FAMILY",
            help="Only those of a recipe (sft, distill) or of a family (llama3, qwen3, ...).",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the built-in configurations: what each does and what it needs."""
    entries = [_entry(name, resource.read_text(encoding="utf-8")) for name, resource in built_in_configs().items()]
    if group is not None:
        groups = sorted({entry[kind] for entry in entries for kind in ("recipe", "family")})
        if group not in groups:
            hint = did_you_mean(group, groups)
            raise ConfigError(f"ls: expected one of {', '.join(groups)}, got {group!r}.{hint}")
        entries = [entry for entry in entries if group in (entry["recipe"], entry["family"])]
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
    else:
        _print(entries)


def _entry(name: str, text: str) -> dict[str, str]:
    """Read an entry from the name, configs/<family>/<recipe>_<variant>.yaml, and the configuration's first lines."""
    family, _, variant = name.partition("/")
    first, second = (line.removeprefix("#").strip() for line in text.splitlines()[:2])
    return {
        "name": name,
        "recipe": variant.partition("_")[0],
        "family": family,
        "description": first,
        "needs": second.removeprefix("Needs "),
    }


def _print(entries: list[dict[str, str]]) -> None:
    """Print one line per entry, with a gap between families. On a terminal, wrap lines within their columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("configuration", no_wrap=True)
    table.add_column("what it does")
    table.add_column("needs")
    terminal, family = sys.stdout.isatty(), None
    for entry in entries:
        if terminal and family not in (None, entry["family"]):
            table.add_row()
        family = entry["family"]
        table.add_row(entry["name"], entry["description"], entry["needs"])
    Console(width=None if terminal else UNWRAPPED, highlight=False, markup=False).print(table)


def cat(config: Config) -> None:
    """Print a configuration."""
    typer.echo(find_config(config)[0], nl=False)


def cp(
    config: Config,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A file, or a folder that exists.", show_default=False)],
    force: Force = False,
) -> None:
    """Copy a configuration, to change it."""
    text, label = find_config(config)
    path = dest.expanduser()
    path = path / Path(label).name if path.is_dir() else path
    write_new(path, text, force)
    typer.echo(f"Copied to {path}; start it with: liger-trainer run {path}")
