"""`teacher: self`: the student without its adapters. No weight is loaded or copied."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear

from ..compat.deepspeed import is_partitioned
from ..compat.models import adapter_switches, switch_adapters
from ..errors import ConfigError
from ..losses.deferred_logits import DeferredLogits
from ..losses.spec import Logits
from ..patching.patcher import base_of
from ..plugins import MTP
from .base import DistillHost, Teacher, teacher_logits, without_labels
from .vocabulary import check_student_vocabulary, tokenizer_size

# The starts of LoRA's adapters with which PEFT leaves the base's weights as they are.
KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "mica", "eva")


class SelfTeacher(Teacher):
    """The base of a PEFT student, with every adapter, saved module and trained token switched off.

    It answers before the student's pass begins, in eval mode and without gradient, and leaves flags, modes and
    requires_grad as they were.
    """

    def __init__(self) -> None:
        self._student: Any = None
        self._accelerator: Any = None

    def prepare(self, trainer: DistillHost) -> int:
        if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
            raise ConfigError(
                "teacher: self does not work with FSDP1, whose hooks gather the weights only for the student's pass. "
                "Use FSDP2, DDP or DeepSpeed, or load the base as a separate teacher: teacher: model with "
                "teacher_model_name_or_path."
            )
        _check_adapters(trainer.student)
        self._student, self._accelerator = trainer.student, trainer.accelerator
        return check_student_vocabulary(trainer.student, tokenizer_size(trainer.tokenizer))

    def answer(self, inputs: dict[str, Any]) -> Logits:
        student, base = self._student, base_of(self._student)
        # FSDP2 and ZeRO-3 gather what is not in the decoder layers in the forward of the model that they were given
        gathered = isinstance(student, FSDPModule) or any(map(is_partitioned, base.parameters()))
        call: Any = student if gathered else base
        with without_adapters(self._student), self._accelerator.autocast():
            logits = teacher_logits(call, base, **without_labels(inputs))
        if not isinstance(logits, DeferredLogits):
            return logits
        # The logits are computed later, when the head has its adapters again: so use its bare weight.
        return replace(logits, project=partial(linear, weight=logits.head.weight, bias=logits.head.bias))

    @contextlib.contextmanager
    def live(self) -> Iterator[dict[str, Any]]:
        with without_adapters(self._student):
            yield {"": base_of(self._student)}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within the context, a PEFT model is in eval mode and computes what its base does; afterwards all is as before.

    PEFT's own `disable_adapter` would not do: it sets requires_grad by its own rules, not to what it was.
    """
    # Flags are read before any is set, so that what another context has switched off stays so afterwards.
    modes = [(module, module.training) for module in model.modules()]
    switches: list[Any] = adapter_switches(model)
    before = [module.disable_adapters for module in switches]
    try:
        for module in switches:
            switch_adapters(module, off=True)
        model.eval()
        yield
    finally:
        for module, disabled in zip(switches, before, strict=True):
            switch_adapters(module, off=disabled)
        for module, training in modes:
            module.training = training


def _check_adapters(student: Any) -> None:
    """Raise ConfigError where the model without adapters is not the model before training."""
    if not isinstance(student, PeftModel):
        raise ConfigError(
            "teacher: self is the student without its adapters, but the student has none. Train adapters "
            "(use_peft: true in a configuration, peft_config in Python), or name another teacher."
        )
    if any(config.is_prompt_learning or config.is_adaption_prompt for config in student.peft_config.values()):
        raise ConfigError(
            "teacher: self needs adapters of layers, such as LoRA's; prompt learning adds tokens or more."
        )
    for name, config in student.peft_config.items():
        start = getattr(config, "init_lora_weights", True)
        if start not in KEEP_THE_BASE:
            raise ConfigError(
                f"teacher: self is the student without its adapters, but init_lora_weights={start!r} of the adapter "
                f"{name!r} moves part of the base's weights into it, so what is left is not the model before training. "
                "Set init_lora_weights to true, or load the base as a separate teacher: teacher: model with "
                "teacher_model_name_or_path."
            )
    if any(getattr(module, "merged_adapters", None) for module in student.modules()):
        raise ConfigError("teacher: self needs adapters that are apart from the weights: call unmerge_adapter() first.")
    # parts of the names of adapters, of their copies of modules, and of a head that the teacher does not run
    parts = (f".{student.base_model.prefix}", ".modules_to_save.", ".token_adapter.", ".trainable_tokens_", f".{MTP}.")
    trained = [name for name, p in student.named_parameters() if p.requires_grad]
    moving = [name for name in trained if not any(part in f".{name}" for part in parts)]
    if moving:
        raise ConfigError(
            f"teacher: self is the model without adapters, but its own weights are trained too: {moving[0]}"
            f"{f' and {len(moving) - 1} more' if len(moving) > 1 else ''}. The teacher would change with the student. "
            'Freeze them (LoRA: bias="none"), or load the base as a separate teacher.'
        )
