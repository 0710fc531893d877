"""An MLP's projections: by our ops where they are plain linear layers, else by calling them."""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat.modules import is_called
from ...kernels.activation_linear import activation_linear
from ...kernels.gated_linear import gated_linear
from ...kernels.geglu import geglu
from ...kernels.linears import linears
from ...kernels.swiglu import swiglu

WEIGHTS = (nn.Parameter, Tensor)  # a sharded or packed weight has another type


def project(down: nn.Module, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Return down(act(gate) * up). Where down is a plain nn.Linear, only gate and up are stored for the backward.

    Any other layer (LoRA, quantised, hooked, sharded) is called, so it stores its own input.

    Args:
        down: the layer, which takes (..., I).
        gate: (..., I), or with up=None packed [gate | up], (..., 2 I).
        up: as gate, or None.
        activation: "silu", "gelu_tanh" or "gelu" (erf).
    """
    if is_plain(down):
        return gated_linear(gate, up, down.weight, down.bias, activation=activation)
    return down(gated(gate, up, activation))


def project_ungated(down: nn.Module, x: Tensor, activation: str) -> Tensor:
    """Return down(act(x)). Where down is a plain nn.Linear, only x is stored for the backward.

    Args:
        down: the layer, which takes (..., I).
        x: (..., I).
        activation: "gelu_tanh" or "gelu" (erf).
    """
    if is_plain(down):
        return activation_linear(x, down.weight, down.bias, activation=activation)
    return down(F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none"))


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x). Where the layer is a plain nn.Linear that trains, an x that a norm made is not stored.

    Args:
        layer: takes (..., K).
        x: (..., K).
    """
    if torch.is_grad_enabled() and is_plain(layer) and layer.weight.requires_grad and x.requires_grad:
        return linears(x, [layer.weight], [layer.bias])[0]
    return layer(x)


def gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Return act(gate) * up. Arguments: see `project`."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear layer can be replaced by its weight and bias: no adapter, quantisation, hook or sharding."""
    return has_plain_weight(linear) and not is_called(linear)


def has_plain_weight(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is a linear one with a weight that is neither packed nor sharded, whatever its forward is."""
    return type(linear) is nn.Linear and type(linear.weight) in WEIGHTS
