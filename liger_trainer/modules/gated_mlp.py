"""The end of a gated MLP: activation, product and down-projection, whatever layer the projection has become."""

from typing import TypeGuard

from torch import Tensor, nn

from ..common.hooks import is_called
from ..kernels.gated_linear import gated_linear
from ..kernels.geglu import geglu
from ..kernels.swiglu import swiglu

WEIGHTS = (nn.Parameter, Tensor)  # the types of one that is nothing more: neither sharded nor packed


def project(down: nn.Module, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """down(act(gate) * up), storing only gate and up for the backward where down is a plain nn.Linear.

    Any other layer (LoRA, quantised, hooked, sharded) is called, so it keeps its own input.

    Args:
        down: what takes (..., I).
        gate: (..., I), or with up=None packed [gate | up], (..., 2 I).
        up: as gate, or None.
        activation: "silu", "gelu_tanh" or "gelu" (erf).
    """
    if is_plain(down):
        return gated_linear(gate, up, down.weight, down.bias, activation=activation)
    return down(gated(gate, up, activation))


def gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """act(gate) * up by the op of that activation. Arguments: see `project`."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear layer can be replaced by its weight and bias: no adapter, quantisation, hook or sharding."""
    return type(linear) is nn.Linear and type(linear.weight) in WEIGHTS and not is_called(linear)
