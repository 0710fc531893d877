"""The end of a gated MLP: activation, product and down-projection, also where that is no plain linear layer."""

from typing import TypeGuard

from torch import Tensor, nn

from ..common.hooks import is_called
from ..kernels.gated_linear import gated_linear
from ..kernels.geglu import geglu
from ..kernels.swiglu import swiglu

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


def gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Return act(gate) * up. Arguments: see `project`."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear layer can be replaced by its weight and bias: no adapter, quantisation, hook or sharding."""
    return type(linear) is nn.Linear and type(linear.weight) in WEIGHTS and not is_called(linear)
