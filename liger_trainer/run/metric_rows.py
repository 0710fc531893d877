"""The held-out metrics of a run, by name and in words. Imports nothing."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricRow:
    """A line of the table: a metric of `trainer.evaluate()` without its prefix, and how it is shown."""

    metric: str
    title: str
    digits: int = 3
    better: str | None = None
    """"lower", "higher" or None"""


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
OTHER_TOKENS_ROWS = (
    MetricRow("loss/alm", "ALM (nats/token)", better="lower"),
    MetricRow("loss/uld", "ULD", better="lower"),
)
"""Of a distillation from a teacher with another tokenizer, which has no KL"""
OTHER_NAME = {"perplexity": "student_perplexity"}  # a distillation logs both names


def shown_rows(rows: Iterable[MetricRow], measured: Sequence[Collection[str]]) -> tuple[MetricRow, ...]:
    """Return the rows whose metric some run has, each metric by one of its names.

    Args:
        measured: the names of the metrics of each run.
    """
    return tuple(
        row
        for row in rows
        if any(row.metric in names for names in measured) and not has_other_name(row.metric, measured)
    )


def has_other_name(metric: str, measured: Iterable[Collection[str]]) -> bool:
    """Whether every run that has the metric has it by its other name too."""
    other = OTHER_NAME.get(metric)
    return other is not None and all(other in names for names in measured if metric in names)
