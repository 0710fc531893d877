"""NaN planted in one step of a training: in its loss, gradient, a weight, its batch, or what the teacher says."""

from typing import Any

import torch
from transformers import TrainerCallback

from liger_trainer.compat.deepspeed import share_of

PLACES = ("loss", "gradient", "weight", "batch", "teacher")


class Plant(TrainerCallback):
    """Plants NaN in the step with number `step`, counted from 1, and in the `several - 1` after it."""

    def __init__(self, trainer: Any, place: str, step: int, several: int = 1):
        self.trainer, self.place, self.steps = trainer, place, range(step, step + several)
        self.active = False
        trainer.add_callback(self)
        model, teacher = trainer.model, getattr(trainer, "teacher", None)
        if place == "loss":
            compute = trainer.compute_loss
            trainer.compute_loss = lambda *args, **kwargs: self._spoiled(compute(*args, **kwargs))
        elif place == "gradient":
            next(iter(model.parameters())).register_hook(self._spoiled)
        elif place == "batch":
            model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: self._spoiled(output))
        elif place == "teacher":
            teacher.get_decoder().norm.register_forward_hook(lambda module, inputs, output: self._spoiled(output))

    def _spoiled(self, value: torch.Tensor) -> torch.Tensor:
        return value * torch.nan if self.active else value

    def on_step_begin(self, args, state, control, **kwargs):
        self.active = state.global_step + 1 in self.steps
        if self.active and self.place == "weight":
            with torch.no_grad():
                share_of(next(iter(self.trainer.model.parameters()))).fill_(torch.nan)

    def on_step_end(self, args, state, control, **kwargs):
        self.active = False
