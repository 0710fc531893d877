"""`ls`, `cat` and `cp`: the built-in configurations."""

import json
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.value_rules import did_you_mean
from ..config.catalogue import Needs, built_in_configs, find_config, needs_of
from ..errors import ConfigError
from ._shared import AsJson, Config, Force, write_new

UNWRAPPED = 400  # columns, if the output goes into a file or a pipe
_NAMED = re.compile(r"^model_name_or_path: *(\S+)", re.M)
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([bm])(?![a-z])", re.I)


class Order(StrEnum):
    """What `ls` sorts by, before the rest."""

    model = "model"
    memory = "memory"
    purpose = "purpose"


def billions(model: str) -> float:
    """Return the parameters that a model's name tells, in billions; 0 where it tells none."""
    size = _SIZE.search(model.rpartition("/")[2])
    return 0.0 if size is None else float(size[1]) / (1000 if size[2].lower() == "m" else 1)


def ls(
    group: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE | FAMILY",
            help="Only those of a recipe (sft, distill) or of a family (llama3, qwen3, ...).",
            show_default=False,
        ),
    ] = None,
    fits: Annotated[
        float | None,
        typer.Option("--fits", metavar="GB", min=0, help="Only those that need so much memory a GPU, or less."),
    ] = None,
    sort: Annotated[Order, typer.Option(help="What comes first in the order.")] = Order.model,
    as_json: AsJson = False,
) -> None:
    """List the built-in configurations, by model, memory and purpose: what each does and what it needs."""
    entries = [_entry(name, resource.read_text(encoding="utf-8")) for name, resource in built_in_configs().items()]
    if group is not None:
        groups = sorted({entry[kind] for entry in entries for kind in ("recipe", "family")})
        if group not in groups:
            hint = did_you_mean(group, groups)
            raise ConfigError(f"ls: expected one of {', '.join(groups)}, got {group!r}.{hint}")
        entries = [entry for entry in entries if group in (entry["recipe"], entry["family"])]
    entries = sorted(entries, key=_ORDERS[sort])
    if fits is not None:
        entries = [entry for entry in entries if entry["memory_gb"] <= fits]
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
    elif not entries:
        typer.echo(f"None needs {fits:g} GB or less.")
    else:
        _print(entries, gaps=sort is Order.model)


def _by_model(entry: dict[str, Any]) -> tuple:
    return entry["family"], billions(entry["model"]), entry["gpus"], entry["memory_gb"], entry["recipe"]


_ORDERS: dict[Order, Callable[[dict[str, Any]], tuple]] = {
    Order.model: _by_model,
    Order.memory: lambda entry: (entry["gpus"], entry["memory_gb"], *_by_model(entry)),
    Order.purpose: lambda entry: (entry["recipe"] == "distill", entry["kind"], *_by_model(entry)),
}


def _entry(name: str, text: str) -> dict[str, Any]:
    """Read an entry from the name, configs/<family>/<recipe>_<variant>.yaml, and the configuration's first lines."""
    family, _, variant = name.partition("/")
    first, second = (line.removeprefix("#").strip() for line in text.splitlines()[:2])
    model, needs = _NAMED.search(text), needs_of(text) or Needs(0, 0)
    kind = re.match(r"[a-z]+_(on_policy|two_stage|[a-z]+)", variant)
    return {
        "name": name,
        "recipe": variant.partition("_")[0],
        "family": family,
        "kind": kind[1] if kind else "",
        "model": model[1] if model else "",
        "gpus": needs.gpus,
        "memory_gb": needs.memory_gb,
        "description": first,
        "needs": second.removeprefix("Needs "),
    }


def _print(entries: list[dict[str, Any]], gaps: bool) -> None:
    """Print one line per entry, with gaps between families. On a terminal, wrap lines within their columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("configuration", no_wrap=True)
    table.add_column("what it does")
    table.add_column("needs")
    terminal, family = sys.stdout.isatty(), None
    for entry in entries:
        if gaps and terminal and family not in (None, entry["family"]):
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
