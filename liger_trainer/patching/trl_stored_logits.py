"""TRL's ORPO and CPO (SimPO) trainers, which compute their loss from the logits of the whole batch: here from none.

Both run the model in `get_batch_loss_metrics` and hand its logits to `get_batch_logps` and to a cross-entropy. Within
the first the model's head returns `ScoredLogits`; the second is replaced for them, the cross-entropy recognises them.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..common.replacements import Replacements
from ..common.zero3 import is_partitioned
from ..errors import MaterializedLogitsWarning
from ..losses.model_parts import output_module
from ..losses.scored_logits import ScoredLogits, scored_logits
from .patcher import base_of

_TRAINERS = {"trl.experimental.orpo.orpo_trainer": "ORPOTrainer", "trl.experimental.cpo.cpo_trainer": "CPOTrainer"}
_METHODS = ("get_batch_loss_metrics", "get_batch_logps")


def replace_trl_stored_logits(replacements: Replacements) -> None:
    """Have ORPOTrainer and CPOTrainer compute their losses from hidden states.

    TRL may move or drop what it calls experimental: a trainer that is not there, or without the two methods, is left
    alone with a warning.
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
            obstacle = forward.obstacle
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
