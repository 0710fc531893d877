"""The optimizer of projectors beside a student whose own is an engine's, which takes no other parameters."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, CorruptError
from .finite_guard import drops_on_device

FILE = "hidden_projectors_optimizer.pt"  # in a checkpoint


class ProjectorOptimizer:
    """Trains projectors as the student's optimizer would: one of the same kind, at the same learning rate.

    Args:
        trainer: a Trainer that has made no optimizer yet.
        parameters: plain tensors, the same on all ranks.

    Raises:
        ConfigError: the student's optimizer is given to the trainer, or none of torch's; fp16, whose scale of the loss
            the student's alone would take out of its gradients.
    """

    def __init__(self, trainer: Any, parameters: list[nn.Parameter]):
        args = trainer.args
        engine = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        about = f"Hidden-state losses that learn projectors beside a student that {engine} shards: "
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
        torch.save(self._optimizer.state_dict(), Path(folder, FILE))

    def load(self, path: Path) -> None:
        """Load what `save` wrote. Raise CorruptError where it is damaged."""
        try:
            self._optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except (RuntimeError, EOFError, UnpicklingError, ValueError) as error:
            raise CorruptError(f"{path} is damaged: {error}") from error
