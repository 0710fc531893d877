"""What changes about a loss while a student trains: schedules, and TAID's share."""

import json
import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..errors import ConfigError, CorruptError
from ..kernels.types import HostCopy
from ..losses.fused_forward import FusedLoss
from ..losses.plan import LossPlan
from ..losses.schedules import Taid
from ..losses.spec import LossOptions, final_fields, moved_fields
from ..plugins import load
from .host import DistillTrainerHost

LOSS_STATE = "loss_state.json"  # in a checkpoint


class LossSchedule:
    """The scalars of a loss plan from step to step, TAID's share among them.

    Attributes:
        share: TAID's, or None.
        final: the fields of `Distillation` that have other values in evaluations.
        logged: the scalars of the step at hand, as they are logged: schedule/<name>.
    """

    def __init__(self, plan: LossPlan):
        self.plan, self.final, self.logged = plan, final_fields(plan), dict[str, float]()
        self.restart()

    def restart(self) -> None:
        """Start TAID's share again, for a training that starts at step 0."""
        self.share = None if self.plan.taid is None else TaidShare(self.plan.taid)

    def changes(self, state: Any) -> dict[str, Any]:
        """Return the fields of `Distillation` that change for the step at hand."""
        moved = self.plan.at(state.global_step, state.max_steps)
        changes = moved_fields(self.plan, moved)
        if self.share is not None:
            moved["teacher_share"] = changes["teacher_share"] = self.share.at(state.global_step, state.max_steps)
        self.logged = {f"schedule/{name}": value for name, value in moved.items()}
        return changes

    def set_loss(self, fused: FusedLoss, options: LossOptions) -> None:
        """Put the options on a fused loss. In evaluation, what is scheduled has its final value."""
        assert options.distillation is not None
        fused.options = options
        fused.eval_options = replace(options, distillation=replace(options.distillation, **self.final))


class LossState(LossSchedule, TrainerCallback):
    """Moves the loss of a `LigerDistillTrainer` along its plan; what it has learned is part of each checkpoint.

    Attributes, besides LossSchedule's:
        hidden: the hidden-state losses (extras/hidden_states.py), or None.

    Raises:
        ConfigError: a loss that changes under torch.compile; hidden-state losses that could not be learned right.
    """

    def __init__(self, trainer: DistillTrainerHost, plan: LossPlan):
        super().__init__(plan)
        self._trainer = trainer
        if trainer.args.torch_compile and (plan.moves or plan.of("hidden")):
            raise ConfigError(
                "torch_compile fixes the loss in its graph: schedules and taid would compile again in each step, and "
                "hidden-state losses record what blocks return. Leave torch_compile out, or these."
            )
        self.hidden: Any = load("hidden").TrainedHiddenLosses(trainer, plan) if plan.of("hidden") else None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 0:
            self.restart()
        self._set_sampling(state)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        changes = self.changes(state)
        if changes:
            self._trainer.distil(**changes)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.share is not None:
            self.share.close()
        self._set_sampling(state)

    def _set_sampling(self, state) -> None:
        """Set what completions are sampled one step ahead: a step's micro-batches are made before it begins."""
        moved = self.plan.at(state.global_step, state.max_steps)
        self._trainer.lmbda = moved.get("lmbda", self._trainer.lmbda)
        length = moved.get("max_completion_length", self._trainer.max_completion_length)
        self._trainer.max_completion_length = math.ceil(length)

    def add_micro_batch(self, totals: dict[str, Tensor], tokens: Tensor) -> None:
        """Add a micro-batch of training: sums over its tokens of all ranks."""
        if self.share is not None:
            self.share.add(totals["kd_loss"], tokens)

    def save(self, folder: str) -> None:
        if not self._trainer.args.should_save:
            return
        if self.share is not None and self.share.taid.adaptive:
            Path(folder, LOSS_STATE).write_text(json.dumps({"taid": self.share.state()}), encoding="utf-8")
        if self.hidden is not None:
            self.hidden.save(folder)

    def load(self, folder: str) -> None:
        """Load what `save` wrote. Raise ConfigError where it is missing, CorruptError where it is damaged."""
        if self.share is not None and self.share.taid.adaptive:
            path = needed_file(folder, LOSS_STATE, "taid")
            try:
                self.share.restore(json.loads(path.read_text(encoding="utf-8"))["taid"])
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptError(f"{path} is damaged: {error}") from error
        if self.hidden is not None:
            self.hidden.load(folder)


def needed_file(folder: str, name: str, what: str) -> Path:
    """Return the path of a file in a checkpoint. Raise ConfigError where a run without `what` has saved it."""
    path = Path(folder, name)
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {name}: it was saved by a run without {what}, and cannot go on with them. Leave them "
            "out, or start again from its weights."
        )
    return path


# TAID's adaptive share of the teacher: the faster the student's loss falls, the faster the share rises.
#
# change   = (previous loss - loss) / previous loss
# momentum = beta momentum + (1 - beta) change
# t        = min(end, max(linear in the steps, t + alpha sigmoid(momentum) (1 - t)))
#
# Source: Shing et al. 2025, TAID, arXiv:2501.16937. The loss here is kd_loss, over all tokens of an optimizer step. It
# is read one step late, when its copy has arrived on the host, so the host does not wait for the device.


STEPS_BEHIND = 1  # the loss of so many steps may still be on its way to the host


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
        while len(self._pending) > STEPS_BEHIND:
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
