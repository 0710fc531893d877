"""`ls`, `cat`, `cp` and `new`: the built-in configurations, and how to write another."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.options import did_you_mean
from ..config.schema import Hardware, built_in_configs, find_config, needs_of
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
    # "Qwen3-0.6B" says it, and a name with several numbers says it first.
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
    model, needs = _NAMED.search(text), needs_of(text) or Hardware(0, 0)
    # The first word after the recipe, such as lora; on_policy and two_stage are one word to a reader.
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
    # A table in a file is read by programs: no gaps, and a row a line.
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
    # As cp does.
    path = path / Path(label).name if path.is_dir() else path
    write_new(path, text, force)
    typer.echo(f"Copied to {path}; start it with: liger-trainer run {shlex.quote(str(path))}")


# `new`: ask four questions and write a configuration. What flags answer is not asked.


class Purpose(StrEnum):
    sft = "sft"
    distill = "distill"


class Method(StrEnum):
    full = "full"
    lora = "lora"
    qlora = "qlora"


def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration to write.")] = Path("my.yaml"),
    purpose: Annotated[Purpose | None, typer.Option(help="Fine-tune, or learn from a teacher.")] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The model to train: hub id or folder.")] = None,
    teacher: Annotated[str | None, typer.Option(metavar="MODEL", help="Who teaches it, to distil.")] = None,
    method: Annotated[Method | None, typer.Option(help="What is trained. To distil: all weights by default.")] = None,
    data: Annotated[str | None, typer.Option(metavar="DATA", help="A file, a folder or a dataset of the hub.")] = None,
    force: Force = False,
) -> None:
    """Write a configuration: asks for purpose, model, data, and teacher or method, unless flags say it."""
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another name or add --force.")
    purpose = Purpose(
        _ask("purpose", purpose, "Fine-tune (sft) or learn from a teacher (distill)?", Purpose.sft, Purpose)
    )
    model = _ask("model", model, "Which model is trained? A hub id or a folder", "Qwen/Qwen3-0.6B")
    if purpose is Purpose.distill:
        teacher = _ask("teacher", teacher, "Which model teaches it? One of the same tokenizer", "Qwen/Qwen3-4B")
        method = method or Method.full
    elif teacher is not None:
        raise ConfigError("--teacher: only --purpose distill has a teacher.")
    else:
        method = Method(
            _ask("method", method, "Train all weights (full), LoRA (lora) or 4-bit LoRA (qlora)?", Method.lora, Method)
        )
    data = _ask("data", data, "Which rows? A .jsonl, .csv, .parquet file, a folder, a hub id", "trl-lib/Capybara")
    from ..config.run_config import check_text
    from ..extras.new_config import configuration

    text = configuration(file, purpose, model, teacher, method, data, billions(model))

    try:  # answers may be wrong, such as a teacher that is no text or a file that is not there
        check_text(text, str(file), paths=True)
    except ConfigError as error:
        raise ConfigError(f"Nothing was written: the configuration of these answers is wrong. {error}") from None
    write_new(file, text, force)
    typer.echo(f"Wrote {file}. Next:")
    typed = shlex.quote(str(file))
    for command, what in (
        (f"liger-trainer preview {typed}", "rows as the model will see them"),
        (f"liger-trainer estimate {typed} --gpu 24GB", "does it fit"),
        (f"liger-trainer run {typed}", "train"),
    ):
        typer.echo(f"  {command:<{len(typed) + 35}}  # {what}")


def _ask(flag: str, answer: str | None, question: str, default: str, choices: type[StrEnum] | None = None) -> str:
    """Return the answer of a flag, or ask on a terminal.

    Raises:
        ConfigError: the flag is missing, and nobody is there to be asked.
    """
    if answer is not None:
        return answer
    # A script would wait for ever.
    if not sys.stdin.isatty():
        which = f" Choose from: {', '.join(choices)}." if choices else ""
        raise ConfigError(f"--{flag} is missing, and there is no terminal to ask on.{which}")
    while True:
        given = str(typer.prompt(question, default=str(default))).strip()
        if choices is None:
            wrong = _not_there(flag, given)
        else:
            wrong = None if given in list(choices) else f"Expected one of {', '.join(choices)}."
        if wrong is None:
            return given
        typer.echo(wrong)


def _not_there(flag: str, answer: str) -> str | None:
    """Return what is wrong with the name of a model or of rows, so that only this is asked again."""
    from ..config.check import missing_paths
    from ..config.yaml_reader import COMMAND_LINE, Setting

    key = {"model": "model_name_or_path", "teacher": "teacher_model_name_or_path", "data": "dataset_name"}[flag]
    return next((finding.message for finding in missing_paths({key: Setting(answer, COMMAND_LINE)})), None)
