"""The table that transformers shows in a notebook, with the metrics of tokens and of a teacher beside the loss.

With evaluations transformers has a column for each metric of theirs; without, it would show the loss alone.
"""

from typing import Any

from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy

COLUMNS = {
    "forward_kl": "Forward KL",
    "reverse_kl": "Reverse KL",
    "agreement_at_1": "Agreement@1",
    "mean_token_accuracy": "Token accuracy",
    "learning_rate": "Learning rate",
}
TERM = "loss/"


def widen_notebook_table(trainer: Trainer) -> None:
    """Replace transformers' callback of notebooks, if the trainer has it, by one with more columns."""
    callbacks = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if type(callback).__name__ == "NotebookProgressCallback":
            callbacks[place] = _with_more_columns(type(callback))()


def _with_more_columns(usual: type[Any]) -> type[Any]:
    """Return a subclass of transformers' callback, whose module needs IPython and is imported in notebooks alone."""

    class NotebookTable(usual):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if args.eval_strategy != IntervalStrategy.NO or not logs or "loss" not in logs:
                return
            terms = {name: name.removeprefix(TERM) for name in logs if name.startswith(TERM)}
            shown = {**terms, **COLUMNS}
            values = {"Step": state.global_step, "Training Loss": logs["loss"]}
            values |= {title: logs[name] for name, title in shown.items() if name in logs}
            self.training_tracker.write_line(values)

    return NotebookTable
