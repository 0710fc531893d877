"""Which way a metric is better: for the best checkpoint, early stopping, and learning rates that follow evaluations.

transformers takes the greater value for the better one unless the name ends in "loss", and lowers the learning rate on
a plateau as if less were better in any case. Imports no torch.
"""

import re
import warnings
from typing import Any

_LESS = r"loss|loss/\w+|\w+_loss|perplexity|student_perplexity|student_nll|forward_kl|reverse_kl|jsd"
_MORE = r"mean_token_accuracy|agreement_at_1"
_NEITHER = r"entropy|teacher_entropy|teacher_perplexity|teacher_nll|num_tokens"
# The last one of them in a name: in front stand eval_, the name of a dataset or of a kind of token.
_METRIC = re.compile(rf"(?:^|.*?[_/])(?:(?P<neither>{_NEITHER})|(?P<more>{_MORE})|(?P<less>{_LESS}))")
FOLLOW_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


def greater_is_better(metric: str | None) -> bool | None:
    """Return which way a metric of the trainers is better; None for one that is neither, and for others' metrics."""
    found = _METRIC.fullmatch(metric or "")
    return None if found is None or found["neither"] else bool(found["more"])


def is_neither(metric: str | None) -> bool:
    """Return whether it is a metric of the trainers of which neither more nor less is better."""
    found = _METRIC.fullmatch(metric or "")
    return found is not None and found["neither"] is not None


def choose_direction(args: Any) -> None:
    """Set `greater_is_better`, where it is None, for a metric of the trainers.

    Raises:
        ValueError: neither more nor less of it is better.
    """
    metric = args.metric_for_best_model
    if args.greater_is_better is not None or metric is None:
        return
    if is_neither(metric):
        raise ValueError(f"metric_for_best_model: {no_direction(metric)}")
    args.greater_is_better = greater_is_better(metric)


def no_direction(metric: str) -> str:
    """Return what is said about a metric that is no better high than low."""
    return f"neither more nor less of {metric} is better. Say which is meant: greater_is_better, true or false."


def correct_guess(args: Any) -> None:
    """Set `greater_is_better` to false where transformers has guessed it true, in arguments that are not ours.

    Warns, since such arguments do not tell a guess from a choice.
    """
    metric = args.metric_for_best_model
    guess = metric is not None and not metric.endswith("loss")
    if guess and args.greater_is_better and greater_is_better(metric) is False:
        args.greater_is_better = False
        warnings.warn(
            f"metric_for_best_model: transformers takes more {metric} for the better; less is, so greater_is_better is "
            "set to False. To choose the highest all the same, set it in a LigerConfig or LigerDistillConfig.",
            stacklevel=3,
        )


def follow_direction(args: Any) -> None:
    """Have a learning rate that follows evaluations follow `greater_is_better`, unless `mode` is given."""
    if args.lr_scheduler_type in FOLLOW_EVALUATIONS:
        mode = "max" if args.greater_is_better else "min"
        args.lr_scheduler_kwargs = {"mode": mode, **(args.lr_scheduler_kwargs or {})}
