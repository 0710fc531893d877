"""Stop training early, with a checkpoint: on a signal, or when the hours that a run may take are over."""

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ..errors import Interrupted, OutOfTimeError

OUT_OF_TIME = 1000  # above the number of every signal
SECOND_SIGINT_AFTER = 1.0  # seconds; one Ctrl-C can arrive twice, from the terminal and from a launcher


class StopEarly(TrainerCallback):
    """Ends training with a checkpoint after a signal or after `max_hours`; at once on a second Ctrl-C.

    One process stops after the current step. Several compare notes after each step, in the background and on the host,
    so that no device waits: they read the result one step later, and all stop after that one.

    Args:
        max_hours: how long the run may take, from `began` on.
        began: by `time.monotonic()`.
    """

    def __init__(self, max_hours: float | None = None, began: float = 0.0) -> None:
        self.ends = None if max_hours is None else began + 3600 * max_hours
        self.max_hours = max_hours
        self.received, self.received_at = 0, 0.0
        self.reason = 0
        """why all processes stop: the number of a signal, or OUT_OF_TIME; 0 while they train"""
        self.process, self.stepping = os.getpid(), False
        self._notes: _Notes | None = None

    def receive(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        if os.getpid() != self.process:  # in a worker of the data loader, which ends with this process
            return
        now = time.monotonic()
        if not self.stepping:  # the student is being measured: there is nothing to save
            raise KeyboardInterrupt
        if self.received and number == signal.SIGINT and now - self.received_at > SECOND_SIGINT_AFTER:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self.received_at = number, now
            name = signal.Signals(number).name
            line = f"\n{name}: stopping after this step and saving a checkpoint; Ctrl-C again to stop at once.\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())  # print is not reentrant

    def on_train_begin(self, args, state, control, **kwargs):
        if args.world_size > 1:
            self._notes = _Notes()

    def on_step_begin(self, args, state, control, **kwargs):
        self.stepping = True

    def on_step_end(self, args, state, control, **kwargs):
        late = self.ends is not None and time.monotonic() >= self.ends
        mine = OUT_OF_TIME if late else self.received
        self.reason = mine if self._notes is None else self._notes.exchange(mine)
        if self.reason:
            control.should_save = control.should_training_stop = True
            # An evaluation takes time that may not be left, and with `save_strategy: best` decides whether to save.
            control.should_evaluate = False
        return control

    def on_train_end(self, args, state, control, **kwargs):
        if self._notes is not None:
            self._notes.close()

    def error(self, message: str) -> Interrupted:
        """Return what to raise for the reason of the stop."""
        if self.reason == OUT_OF_TIME:
            return OutOfTimeError(f"max_hours: {self.max_hours:g} is over. {message}")
        return Interrupted(f"{signal.Signals(self.reason).name}: {message}")


class _Notes:
    """The largest number that any process gave, one exchange late."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")  # on the host: NCCL would take its turn on the device
        self.value = torch.zeros(1, dtype=torch.int64)
        self.work: Any = None

    def exchange(self, mine: int) -> int:
        """Start to compare `mine`; return the result of the exchange before, 0 at first."""
        before = self._finish()
        self.value = torch.tensor([mine])
        self.work = dist.all_reduce(self.value, dist.ReduceOp.MAX, self.group, async_op=True)
        return before

    def _finish(self) -> int:
        if self.work is None:
            return 0
        self.work.wait()
        self.work = None
        return int(self.value)

    def close(self) -> None:
        self._finish()
        dist.destroy_process_group(self.group)  # pyright: ignore[reportArgumentType]
