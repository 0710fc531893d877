"""Inputs of the gated activations, in every memory layout that a model may hand over."""

from typing import Any

import torch
from torch import Tensor

SHAPES = {
    "odd": (5, 37),
    "even": (4, 48),  # blocks of 16 divide it: no mask
    "one row": (1, 33),
    "one column": (7, 1),
    "vector": (19,),
    "three dimensions": (2, 3, 21),
    "four dimensions": (2, 2, 3, 18),
    "empty batch": (0, 16),
}


def like(place: Any) -> dict[str, Any]:
    """Return the dtype and device of a place, as tensors are made with."""
    return {"dtype": place.dtype, "device": place.device}


def normal(*shape: int, like: dict | None = None, seed: int = 0, spread: float = 2.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(**(like or {}))


# name: from a seed and a dtype and device, a tensor of some shape and strides
LAYOUTS = {
    "columns of a wider tensor": lambda seed, like: normal(6, 50, like=like, seed=seed)[:, 3:43],
    "every other row": lambda seed, like: normal(10, 32, like=like, seed=seed)[::2],
    "positions of a longer sequence": lambda seed, like: normal(3, 7, 32, like=like, seed=seed)[:, 1:-2],
    "batch and sequence swapped": lambda seed, like: normal(5, 3, 24, like=like, seed=seed).transpose(0, 1),
    "four dimensions that do not fold": lambda seed, like: normal(2, 3, 4, 20, like=like, seed=seed).transpose(0, 1),
    "four dimensions that fold": lambda seed, like: normal(2, 3, 4, 40, like=like, seed=seed)[..., 3:33],
    "transposed": lambda seed, like: normal(20, 9, like=like, seed=seed).t(),
    "one row expanded": lambda seed, like: normal(1, 20, like=like, seed=seed).expand(6, 20),
    "one position expanded": lambda seed, like: normal(3, 1, 32, like=like, seed=seed).expand(3, 4, 32),
    "one column expanded": lambda seed, like: normal(6, 1, like=like, seed=seed).expand(6, 20),
}


def pair(shape: tuple[int, ...], like: dict) -> dict[str, Tensor]:
    return {"gate": normal(*shape, like=like), "up": normal(*shape, like=like, seed=1)}


def strided_pair(layout: str, like: dict) -> dict[str, Tensor]:
    return {"gate": LAYOUTS[layout](0, like), "up": LAYOUTS[layout](1, like)}


def packed(*shape: int, like: dict) -> dict[str, Tensor | None]:
    """gate and up of that shape in one tensor."""
    return {"gate": normal(*shape[:-1], 2 * shape[-1], like=like), "up": None}


def extremes(like: dict) -> dict[str, Tensor]:
    """Gates where exponentials overflow or vanish, and around zero."""
    gate = [0.0, -0.0, 1e-3, 0.7, -0.7, 2.5, -2.5, 5.5, -5.5, 9.0, -9.0, 30.0, -30.0, 95.0, -95.0, 200.0, -200.0]
    return {"gate": torch.tensor([gate]).to(**like), "up": torch.tensor([gate[::-1]]).clamp(-9, 9).to(**like) + 1}
