"""DeepSpeed's ZeRO-3 by decoder layers.

DeepSpeed gathers a module's own parameters by hooks on it. Our ops read the weights of several modules at once, so they
need a whole layer gathered: DeepSpeed calls that a leaf. It then has no hooks inside, and fewer and larger messages.

DeepSpeed sums the gradients of a leaf over the ranks when that of its input is known. The input of the first layer over
frozen embeddings needs none, so the layer's gradients would be summed before they are computed. So it gets one.
"""

import inspect
import logging
from typing import Any

import torch
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from ..common.replacements import Replacements
from ..compat.modules import is_of_deepspeed
from ..errors import ConfigError
from ..losses.deferred_logits import DeferredLogits
from ..losses.model_parts import decoder_layers

LEAF = "_z3_leaf"  # the attribute by which DeepSpeed knows a leaf


def gather_by_layers(model: Any, replacements: Replacements) -> None:
    """Have ZeRO-3, if it is configured, gather each decoder layer of a model as one. Call it before DeepSpeed starts.

    A model whose decoder layers are not recognised, or which DeepSpeed has hooked, is gathered module by module.
    """
    if not is_deepspeed_zero3_enabled():
        return
    _expect_deferred_logits()
    try:
        _, layers = decoder_layers(model)
    except ConfigError:
        return
    if any(is_of_deepspeed(hook) for hook in layers[0]._forward_pre_hooks.values()):
        return
    for layer in layers:
        replacements.set(layer, LEAF, True)
        replacements.pre_hook(layer, _with_gradient_of_input)


def _with_gradient_of_input(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the arguments with hidden states that need a gradient, first and by position, where hooks see them."""
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in layer.parameters()):
        return None
    if not args:
        name = list(inspect.signature(type(layer).forward).parameters)[1]
        args = (kwargs.pop(name),)
    hidden, *others = args
    if not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *others), kwargs


class _NotOfDeferredLogits(logging.Filter):
    """Leaves out DeepSpeed's warning that an output head returns none of the types that it knows: it need not."""

    def filter(self, record: logging.LogRecord) -> bool:
        return DeferredLogits.__name__ not in record.getMessage()


_FILTER = _NotOfDeferredLogits()


def _expect_deferred_logits() -> None:
    from deepspeed.utils import logger  # pyright: ignore[reportMissingImports]

    logger.addFilter(_FILTER)  # a second time adds nothing
