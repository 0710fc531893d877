"""Trained linear layers that read one tensor, such as queries, keys and values, or gate and up, as one op.

The module that holds them calls them one after the other, as before (shared_input.py). While no gradient of their input
is wanted, or one of them is more than its weight and bias, each is computed by its class's forward.
"""

import functools
import types
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..common.hooks import is_hooked
from ..common.replacements import Replacements
from ..kernels.linears import linears
from ..modules.projections import has_plain_weight, is_plain
from .options import PatchOptions, PatchReport
from .shared_input import GROUP, SharedInput, layers_of_one_input


def patch_linears(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Have plain, trained linear layers that a module calls with one tensor computed together."""
    if not options.linear:
        return
    for module in model.modules():
        for names in layers_of_one_input(module):
            layers = [layer for name in names if _is_trained(layer := module._modules.get(name))]
            if len(set(map(id, layers))) < 2 or any(layer in replacements for layer in layers):
                continue
            group = SharedInput(list(dict.fromkeys(layers)))
            for layer in group.layers:
                replacements.forward(layer, _forward)
                replacements.set(layer, GROUP, group)
            report.swap("shared input")


def is_weight_and_bias(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear layer can be replaced by its weight and bias: see `is_plain`; its forward may be ours."""
    return is_plain(layer) or _is_served(layer)


def _is_trained(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    return layer is not None and is_plain(layer) and layer.weight.requires_grad


def _is_served(layer: Any) -> TypeGuard[nn.Linear]:
    """Whether a layer has our forward, and is nothing but its weight and bias."""
    forward = vars(layer).get("forward")
    ours = isinstance(forward, types.MethodType) and forward.__func__ is _forward
    return ours and has_plain_weight(layer) and not is_hooked(layer)


def _forward(module: Any, input: Tensor) -> Tensor:  # noqa: A002  its name in nn.Linear
    group = vars(module)[GROUP]
    y = None
    if torch.is_grad_enabled() and input.requires_grad and not torch.compiler.is_compiling():
        y = group.output(module, input, functools.partial(_outputs, input))
    return type(module).forward(module, input) if y is None else y


def _outputs(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """Return the outputs of layers for x, None if one of them has to be called."""
    if not all(map(_is_served, layers)):
        return None
    return linears(x, [layer.weight for layer in layers], [layer.bias for layer in layers])  # pyright: ignore
