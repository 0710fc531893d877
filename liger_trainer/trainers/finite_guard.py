"""Watches a training for numbers that are not finite: losses, the gradient norm, weights, what the teacher says.

Each optimizer step leaves a few numbers on the device. They are gathered over the ranks, set off to the host, and read
when the next step is done, so the host never waits for the step at hand. They are read at once where the trainer waits
for the device anyway, to log, to evaluate or to save: no checkpoint is written from a state that nobody has looked at.
"""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ..common.checkpoints import TRAINER_STATE
from ..compat.torch_internals import skips_step_on_device
from ..errors import ConfigError
from ..kernels.types import HostCopy
from .finite_report import KEPT, Batch, FiniteReport, abs_max, moments, subject_and_verb, warn
from .options import SKIP, STOP, check_policy, updating_in_backward

MOST_IN_A_ROW = 10  # steps that `skip_step` leaves out before it stops, too
STEPS_BEHIND = 1  # so many steps' numbers may be on their way to the host: it reads them one step late, without waiting


@dataclass
class _Step:
    """An optimizer step.

    Attributes:
        copy: its numbers, packed, a row for each rank, on their way to the host.
        batches: this rank's micro-batches.
        can_be_left_out: False where the engine has updated the weights by it.
    """

    number: int
    copy: HostCopy
    batches: list[Batch]
    can_be_left_out: bool


class FiniteGuard(TrainerCallback):
    """Stops a training at numbers that are not finite, or leaves out such steps.

    A trainer tells it each micro-batch (`record_teacher`, `record_loss`) and gradient norm (`record_norm`). The rest it
    learns as a callback. The update of a step that is not finite is dropped on the device by optimizers that can, as
    the fused ones of torch. With others `skip_step` waits for the device in each step, and `stop` leaves the weights
    lost. DeepSpeed has stepped before it is asked, and leaves out steps whose gradients are not finite by itself.

    Args:
        policy: "stop" or "skip_step".

    Attributes:
        skipped: steps left out since the training began, before a resume too.
        poisoned: whether the step at hand is not finite, a bool on the device, from the moment that it has been
            gathered; None before the first.

    Raises:
        NonFiniteError: in training, on all ranks together.
        ConfigError: when training begins, an update that cannot be left out.
    """

    def __init__(self, accelerator: Any, policy: str = STOP):
        self.policy, self._accelerator = check_policy(policy), accelerator
        self.skipped = 0
        self.poisoned: Tensor | None = None
        self._begin()

    def _begin(self) -> None:
        self._numbers = StepNumbers()
        self._pending: deque[_Step] = deque()
        self._in_a_row = 0
        self._report: FiniteReport | None = None  # in training
        self._checked: tuple[int, bool] | None = None  # the step whose weights were checked, and whether moments were
        self._unseen: Path | None = None  # a checkpoint that was saved before the state was checked

    # what the trainer says

    def record_teacher(self, sums: dict[str, Tensor]) -> None:
        """Take what the teacher said about a micro-batch, by the names of metrics. Nothing without a teacher."""
        if "teacher_entropy" in sums:
            self._numbers.teacher.append(sums["teacher_entropy"].detach())
        elif "teacher_perplexity" in sums:  # of a cache, which may give a label no probability
            self._numbers.teacher.append(sums["teacher_perplexity"].detach().nan_to_num(torch.nan, 0.0, 0.0))

    def record_loss(self, loss: Tensor, inputs: dict[str, Any]) -> None:
        """Take the loss of a micro-batch, after its teacher."""
        self._numbers.losses.append(loss.detach())
        # what the search for rows needs of it, without a copy
        kept = {name: inputs[name] for name in KEPT if isinstance(inputs.get(name), Tensor)}
        self._numbers.batches.append(kept)

    def record_norm(self, norm: Tensor | float | None) -> None:
        """Take the norm of a step's gradients, of all ranks. Under fp16 an infinite one is how its scale is found."""
        self._numbers.norm = None if self._accelerator.mixed_precision == "fp16" else norm

    # what happens in training

    def on_train_begin(self, args, state, control, model=None, optimizer=None, train_dataloader=None, **kwargs) -> None:
        self._begin()
        self._report = FiniteReport(args, model, optimizer, getattr(train_dataloader, "dataset", None))
        self.skipped = state.stateful_callbacks.get(TRAINER_STATE, {}).get("skipped_steps", 0)
        optim, megatron = updating_in_backward(args), DistributedType.MEGATRON_LM
        if self.policy == SKIP and (optim or self._accelerator.distributed_type == megatron):
            who = f"optim={optim}" if optim else "Megatron-LM"
            raise ConfigError(
                f"on_non_finite: skip_step leaves the optimizer's step out, but {who} updates weights in its backward. "
                "Set on_non_finite to stop, or choose another."
            )

    def on_pre_optimizer_step(self, args, state, control, optimizer: Any = None, **kwargs) -> None:
        numbers, self._numbers = self._numbers, StepNumbers()
        values = self._gathered(numbers.packed(args.gradient_accumulation_steps, self._accelerator.device))
        stepped = _steps_itself(self._accelerator) and not optimizer.step_was_skipped
        self._pending.append(_Step(state.global_step + 1, HostCopy(values), numbers.batches, not stepped))
        self.poisoned = (values - values).sum() != 0  # NaN unless all are finite, in fewer kernels than isfinite takes
        if self._accelerator.mixed_precision == "fp16" or _steps_itself(self._accelerator):
            return  # who scales losses drops such steps
        if drops_on_device(optimizer):
            innermost(optimizer).found_inf = self.poisoned.float()
        elif self.policy == SKIP and bool(self.poisoned):
            self._in_training().optimizer.zero_grad(set_to_none=True)

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs) -> None:
        vars(innermost(optimizer)).pop("found_inf", None)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        while len(self._pending) > STEPS_BEHIND:
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
        self._report = None

    def _before_reading(self, state: Any, control: Any) -> None:
        """Check where the trainer is about to wait for the device: to log, to evaluate, to save."""
        if control.should_log or control.should_evaluate or control.should_save:
            self.check(state, and_moments=control.should_save)

    def check(self, state: Any, and_moments: bool = False) -> None:
        """Read what is on its way, and look at the weights, and the optimizer's moments. Waits for the device."""
        report = self._report
        while self._pending:
            self._judge(self._pending.popleft())
        if report is None or self._checked in ((state.global_step, True), (state.global_step, and_moments)):
            return
        self._checked = (state.global_step, and_moments)
        parts = {"weights": report.weights().values(), "optimizer state": moments(report.optimizer)}
        looked_at = list(parts)[: 1 + and_moments]
        device = self._accelerator.device
        sizes = self._gathered(torch.stack([abs_max(parts[name], device) for name in looked_at]))
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

    # what is made of it

    def _gathered(self, numbers: Tensor) -> Tensor:
        """Return a row of numbers for each rank, on the device."""
        return self._accelerator.gather(numbers[None])

    def _judge(self, step: _Step) -> None:
        """Read a step's numbers. All ranks read the same ones, and so decide alike."""
        packed = step.copy.get()  # (ranks, 2 * micro-batches + 1), as `StepNumbers.packed` lays them out
        count = packed.shape[1] // 2
        losses, teacher, norm = packed[:, :count], packed[:, count:-1], packed[:, -1:]
        kinds = {"the teacher's logits": teacher, "loss": losses, "gradient norm": norm}
        wrong = [name for name, values in kinds.items() if not bool(torch.isfinite(values).all())]
        if not wrong:
            self._in_a_row = 0
            return
        bad = ~(torch.isfinite(losses) & torch.isfinite(teacher))
        bad = bad if bool(bad.any()) else torch.ones_like(bad)  # a norm is of all micro-batches
        rows = self._in_training().rows(step.batches, bad)
        ranks = f" on ranks {', '.join(map(str, bad.any(1).nonzero().flatten().tolist()))}" if len(bad) > 1 else ""
        where = f"In step {step.number}{ranks}"
        self._in_a_row += 1
        if self.policy == SKIP and not step.can_be_left_out:
            self._stop(where, wrong, step.number, f"DeepSpeed did not leave the step out by itself. {rows}")
        if self.policy == STOP or self._in_a_row >= MOST_IN_A_ROW:
            self._stop(where, wrong, step.number, rows)
        self.skipped += 1
        warn(f"{where} {subject_and_verb(wrong)} not finite. The step is left out, {self.skipped} in all. {rows}")

    def _stop(self, where: str, wrong: list[str], step: int, rows: str = "") -> NoReturn:
        left_out = self._in_a_row if self._in_a_row >= MOST_IN_A_ROW else 0
        raise self._in_training().failure(where, wrong, step, rows, self._unseen, left_out)

    def _in_training(self) -> FiniteReport:
        assert self._report is not None
        return self._report


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def drops_on_device(optimizer: Any) -> bool:
    """Whether an optimizer leaves its step out if `found_inf`, a tensor, is not 0: the fused ones, for GradScaler."""
    inner = innermost(optimizer)
    # a checkpoint brings its groups, fused or not, whatever the optimizer was made as
    fused = all(group.get("fused") for group in getattr(inner, "param_groups", [{}]))
    return fused and skips_step_on_device(inner)


def _steps_itself(accelerator: Any) -> bool:
    """Whether the engine has updated the weights by the time the trainer steps."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


@dataclass
class StepNumbers:
    """The numbers of an optimizer step on one rank, collected from micro-batch to micro-batch, on the device."""

    losses: list[Tensor] = field(default_factory=list)
    teacher: list[Tensor] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)  # what tells the rows of each micro-batch
    norm: Tensor | float | None = None  # of the gradients of all ranks

    def packed(self, count: int, device: torch.device) -> Tensor:
        """Return `count` losses, `count` numbers of the teacher and the norm, (2 * count + 1,) fp32.

        Every rank packs as many, with zeros where it has none.
        """
        zero = torch.zeros((), device=device)
        norm = torch.full((), self.norm, device=device) if isinstance(self.norm, (int, float)) else self.norm
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        padded = [(values + [zero] * count)[:count] for values in (self.losses, self.teacher)]
        numbers = [*padded[0], *padded[1], zero if norm is None else norm.detach()]
        return torch.stack([number.to(device, torch.float32, non_blocking=True) for number in numbers])
