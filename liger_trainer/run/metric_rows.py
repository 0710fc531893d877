"""What the held-out metrics of a run are called, how numbers are written, and what a run has achieved, in sentences."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MetricRow:
    """A line of the table: a metric of `trainer.evaluate()` without its prefix, and how it is shown."""

    metric: str
    title: str
    digits: int = 3
    better: str | None = None  # "lower", "higher" or None


SFT_ROWS = (
    MetricRow("loss", "loss (nats/token)", better="lower"),
    MetricRow("perplexity", "perplexity", 2, better="lower"),
    MetricRow("mean_token_accuracy", "token accuracy", better="higher"),
    MetricRow("entropy", "entropy (nats/token)"),
)
DISTILL_ROWS = (
    MetricRow("forward_kl", "forward KL (nats/token)", better="lower"),
    MetricRow("reverse_kl", "reverse KL (nats/token)", better="lower"),
    MetricRow("agreement_at_1", "agreement@1", better="higher"),
    MetricRow("student_perplexity", "student perplexity", 2, better="lower"),
    MetricRow("teacher_perplexity", "teacher perplexity", 2),
)
# Of a distillation from a teacher with another tokenizer, which has no KL
OTHER_TOKENS_ROWS = (
    MetricRow("loss/alm", "ALM (nats/token)", better="lower"),
    MetricRow("loss/uld", "ULD", better="lower"),
)
# Of rows of a task with a checker, before all others
EXACT_MATCH = MetricRow("exact_match", "exact match", better="higher")
TASK_ROWS = EXACT_MATCH, MetricRow("teacher_exact_match", "teacher's exact match")
# Of a head for multi-token prediction, behind all others
ACCEPTED = MetricRow("mtp_accepted", "drafts accepted", better="higher")
OTHER_NAME = {"perplexity": "student_perplexity"}  # a distillation logs both names


def shown_rows(rows: Iterable[MetricRow], measured: Sequence[Collection[str]]) -> tuple[MetricRow, ...]:
    """Return the rows whose metric is among the names that some run has measured, each by one of its names."""
    return tuple(
        row
        for row in (*TASK_ROWS, *rows, ACCEPTED)
        if any(row.metric in names for names in measured) and not has_other_name(row.metric, measured)
    )


def has_other_name(metric: str, measured: Iterable[Collection[str]]) -> bool:
    """Whether every run that has the metric has it by its other name too."""
    other = OTHER_NAME.get(metric)
    return other is not None and all(other in names for names in measured if metric in names)


# Write numbers and values as text for reports.
MINUS = "\u2212"


def figure(value: float | None, digits: int = 3) -> str:
    """Write a measurement with `digits` decimals, none for large numbers, and an exponent where they show nothing."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if value and not 10**-digits <= abs(value) < 1e9:
        text = f"{value:.{digits}g}"
    else:
        text = f"{value:,.{0 if abs(value) >= 1e4 else digits}f}"
    return text.replace("-", MINUS)


def change(old: float | None, new: float | None) -> str:
    """Write the relative change; nothing if it has no meaning."""
    if old is None or new is None or not (math.isfinite(old) and math.isfinite(new)) or old == 0:
        return ""
    share = (new - old) / abs(old)
    return f"{share:+.1%}".replace("-", MINUS) if abs(share) < 10 else f"{new / old:,.0f}×"


def duration(seconds: float | None) -> str:
    """Write `2 h 5 min`, `3 min 20 s` or `4.2 s`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {round(seconds) % 60} s"


def parameters(value: int) -> str:
    """Write three digits: `135 M`, `1.24 B`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


# What a run achieved, in sentences: how the held-out rows changed, and how the student compares with its teacher.


FEW_ROWS = 20  # held-out rows below which a verdict says how many they are
HARDLY = 0.005  # a relative change below this is called none: a rerun with another seed moves as much


@dataclass(frozen=True)
class Verdict:
    """`tone` is good, bad or nothing, as in tables."""

    text: str
    tone: str


def verdict(
    recipe: str | None,
    before: Mapping[str, float],
    after: Mapping[str, float],
    models: Mapping[str, Mapping[str, Any]],
    rows: int | None = None,
) -> Verdict | None:
    """Judge a run by the first metric of its recipe; None if it has no metric from before and after.

    Args:
        before, after: held-out metrics by their names without `eval_`.
        models: `student` and `teacher` with `parameters`, as far as they are there.
        rows: how many were held out, if that is known.
    """
    of_recipe = (EXACT_MATCH, *((*OTHER_TOKENS_ROWS, *DISTILL_ROWS) if recipe == "distill" else SFT_ROWS))
    judged = [row for row in of_recipe if row.better and row.metric in before and row.metric in after]
    if not judged:
        return None
    first = judged[0]
    if first is EXACT_MATCH and len(judged) > 1 and before[first.metric] == after[first.metric]:
        judged = [first := judged[1], EXACT_MATCH, *judged[2:]]  # as of a run too short to get an answer right
    old, new = before[first.metric], after[first.metric]
    if new != new:
        return Verdict(f"{_name(first)} on the held-out rows is NaN: the trained model cannot be used.", "bad")
    if abs(new - old) <= HARDLY * abs(old):
        word, tone = "hardly changed", ""
    elif (new < old) == (first.better == "lower"):
        word, tone = "got better", "good"
    else:
        word, tone = "got worse", "bad"
    who = "student" if recipe == "distill" else "model"
    shown = [first, *(row for row in judged[1:] if row.metric in ("exact_match", "agreement_at_1", "perplexity"))]
    moves = ", ".join(_move(row, before[row.metric], after[row.metric]) for row in shown)
    few = f" It is judged by {rows} rows, which are few." if rows is not None and rows < FEW_ROWS else ""
    text = f"The {who} {word} on rows that it was not trained on: {moves}.{few}{beside_teacher(models)}"
    return Verdict(text, tone)


def _name(row: MetricRow) -> str:
    return row.title.partition(" (")[0]


def _move(row: MetricRow, old: float, new: float) -> str:
    share = change(old, new)
    moved = f"from {figure(old, row.digits)} to {figure(new, row.digits)}"
    return f"{_name(row)} {moved}{f' ({share})' if share else ''}"


def beside_teacher(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Compare the sizes of student and teacher; nothing without a teacher."""
    student, teacher = models.get("student"), models.get("teacher")
    if not student or not teacher:
        return ""
    small, large = student["parameters"], teacher["parameters"]
    if not (small and large):  # ZeRO-3 leaves empty tensors in each process
        return ""
    text = f" It has {small / large:.0%} of its teacher's parameters ({parameters(small)} of {parameters(large)})"
    if small == large:
        text = " It is as large as its teacher"
    return f"{text}."
