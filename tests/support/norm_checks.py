"""Inputs of the normalizations' tests, and tiles so small that a few rows take several of them."""

import torch
from torch import Tensor

# (1, 1): smallest. One row, odd and single columns. (16, 32): tiles fit exactly. (70, 64): two of the ops' own tiles.
SHAPES = [(1, 1), (1, 7), (5, 1), (16, 32), (37, 24), (2, 3, 33), (70, 64), (65,)]
EMPTY = [(0, 24), (3, 0, 5)]


def random_tensors(shape, place, names=("x", "weight"), weight_dtype=None) -> dict[str, Tensor]:
    """Rows of all sizes with a mean that is not 0; weights about 1. (H,) where the name is weight or bias."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in names:
        if name in ("weight", "bias"):
            x = torch.randn(shape[-1], generator=generator) * 0.5 + (name == "weight")
            dtype = weight_dtype or place.dtype
        else:
            x = torch.randn(shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator) * 3 + 0.5
            dtype = place.dtype
        tensors[name] = x.to(place.device, dtype)
    return tensors


def strided(x: Tensor, how: str) -> Tensor:
    """A (B, S, H) tensor with the values of x's front and other strides, or a larger one that views x."""
    if how == "columns first":
        return x.transpose(0, 2).contiguous().transpose(0, 2)
    if how == "batch second":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "slice of columns":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if how == "every other row":
        return torch.cat([x, x], 1)[:, ::2]
    assert how == "expanded"
    return x[:1, :1].expand_as(x)


STRIDED = ["columns first", "batch second", "slice of columns", "every other row", "expanded"]
# How an output is used decides the strides of its gradient: swapped, 0 between columns, 0 between rows, a larger step.
USES = {
    "transposed": lambda y: y.transpose(0, 2),
    "column sums": lambda y: y.sum(0),
    "row sums": lambda y: y.sum(-1),
    "as a slice": lambda y: torch.cat([y, y], -1),
}


def set_small_tiles(monkeypatch, *modules) -> None:
    """Tiles of 2 rows, 4 programs in a backward pass, and 3 programs' shares at a time in the sum over programs."""
    from liger_trainer.kernels import _norm
    from liger_trainer.kernels._triton import triton

    def config(H: int, *_):
        return triton.next_power_of_2(H), 2, 1, 1, 2

    for module in modules:
        monkeypatch.setattr(module, "forward_config", lambda H: config(H)[:3])
        if hasattr(module, "backward_config"):
            monkeypatch.setattr(module, "backward_config", config)
    monkeypatch.setattr(_norm, "SUM_ROWS", 2)
    monkeypatch.setattr(_norm, "SUM_COLUMNS", 16)


class Guarded:
    """Stands for `empty` and `vector`: memory that lies before 64 sentinels, which no kernel may overwrite."""

    def __init__(self):
        self.guards: list[Tensor] = []

    def empty(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.vector(x.numel(), x, dtype or x.dtype).view(x.shape)

    def vector(self, n: int, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        buffer = x.new_full((n + 64,), 7.0, dtype=dtype)
        self.guards.append(buffer[n:])
        return buffer[:n]


def check_stays_inside(monkeypatch, op, reference, place, names, *modules) -> None:
    """5 rows of 8: columns fill their tile, rows do not. What follows the last row of an input is NaN."""
    guarded = Guarded()
    for module in modules:
        monkeypatch.setattr(module, "empty", guarded.empty, raising=False)  # the sums over programs are vectors
        monkeypatch.setattr(module, "vector", guarded.vector)
    tensors = random_tensors((5, 8), place, names)
    for name, x in tensors.items():
        buffer = torch.full((2048, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
        buffer[: len(x)] = x
        tensors[name] = buffer[: len(x)]
    got, expected = [], []
    for function, results in ((op, got), (reference, expected)):
        leaves = [x.detach().requires_grad_() for x in tensors.values()]
        outputs = function(*leaves)
        results += [outputs] if isinstance(outputs, Tensor) else outputs
        results += torch.autograd.grad(results[:], leaves, [tensors["x"]] * len(results))
    torch.testing.assert_close(got, expected)
    assert bool(guarded.guards) == (place.path == "triton")
    assert all((guard == 7).all() for guard in guarded.guards)
