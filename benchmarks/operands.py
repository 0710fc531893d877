"""The tensors of a case, and whether a provider wrote into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Operands:
    """Inputs by name, and a gradient for each output."""

    tensors: dict[str, Tensor]
    upstream: list[Tensor]

    @property
    def is_cuda(self) -> bool:
        return self.upstream[0].is_cuda

    def named(self) -> dict[str, Tensor]:
        """Return everything that a provider could write into; the gradient of output i is d_out<i>."""
        return {**self.tensors, **{f"d_out{i}": x for i, x in enumerate(self.upstream)}}


@dataclass
class Draw:
    """Draw the tensors of a case: the same ones for the same case, device and seed."""

    dtype: torch.dtype
    generator: torch.Generator = field(repr=False)

    @staticmethod
    def seeded(dtype: torch.dtype, device: torch.device, seed: int) -> Draw:
        return Draw(dtype, torch.Generator(device).manual_seed(seed))

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        x = torch.empty(shape, dtype=self.dtype, device=self.generator.device)
        return x.normal_(mean, std, generator=self.generator)

    def labels(self, tokens: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, (tokens,), device=self.generator.device, generator=self.generator)


def outputs_of(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def bits(operands: Operands) -> dict[str, int]:
    """Return an exact sum over the bits of each tensor, to notice what a provider writes into."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: int(x.detach().flatten().view(integers[x.element_size()]).sum()) for name, x in operands.named().items()
    }


class Restorer:
    """Put back the tensors `names` of operands that a provider writes into."""

    def __init__(self, case: Any, copies: Sequence[Operands], names: Sequence[str]):
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for seed, operands in enumerate(copies if names else ()):
            here = operands.named()
            fresh = case.make_operands(next(iter(here.values())).device, seed).named()
            self.pairs += [(here[name].detach(), fresh[name].detach()) for name in names]

    def __call__(self) -> None:
        for here, fresh in self.pairs:
            here.copy_(fresh)
