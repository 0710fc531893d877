"""What changes about a loss while a student trains: schedules, TAID's share, projectors of hidden states."""

import json
import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import ConfigError, CorruptError
from ..kernels.types import HostCopy
from ..losses.fused_forward import FusedLoss
from ..losses.hidden_states import HiddenLosses
from ..losses.plan import LossPlan
from ..losses.schedules import Taid
from ..losses.spec import LossOptions, final_fields, moved_fields
from ..patching.patcher import base_of
from .finite_guard import drops_on_device
from .host import DistillTrainerHost
from .options import updating_in_backward

# in a checkpoint
PROJECTORS, LOSS_STATE = "hidden_projectors.safetensors", "loss_state.json"
PROJECTORS_OPTIMIZER = "hidden_projectors_optimizer.pt"


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
        hidden: the hidden-state terms, or None.

    Raises:
        ConfigError: hidden-state terms where there are no hidden states, or where they would not be learned right;
            a loss that changes under torch.compile.
    """

    def __init__(self, trainer: DistillTrainerHost, plan: LossPlan):
        super().__init__(plan)
        self._trainer = trainer
        self.hidden: HiddenLosses | None = None
        self._own: ProjectorOptimizer | None = None  # where the student's optimizer takes no projectors
        if trainer.args.torch_compile and (plan.moves or plan.of("hidden")):
            raise ConfigError(
                "torch_compile fixes the loss in its graph: schedules and taid would compile again in each step, and "
                "hidden-state losses record what blocks return. Leave torch_compile out, or these."
            )
        if plan.of("hidden"):
            self.hidden = self._hidden_losses()
        if self.hidden is not None and self.parameters() and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            self.hidden.to(trainer.accelerator.device)  # the student is not there yet
            self._own = ProjectorOptimizer(trainer, self.parameters())

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 0:
            self.restart()
        if self.hidden is not None:
            self.hidden.zero_grad()  # of a training that was interrupted
        self._set_sampling(state)

    def on_step_begin(self, args, state, control, optimizer: Any = None, **kwargs) -> None:
        if self._own is not None:
            self._own.follow(optimizer)
        changes = self.changes(state)
        if changes:
            self._trainer.distil(**changes)

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if args.max_grad_norm > 0 and self.parameters():
            nn.utils.clip_grad_norm_(self.parameters(), args.max_grad_norm)
        if self._own is not None:
            poisoned = self._trainer.finite.poisoned
            assert poisoned is not None  # the guard is an earlier callback, and has judged this step
            self._own.step(poisoned)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.share is not None:
            self.share.close()
        if self.hidden is not None:
            self.hidden.zero_grad()  # the trainer clears only its model's gradients
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

    def parameters(self) -> list[nn.Parameter]:
        return [] if self.hidden is None else list(self.hidden.parameters())

    def add_projectors(self, optimizer: Any) -> None:
        """Have projectors without their own optimizer trained by the student's, with its weight decay."""
        if self._own is not None:
            return
        there = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [p for p in self.parameters() if id(p) not in there]
        if mine and self._trainer.lr_scheduler is not None:
            raise ConfigError(
                "optimizers: a learning-rate scheduler made before the projectors of hidden-state losses has no rate "
                "for them. Give only the optimizer, or leave hidden-state losses out."
            )
        if mine:
            optimizer.add_param_group({"params": mine, "weight_decay": self._trainer.args.weight_decay})

    def average_gradients(self) -> None:
        """Average the projectors' gradients over ranks: they are not inside the student's DDP wrapper."""
        accelerator, parameters = self._trainer.accelerator, self.parameters()
        if accelerator.num_processes == 1 or not parameters:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        mean: Any = accelerator.reduce(flat, "mean")
        for p, gradient in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.view_as(p)

    def save(self, folder: str) -> None:
        if not self._trainer.args.should_save:
            return
        if self.share is not None and self.share.taid.adaptive:
            Path(folder, LOSS_STATE).write_text(json.dumps({"taid": self.share.state()}), encoding="utf-8")
        if self.parameters():
            assert self.hidden is not None
            save_file({k: v.contiguous() for k, v in self.hidden.state_dict().items()}, Path(folder, PROJECTORS))
        if self._own is not None:
            self._own.save(folder)

    def load(self, folder: str) -> None:
        """Load what `save` wrote. Raise ConfigError where it is missing, CorruptError where it is damaged."""
        if self.share is not None and self.share.taid.adaptive:
            path = _present(folder, LOSS_STATE, "taid")
            try:
                self.share.restore(json.loads(path.read_text(encoding="utf-8"))["taid"])
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptError(f"{path} is damaged: {error}") from error
        if self.parameters():
            self._load_projectors(_present(folder, PROJECTORS, "projectors of hidden-state losses"))
        if self._own is not None:
            what = "an optimizer of their own for projectors of hidden-state losses"
            self._own.load(_present(folder, PROJECTORS_OPTIMIZER, what))

    def load_best(self, folder: str) -> None:
        """Load the projectors of the best checkpoint. One that has only weights leaves them as they are."""
        path = Path(folder, PROJECTORS)
        if self.parameters() and path.is_file():
            self._load_projectors(path)

    def _load_projectors(self, path: Path) -> None:
        assert self.hidden is not None
        try:
            self.hidden.load_state_dict(load_file(path))
        except SafetensorError as error:
            raise CorruptError(f"{path} is damaged: {error}") from error
        except RuntimeError as error:
            raise ConfigError(f"{path} holds the projectors of other layers or widths: {error}") from error

    def _hidden_losses(self) -> HiddenLosses:
        trainer = self._trainer
        parallel = getattr(trainer.accelerator, "parallelism_config", None)
        data_parallel = parallel is None or parallel.total_size == parallel.dp_replicate_size * parallel.dp_shard_size
        fsdp1 = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
        if fsdp1 or not data_parallel:  # hidden states are in parts, or out of reach
            raise ConfigError(
                "Hidden-state losses read what blocks return: not with FSDP1 or models split over devices. Use DDP, "
                "FSDP2 or DeepSpeed, or leave them out of losses."
            )
        with trainer.teaching.live() as teachers:
            models = list(teachers.values())
        if len(models) != 1:
            raise ConfigError(
                f"Hidden-state losses need one teacher whose model is in this process, got {len(models)}. "
                "Leave them out of losses, or use a single teacher with teacher='model' or 'self'."
            )
        student, teacher = base_of(trainer.student), base_of(trainer.accelerator.unwrap_model(models[0]))
        losses = HiddenLosses(self.plan.of("hidden"), student, teacher, trainer.args.seed)
        optim = updating_in_backward(trainer.args)
        if optim and any(True for _ in losses.parameters()):
            raise ConfigError(f"optim: {optim} updates the student in its backward, and would not train projectors.")
        return losses


def _present(folder: str, name: str, what: str) -> Path:
    path = Path(folder, name)
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {name}: it was saved by a run without {what}, and cannot go on with them. Leave them "
            "out, or start again from its weights."
        )
    return path


class ProjectorOptimizer:
    """Trains projectors where the student's optimizer is an engine's, which takes no other parameters.

    It is one of the same kind, at the same learning rate.

    Args:
        trainer: a Trainer that has made no optimizer yet.
        parameters: plain tensors, the same on all ranks.

    Raises:
        ConfigError: the student's optimizer is given to the trainer, or none of torch's; fp16, whose scale of the loss
            only the student's would take out of its gradients.
    """

    def __init__(self, trainer: DistillTrainerHost, parameters: list[nn.Parameter]):
        args = trainer.args
        engine = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        about = f"Hidden-state losses that learn projectors next to a student that {engine} shards: "
        if args.fp16:
            raise ConfigError(f"{about}fp16 scales the gradients of both, and takes the scale out of one. Use bf16.")
        if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
            raise ConfigError(f"{about}they get an optimizer of the same kind, so name it in optim; one was given.")
        kind, options = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
        if not kind.__module__.startswith("torch.optim"):
            optim = getattr(args.optim, "value", args.optim)
            raise ConfigError(f"{about}they need one of torch's optimizers, such as adamw_torch; got optim={optim}.")
        self._optimizer = kind([{"params": parameters, "weight_decay": args.weight_decay}], **options)

    def follow(self, student: Any) -> None:
        """Take the learning rate of the student's optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = student.param_groups[0]["lr"]

    def step(self, poisoned: Tensor) -> None:
        """Step, unless `poisoned`, a bool on the device. Torch's fused optimizers don't wait for it."""
        if drops_on_device(self._optimizer):
            self._optimizer.found_inf = poisoned.float()
            self._optimizer.step()
            del self._optimizer.found_inf
        elif not bool(poisoned):
            self._optimizer.step()

    def save(self, folder: str) -> None:
        torch.save(self._optimizer.state_dict(), Path(folder, PROJECTORS_OPTIMIZER))

    def load(self, path: Path) -> None:
        """Load what `save` wrote. Raise CorruptError where it is damaged."""
        try:
            self._optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except (RuntimeError, EOFError, UnpicklingError, ValueError) as error:
            raise CorruptError(f"{path} is damaged: {error}") from error


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
