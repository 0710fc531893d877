"""`preview`: rows as the model will see them, supervised tokens coloured."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..common.console import visible
from ._shared import Config, Overrides, show_notices

if TYPE_CHECKING:
    from rich.console import Console

    from ..config.run_config import RunConfig
    from ..tools.preview import SeenRow

SUPERVISED, OTHER = "bold green", "dim"
MARKS = ("⟦", "⟧")
"""Marks around supervised text if there are no colours."""


def preview(
    config: Config,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Training rows to print.")] = 3,
) -> None:
    """Print training rows as the model will see them, supervised tokens coloured. Count what is cut. No weights."""
    from ..config.run_config import load_run_config
    from .run import _quieten

    settings = load_run_config(config, overrides or [], exact=True)
    show_notices(settings)
    _quieten()
    from rich.console import Console

    console = Console(highlight=False)
    _preview(console, settings.on_this_machine(), rows)


def _preview(console: "Console", settings: "RunConfig", rows: int) -> None:
    from ..run.data.datasets import load_run_datasets
    from ..run.models import check_student, open_model, with_processor
    from ..run.results import print_data, print_rows
    from ..tools.preview import preview as prepare

    files = open_model(settings, "model_name_or_path")
    data = load_run_datasets(settings, files.vocab_size)
    files = with_processor(settings, files, data)
    check_student(settings, files, data)
    with console.status("Tokenizing rows"):
        seen = prepare(settings, data, files, rows)
    print_data(console, data.facts)
    if seen.facts:  # rows with images are prepared batch by batch, and not counted
        print_rows(console, seen.facts)
    for row in seen.rows:
        _print(console, row)
    if settings.recipe == "distill" and (settings["lmbda"] or settings["seq_kd"]):
        told = "In training completions are sampled too (lmbda, seq_kd); these are the rows' own."
        if data.facts.form == "prompt":
            told = "In training completions are sampled for these prompts (lmbda, seq_kd)."
        console.print(f"\n{told}", style="yellow")


def _print(console: "Console", row: "SeenRow") -> None:
    from rich.text import Text

    told = f"{row.place}: {row.tokens:,} tokens, {row.supervised:,} supervised"
    if row.tokens_cut:
        told += f"; {row.tokens_cut:,} beyond max_length, {row.supervised_cut:,} of them supervised"
    console.print(Text(f"\n── {told}", "cyan"), soft_wrap=True)
    colours = console.color_system is not None and not console.no_color
    for number, document in enumerate(row.documents):
        if number:
            console.print(Text(f"── document {number + 1}", "cyan"))
        text = Text()
        for piece in document:
            shown = visible(piece.text)
            marked = shown if colours or not piece.supervised else shown.join(MARKS)
            text.append(marked, SUPERVISED if piece.supervised else OTHER)
        console.print(text, soft_wrap=True)
