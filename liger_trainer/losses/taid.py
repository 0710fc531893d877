"""TAID's adaptive share of the teacher: the faster the student's loss falls, the faster the share rises.

    change   = (previous loss - loss) / previous loss
    momentum = beta momentum + (1 - beta) change
    t        = min(end, max(linear in the steps, t + alpha sigmoid(momentum) (1 - t)))

Source    Shing et al. 2025, TAID, arXiv:2501.16937. The loss here is kd_loss, over all tokens of an optimizer step. It
          is read one step late, when its copy has arrived on the host, so the host does not wait for the device.
"""

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..kernels.types import HostCopy
from .schedules import Taid

LATE = 1  # the loss of so many steps may still be on its way to the host


class TaidShare:
    """The teacher's share t over the steps of a training.

    Call `at` before each step, `add` for each micro-batch, and `close` after the step.
    """

    def __init__(self, taid: Taid):
        self.taid = taid
        self._t, self._momentum, self._previous = taid.start, 0.0, None
        self._pending: deque[HostCopy] = deque()
        self._sums: Tensor | None = None

    def at(self, step: int, max_steps: int) -> float:
        """Return t in the step after `step` steps of `max_steps`."""
        linear = self.taid.linear(step, max_steps)
        if not self.taid.adaptive:
            return linear
        while len(self._pending) > LATE:
            total, tokens = self._pending.popleft().get().tolist()
            self._follow(total / max(tokens, 1.0))
        self._t = min(self.taid.end, max(linear, self._t))
        return self._t

    def _follow(self, loss: float) -> None:
        if self._previous and math.isfinite(loss):
            change = (self._previous - loss) / self._previous
            self._momentum = self.taid.beta * self._momentum + (1 - self.taid.beta) * change
            sigmoid = (1 + math.tanh(self._momentum / 2)) / 2
            self._t += self.taid.alpha * sigmoid * (1 - self._t)
        self._previous = loss if math.isfinite(loss) else self._previous

    def add(self, loss: Tensor, tokens: Tensor) -> None:
        """Add a micro-batch: its kd_loss, summed over its `tokens` of all ranks."""
        if self.taid.adaptive:
            sums = torch.stack([loss, tokens]).detach()
            self._sums = sums if self._sums is None else self._sums + sums

    def close(self) -> None:
        """End the optimizer step."""
        if self._sums is not None:
            self._pending.append(HostCopy(self._sums))
            self._sums = None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Waits for the losses on their way."""
        pending = [copy.get().tolist() for copy in self._pending]
        return {"t": self._t, "momentum": self._momentum, "previous_loss": self._previous, "pending": pending}

    def restore(self, state: dict[str, Any]) -> None:
        self._t, self._momentum, self._previous = state["t"], state["momentum"], state["previous_loss"]
        self._sums = None  # those of a step that was interrupted
        self._pending = deque(HostCopy(torch.tensor(sums, dtype=torch.float64)) for sums in state["pending"])
