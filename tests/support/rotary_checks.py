"""Inputs of the rotary ops, as attention layers have them."""

import torch
from torch import Tensor


def angles(
    batch: int, positions: int, width: int, *, interleaved=False, half_width=False, axes=0, seed=0
) -> tuple[Tensor, Tensor]:
    """cos and sin of random positions, in the layout of transformers: (batch, positions, width), axes first if any."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(0, 200, ([axes] if axes else []) + [batch, positions], generator=generator)
    t = at[..., None].double() * 100.0 ** -torch.linspace(0, 1, width // 2, dtype=torch.double)
    if not half_width:
        t = t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)
    return t.cos(), t.sin()


def projected(batch: int, positions: int, heads: int, width: int, seed: int) -> Tensor:
    """(B, S, H, D), as a linear layer's output is viewed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, positions, heads * width, generator=generator).view(batch, positions, heads, width)


def cast(tensors: dict[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {k: x.to(device, dtype) for k, x in tensors.items()}  # keeps strides
