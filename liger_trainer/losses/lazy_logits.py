"""Logits that an evaluation may or may not read: a tensor without memory until somebody looks into it.

An evaluation loop cannot say in advance whether its metrics need logits, and gathers what is a tensor. So without
gradients a model with a fused loss returns its deferred logits as this: a loss-only evaluation never computes them, and
whatever else is done to them works on the real ones.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .deferred_logits import DeferredLogits

# What describes a tensor without reading it. `.T`, `.data` and the like are views, and come to __torch_dispatch__.
_DESCRIBES = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__,
}  # fmt: skip


class LazyLogits(Tensor):
    """(..., V) logits with the shape, dtype and device that they will have. Any operation computes them first."""

    _real: functools.partial

    @staticmethod
    @torch.compiler.disable(reason="logits that may never be read are made outside of a graph")
    def of(deferred: DeferredLogits) -> "LazyLogits":
        """Logits to be computed as they would have been now: without gradient, under the autocast of this moment."""
        lazy = Tensor._make_wrapper_subclass(LazyLogits, deferred.shape, dtype=deferred.dtype, device=deferred.device)
        kind = deferred.device.type
        autocast = functools.partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        )
        lazy._real = functools.partial(_compute, deferred, autocast)
        return lazy

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _DESCRIBES or getattr(func, "__name__", "") in ("__get__", "__set__"):
            with torch._C.DisableTorchFunctionSubclass():  # whose result is not made a LazyLogits again
                return func(*args, **(kwargs or {}))
        if func is Tensor.float:  # mixed precision casts what a model returns, read or not
            return args[0] if args[0].dtype == torch.float32 else args[0]._as_float()
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))

    def _as_float(self) -> "LazyLogits":
        deferred, autocast = self._real.args
        lazy = LazyLogits.of(deferred.float())
        lazy._real = functools.partial(_compute, deferred.float(), autocast)
        return lazy


def _compute(deferred: DeferredLogits, autocast: Any) -> Tensor:
    with torch.no_grad(), autocast():
        return deferred.compute().to(deferred.dtype)


def _real(value: Any) -> Any:
    return value._real() if isinstance(value, LazyLogits) else value
