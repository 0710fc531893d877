"""ms-swift's external plugin: our layers, LoRA and loss in the models that `swift sft` trains, and distillation.

    # my_plugin.py, for: swift sft --external_plugins my_plugin.py --callbacks liger_trainer ...
    from liger_trainer.integrations.ms_swift import register
    register(teacher="Qwen/Qwen3-8B", losses=[{"type": "forward_kl"}])

ms-swift imports the file and makes the callback that it registers, which patches the model when the trainer has taken
it. This file itself is such a plugin, without options. ms-swift imports it under another name, so its imports are
absolute.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from liger_trainer.common.console import announce
from liger_trainer.common.replacements import Replacements
from liger_trainer.errors import ConfigError
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.losses.deferring_head import LazyLogits
from liger_trainer.patching.patcher import Patched, PatchOptions, patch
from liger_trainer.trainers.distill_callback import DistillationCallback

try:
    from swift.callbacks import TrainerCallback, callbacks_map  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ConfigError(
        f"liger_trainer.integrations.ms_swift needs ms-swift 4.6 or later: {error}. Install ms-swift, or upgrade it: "
        "its callbacks are registered by name since 4.0."
    ) from error

NAME = "liger_trainer"


def register(
    *, liger_kernel_config: dict[str, bool] | None = None, teacher: str | None = None, **distillation: Any
) -> None:
    """Register the callback `liger_trainer` with these options, in place of what was registered before.

    Args:
        liger_kernel_config: what to patch, as `PatchOptions` names it; everything by default.
        teacher: path or hub id of a teacher to learn from; none by default.
        distillation: what else `DistillationCallback` takes, such as losses and temperature.

    Raises:
        ConfigError: an option that is not known; one about distillation without a teacher.
        ValueError: a value out of range.
    """
    options = PatchOptions.of(liger_kernel_config)
    if teacher is None and distillation:
        raise ConfigError(f"register: {', '.join(distillation)} is about distillation. Name its teacher=... as well.")

    def distil() -> DistillationCallback | None:
        return None if teacher is None else DistillationCallback(teacher, **distillation)

    try:
        distil()
    except TypeError as error:
        raise ConfigError(f"register: {error}. Its options are those of DistillationCallback.") from None

    def make(args: Any, trainer: Any) -> LigerTrainerCallback:
        return LigerTrainerCallback(args, trainer, options, distil())

    # ms-swift looks callbacks up by name, and calls what it finds with arguments and trainer
    callbacks_map[NAME] = make


class LigerTrainerCallback(TrainerCallback):
    """Patches the model of one trainer of ms-swift from its construction to the end of its training.

    Token accuracy, for which ms-swift reads logits, comes from the fused loss: no logits are stored for it.

    Raises:
        ConfigError: `use_liger_kernel`, which replaces the same layers; a model without anything to replace.
    """

    def __init__(self, args: Any, trainer: Any, options: PatchOptions, distillation: DistillationCallback | None):
        super().__init__(args, trainer)
        if getattr(args, "use_liger_kernel", False):
            raise ConfigError(
                "--callbacks liger_trainer replaces what --use_liger_kernel true would replace too. Take one of them."
            )
        self._options, self._distillation = options, distillation
        self._record: Patched | None = None
        self._replaced = Replacements()
        self._is_top1: Tensor | None = None  # of the last pass

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _call_adapters_plainly(self.trainer.model, self._replaced)
        self._record = patch(self.trainer.model, self._options)
        announce(str(self._record.report))
        if self._record.fused is not None:
            # the fused loss calls this with each pass: its accuracy stands in for logits that are not there
            self._replaced.set(self._record.fused, "seen", self._seen)
        # not every trainer of ms-swift has it
        if hasattr(self.trainer, "_compute_acc"):
            self._stock = self.trainer._compute_acc
            self._replaced.set(self.trainer, "_compute_acc", self._compute_acc)
        if self._distillation is not None:
            self.trainer.add_callback(self._distillation)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._record is not None:
            self._record.undo()
            self._record = None
        self._replaced.undo()

    def _seen(self, model: Any, outputs: Any, loss: Any) -> None:
        self._is_top1 = loss.token_output(outputs).is_top1

    def _compute_acc(self, outputs: Any, labels: Tensor, **kwargs: Any) -> None:
        logits, is_top1, self._is_top1 = outputs.logits, self._is_top1, None
        if not isinstance(logits, DeferredLogits | LazyLogits):
            self._stock(outputs, labels, **kwargs)
        elif is_top1 is not None:
            self._stock(SimpleNamespace(logits=_Predicted(is_top1, labels)), labels, **kwargs)


def _call_adapters_plainly(model: Any, replaced: Replacements) -> None:
    """Take off what ms-swift puts on LoRA's A and B to follow devices, where all weights are on one."""
    # spread over devices they are needed
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return
    for module in model.modules():
        if isinstance(module, nn.Linear) and "forward_origin" in vars(module) and "forward" in vars(module):
            # recorded first, so that undo brings ms-swift's forward back; then the class's forward shows through
            replaced.set(module, "forward", module.forward_origin)
            del module.forward


class _Predicted:
    """Answers for logits to whom their argmax is enough: the label where it is the likeliest token, else none."""

    def __init__(self, is_top1: Tensor, labels: Tensor):
        self._is_top1, self._labels = is_top1, labels

    def argmax(self, dim: int = -1) -> Tensor:
        following = self._labels[:, 1:]
        # -1 is no token, so it never equals a label
        predicted = following.masked_fill(~self._is_top1.bool().to(following.device), -1)
        return torch.nn.functional.pad(predicted, (0, 1), value=-1)


register()
