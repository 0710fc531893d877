"""Watches a training for numbers that are not finite: losses, the gradient norm, weights, what the teacher says.

Each optimizer step leaves a few numbers on the device. They are gathered over the ranks, set off to the host, and read
when the next step is done, so the host never waits for the step at hand. They are read at once where the trainer waits
for the device anyway, to log, to evaluate or to save: no checkpoint is written from a state that nobody has looked at.
"""

import math
import warnings
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ..common.checkpoints import TRAINER_STATE, set_aside
from ..common.console import is_main_process
from ..common.non_finite import SKIP, STOP, check_policy
from ..common.optimizers import updating_in_backward
from ..errors import ConfigError, NonFiniteError
from ..kernels.types import HostCopy
from .finite_weights import advice, largest, moments, not_finite, trained
from .loss_spikes import LossSpikes
from .row_search import Batch, kept_of, listed, rows_in

MOST_IN_A_ROW = 10  # steps that `skip_step` leaves out before it stops, too
LATE = 1  # the numbers of so many steps may still be on their way to the host


@dataclass
class _Step:
    """The numbers of an optimizer step, a row of them for each rank, and the micro-batches of this rank."""

    number: int
    copy: HostCopy
    batches: list[Batch]


@dataclass
class _Training:
    """What is trained, and on what."""

    args: Any
    model: Any
    optimizer: Any
    dataset: Any

    def weights(self) -> dict[str, Tensor]:
        return trained(self.model, self.optimizer)


class FiniteGuard(TrainerCallback):
    """Stops a training at numbers that are not finite, or leaves out such steps; warns of spikes of the loss.

    A trainer tells it each micro-batch (`saw_teacher`, `saw_loss`) and gradient norm (`saw_norm`). The rest it learns
    as a callback. The update of a step that is not finite is dropped on the device by optimizers that can, as the fused
    ones of torch. With others `skip_step` waits for the device in each step, and `stop` leaves the weights lost.

    Args:
        policy: "stop" or "skip_step".

    Attributes:
        skipped: steps left out since the training began, before a resume too.

    Raises:
        NonFiniteError: in training, on all ranks together.
        ConfigError: when training begins, an update that cannot be left out.
    """

    def __init__(self, accelerator: Any, policy: str = STOP):
        self.policy, self._accelerator = check_policy(policy), accelerator
        self.skipped = 0
        self._begin()

    def _begin(self) -> None:
        self._losses: list[Tensor] = []
        self._teacher: list[Tensor] = []
        self._batches: list[Batch] = []
        self._norm: Tensor | float | None = None
        self._pending: deque[_Step] = deque()
        self._spikes, self._in_a_row = LossSpikes(), 0
        self._training: _Training | None = None
        self._checked: tuple[int, bool] | None = None  # the step whose weights were checked, and whether moments were
        self._unseen: Path | None = None  # a checkpoint that was saved before the state was checked

    # what the trainer says

    def saw_teacher(self, sums: dict[str, Tensor]) -> None:
        """Take what the teacher said about a micro-batch, by the names of metrics. Nothing without a teacher."""
        if "teacher_entropy" in sums:
            self._teacher.append(sums["teacher_entropy"].detach())
        elif "teacher_perplexity" in sums:  # of a cache, which may give a label no probability
            self._teacher.append(sums["teacher_perplexity"].detach().nan_to_num(torch.nan, 0.0, 0.0))

    def saw_loss(self, loss: Tensor, inputs: dict[str, Any]) -> None:
        """Take the loss of a micro-batch, after its teacher."""
        self._losses.append(loss.detach())
        self._batches.append(kept_of(inputs))

    def saw_norm(self, norm: Tensor | float | None) -> None:
        """Take the norm of a step's gradients, of all ranks. Under fp16 an infinite one is how its scale is found."""
        self._norm = None if self._accelerator.mixed_precision == "fp16" else norm

    # what happens in training

    def on_train_begin(
        self, args, state, control, model=None, optimizer=None, train_dataloader=None, **kwargs
    ) -> None:  # fmt: skip
        self._begin()
        self._training = _Training(args, model, optimizer, getattr(train_dataloader, "dataset", None))
        self.skipped = state.stateful_callbacks.get(TRAINER_STATE, {}).get("skipped_steps", 0)
        if self.policy == SKIP:
            _check_can_skip(args, self._accelerator)

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs) -> None:
        values = self._gathered(self._numbers(args))
        self._pending.append(_Step(state.global_step + 1, HostCopy(values), self._batches))
        self._losses, self._teacher, self._batches, self._norm = [], [], [], None
        if self._accelerator.mixed_precision == "fp16" or _steps_itself(self._accelerator):
            return  # who scales losses drops such steps
        poisoned = (values - values).sum() != 0  # NaN unless all are finite, in fewer kernels than isfinite takes
        if _drops_on_device(optimizer):
            _innermost(optimizer).found_inf = poisoned.float()
        elif self.policy == SKIP and bool(poisoned):
            self._in_training().optimizer.zero_grad(set_to_none=True)

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs) -> None:
        vars(_innermost(optimizer)).pop("found_inf", None)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        while len(self._pending) > LATE:
            self._judge(self._pending.popleft())
        self._before_reading(state, control)

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self._before_reading(state, control)

    def on_save(self, args, state, control, **kwargs) -> None:
        """Check the state behind a checkpoint that is there already, as one that a later callback asked for."""
        self._unseen = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        self.check(state, and_moments=True)
        self._unseen = None

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.check(state)
        self._training = None

    def _before_reading(self, state: Any, control: Any) -> None:
        """Check where the trainer is about to wait for the device: to log, to evaluate, to save."""
        if control.should_log or control.should_evaluate or control.should_save:
            self.check(state, and_moments=control.should_save)

    def check(self, state: Any, and_moments: bool = False) -> None:
        """Read what is on its way, and look at the weights, and the optimizer's moments. Waits for the device."""
        training = self._training
        while self._pending:
            self._judge(self._pending.popleft())
        if training is None or self._checked in ((state.global_step, True), (state.global_step, and_moments)):
            return
        self._checked = (state.global_step, and_moments)
        parts = {"weights": training.weights().values(), "optimizer state": moments(training.optimizer)}
        looked_at = list(parts)[: 1 + and_moments]
        device = self._accelerator.device
        sizes = self._gathered(torch.stack([largest(parts[name], device) for name in looked_at]))
        finite = torch.isfinite(sizes).all(0).tolist()
        wrong = [name for name, right in zip(looked_at, finite, strict=True) if not right]
        if wrong:
            self._stop(f"After step {state.global_step}", wrong, state.global_step + 1)

    def remember(self, state: Any) -> None:
        """Put the count of skipped steps into a state that a checkpoint saves."""
        state.stateful_callbacks.setdefault(TRAINER_STATE, {})["skipped_steps"] = self.skipped

    def logged(self) -> dict[str, float]:
        """Return what is logged: under `skip_step`, the steps left out so far."""
        return {"skipped_steps": self.skipped} if self.policy == SKIP else {}

    # numbers

    def _numbers(self, args: Any) -> Tensor:
        """Return losses, the teacher's numbers and the gradient norm of a step, as many in each step."""
        count, device = args.gradient_accumulation_steps, self._accelerator.device
        zero = torch.zeros((), device=device)
        norm = torch.full((), self._norm, device=device) if isinstance(self._norm, (int, float)) else self._norm
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        padded = [(values + [zero] * count)[:count] for values in (self._losses, self._teacher)]
        numbers = [*padded[0], *padded[1], zero if norm is None else norm.detach()]
        return torch.stack([number.to(device, torch.float32, non_blocking=True) for number in numbers])

    def _gathered(self, numbers: Tensor) -> Tensor:
        """Return a row of numbers for each rank, on the device."""
        return self._accelerator.gather(numbers[None])

    def _judge(self, step: _Step) -> None:
        """Read a step's numbers. All ranks read the same ones, and so decide alike."""
        numbers = step.copy.get()
        count = (numbers.shape[1] - 1) // 2
        if all(map(math.isfinite, numbers.flatten().tolist())):
            self._in_a_row = 0
            return self._look_for_spike(step, numbers[:, :count])
        finite = torch.isfinite(numbers)
        kinds = {
            "the teacher's logits": finite[:, count:-1],
            "loss": finite[:, :count],
            "gradient norm": finite[:, -1:],
        }
        wrong = [name for name, good in kinds.items() if not bool(good.all())]
        bad = ~(finite[:, :count] & finite[:, count:-1])  # (ranks, micro-batches)
        bad = bad if bool(bad.any()) else torch.ones_like(bad)
        rows = self._rows(step, bad)
        ranks = f" on ranks {', '.join(map(str, bad.any(1).nonzero().flatten().tolist()))}" if len(bad) > 1 else ""
        where = f"In step {step.number}{ranks}"
        self._in_a_row += 1
        if self.policy == STOP or self._in_a_row >= MOST_IN_A_ROW:
            self._stop(where, wrong, step.number, rows)
        self.skipped += 1
        self._warn(f"{where} {_are(wrong)} not finite. The step is left out, {self.skipped} in all. {rows}")

    def _look_for_spike(self, step: _Step, losses: Tensor) -> None:
        """Warn of a loss far above those before, with the rows of the micro-batch that has the most of it."""
        loss = losses.sum(1).mean().item()
        spike = self._spikes.add(loss)
        if spike is not None:
            rows = self._rows(step, losses == losses.max())
            self._warn(
                f"In step {step.number} the loss is {loss:.4g}, far above the {spike[1]:.4g} of the steps before "
                f"(robust z-score {spike[0]:.0f}). {rows}"
            )

    def _rows(self, step: _Step, chosen: Tensor) -> str:
        """Return the rows of the chosen micro-batches (ranks, micro-batches) in a sentence, the same on all ranks."""
        mine = chosen[self._accelerator.process_index]
        batches = [batch for batch, is_chosen in zip(step.batches, mine.tolist(), strict=False) if is_chosen]
        words = gather_object([word for batch in batches for word in rows_in(batch, self._in_training().dataset)])
        return f"Rows of the training dataset, as the trainer holds it: {listed(words)}." if words else ""

    def _in_training(self) -> _Training:
        assert self._training is not None
        return self._training

    def _warn(self, message: str) -> None:
        if is_main_process():
            warnings.warn(message, stacklevel=2)

    def _stop(self, where: str, wrong: list[str], step: int, rows: str = "") -> NoReturn:
        """Raise on all ranks, with the weights that are not finite and the newest checkpoint whose weights are."""
        training = self._in_training()
        names = list(dict.fromkeys(gather_object(not_finite(training.weights()))))
        if names and "weights" not in wrong:
            wrong = [*wrong, "weights"]
        which = f"Weights: {listed(names)}." if names else "The weights are finite still."
        saved = self._set_unseen_aside()
        lines = [saved, advice(Path(str(training.args.output_dir)), step) if is_main_process() else ""]
        broadcast_object_list(lines)
        many = f" {MOST_IN_A_ROW} steps in a row were left out." if self._in_a_row >= MOST_IN_A_ROW else ""
        raise NonFiniteError(
            f"{where} {_are(wrong)} not finite.{many} Training stopped, and {lines[0]}. "
            f"{rows}{' ' if rows else ''}{which} A smaller learning_rate, warmup_steps or max_grad_norm may help, or "
            f"bf16 instead of fp16; on_non_finite='skip_step' leaves such steps out. {lines[1]}"
        )

    def _set_unseen_aside(self) -> str:
        """Take its name from a checkpoint that was saved unseen, where this process writes; return what was saved."""
        unseen, args = self._unseen, self._in_training().args
        if unseen is None or not args.should_save or not unseen.is_dir():
            return "nothing was saved since"
        return f"{unseen.name}, saved before its state was checked, was renamed to {set_aside(unseen).name}"


def _are(names: list[str]) -> str:
    *first, last = [name if name.startswith("the ") else f"the {name}" for name in names]
    plural = bool(first) or last.endswith("s")
    return f"{', '.join(first)} and {last} are" if first else f"{last} {'are' if plural else 'is'}"


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _drops_on_device(optimizer: Any) -> bool:
    """Whether an optimizer leaves its step out if `found_inf`, a tensor, is not 0: the fused ones, for GradScaler."""
    inner = _innermost(optimizer)
    # a checkpoint brings its groups, fused or not, whatever the optimizer was made as
    fused = all(group.get("fused") for group in getattr(inner, "param_groups", [{}]))
    return fused and getattr(inner, "_step_supports_amp_scaling", False)


def _steps_itself(accelerator: Any) -> bool:
    """Whether the engine has updated the weights by the time the trainer steps."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def _check_can_skip(args: Any, accelerator: Any) -> None:
    optim = updating_in_backward(args)
    if _steps_itself(accelerator) or optim:
        who = f"optim={optim}" if optim else "DeepSpeed"
        raise ConfigError(
            f"on_non_finite: skip_step leaves the optimizer's step out, but {who} updates weights in its backward. Set "
            "on_non_finite to stop, or choose another."
        )
