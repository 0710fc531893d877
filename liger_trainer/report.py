"""What a run says: its effective configuration and data at the start, its results at the end."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from .data import DataFacts
from .evaluation import Completion, Row, comparison_table, print_completions
from .training import TrainingFacts

if TYPE_CHECKING:
    from .run_config import RunConfig


@dataclass(frozen=True)
class RunResults:
    """What metrics.json holds, beside the versions. KLs, losses and entropies are in nats per token."""

    recipe: str
    config: str
    before: dict[str, float]
    after: dict[str, float]
    completions: list[Completion]
    data: DataFacts
    skipped_rows: dict[str, int]
    """rows of each split that had no supervised token left"""
    training: TrainingFacts
    seconds: dict[str, float]
    """of each part of the run"""
    log_history: list[dict[str, Any]]


def run_console() -> Console:
    """The console of a run; silent in all processes but the first, by the RANK that launchers set."""
    return Console(quiet=os.environ.get("RANK", "0") != "0")


def print_plan(console: Console, config: "RunConfig", facts: DataFacts, vocabulary: str | None = None) -> None:
    """The settings that differ from the defaults, with their origin, and what is known about the data."""
    settings = Table(title=f"{config.recipe}: {config.source}", title_justify="left")
    for column in ("setting", "value", "set by"):
        settings.add_column(column, overflow="fold")
    for key, (value, where) in config.changes().items():
        settings.add_row(key, str(value), where)
    console.print(settings)
    data = Table(title="data", title_justify="left", show_header=False)
    data.add_column()
    data.add_column(overflow="fold")
    for name, value in asdict(facts).items():
        shown = ", ".join(value) if isinstance(value, tuple) else "unknown" if value is None else str(value)
        data.add_row(name.replace("_", " "), shown)
    if vocabulary:
        data.add_row("vocabulary", vocabulary)
    console.print(data)


def print_results(console: Console, results: RunResults, rows: tuple[Row, ...], output_dir: Path) -> None:
    """The end of a run: completions, the table before/after, speed, memory, and where everything is."""
    print_completions(console, results.completions)
    console.print(comparison_table(rows, results.before, results.after))
    training = results.training
    console.print(
        f"{training.steps} steps, {training.tokens:,} tokens in {training.seconds:.0f} s "
        f"({training.tokens_per_second:,.0f} tokens/s); peak memory {training.peak_memory_mib:,.0f} MiB "
        f"({training.peak_memory_of}); {training.device}",
        highlight=False,
    )
    if any(results.skipped_rows.values()):
        skipped = ", ".join(f"{count} of {split}" for split, count in results.skipped_rows.items())
        console.print(f"Rows skipped because no supervised token was left in them: {skipped}", style="yellow")
    console.print(f"Model, tokenizer, config.yaml and metrics.json are in {output_dir}", highlight=False)
