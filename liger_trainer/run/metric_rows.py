"""The held-out metrics that a run is judged by: their names in `trainer.evaluate()` and in words. Imports nothing."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table: a metric of `trainer.evaluate()` without its prefix, and how it is shown."""

    metric: str
    title: str
    digits: int = 3
    better: str | None = None
    """"lower" or "higher"; None where neither is"""


SFT_ROWS = (
    Row("loss", "loss (nats/token)", better="lower"),
    Row("perplexity", "perplexity", 2, better="lower"),
    Row("mean_token_accuracy", "token accuracy", better="higher"),
    Row("entropy", "entropy (nats/token)"),
)
DISTILL_ROWS = (
    Row("forward_kl", "forward KL (nats/token)", better="lower"),
    Row("reverse_kl", "reverse KL (nats/token)", better="lower"),
    Row("agreement_at_1", "agreement@1", better="higher"),
    Row("student_perplexity", "student perplexity", 2, better="lower"),
    Row("teacher_perplexity", "teacher perplexity", 2),
)
OTHER_NAME = {"perplexity": "student_perplexity"}  # a distillation logs it by both


def said_already(metric: str, measured: Iterable[Collection[str]]) -> bool:
    """Whether each run that has a metric, of runs with these metrics, has it by its other name too."""
    other = OTHER_NAME.get(metric)
    return other is not None and all(other in names for names in measured if metric in names)
