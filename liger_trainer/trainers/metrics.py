"""Averages over tokens, kept on the device until they are logged, and the count of tokens through checkpoints."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy

from ..common.checkpoints import TRAINER_STATE
from ..compat.trainers import (
    logged_losses,
    restart_running_loss,
    running_loss,
    set_logged_losses,
    set_tokens_seen,
    trl_metrics,
    unlogged_steps,
)
from ..losses.spec import TokenLossOutput
from .host import TrainerHost


class TokenMetrics:
    """Sums over tokens between two logs. Perplexities are averaged as log-probabilities and exponentiated last.

    `x/share`, or `x_share`, is the share of tokens of a kind x. The other `x/...`, or `x_...`, are then means over the
    tokens of that kind, and are left out where there were none.
    """

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._tokens: Tensor | None = None

    def add(self, sums: dict[str, Tensor], tokens: Tensor) -> None:
        """Add scalars by name, summed over `tokens` tokens of all ranks, or of this rank if `flush` adds ranks up."""
        # fp64: sums over thousands of micro-batches, of which means of small numbers are taken
        totals = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=tokens.device), self._sums)
        self._sums = {name: totals[name] + value for name, value in sums.items()}
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def flush(self, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """Return the means since the last flush. Waits for the device. `over_ranks` adds up the sums of ranks."""
        if self._tokens is None:
            return {}
        # one tensor, so one message to the other ranks and one wait for the device
        *sums, tokens = over_ranks(torch.stack([*self._sums.values(), self._tokens])).unbind()
        means = torch.stack(sums) / tokens.clamp(min=1)
        means = torch.stack(
            [m.exp() if name.endswith("perplexity") else m for name, m in zip(self._sums, means, strict=True)]
        )
        result = dict(zip(self._sums, means.tolist(), strict=True))
        self._sums, self._tokens = {}, None
        return _of_kinds(result)


def _of_kinds(means: dict[str, float]) -> dict[str, float]:
    """Turn means over all tokens into means over the tokens of each kind that has a share."""
    shares = {name.removesuffix("share"): share for name, share in means.items() if name.endswith(("/share", "_share"))}
    result = {}
    for name, mean in means.items():
        kind = name[: name.rfind("/" if "/" in name else "_") + 1]
        share = 1.0 if name == f"{kind}share" else shares.get(kind, 1.0)
        if share:
            result[name] = mean / share
    return result


def tokens_before(state: TrainerState) -> int:
    """Return the tokens trained until `state`. A checkpoint without the count, such as SFTTrainer's, has those of its
    last log."""
    states: Any = state.stateful_callbacks
    stored = states.get(TRAINER_STATE)
    if stored is not None:
        return stored["num_tokens"]
    logged = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
    return int(logged[-1]) if logged else 0


def remember_tokens(state: TrainerState, tokens: int) -> None:
    """Put the count into a state that a checkpoint saves."""
    states: Any = state.stateful_callbacks
    states.setdefault(TRAINER_STATE, {})["num_tokens"] = tokens


class TokenCount(TrainerCallback):
    """Starts a trainer's `num_tokens` at 0, or at the checkpoint's count. TRL's starts at 0 in each process."""

    def __init__(self, trainer: TrainerHost):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._trainer.restart_metrics(tokens_before(state))


def per_token_values(outputs: TokenLossOutput) -> dict[str, Tensor]:
    """Return what distillation averages over tokens and logs, without what the teacher does not determine."""
    values = {
        "kd_loss": outputs.divergence,
        "ce_loss": -outputs.log_probs,
        "forward_kl": outputs.forward_kl,
        "reverse_kl": outputs.reverse_kl,
        "agreement_at_1": outputs.agrees,
        "student_perplexity": -outputs.log_probs,
        "teacher_perplexity": None if outputs.teacher_log_probs is None else -outputs.teacher_log_probs,
        "teacher_entropy": outputs.teacher_entropy,
        "jsd": outputs.jsd,
        **{f"loss/{name}": value for name, value in (outputs.terms or {}).items()},
        **(outputs.parts or {}),
    }
    return {name: value for name, value in values.items() if value is not None}


def count(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64)


def num_tokens(inputs: dict[str, Any]) -> Tensor:
    """Count the tokens of the micro-batch without padding. Padding-free batches carry no attention mask."""
    if "attention_mask" in inputs:
        return count(inputs["attention_mask"])
    ids = inputs["input_ids"]
    return torch.full((), ids.numel(), dtype=torch.float64, device=ids.device)  # torch.tensor would wait for the device


# Of the table that transformers shows in a notebook. With evaluations it has a column for each metric of theirs;
# without, it would show only the loss.
COLUMNS = {
    "forward_kl": "Forward KL",
    "reverse_kl": "Reverse KL",
    "agreement_at_1": "Agreement@1",
    "mean_token_accuracy": "Token accuracy",
    "learning_rate": "Learning rate",
}
TERM = "loss/"


def widen_notebook_table(trainer: TrainerHost) -> None:
    """Replace transformers' callback of notebooks, if the trainer has it, by one with more columns."""
    # By name: its module needs IPython, and is imported only where transformers has found a notebook.
    callbacks = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if type(callback).__name__ == "NotebookProgressCallback":
            usual: Any = type(callback)

            class NotebookTable(usual):
                def on_log(self, args, state, control, logs=None, **kwargs):
                    if args.eval_strategy != IntervalStrategy.NO or not logs or "loss" not in logs:
                        return
                    terms = {name: name.removeprefix(TERM) for name in logs if name.startswith(TERM)}
                    values = {"Step": state.global_step, "Training Loss": logs["loss"]}
                    shown = {**terms, **COLUMNS}.items()
                    self.training_tracker.write_line(values | {to: logs[name] for name, to in shown if name in logs})

            callbacks[place] = NotebookTable()


class StepMetrics:
    """What a trainer logs of its micro-batches, and how TRL's and transformers' own sums are kept right meanwhile."""

    def __init__(self, trainer: TrainerHost):
        self._trainer = trainer
        self._over_tokens = {"train": TokenMetrics(), "eval": TokenMetrics()}

    def add(self, mode: str, totals: dict[str, Tensor], tokens: Tensor) -> None:
        """Add a micro-batch's sums over the tokens of all ranks; `mode` is "train" or "eval"."""
        self._over_tokens[mode].add(totals, tokens)

    def means(self, mode: str, prefix: str) -> dict[str, float]:
        """Return the averages since the last log, and take over TRL's, which it would log without the prefix."""
        means, of_trl = self._over_tokens[mode].flush(), trl_metrics(self._trainer, mode)
        if mode == "eval":
            means.update(self._trainer.evaluation_rows.returned_loss())
        for name, values in of_trl.items():
            means[name] = sum(map(float, values)) / len(values)
        of_trl.clear()
        return {f"{prefix}{name}": value for name, value in means.items()}

    def drop(self, mode: str) -> None:
        """Drop metrics accumulated since the last log, by a training or an evaluation that was broken off."""
        self._over_tokens[mode] = TokenMetrics()
        trl_metrics(self._trainer, mode).clear()

    def restart(self, tokens: int) -> None:
        """Start a training's metrics from the start, after `tokens` tokens of an earlier process."""
        self.drop("train")
        set_tokens_seen(self._trainer, tokens)
        self._first_step = self._last_step = self._trainer.state.global_step
        self._finite_sum, self._finite_steps = 0.0, 0  # of the losses in logs that are finite

    def add_log(self, loss: float) -> None:
        """Take the mean loss of a training's log, which Trainer has added to its sum.

        `train_loss` is the mean of that sum. Logs that are not finite, of steps that were left out, are taken out of
        it; until there is a finite one it is NaN.
        """
        trainer = self._trainer
        if not trainer.is_in_train:
            return
        step = trainer.state.global_step
        steps, self._last_step = step - self._last_step, step
        if math.isfinite(loss):
            self._finite_sum += loss * steps
            self._finite_steps += steps
        if self._finite_steps < step - self._first_step:
            mean = self._finite_sum / self._finite_steps if self._finite_steps else math.nan
            set_logged_losses(trainer, mean * (step - self._first_step))
        if not math.isfinite(loss):  # Trainer would start the next sum from NaN - NaN
            restart_running_loss(trainer)

    def add_rest(self) -> None:
        """Add what was not logged at the end of a training, which Trainer is about to do."""
        trainer = self._trainer
        steps = unlogged_steps(trainer)
        if steps:
            rest = running_loss(trainer)
            restart_running_loss(trainer)
            set_logged_losses(trainer, logged_losses(trainer) + rest)
            self.add_log(rest / steps)
