"""What `liger-trainer estimate` prints: memory by part, tokens and steps, whether it fits, and what would take less."""

from rich.console import Console
from rich.table import Table

from .estimator import Estimate

_PHASES = {"teacher": "teacher's forward", "optimizer": "optimizer's step"}  # the others are called as they are


def print_estimate(found: Estimate) -> None:
    console = Console(highlight=False)
    console.print(_model(found))
    console.print(f"Memory of a GPU at its highest, in the {_PHASES.get(found.phase, found.phase)}:")
    table = Table()
    table.add_column("part")
    table.add_column("MiB", justify="right")
    for part, size in found.parts_mib.items():
        table.add_row(part, f"{size:,.0f}" if size >= 1 or not size else "< 1")
    table.add_section()
    table.add_row("peak", f"{found.peak_mib:,.0f}", style="bold")
    console.print(table)
    console.print(
        "Highest of each phase, without cuBLAS workspaces: "
        + ", ".join(f"{k} {v:,.0f}" for k, v in found.peaks_mib.items())
    )
    # Where they are always recorded, they are part of the peak.
    if found.graphs_mib is not None and "CUDA graphs" not in found.parts_mib:
        what = "CUDA graphs, and whole weights in place," if found.sharding.stays else "CUDA graphs"
        console.print(f"{what} would take {found.graphs_mib:,.0f} MiB more, and are used only if so much is free.")
    if found.sampling_mib is not None:
        console.print(
            f"While completions are sampled: {found.sampling_mib:,.0f} MiB, with {found.kept_mib:,.0f} of keys and "
            "values of all rows; where less is free, fewer rows are completed at once."
        )
    _print_amounts(console, found)
    _print_verdict(console, found)


def _model(found: Estimate) -> str:
    line = f"{found.source}: {found.recipe}, {found.parameters:,} parameters, {found.trainable:,} of them trained"
    if found.teacher_parameters:
        line += f", teacher {found.teacher_parameters:,}"
    shared = found.sharding
    many = f"; {shared.processes} processes, {shared.name}" if shared.processes > 1 else ""
    return f"{line}{many}.\nA batch of {found.rows} x {found.length:,} tokens on each GPU."


def _print_amounts(console: Console, found: Estimate) -> None:
    steps = "unknown" if found.steps is None else f"{found.steps:,}"
    tokens = "unknown" if found.total_tokens is None else f"{found.total_tokens:,}"
    why = f" ({found.unknown})" if found.unknown else ""
    console.print(f"Tokens a step: {found.tokens_per_step:,}; steps: {steps}; tokens in all: {tokens}{why}")
    if found.cache_mib is not None:
        console.print(f"Teacher cache of the training rows: {found.cache_mib:,.0f} MiB, if all tokens are supervised.")
    if found.capture_mib is not None:
        console.print(f"Capturing it, only the teacher: {found.capture_mib:,.0f} MiB of a GPU.")


def _print_verdict(console: Console, found: Estimate) -> None:
    if found.gpu is None:
        console.print("No GPU here; --gpu NAME compares with one.")
        return
    has = f"of {found.gpu.name}, {found.gpu.usable_mib:,} MiB can be used"
    console.print(f"Fits: {has}." if found.fits else f"Does not fit: {has}.", style="green" if found.fits else "red")
    if found.changes:
        console.print("What takes less:")
        table = Table()
        table.add_column("settings", overflow="fold")
        table.add_column("MiB", justify="right")
        table.add_column("fits")
        for change in found.changes:
            table.add_row(" ".join(change.settings), f"{change.peak_mib:,.0f}", "yes" if change.fits else "no")
        console.print(table)
