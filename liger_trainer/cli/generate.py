"""`generate`: data from a teacher, filtered, as a dataset that a run reads."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..common.signals import handling, interrupt
from ._shared import out_of_memory, quieten

TAKES_LESS = (
    "What takes less: dtype=bfloat16, or a new folder with a smaller batch_size, max_new_tokens or max_prompt_tokens."
)


def generate(
    teacher: Annotated[
        str, typer.Argument(metavar="TEACHER", help="Directory, hub id or demo: name of a model.", show_default=False)
    ],
    output_dir: Annotated[
        Path, typer.Argument(metavar="OUTPUT_DIR", help="A new folder, or one to go on with.", show_default=False)
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE | --KEY VALUE", help="Options; docs/extras.md.", show_default=False),
    ] = None,
) -> None:
    """Sample data from a teacher, drop what is of no use, write a dataset; the same command goes on if interrupted."""
    from ..extras.generate.options import read_options

    # Before the imports, which take seconds.
    options = read_options(settings or [])
    quieten()
    from ..extras.generate.run import generate as run
    from ..extras.generate.run import print_generated

    output_dir = output_dir.expanduser()
    try:
        with handling(interrupt), out_of_memory(TAKES_LESS), _progress() as progress:
            generated = run(teacher, output_dir, options, progress)
    except KeyboardInterrupt:
        typer.echo("liger-trainer: interrupted. What was sampled is kept; the same command continues.", err=True)
        raise typer.Exit(130) from None
    print_generated(output_dir, generated)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar with the rows that are kept and the remaining time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    # stdout may be a pipe, and a bar is no line of a log.
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda rows, asked: bar.update(task, completed=rows, total=asked)
