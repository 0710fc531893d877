"""What a run achieved, in sentences: how the held-out rows changed, and what the student is beside its teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..metric_rows import DISTILL_ROWS, OTHER_TOKENS_ROWS, SFT_ROWS, MetricRow
from .format import change, figure, parameters

HARDLY = 0.005
"""A relative change below this is called none: a rerun with another seed moves as much."""


@dataclass(frozen=True)
class Verdict:
    """`tone` is good, bad or nothing, as in tables."""

    text: str
    tone: str


def verdict(
    recipe: str | None, before: Mapping[str, float], after: Mapping[str, float], models: Mapping[str, Mapping[str, Any]]
) -> Verdict | None:
    """Judge a run by the first metric of its recipe; None if it has no metric from before and after.

    Args:
        before, after: held-out metrics by their names without `eval_`.
        models: `student` and `teacher` with `parameters`, `dtype` and `tokens_per_second`, as far as they are there.
    """
    rows = (*OTHER_TOKENS_ROWS, *DISTILL_ROWS) if recipe == "distill" else SFT_ROWS
    judged = [row for row in rows if row.better and row.metric in before and row.metric in after]
    if not judged:
        return None
    first = judged[0]
    old, new = before[first.metric], after[first.metric]
    if new != new:
        return Verdict(f"{_name(first)} on the held-out rows is NaN: the trained model is of no use.", "bad")
    if abs(new - old) <= HARDLY * abs(old):
        word, tone = "The student hardly changed", ""
    elif (new < old) == (first.better == "lower"):
        word, tone = "The student got better", "good"
    else:
        word, tone = "The student got worse", "bad"
    shown = [first, *(row for row in judged[1:] if row.metric in ("agreement_at_1", "perplexity"))]
    moves = ", ".join(_move(row, before[row.metric], after[row.metric]) for row in shown)
    return Verdict(f"{word} on rows that it was not trained on: {moves}.{beside_teacher(models)}", tone)


def _name(row: MetricRow) -> str:
    return row.title.partition(" (")[0]


def _move(row: MetricRow, old: float, new: float) -> str:
    share = change(old, new)
    moved = f"from {figure(old, row.digits)} to {figure(new, row.digits)}"
    return f"{_name(row)} {moved}{f' ({share})' if share else ''}"


def beside_teacher(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Compare sizes and, where both computed in the same dtype, the speed of generation; nothing without a teacher."""
    student, teacher = models.get("student"), models.get("teacher")
    if not student or not teacher:
        return ""
    small, large = student["parameters"], teacher["parameters"]
    if not (small and large):  # ZeRO-3 leaves empty tensors in each process
        return ""
    text = f" It has {small / large:.0%} of its teacher's parameters ({parameters(small)} of {parameters(large)})"
    if small == large:
        text = " It is as large as its teacher"
    fast, slow = student.get("tokens_per_second"), teacher.get("tokens_per_second")
    if fast and slow and student.get("dtype") == teacher.get("dtype"):
        text += f" and writes {fast:,.0f} tokens/s where its teacher writes {slow:,.0f} ({fast / slow:.1f} times)"
    return f"{text}."
