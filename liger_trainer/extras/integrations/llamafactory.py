"""LLaMA-Factory's kernel `liger_trainer`: our layers, LoRA and loss in the models that it trains.

LLaMA-Factory imports each file in its folder `v1/plugins/model_plugins/kernels/ops`, and such a file registers a
kernel. One with the line `import liger_trainer.integrations.llamafactory` is enough. The kernel is then chosen by

    use_v1_kernels: liger_trainer                                     # llamafactory-cli train
    kernel_config: {name: liger_trainer, include_kernels: auto}       # the same with USE_V1=1

Trainers of v1 compute weighted losses from the logits of the whole batch (`BaseTrainer.compute_log_probs`). For a model
with this kernel that method is replaced by one that asks `linear_log_probs`, so that no logits are stored.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...common.console import announce
from ...common.replacements import Replacements
from ...errors import ConfigError
from ...losses.deferring_head import ScoredLogits, scored_logits
from ...patching.patcher import PatchOptions, base_of, patch, patched_record

try:
    from llamafactory.v1.accelerator.helper import DeviceType  # pyright: ignore[reportMissingImports]
    from llamafactory.v1.plugins.model_plugins.kernels.base import BaseKernel  # pyright: ignore[reportMissingImports]
    from llamafactory.v1.plugins.model_plugins.kernels.registry import (  # pyright: ignore[reportMissingImports]
        register_kernel,
    )
    from llamafactory.v1.utils.plugin import BasePlugin  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ConfigError(
        f"liger_trainer.integrations.llamafactory needs llamafactory 0.9.5 or later: {error}. Install it, or "
        "upgrade it: its registry of kernels is new."
    ) from error

NAME = "liger_trainer"
_TRAINER = "llamafactory.v1.core.base_trainer"
_replacements = Replacements()  # in LLaMA-Factory's classes, for as long as the process lives


@register_kernel
class LigerTrainerKernel(BaseKernel):
    """The kernel `liger_trainer` of `use_v1_kernels`, and of `include_kernels` for `kernel_config: {name: auto}`."""

    _kernel_id = NAME
    _device = list(DeviceType)

    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Patch `model`, in place, and return it.

        Raises:
            ConfigError: no model; a model without anything to replace.
        """
        return apply(kwargs.get("model"))


@BasePlugin(NAME).register()
def apply(model: Any, include_kernels: str | bool | None = "auto", **_: Any) -> Any:
    """Patch a model, in place, and return it: `kernel_config: {name: liger_trainer}` of v1.

    Args:
        include_kernels: `auto` or true for all that there is, options of `patch` separated by commas for only those;
            none, as in LLaMA-Factory's own kernels, patches nothing.

    Raises:
        ConfigError: an unknown option; a model without anything to replace.
    """
    if not include_kernels:
        return model
    record = patch(model, _options(include_kernels))
    announce(str(record.report))
    # once a process: the method belongs to a class, and asks each model whether it is patched
    if not len(_replacements):
        trainer = importlib.import_module(_TRAINER).BaseTrainer
        _replacements.set(trainer, "compute_log_probs", _fused_log_probs(trainer.compute_log_probs))
    return model


def _options(include_kernels: str | bool) -> PatchOptions:
    if include_kernels is True or include_kernels == "auto":
        return PatchOptions()
    names = {name.strip(): True for name in str(include_kernels).split(",") if name.strip()}
    return PatchOptions.of({field.name: False for field in fields(PatchOptions)} | names)


def _fused_log_probs(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def compute_log_probs(trainer: Any, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return log-probabilities (B, L - 1) of the labels, 0 where one is ignored, as the stock method does."""
        base = base_of(getattr(model, "module", model))  # what DDP and DeepSpeed wrap
        record = patched_record(base)
        if record is None or not record.options.fused_linear_cross_entropy:
            return stock(trainer, model, batch)
        tensors = {name: x.to(trainer.device, non_blocking=True) for name, x in batch.items() if hasattr(x, "to")}
        # without labels the model computes no loss itself
        labels = tensors.pop("labels")[:, 1:]
        with scored_logits(base):
            logits: Any = model(**tensors).logits[:, :-1]
            if isinstance(logits, ScoredLogits) and not logits.stored:
                return logits.log_probs(labels).log_prob
        # here somebody has looked at the logits, and they are stored
        logits = logits.compute() if isinstance(logits, ScoredLogits) else logits
        return -F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

    return compute_log_probs
