"""`report`: an HTML file about one run, or several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ._shared import Force


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR", help="The output_dir of a run; several are compared.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The HTML file; curves go next to it. Default: report.html in RUN_DIR, or here for several runs.",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Write what a run did as one HTML file that loads nothing else: curves, metrics, samples, data, settings."""
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--output: expected a name that ends in .html, got {output}.")
    from ..common.files import REPORT, writing_to
    from ..extras.report.html import is_report, write_report
    from ..extras.report.tables import read_runs

    runs = read_runs(run_dirs)
    # A run's own report may always be written again.
    of_a_run = output is None and len(run_dirs) == 1
    target = run_dirs[0].expanduser() / REPORT if of_a_run else (output or Path(REPORT)).expanduser()
    if target.exists() and not (of_a_run or force or is_report(target)):
        raise ConfigError(f"{target} exists, and is no report; choose another name or add --force.")
    try:
        with writing_to(target):
            write_report(runs, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from None
    typer.echo(f"Wrote {target}")
