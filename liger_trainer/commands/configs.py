"""`ls`, `cat` and `cp`: the built-in configurations."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..config_source import built_in_configs, did_you_mean, find_config
from ..errors import ConfigError
from ._shared import AsJson, Config, Force, write_new


def ls(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]", help="Only those of a recipe (sft, distill) or of a family.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the built-in configurations."""
    entries = [_entry(name, resource.read_text(encoding="utf-8")) for name, resource in built_in_configs().items()]
    if recipe is not None:
        groups = sorted({entry[kind] for entry in entries for kind in ("recipe", "family")})
        if recipe not in groups:
            hint = did_you_mean(recipe, groups)
            raise ConfigError(f"ls: expected one of {', '.join(groups)}, got {recipe!r}.{hint}")
        entries = [entry for entry in entries if recipe in (entry["recipe"], entry["family"])]
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    width = max(len(entry["name"]) for entry in entries)
    for entry in entries:
        typer.echo(f"{entry['name']:<{width}}  {entry['description']}")


def _entry(name: str, text: str) -> dict[str, str]:
    """What the name, configs/<family>/<recipe>_<variant>.yaml, and the first line of a configuration say."""
    family, _, variant = name.partition("/")
    first = text.partition("\n")[0].removeprefix("#").strip()
    return {"name": name, "recipe": variant.partition("_")[0], "family": family, "description": first}


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
