"""Gated MLPs of single families, and MLPs by tiles, under Liger-Kernel's names. The general ones are in layers.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...patching.layers.linears import project
from .layers import SILU, LigerGEGLUMLP, LigerSwiGLUMLP, activation_of


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """Qwen3MoeMLP, the dense layers of Qwen3-MoE. Arguments: see `LigerSwiGLUMLP`."""


class LigerMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` by the name that Liger-Kernel has for other kernels of the same layer."""

    def __init__(self, config: Any):
        super().__init__(config)


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """MuseGlimmerTextMLP. Its config calls the activation hidden_activation. Arguments: see `LigerSwiGLUMLP`."""

    def __init__(self, config: Any):
        super().__init__(config)


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1(x)) * w3(x)): an expert of Mixtral, with the parameters of its first releases.

    Args:
        config: see `LigerSwiGLUMLP`.

    Raises:
        ValueError: the config's activation is another.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.activation = activation_of(config, SILU, type(self).__name__)
        self.hidden_dim, self.ffn_dim = config.hidden_size, config.intermediate_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., hidden_size)."""
        return project(self.w2, self.w1(x), self.w3(x), self.activation)


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """FalconH1MLP: down_proj(silu(gate_proj(x) * g) * up_proj(x)) * d.

    Args:
        config: see `LigerSwiGLUMLP`; its mlp_multipliers are (g, d).

    Raises:
        ValueError: the config's activation is another.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = (float(factor) for factor in config.mlp_multipliers)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden_size) to (..., hidden_size)."""
        # before the activation, which is not linear: it cannot be folded into what follows
        gate = self.gate_proj(x) * self.gate_multiplier
        return project(self.down_proj, gate, self.up_proj(x), self.activation) * self.down_multiplier


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """`LigerFalconH1SwiGLUMLP` by the name that Liger-Kernel has for other kernels of the same layer."""


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` tile by tile, each computed again in the backward, so that long sequences store no gate and up.

    Tiling: Bekman et al. 2025, arXiv:2506.13996.

    Args:
        config: see `LigerSwiGLUMLP`.
        num_shards: how many tiles the positions are cut into. None: positions / hidden_size, rounded up.

    Raises:
        ValueError: num_shards below 1, or the config's activation is another.
    """

    def __init__(self, config: Any, num_shards: int | None = None):
        super().__init__(config)
        self.num_shards = _checked(num_shards)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., positions, hidden_size) to the same shape."""
        return _by_tiles(super().forward, x, self.num_shards)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """`LigerGEGLUMLP` tile by tile. Arguments: see `LigerTiledSwiGLUMLP`."""

    def __init__(self, config: Any, num_shards: int | None = None):
        super().__init__(config)
        self.num_shards = _checked(num_shards)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., positions, hidden_size) to the same shape."""
        return _by_tiles(super().forward, x, self.num_shards)


def _checked(num_shards: int | None) -> int | None:
    if num_shards is not None and num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, or None for positions / hidden_size; got {num_shards}.")
    return num_shards


def _by_tiles(mlp: Any, x: Tensor, num_shards: int | None) -> Tensor:
    """Return mlp(x), one tile of positions at a time. Only x is stored for the backward."""
    # tiles of about hidden_size positions, as Bekman et al. have them
    shards = num_shards or max(1, -(-x.shape[-2] // x.shape[-1]))
    # reentrant checkpointing would need an input that requires a gradient
    return torch.cat([checkpoint(mlp, tile, use_reentrant=False) for tile in x.chunk(shards, -2)], -2)
