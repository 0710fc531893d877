"""The clamps that some models put on gate and up, read from the module's own numbers (gpt-oss, DeepSeek V4, GLM 5)."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ..kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference

SHIFTS = (0.0, 1.0)


@dataclass(frozen=True)
class Clamp:
    """g * sigmoid(alpha g) * (u + shift), g = min(gate, limit), u = clamp(up, -limit, limit).

    Attributes:
        limit, alpha: names of the module's attributes; alpha None is 1.
        shift: added to up.
    """

    limit: str
    alpha: str | None
    shift: float

    def numbers(self, module: nn.Module) -> dict[str, float]:
        """Return the options of `clamped_swiglu`, as the module has them now."""
        alpha = 1.0 if self.alpha is None else getattr(module, self.alpha)
        return {"limit": getattr(module, self.limit), "alpha": alpha, "shift": self.shift}

    def __call__(
        self, module: nn.Module, gate: Tensor, up: Tensor | None, plain: bool = False, interleaved: bool = False
    ) -> Tensor:
        op = clamped_swiglu_reference if plain else clamped_swiglu
        return op(gate, up, **self.numbers(module), interleaved=interleaved)


def clamps_of(module: nn.Module) -> Iterator[Clamp]:
    """Yield the clamps that a module's numbers allow: none if no attribute of it is called a limit."""
    numbers = {name: x for name, x in vars(module).items() if isinstance(x, (int, float)) and not isinstance(x, bool)}
    alphas = [name for name in numbers if "alpha" in name]
    for limit in (name for name, x in numbers.items() if "limit" in name and x > 0):
        for shift in SHIFTS:
            yield from (Clamp(limit, alpha, shift) for alpha in (None, *alphas))
