"""Experts with adapters as flat, named tensors, as `check_op` takes them."""

from collections.abc import Callable
from typing import Any

import torch
from gated_checks import normal
from torch import Tensor

from liger_trainer.kernels.lora_experts import StackedProjection

LEAVES = ["x", "weights", "up_a", "up_b", "down_a", "down_b"]


def experts(op: Callable) -> Callable[..., Tensor]:
    """`op` as a function of x, index, weights, up_weight, up_bias, up_a, ..., down_b."""

    def run(x: Tensor, index: Tensor, weights: Tensor, gate: Any, **tensors: Any) -> Tensor:
        layers = [
            StackedProjection(*(tensors.get(f"{name}_{part}") for part in ("weight", "bias", "a", "b")))
            for name in ("up", "down")
        ]
        return op(x, index, weights, *layers, gate=gate)

    return run


def layer(name: str, count: int, rows: int, columns: int, rank: int, like: dict, bias: bool, wide: Any = None) -> dict:
    """Weights whose base and adapters add about as much to the result."""
    seed = len(name)
    adapters = like if wide is None else {**like, "dtype": wide}
    tensors = {f"{name}_weight": normal(count, rows, columns, like=like, seed=seed, spread=columns**-0.5)}
    tensors[f"{name}_bias"] = normal(count, rows, like=like, seed=seed + 10) if bias else None
    if rank:
        tensors[f"{name}_a"] = normal(count, rank, columns, like=adapters, seed=seed + 20, spread=columns**-0.5)
        tensors[f"{name}_b"] = normal(count, rows, rank, like=adapters, seed=seed + 30, spread=rank**-0.5)
    return tensors


def inputs(
    tokens: int, like: dict, *, count: int = 5, top: int = 2, width: int = 8, inner: int = 16, ranks=(3, 4),
    bias: bool = False, wide: torch.dtype | None = None, skip: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Tokens whose experts are drawn without repetition, never the expert `skip`."""
    generator = torch.Generator().manual_seed(7)
    allowed = [e for e in range(count) if e != skip]
    drawn = [torch.randperm(len(allowed), generator=generator)[:top] for _ in range(tokens)]
    index = torch.tensor(allowed)[torch.stack(drawn)] if tokens else torch.zeros(0, top, dtype=torch.long)
    return {
        "x": normal(tokens, width, like=like, seed=1),
        "index": index.to(like["device"]),
        "weights": torch.rand(tokens, top, generator=generator).to(**like),
        **layer("up", count, 2 * inner, width, ranks[0], like, bias, wide),
        **layer("down", count, width, inner, ranks[1], like, bias, wide),
    }


def leaves_of(tensors: dict[str, Any]) -> list[str]:
    return [name for name in LEAVES if name in tensors]
