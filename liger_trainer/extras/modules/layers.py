"""Layers as modules, under the public names and signatures of Liger-Kernel (arXiv:2410.10989), on top of our ops.

Parameters have the names and shapes of Hugging Face's layers, so state dicts fit both ways. An argument does what it
says or is refused. Arguments that only steer how Liger computes (in_place, row_mode) are accepted, since the values do
not depend on them. docs/extras.md shows each module next to its counterpart, with the differences. Rotary embedding is
in rope.py, losses are in losses.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.add_rms_norm import add_rms_norm
from ...kernels.layer_norm import layer_norm
from ...kernels.relu2 import relu2
from ...kernels.rms_norm import rms_norm
from ...patching.layers.linears import project

SILU = {"silu": "silu", "swish": "silu"}
GELU = {  # transformers' names of the two forms
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def _initial(size: int, init_fn: str) -> nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"init_fn must be 'ones' or 'zeros', got {init_fn!r}.")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


def check_norm(casting_mode: str, offset: float, has_weight: bool) -> None:
    """Raise ValueError for an unknown casting_mode, or an offset without a weight to add it to."""
    if casting_mode not in ("llama", "gemma", "none"):
        raise ValueError(f"casting_mode must be 'llama', 'gemma' or 'none', got {casting_mode!r}.")
    if offset and not has_weight:
        raise ValueError(f"offset {offset} is added to the weight, and there is none. Leave one of them out.")


def casts_before_weight(casting_mode: str, x: Tensor) -> bool:
    if casting_mode == "none" and x.element_size() < 4:
        raise TypeError(
            f"casting_mode='none' computes the mean square in {x.dtype}, which this op never does: it is fp32 inside. "
            "Use 'gemma' (cast once, at the end) or 'llama' (cast before the weight), or give it fp32."
        )
    return casting_mode == "llama"


class LigerRMSNorm(nn.Module):
    """RMSNorm of the last dimension: x / sqrt(mean(x^2) + eps) * (offset + weight).

    Args:
        hidden_size: H.
        eps: added to the mean square.
        offset: added to the weight; 1 for Gemma, whose weights are stored as w - 1.
        casting_mode: "llama" casts the normalised x to x's dtype, then multiplies by the weight; "gemma" multiplies in
            fp32 and casts once; "none" casts nowhere, for fp32 and fp64 only.
        init_fn: "ones" or "zeros", the initial weight.
        in_place, row_mode: how Liger's kernels run. Our values do not depend on them, and no input is ever overwritten.
        elementwise_affine: False for no weight.

    Raises:
        ValueError: an unknown casting_mode or init_fn, or an offset without a weight to add it to.
        TypeError: in forward, half precision under casting_mode="none".
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ):
        super().__init__()
        check_norm(casting_mode, offset, elementwise_affine)
        weight = _initial(hidden_size, init_fn)
        # registered even as None: state dicts and extra_repr look for it
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode, self.elementwise_affine = in_place, row_mode, elementwise_affine

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (..., H) to (..., H); in the dtype of Hugging Face's layer."""
        cast = casts_before_weight(self.casting_mode, hidden_states)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, offset=self.offset, cast_before_weight=cast)

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """The residual stream's sum and its RMSNorm in one pass. Arguments: see `LigerRMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ):
        # without row_mode, which Liger's constructor lacks here
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return (norm(hidden_states + residual), hidden_states + residual), each (..., H)."""
        cast = casts_before_weight(self.casting_mode, hidden_states)
        return add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, offset=self.offset, cast_before_weight=cast
        )


class LigerLayerNorm(nn.Module):
    """LayerNorm of the last dimension: (x - mean) / sqrt(var + eps) * weight + bias.

    Args:
        hidden_size: H.
        eps: added to the variance.
        bias: whether there is a bias; it starts at zero.
        init_fn: "ones" or "zeros", the initial weight.
        impl, mode, backend: choose among Liger's implementations. There is one here: they must be None.

    Raises:
        ValueError: an unknown init_fn, or impl, mode or backend.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        for name, value in (("impl", impl), ("mode", mode), ("backend", backend)):
            if value is not None:
                raise ValueError(
                    f"{name} chooses among Liger's implementations; there is one here. Leave out {value!r}."
                )
        # Liger's module has both names
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _initial(hidden_size, init_fn)
        self.register_parameter("bias", nn.Parameter(torch.zeros(hidden_size)) if bias else None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, bias={self.bias is not None}"


def activation_of(config: Any, names: Mapping[str, str], module: str) -> str:
    """Return our name of the activation that a Hugging Face config asks for."""
    # Gemma's configs call it hidden_activation
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if name is None or name not in names:
        raise ValueError(
            f"{module} computes {', '.join(names)}; the config's hidden_act (hidden_activation) is {name!r}. "
            "Use the module of that activation."
        )
    return names[name]


class _GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), with the parameters of LlamaMLP and GemmaMLP."""

    activations: Mapping[str, str]

    def __init__(self, config: Any, intermediate_size: int | None = None):
        super().__init__()
        self.activation = activation_of(config, self.activations, type(self).__name__)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        # Llama's key; other configurations don't have it
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., hidden_size)."""
        return project(self.down_proj, self.gate_proj(x), self.up_proj(x), self.activation)


class LigerSwiGLUMLP(_GatedMLP):
    """down_proj(silu(gate_proj(x)) * up_proj(x)): the MLP of Llama, Mistral and Qwen.

    Args:
        config: a Hugging Face config, or anything with hidden_size, intermediate_size and hidden_act ("silu" or
            "swish"); mlp_bias, where it has one, gives the three layers a bias.
        intermediate_size: overrides the config's, for experts.

    Raises:
        ValueError: the config's activation is another.
    """

    activations = SILU


class LigerGEGLUMLP(_GatedMLP):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)): the MLP of Gemma.

    Args:
        config: see `LigerSwiGLUMLP`; hidden_activation or hidden_act says which GELU: "gelu_pytorch_tanh" (or another
            name of the tanh form) or "gelu" (exact).

    Raises:
        ValueError: the config's activation is another.
    """

    activations = GELU

    def __init__(self, config: Any):
        super().__init__(config)


class LigerPhi3SwiGLUMLP(nn.Module):
    """The SwiGLU MLP of Phi-3 and GLM-4, with gate and up packed in one layer, gate_up_proj.

    Args:
        config: see `LigerSwiGLUMLP`.

    Raises:
        ValueError: the config's activation is another.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.activation = activation_of(config, SILU, type(self).__name__)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., hidden_size)."""
        # packed: gate is the first half
        return project(self.down_proj, self.gate_up_proj(x), None, self.activation)


class LigerReLUSquared(nn.Module):
    """max(x, 0)^2, the activation of Nemotron."""

    def forward(self, x: Tensor) -> Tensor:
        return relu2(x)
