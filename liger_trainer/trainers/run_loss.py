"""The mean loss of a run, `train_loss`, without what was logged of steps that were left out."""

import math

from .adamw import AdamWTrainer


class RunLoss:
    """What Trainer's sum of losses is without the logs that are not finite.

    first_step: the one after which the training began.
    """

    def __init__(self, first_step: int):
        self._first = self._last = first_step
        self._sum, self._steps = 0.0, 0  # of logs that are finite

    def sum_after(self, loss: float, total: float, step: int) -> float:
        """Return what Trainer's sum, `total` with a log of this mean loss, must be for the mean of finite logs.

        Until there is a finite log it is NaN.
        """
        steps, self._last = step - self._last, step
        if math.isfinite(loss):
            self._sum += loss * steps
            self._steps += steps
        if self._steps == step - self._first:
            return total
        return self._sum / self._steps * (step - self._first) if self._steps else math.nan


class RunLossTrainer(AdamWTrainer):
    """A trainer whose `train_loss` leaves out logs that are not finite, as those of steps that were left out."""

    def start_run_loss(self) -> None:
        """Start the mean anew, at the beginning of a training."""
        self._run_loss = RunLoss(self.state.global_step)

    def saw_logged(self, loss: float) -> None:
        """Take the mean loss of a log, which Trainer has added to its sum."""
        if not self.is_in_train:
            return
        self._total_loss_scalar = self._run_loss.sum_after(loss, self._total_loss_scalar, self.state.global_step)
        if not math.isfinite(loss):  # Trainer would start the next sum from NaN - NaN
            self._tr_loss.zero_()

    def _finalize_training(self, *args, **kwargs):
        steps = self.state.global_step - self._globalstep_last_logged
        if steps:  # Trainer is about to add what was not logged
            rest = self._tr_loss.item()
            self._tr_loss.zero_()
            self._total_loss_scalar += rest
            self.saw_logged(rest / steps)
        return super()._finalize_training(*args, **kwargs)
