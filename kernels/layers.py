"""Layers of transformers' models as Hugging Face's kernel hub takes them: a forward for another class's module.

A layer here has no constructor and no state. `kernels` binds its forward to a module of the model, which has the
weights, and checks that both forwards take the same arguments. `liger-trainer hub-kernels` writes them, with all ops,
into a folder in the hub's layout (docs/compile.md). `patch` needs none of this: it proves each replacement.

Numerics  those of the layers that they stand for; see the ops.
Source    the form of a layer: Hugging Face's kernels 0.17, kernels/layer/layer.py
"""

from typing import Any

from torch import Tensor, nn

from .geglu import geglu
from .rms_norm import rms_norm
from .rope import rope
from .swiglu import swiglu

__all__ = ["GeGLUMLP", "GemmaRMSNorm", "RMSNorm", "Rotary", "SwiGLUMLP"]


class RMSNorm(nn.Module):
    """RMSNorm of Llama, Qwen and Mistral: transformers' layer name `RMSNorm`."""

    has_backward = True
    can_torch_compile = True

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, cast_before_weight=True)


class GemmaRMSNorm(nn.Module):
    """RMSNorm of Gemma to Gemma 3, whose weights are stored as weight - 1."""

    has_backward = True
    can_torch_compile = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=1.0)


class SwiGLUMLP(nn.Module):
    """The gated MLP of Llama, Qwen and Mistral, with SiLU. Its projections are called, so adapters on them count."""

    has_backward = True
    can_torch_compile = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class GeGLUMLP(nn.Module):
    """The gated MLP of Gemma, with GELU's tanh approximation."""

    has_backward = True
    can_torch_compile = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class Rotary(nn.Module):
    """`apply_rotary_pos_emb` of Llama, Qwen, Gemma and Mistral: transformers' layer name `rotary_pos_emb`."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim == 1:
            return rope(q, k, cos, sin)
        if unsqueeze_dim != 2:
            raise ValueError(f"unsqueeze_dim must be 1, for heads before positions, or 2, got {unsqueeze_dim}.")
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
