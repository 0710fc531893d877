"""Logits as a tensor without memory, which is filled when somebody reads it.

Without gradients a model returns its deferred logits as `LazyLogits`. An evaluation loop gathers every tensor of an
output and cannot say in advance whether its metrics need logits. So a loss-only evaluation never computes them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .deferred_logits import DeferredLogits

# These describe a tensor without reading it. `.T`, `.data` and the like are views and reach __torch_dispatch__.
_DESCRIBES = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip


class LazyLogits(Tensor):
    """(..., V) logits with the shape, dtype and device that they will have.

    The first operation that reads them computes them, and every operation is one of the tensor that it has computed.
    """

    _deferred: DeferredLogits

    @staticmethod
    @torch.compiler.disable(reason="logits that may never be read are made outside of a graph")
    def of(deferred: DeferredLogits) -> "LazyLogits":
        """Return logits that will be computed as they would be now."""
        lazy = Tensor._make_wrapper_subclass(LazyLogits, deferred.shape, dtype=deferred.dtype, device=deferred.device)
        lazy._deferred = deferred
        return lazy

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        stored = any(isinstance(x, LazyLogits) and x._deferred.stored for x in args)
        if not stored and (func in _DESCRIBES or name == "__get__"):
            with torch._C.DisableTorchFunctionSubclass():  # whose result is not made a LazyLogits again
                return func(*args, **(kwargs or {}))
        dtype = None if stored else _cast_of(func, args, kwargs)
        if dtype is not None:  # mixed precision casts what a model returns, read or not
            return args[0] if args[0].dtype == dtype else LazyLogits.of(args[0]._deferred.to(dtype))
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))


def _cast_of(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype that a call casts logits to, if it does nothing else: `x.float()` or `x.to(dtype)`."""
    if func is Tensor.float:
        return torch.float32
    alone = func is Tensor.to and len(args) == 2 and not kwargs and isinstance(args[0], LazyLogits)
    return args[1] if alone and isinstance(args[1], torch.dtype) and args[1].is_floating_point else None


def _real(value: Any) -> Any:
    if not isinstance(value, LazyLogits):
        return value
    value._deferred.become_real()
    return value._deferred.compute()
