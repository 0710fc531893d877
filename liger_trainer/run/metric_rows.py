"""The held-out metrics that a run is judged by: their names in `trainer.evaluate()` and in words. Imports nothing."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricRow:
    """A line of the table: a metric of `trainer.evaluate()` without its prefix, and how it is shown."""

    metric: str
    title: str
    digits: int = 3
    better: str | None = None
    """"lower" or "higher"; None where neither is"""


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
OTHER_NAME = {"perplexity": "student_perplexity"}  # a distillation logs it by both


def said_already(metric: str, measured: Iterable[Collection[str]]) -> bool:
    """Whether each run that has a metric, of runs with these metrics, has it by its other name too."""
    other = OTHER_NAME.get(metric)
    return other is not None and all(other in names for names in measured if metric in names)
