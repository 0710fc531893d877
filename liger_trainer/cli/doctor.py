"""`doctor`: what `patch` would swap in a model and what it would leave alone, and why."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..patching.patcher import PatchReport
    from ..tools.doctor import Diagnosis


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model's directory, a hub id in the cache, or a model type such as llama.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every class with a causal-LM head of the installed transformers.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown; of --all it is docs/models.md.")] = False,
) -> None:
    """Print what patch would swap in a model and what it would leave alone. Loads no weights and needs no GPU."""
    if (model is None) == (not every):
        raise ConfigError("doctor takes a model or --all: liger-trainer doctor llama, liger-trainer doctor --all.")
    _silence()
    from ..tools.doctor import config_of, diagnose, diagnose_all, document, family_of, markdown_report

    if model is not None:
        config = config_of(model)
        report = diagnose(config)
        typer.echo(markdown_report(report), nl=False) if markdown else _print(report, family_of(config))
    elif markdown:
        typer.echo(document(diagnose_all()), nl=False)
    else:
        _print_all(diagnose_all())


def _silence() -> None:
    """Silence transformers' comments on default configurations. A family that can't be built is shown anyway."""
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore", module=r"transformers\b")
    logging.set_verbosity_error()


def _print(report: "PatchReport", title: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("layer", "instances", title=title, title_justify="left")
    for kind, count in report.swapped.items():
        table.add_row(kind, str(count))
    console = Console()
    console.print(table)
    if not report.left_alone:
        console.print("Left alone: none.")
        return
    table = Table("left alone", "why")
    for name, why in report.left_alone.items():
        table.add_row(escape(name), escape(why))
    console.print(table)


def _print_all(diagnoses: "list[Diagnosis]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..tools.doctor import COLUMNS, IMAGES, cells

    table = Table("family or class", *COLUMNS, IMAGES, "left alone")
    for found in diagnoses:
        if found.report is None:
            table.add_row(found.name, *([""] * (len(COLUMNS) + 1)), escape(found.problem))
        else:
            left = ", ".join(found.report.left_alone)
            table.add_row(found.name, *cells(found.report).values(), escape(left))
    Console().print(table)
