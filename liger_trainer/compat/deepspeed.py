"""DeepSpeed (0.19), above all parameters that its ZeRO-3 has partitioned.

Such a parameter is empty, of shape (0,), except while DeepSpeed has gathered it: during the forward and the backward of
its module, and of those with which it is registered.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import is_deepspeed_zero3_enabled

from . import missed
from .code_objects import names_read
from .modules import is_of_deepspeed, without_some_hooks


def is_partitioned(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


def is_missing(parameter: Any) -> bool:
    """Whether a parameter is partitioned and not gathered now."""
    # the third status is INFLIGHT: gathering has begun, and the data are not there yet
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
            deepspeed.zero.register_external_parameter(module, parameter)  # pyright: ignore
        if not all(is_needed_in(module, parameter) for parameter in parameters):
            missed(
                "DeepSpeed does not note parameters that other modules need as we know it",
                "models whose output head it partitions are refused",
            )


def is_needed_in(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether `need_in` was called with both."""
    # what `register_external_parameter` writes to, by the parameters' ids
    return id(parameter) in getattr(module, "_external_params", ())


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within the context, in which all ranks are, the parameters of `module` are whole."""
    missing = [parameter for parameter in module.parameters() if is_missing(parameter)]
    if not missing:
        yield
        return
    import deepspeed  # pyright: ignore[reportMissingImports]

    with deepspeed.zero.GatheredParameters(missing):  # pyright: ignore
        yield


@contextlib.contextmanager
def whole_for_many_passes(model: nn.Module) -> Iterator[None]:
    """Do as `gathered`, and keep DeepSpeed's hooks from freeing the parameters after each pass."""
    if not any(map(is_partitioned, model.parameters())):
        yield
        return
    with gathered(model), without_some_hooks(model.modules(), lambda key, hook: is_of_deepspeed(hook)):
        yield


# The attribute by which DeepSpeed knows a leaf: a module that is gathered whole. It is set on modules directly, as all
# that is replaced in a patched model, so that undoing the patch puts back what was there.
LEAF = "_z3_leaf"


def norm_of_gradients(optimizer: Any) -> Any:
    """Return the norm that DeepSpeed's optimizer has left of the gradients which it took; None where it left none.

    The engine's public `get_global_grad_norm` reads the same, but a callback is shown only the optimizer. Without
    ZeRO, and in fp32, the optimizer is torch's own: the engine keeps the norm to itself.
    """
    norm = getattr(optimizer, "_global_grad_norm", None)
    if norm is None and is_of_deepspeed(type(optimizer)) and not hasattr(optimizer, "_global_grad_norm"):
        missed(
            f"DeepSpeed's {type(optimizer).__name__} does not keep the norm of its gradients as we know it",
            "gradients that are not finite show only in the weights",
        )
    return norm


def sequence_parallel_group() -> Any:
    """Return the process group whose ranks share rows."""
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    return groups._get_sequence_parallel_group()


def zero3_averages_over_all_ranks() -> bool:
    """Whether ZeRO-3 averages gradients over all ranks, whether they share rows or not.

    DeepSpeed 0.19.8 does so here. A release that divides by the size of sequence parallelism, or has moved it, would
    train with other gradients: `_why_zero3` (extras/sequence_parallel.py) then refuses it.
    """
    from deepspeed.runtime.zero.stage3 import (  # pyright: ignore[reportMissingImports]
        DeepSpeedZeroOptimizer_Stage3,
    )

    # two underscores before the name in the class: Python puts the class's name in front
    reduce = getattr(DeepSpeedZeroOptimizer_Stage3, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads", None)
    return reduce is not None and "sequence_parallel_size" not in names_read(inspect.unwrap(reduce))
