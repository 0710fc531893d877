"""`init-student`: make a smaller model from a larger one, measure it, and save it for a run to train."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ._shared import Config, Overrides, checked, out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config.run_config import RunConfig
    from ..extras.students.make import StudentRecord

TAKES_LESS = (
    "Teacher and student must fit at once. What takes less, in this order: a smaller "
    "per_device_eval_batch_size, a smaller max_length, dtype=bfloat16, use_cpu=true."
)


def init_student(config: Config, overrides: Overrides = None) -> None:
    """Make a student of model_name_or_path: drop layers, narrow MLPs, compare with the original, save it."""
    settings = checked(config, overrides)
    from ..extras.students.make import make_student

    with out_of_memory(TAKES_LESS):
        path, record, student = make_student(settings.on_this_machine())
    _print(settings, path, record, student)


def _print(config: "RunConfig", path: Path, record: "StudentRecord", student: "PreTrainedModel") -> None:
    from rich.console import Console
    from rich.table import Table

    from ..run.metric_rows import DISTILL_ROWS

    console = Console()
    # By their number in the original, since that is what importances are of.
    new = {old: index for index, old in enumerate(record.layers_kept)}
    kinds = getattr(student.config.get_text_config(decoder=True), "layer_types", None)
    layers = Table(title=f"Layers of {record.teacher}", title_justify="left")
    for column in ("layer", "importance", "in the student"):
        layers.add_column(column, justify="right" if column != "in the student" else "left")
    for index, importance in enumerate(record.layer_importance):
        kind = f", {kinds[new[index]]}" if kinds and index in new and len(set(kinds)) > 1 else ""
        state = f"kept as {new[index]}{kind}" if index in new else "dropped"
        layers.add_row(str(index), f"{importance:.4f}", state, style=None if index in new else "dim")
    console.print(layers)

    metrics = Table(title="Held-out rows, against the original", title_justify="left")
    metrics.add_column("metric")
    metrics.add_column("student", justify="right")
    for row in DISTILL_ROWS:
        metrics.add_row(row.title, f"{record.metrics[row.metric]:.{row.digits}f}")
    console.print(metrics)

    if record.intermediate_size and record.activation_kept:
        sizes, shares = record.intermediate_size, record.activation_kept
        console.print(
            f"MLPs narrowed from {sizes['teacher']} to {sizes['student']} units, which have "
            f"{min(shares):.1%} to {max(shares):.1%} of a layer's activation.",
            highlight=False,
        )
    before, after = record.parameters["teacher"], record.parameters["student"]
    console.print(f"{before:,} parameters became {after:,} ({after / before:.0%}): {path}", highlight=False)
    console.print(f"Train it: {_next_command(config, path)}", highlight=False, soft_wrap=True)


def _next_command(config: "RunConfig", path: Path) -> str:
    """Return the `run` command that trains the student, with the keys that made it removed."""
    from ..config.conflicts import STUDENT_KEYS
    from ..config.schema import find_config
    from ..config.yaml_reader import read_settings, setting
    from ..extras.students.make import CHOICE

    # On the command line they need not be repeated; in the file they would drop layers of the student too.
    in_file = [key for key in read_settings(*find_config(config.source)).values if key in (*STUDENT_KEYS, CHOICE)]
    return shlex.join(
        ["liger-trainer", "run", config.source, setting("model_name_or_path", path), *(f"~{key}" for key in in_file)]
    )
