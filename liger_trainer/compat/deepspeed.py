"""Parameters that DeepSpeed's ZeRO-3 has partitioned.

Such a parameter is empty, of shape (0,), except while DeepSpeed has gathered it: during the forward and the backward of
its module, and of those with which it is registered.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import is_deepspeed_zero3_enabled

from .modules import is_of_deepspeed


def is_partitioned(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


def is_missing(parameter: Any) -> bool:
    """Whether a parameter is partitioned and not gathered now."""
    return is_partitioned(parameter) and parameter.ds_status.name != "AVAILABLE"


def shape_of(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor, or what it is while it is gathered."""
    return getattr(tensor, "ds_shape", tensor.shape)


def share_of(tensor: Any) -> Tensor:
    """Return what this rank keeps of a tensor: the flat share of a partitioned one, gathered or not."""
    return tensor.ds_tensor if is_partitioned(tensor) else tensor


def need_in(module: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Under ZeRO-3, have parameters of other modules gathered during the forward and the backward of `module`."""
    if is_deepspeed_zero3_enabled():
        import deepspeed  # pyright: ignore[reportMissingImports]

        for parameter in parameters:
            deepspeed.zero.register_external_parameter(module, parameter)


def is_needed_in(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether `need_in` was called with both."""
    return id(parameter) in getattr(module, "_external_params", ())


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within the context, in which all ranks are, the parameters of `module` are whole."""
    missing = [parameter for parameter in module.parameters() if is_missing(parameter)]
    if not missing:
        yield
        return
    import deepspeed  # pyright: ignore[reportMissingImports]

    with deepspeed.zero.GatheredParameters(missing):
        yield


@contextlib.contextmanager
def whole_for_many_passes(model: nn.Module) -> Iterator[None]:
    """Do as `gathered`, and keep DeepSpeed's hooks from freeing the parameters after each pass."""
    if not any(map(is_partitioned, model.parameters())):
        yield
        return
    places = [(vars(module), name) for module in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    before = [attributes[name] for attributes, name in places]
    with gathered(model):
        for (attributes, name), hooks in zip(places, before, strict=True):
            attributes[name] = OrderedDict((k, hook) for k, hook in hooks.items() if not is_of_deepspeed(hook))
        try:
            yield
        finally:
            for (attributes, name), hooks in zip(places, before, strict=True):
                attributes[name] = hooks
