"""`use_liger_kernel=True` of an unmodified `transformers.Trainer`, and of TRL's trainers, served by `patch`.

`enable()` replaces the one function through which Trainer applies the flag, and makes `evaluate` and `predict` apply it
too, because Trainer itself does so in `train` only. Whatever the flag, it also replaces the function that scores labels
in TRL's fused head (trl_log_probs.py), and two methods of the trainers that have no such head (trl_stored_logits.py).
`disable()` puts all back. Patched models stay patched.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import transformers.integrations.liger
import transformers.trainer
from transformers import PreTrainedModel, Trainer

from ..common.console import announce
from ..common.replacements import Replacements
from ..errors import ConfigError
from ..losses.fused_forward import has_trl_head
from .options import PatchOptions, canonical
from .patcher import Patched, base_of, patch, patched_record
from .trl_losses import replace_trl_log_probs, replace_trl_stored_logits

_replacements = Replacements()


def enable() -> None:
    """Serve `use_liger_kernel` and `liger_kernel_config` in this process, whether liger-kernel is installed or not.

    Doing it twice does nothing more. Trainers that have their own fused head (TRL's SFT, DPO, KTO, GRPO and RLOO pass
    `fused_linear_cross_entropy=False`) keep it, and get the layers. That head then computes log-probabilities and
    entropies by `linear_log_probs`, for trained and reference models, with `use_liger_kernel` or without it. TRL's
    experimental ORPO and CPO trainers no longer store logits. (So this imports them, and takes TRL's notice about its
    experimental part, once a process, off the user's import.)
    """
    if len(_replacements):
        return
    for module in (transformers.trainer, transformers.integrations.liger):
        _replacements.set(module, "apply_liger_kernel", apply_liger_kernel)
    _replacements.set(Trainer, "evaluation_loop", _patching_first(Trainer.evaluation_loop))
    replace_trl_log_probs(_replacements)
    replace_trl_stored_logits(_replacements)


def disable() -> None:
    """Undo `enable()`: the flag then means LinkedIn's liger-kernel again. Without `enable()` nothing happens."""
    _replacements.undo()


def apply_liger_kernel(model: Any, kernel_config: Mapping[str, bool] | None) -> None:
    """Patch the model as `liger_kernel_config` says and print what was replaced. Trainer calls this.

    Raises:
        ConfigError: an unknown option, or one without effect here; a model that is no PreTrainedModel, or was patched
            with other options before; a model without anything to replace.
    """
    base, flags = base_of(model), canonical(kernel_config)
    options = PatchOptions.of(flags)
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(
            f"use_liger_kernel=True needs a PreTrainedModel of transformers, or a PEFT model around one, got "
            f"{type(base).__name__}. Take the flag away, or use the layers and losses of liger_trainer in it."
        )
    if options.cross_entropy and has_trl_head(base):
        raise ConfigError(
            "cross_entropy=True has no effect here: this trainer of TRL computes its loss from hidden states, not from "
            "logits. Take it out of liger_kernel_config."
        )
    done = patched_record(base)
    if done is None:
        announce(f"{patch(base, options).report}{_beside_liger()}")
    else:
        _check_agrees(done, flags)


def _check_agrees(done: Patched, flags: dict[str, bool]) -> None:
    if has_trl_head(done.model):  # TRL asks for no fused loss; one from before stands below its head and is unused
        flags.pop("fused_linear_cross_entropy", None)
    differing = {name: value for name, value in flags.items() if getattr(done.options, name) != value}
    if differing:
        raise ConfigError(
            f"liger_kernel_config asks for {differing}, but this {type(done.model).__name__} was patched with "
            f"{done.options}. Leave the patching to the trainer, or liger_kernel_config away."
        )


def _patching_first(evaluation_loop: Callable) -> Callable:
    @functools.wraps(evaluation_loop)
    def patching_evaluation_loop(trainer, *args, **kwargs):
        if trainer.args.use_liger_kernel and not trainer.is_in_train:
            model = trainer.accelerator.unwrap_model(trainer.model)
            if patched_record(model) is None:
                apply_liger_kernel(model, trainer.args.liger_kernel_config)
        return evaluation_loop(trainer, *args, **kwargs)

    return patching_evaluation_loop


def _beside_liger() -> str:
    """Say that LinkedIn's package is not used, where it is installed too."""
    if importlib.util.find_spec("liger_kernel") is None:
        return ""
    try:
        version = f" {importlib.metadata.version('liger-kernel')}"
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return f" The liger-kernel{version} that is installed is not used."
