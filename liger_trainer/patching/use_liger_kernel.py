"""`use_liger_kernel=True` of an unmodified `transformers.Trainer`, and of TRL's trainers, served by `patch`.

`enable()` replaces the one function through which Trainer applies the flag, and makes `evaluate` and `predict` apply it
too, because Trainer itself does so in `train` only. Whatever the flag, it also replaces the function that scores labels
in TRL's fused head, and two methods of the trainers that have no such head.
`disable()` puts all back. Patched models stay patched.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import transformers.integrations.liger
import transformers.trainer
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from ..common.console import announce
from ..common.replacements import Replacements
from ..compat.deepspeed import is_partitioned
from ..compat.models import CHUNKED_LOG_PROBS
from ..errors import ConfigError, MaterializedLogitsWarning
from ..kernels.linear_log_probs import linear_log_probs
from ..losses.deferring_head import ScoredLogits, scored_logits
from ..losses.fused_forward import has_trl_head
from ..losses.model_parts import output_module
from .options import PatchOptions, canonical
from .patcher import base_of, patch, patched_record

# The fused head of TRL's trainers (DPO, KTO, GRPO, RLOO, SFT), with `linear_log_probs` in place of TRL's function.
#
# Those trainers call `model(..., labels=..., fused_lm_head=True)`, whose forward
# (`trl.trainer.utils.add_fused_lm_head`) runs the backbone, chooses the labelled positions and hands hidden states,
# head and labels to one function. Only that function is replaced, so labels, masks, autocast, adapters, auxiliary
# losses and engines stay TRL's.


_PARAMETERS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

Scores = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def replace_trl_log_probs(replacements: Replacements) -> None:
    """Have TRL's fused head call `linear_log_probs`.

    A release of TRL whose head calls another function keeps it, with a warning that says so.
    """
    import trl
    from trl.trainer import utils

    stock = getattr(utils, CHUNKED_LOG_PROBS, None)
    if stock is None or tuple(inspect.signature(stock.forward).parameters)[1:] != _PARAMETERS:
        warnings.warn(
            f"The fused head of TRL {trl.__version__} calls another function than the one of TRL 1.16, which "
            "liger_trainer.enable() replaces: its preference and RL trainers keep TRL's own.",
            stacklevel=3,
        )
        return
    replacements.set(utils, CHUNKED_LOG_PROBS, FusedLogProbs(stock))


class FusedLogProbs:
    """Stands in for TRL's autograd function, which is called by its `apply`.

    Args:
        stock: TRL's own, for weights that DeepSpeed ZeRO-3 has partitioned: it gathers them again in the backward.
    """

    def __init__(self, stock: Any):
        self._stock = stock

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
        chunk_size: int, final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> Scores:  # fmt: skip
        """Return TRL's five values (N,) of labels that are all in use; None for those that `outputs` leaves out."""
        if hasattr(weight, "ds_id"):
            return self._stock.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
        head: dict[str, Any] = {
            "hidden": hidden, "weight": weight, "labels": targets, "bias": bias, "softcap": final_logit_softcapping,
            "scale": logit_scale, "ignore_index": None,
        }  # fmt: skip
        values = linear_log_probs(**head, temperature=temperature, mean_logits="mean_logits" in outputs)
        return (
            values.log_prob,
            values.entropy if "entropy" in outputs else None,
            _log_sum_of_squares(head, temperature, values.log_prob) if "log_sum_sq_probs" in outputs else None,
            values.mean_logit,
            values.is_top1 if "is_top1" in outputs else None,
        )


def _log_sum_of_squares(head: dict[str, Any], temperature: float, log_prob: Tensor) -> Tensor:
    """Return log sum_v p_v^2 (N,), which WPO weights by, without gradient.

    p_v^2 / sum p^2 is the distribution at half the temperature, so one more pass with the labels gives the sum.
    """
    fixed: dict[str, Any] = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in head.items()
    }
    return 2 * log_prob.detach() - linear_log_probs(**fixed, temperature=temperature / 2).log_prob


# TRL's ORPO and CPO (SimPO) trainers, which compute their loss from the logits of the whole batch: here from none.
#
# Both run the model in `get_batch_loss_metrics` and hand its logits to `get_batch_logps` and to a cross-entropy. Within
# the first the model's head returns `ScoredLogits`; the second is replaced for them, the cross-entropy recognises them.


_TRAINERS = {"trl.experimental.orpo.orpo_trainer": "ORPOTrainer", "trl.experimental.cpo.cpo_trainer": "CPOTrainer"}
_METHODS = ("get_batch_loss_metrics", "get_batch_logps")


def replace_trl_stored_logits(replacements: Replacements) -> None:
    """Have ORPOTrainer and CPOTrainer compute their losses from hidden states.

    TRL may move or drop what it calls experimental: a trainer that is not there, or without the two methods, stays
    as it is, with a warning.
    """
    for module, name in _TRAINERS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing from trl.experimental warns, and nobody asked for it here
            try:
                trainer = getattr(importlib.import_module(module), name)
                stock = [vars(trainer)[method] for method in _METHODS]
            except (ImportError, AttributeError, KeyError):
                trainer, stock = None, []
        if trainer is None:
            warnings.warn(f"This release of TRL has no {name} as of 1.16, so it stores logits.", stacklevel=3)
            continue
        replacements.set(trainer, _METHODS[0], _with_scored_logits(stock[0]))
        replacements.set(trainer, _METHODS[1], staticmethod(_log_probs_of_rows(stock[1].__func__)))


def _with_scored_logits(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def get_batch_loss_metrics(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        base = base_of(trainer.accelerator.unwrap_model(model))
        if trainer.is_encoder_decoder:
            return stock(trainer, model, *args, **kwargs)
        head = output_module(base)
        if head is not None and any(map(is_partitioned, head.parameters())):
            result = stock(trainer, model, *args, **kwargs)
            obstacle = "ZeRO-3 frees the output head before the trainer computes its loss; ZeRO-2 keeps it"
        else:
            with scored_logits(base) as forward:
                result = stock(trainer, model, *args, **kwargs)
            obstacle = forward.why_not_deferred
        if obstacle is not None:
            warnings.warn(
                f"{type(base).__name__} stores the logits of the whole batch: {obstacle}.",
                MaterializedLogitsWarning,
                stacklevel=2,
            )
        return result

    return get_batch_loss_metrics


def _log_probs_of_rows(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def get_batch_logps(
        logits: Any, labels: Tensor, average_log_prob: bool = False, is_encoder_decoder: bool = False
    ) -> Tensor:
        """Return the sum, or mean, of each row's log-probabilities, as TRL does; ignored labels cost nothing."""
        if not isinstance(logits, ScoredLogits) or logits.stored:
            return stock(logits, labels, average_log_prob, is_encoder_decoder)
        if logits.shape[:-1] != labels.shape:
            raise ValueError(f"Logits are {tuple(logits.shape)}, but labels are {tuple(labels.shape)}.")
        shifted: Any = logits[:, :-1]
        labels = labels[:, 1:]
        total = shifted.log_probs(labels).log_prob.sum(-1)
        return total / (labels != -100).sum(-1) if average_log_prob else total

    return get_batch_logps


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
    if importlib.util.find_spec("trl") is not None:
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
        announce(f"{patch(base, options).report}{_other_package()}")
        return
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


def _other_package() -> str:
    """Say that LinkedIn's package is not used, where it is installed too."""
    if importlib.util.find_spec("liger_kernel") is None:
        return ""
    try:
        version = f" {importlib.metadata.version('liger-kernel')}"
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return f" The liger-kernel{version} that is installed is not used."
