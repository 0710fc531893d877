"""`eval`: compare a student with its teacher on the held-out rows."""

import contextlib
import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import plugins
from ..errors import ConfigError
from ..plugins import LM_EVAL
from ._shared import AsJson, Force, out_of_memory, quieten, show_notices, write_new

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..run.evaluate import Evaluation, Subject

OF_TASKS = "exact_match/", LM_EVAL  # begin the names of metrics that only a task has
TAKES_LESS = "What takes less: a smaller per_device_eval_batch_size, a smaller max_length, dtype=bfloat16."


def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR | CONFIG | KEY=VALUE",
            help="Runs, checkpoints or configurations, each a column; then settings that go before theirs.",
            show_default=False,
        ),
    ],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON to this file.")] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            "--lm-eval", metavar="TASKS", help="Measure these tasks of lm-eval-harness too: names, files, with commas."
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate students on the held-out rows: divergences from the teacher, agreement, perplexity, calibration."""
    names, overrides = split_targets(targets)
    harness = None if lm_eval is None else plugins.load("lm_eval").harness(lm_eval)
    if output is not None and output.exists() and not force:
        raise ConfigError(f"{output} exists; choose another name or add --force.")
    quieten()
    from ..run.evaluate import subject_of

    # All of them before the first is measured, which may take long.
    subjects = [subject_of(name, overrides) for name in names]
    for subject in subjects:
        show_notices(subject.config)
    with contextlib.redirect_stdout(sys.stderr):  # trainers print, and the output may be JSON
        found = [_evaluate(subject, harness) for subject in subjects]
    text = json.dumps({"evaluations": [dataclasses.asdict(e) for e in found], **_circumstances()}, indent=2)
    if output is not None:
        write_new(output, text + "\n", force)
    if as_json:
        typer.echo(text)
    else:
        _print(found)


def split_targets(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return (runs or configurations, settings). Settings begin with the first argument that is one.

    Raises:
        ConfigError: if there is nothing to evaluate.
    """
    first = next((i for i, x in enumerate(arguments) if "=" in x or x.startswith(("~", "--"))), len(arguments))
    if first and Path(arguments[0]).expanduser().exists():  # a path may begin with ~ or contain a =
        first = max(first, 1)
    if not first:
        raise ConfigError(f"eval takes runs or configurations before settings, got {arguments[0]!r} first.")
    return arguments[:first], arguments[first:]


def _evaluate(subject: "Subject", more: "Callable[[Any], dict[str, float]] | None") -> "Evaluation":
    import torch

    from ..run.evaluate import evaluate as run

    try:
        with out_of_memory(TAKES_LESS):
            return run(subject, more)
    finally:
        # Trainer and model refer to each other, so that only this frees them.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the next subject


def _circumstances() -> dict[str, object]:
    from ..run.launch import device_facts, versions

    return {"versions": versions(), "device": device_facts()}


def _print(found: "list[Evaluation]") -> None:
    from rich.console import Console
    from rich.table import Table

    from ..run.evaluate import ROWS
    from ..run.metric_rows import MetricRow, shown_rows

    console = Console(highlight=False)
    table = Table("held-out metric")
    for evaluation in found:
        table.add_column(evaluation.name, justify="right", overflow="fold")
    each_task = sorted({name for evaluation in found for name in evaluation.metrics if name.startswith(OF_TASKS)})
    rows = {row.metric: row for evaluation in found for row in ROWS[evaluation.recipe]}
    rows |= {name: MetricRow(name, name) for name in each_task}
    for row in shown_rows(rows.values(), [evaluation.metrics for evaluation in found]):
        values = [evaluation.metrics.get(row.metric) for evaluation in found]
        table.add_row(row.title, *("" if value is None else f"{value:.{row.digits}f}" for value in values))
    console.print(table)
    for evaluation in found:
        against = f" against {evaluation.teacher}" if evaluation.teacher else ""
        rows = f"{evaluation.data.test_rows} rows ({evaluation.data.held_out})"
        console.print(f"{evaluation.name}: {evaluation.model}{against}, {rows}", soft_wrap=True)
    # The hash is over the rows that were used, in their order.
    if len({evaluation.data.sha256 for evaluation in found}) > 1:
        console.print("The rows differ, so these columns can't be compared.", style="red")
