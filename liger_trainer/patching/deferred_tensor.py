"""What stands for a tensor that is not computed yet. Whatever does not know it computes it, and goes on from there."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..common.hooks import is_hooked


class DeferredTensor(ABC):
    """The base of such objects: every operation that a subclass does not have is one of the computed tensor."""

    @abstractmethod
    def compute(self) -> Tensor:
        """Return the tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*_computed(args), **{name: _computed(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.compute(), name)


def _operator(name: str) -> Callable:
    def compute_and_apply(self, *args):
        return getattr(self.compute(), name)(*args)

    return compute_and_apply


# Python looks operators up on the class, not through __getattr__.
for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow", "matmul", "rmatmul", "getitem",
    "setitem", "lt", "le", "gt", "ge", "eq", "ne", "len", "iter", "iadd", "isub", "imul", "itruediv", "abs", "pos",
    "floordiv", "rfloordiv", "mod", "rmod", "rpow", "and", "or", "xor", "invert", "bool", "float", "contains",
):  # fmt: skip
    setattr(DeferredTensor, f"__{_name}__", _operator(f"__{_name}__"))


def _computed(value: Any) -> Any:
    if isinstance(value, DeferredTensor):
        return value.compute()
    if isinstance(value, (tuple, list)):
        return type(value)(_computed(item) for item in value)
    return value


def is_watched(module: nn.Module) -> bool:
    """Whether hooks see what a module takes and returns, or offload its weights when it has returned."""
    return is_hooked(module) or "_hf_hook" in vars(module)
