"""Projections with LoRA adapters as flat, named tensors, as `check_op` takes them, and ops called with such."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gated_checks import normal
from torch import Tensor

from liger_trainer.kernels.types import Adapter, Projection

SCALES = (2.0, 0.7, 1.3)  # of the adapters in turn; not all powers of two


def projection(
    rows: int, columns: int, ranks: Sequence[int], like: dict, *, bias: bool = True,
    adapters: torch.dtype | None = None, seed: int = 0,
) -> dict[str, Tensor | None]:  # fmt: skip
    """weight, bias, a0, b0, a1, ... of a layer whose base and adapters add about as much to the result."""
    wide = like if adapters is None else {**like, "dtype": adapters}
    tensors = {
        "weight": normal(rows, columns, like=like, seed=seed, spread=columns**-0.5),
        "bias": normal(rows, like=like, seed=seed + 1) if bias else None,
    }
    for i, r in enumerate(ranks):
        tensors[f"a{i}"] = normal(r, columns, like=wide, seed=seed + 2 + 2 * i, spread=columns**-0.5)
        tensors[f"b{i}"] = normal(rows, r, like=wide, seed=seed + 3 + 2 * i, spread=r**-0.5)
    return tensors


def named(prefix: str, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {f"{prefix}_{name}": tensor for name, tensor in tensors.items()}


def adapters_of(tensors: dict[str, Any], prefix: str = "") -> tuple[Adapter, ...]:
    count = sum(name.startswith(f"{prefix}a") and name[len(prefix) + 1 :].isdigit() for name in tensors)
    return tuple(Adapter(tensors[f"{prefix}a{i}"], tensors[f"{prefix}b{i}"], SCALES[i]) for i in range(count))


def projection_of(tensors: dict[str, Any], name: str) -> Projection | None:
    if f"{name}_weight" not in tensors:
        return None
    return Projection(tensors[f"{name}_weight"], tensors[f"{name}_bias"], adapters_of(tensors, f"{name}_"))


def linear(op: Callable) -> Callable[..., Tensor]:
    """`op` as a function of x, weight, bias, a0, b0, ..."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, **adapters: Tensor) -> Tensor:
        return op(x, weight, bias, adapters_of(adapters))

    return run


def mlp(op: Callable) -> Callable[..., Tensor]:
    """`op` as a function of x, gate_weight, gate_bias, gate_a0, ..., down_b0; without up_weight gate is packed."""

    def run(x: Tensor, activation: str = "silu", **tensors: Any) -> Tensor:
        gate, up, down = (projection_of(tensors, name) for name in ("gate", "up", "down"))
        return op(x, gate, up, down, activation=activation)

    return run


def linears(op: Callable) -> Callable[..., tuple[Tensor, ...]]:
    """`op` as a function of x, q_weight, q_bias, q_a0, ..., v_b0."""

    def run(x: Tensor, **tensors: Any) -> tuple[Tensor, ...]:
        return op(x, [projection_of(tensors, name) for name in "qkv" if f"{name}_weight" in tensors])

    return run


def leaves_of(tensors: dict[str, Any]) -> list[str]:
    """x and the adapters."""
    return ["x", *(name for name in tensors if name[-2:-1] in ("a", "b") and name[-1].isdigit())]
