"""Norms of queries and keys that are computed later, together with the rotation.

Between the norm and the rotary function, attention only views its queries as heads and transposes them. Inside such an
attention the norm returns a `DeferredNorm`, which records these views, and the rotary function takes it apart: norm and
rotation then run in one launch. Any other use of it computes the norm, with our op, and goes on from there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.modules import accelerate_hook, is_hooked
from ...kernels.qk_norm_rope import qk_norm_rope
from .norms import NormRule


@dataclass(eq=False)
class _Pending:
    """The norm's input, and its output once something has needed it: all views share it."""

    x: Tensor
    module: nn.Module
    rule: NormRule
    # whether gradients were recorded when the norm was called: its output has one then, whenever it is computed
    grad: bool = field(default_factory=torch.is_grad_enabled)
    value: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        assert self.rule.weight is not None
        return getattr(self.module, self.rule.weight)

    @property
    def eps(self) -> float:
        return self.rule.eps_of(self.module)

    @property
    def requires_grad(self) -> bool:
        return self.grad and (self.x.requires_grad or self.weight.requires_grad)

    def compute(self) -> Tensor:
        if self.value is None:
            if self.requires_grad and not torch.is_grad_enabled():
                raise RuntimeError(
                    f"A deferred {type(self.module).__name__} of queries or keys is needed where no gradients are "
                    "recorded (inside a custom autograd function or torch.no_grad()), so its gradients would be lost. "
                    "Patch this model with rope=False."
                )
            self.value = self.rule(self.module, self.x, widens=False)
        return self.value


class Deferred:
    """A tensor that is not computed yet. Every operation that a class does not define is one of what it computes."""

    def compute(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*_computed(args), **{name: _computed(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str):
        if name.startswith("__"):  # deepcopy and pickle ask for such before there are fields
            raise AttributeError(name)
        return getattr(self.compute(), name)


def _computed(value: Any) -> Any:
    if isinstance(value, Deferred):
        return value.compute()
    if isinstance(value, (tuple, list)):
        return type(value)(_computed(item) for item in value)
    return value


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
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))


@dataclass(frozen=True, eq=False)
class DeferredNorm(Deferred):
    """The result of a norm of queries or keys, not computed yet, viewed as attention views it.

    Attributes:
        x: the norm's input under the same views.
        over: the dimensions of x that one mean is taken over: the last, or heads and columns.
    """

    pending: _Pending
    x: Tensor
    over: tuple[int, ...]
    views: tuple[tuple[str, tuple], ...] = ()

    @classmethod
    def of(cls, x: Tensor, module: nn.Module, rule: NormRule) -> "DeferredNorm":
        return cls(_Pending(x, module, rule), x, (x.dim() - 1,))

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def ndim(self) -> int:
        return self.x.ndim

    @property
    def dtype(self) -> torch.dtype:
        casts = self.pending.rule.form.cast_before_weight
        return torch.promote_types(self.x.dtype, self.pending.weight.dtype) if casts else self.x.dtype

    @property
    def requires_grad(self) -> bool:
        return self.pending.requires_grad

    def dim(self) -> int:
        return self.x.dim()

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def transpose(self, first: int, second: int):
        places = list(range(self.ndim))
        places[first], places[second] = places[second], places[first]
        over = tuple(sorted(places.index(dim) for dim in self.over))
        return self._viewed(self.x.transpose(first, second), over, "transpose", (first, second))

    def view(self, *shape):
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if self.over == (self.ndim - 1,) and all(isinstance(n, int) for n in sizes):
            try:
                x = self.x.view(sizes)
            except RuntimeError:  # the input's memory has gaps; the norm's need not have
                return self.compute().view(sizes)
            if x.shape[-1] == self.shape[-1]:
                return self._viewed(x, (x.dim() - 1,), "view", (sizes,))
            # heads split off from what one mean is taken over
            if x.shape[:-2] == self.shape[:-1] and math.prod(x.shape[-2:]) == self.shape[-1]:
                return self._viewed(x, (x.dim() - 2, x.dim() - 1), "view", (sizes,))
        return self.compute().view(*shape)

    def _viewed(self, x: Tensor, over: tuple[int, ...], name: str, args: tuple) -> "DeferredNorm":
        return DeferredNorm(self.pending, x, over, (*self.views, (name, args)))

    def compute(self) -> Tensor:
        """Return the normalised tensor, under the views taken so far."""
        value = self.pending.compute()
        for name, args in self.views:
            value = getattr(value, name)(*args)
        return value


def can_wait(rule: NormRule) -> bool:
    """Whether `qk_norm_rope` computes a norm of this rule."""
    plain = rule.form.kind == "RMSNorm" and rule.autocast == "keep"
    return plain and rule.weight is not None and rule.bias is None


def deferring_forward(rule: NormRule) -> Callable[[nn.Module, Tensor], Any]:
    """Return a forward for a norm of queries or keys whose attention rotates them right after."""

    def forward(module: nn.Module, hidden_states: Tensor):
        # torch.compile fuses the two steps itself; a hook wants to see a tensor, or offloads the weights after the call
        if torch.compiler.is_compiling() or is_hooked(module) or accelerate_hook(module) is not None:
            return rule(module, hidden_states, widens=False)
        return DeferredNorm.of(hidden_states, module, rule)

    return forward


def norm_and_rotate(
    q: DeferredNorm, k: DeferredNorm, cos: Tensor, sin: Tensor, heads_dim: int, promotes: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Compute both steps in one launch; return None where that is not the same as one after the other.

    Args:
        q, k: (B, H, S, D), or (B, S, H, D) with heads_dim 2.
        cos, sin: as `qk_norm_rope` takes them, with `options`.
        promotes: whether the rotation's result has the dtype that its input and the cosines promote to.
    """
    one, other = q.pending, k.pending
    widened = promotes and not torch.is_autocast_enabled(q.device.type)
    if (
        (one.rule, one.eps) != (other.rule, other.eps)
        or one.value is not None  # somebody has looked at it, and it is computed
        or other.value is not None
        or q.over != k.over
        or q.over not in ((3,), (heads_dim, 3))
        # the rotation would return a wider dtype than the norm: the op has one for both
        or (widened and any(torch.promote_types(x.dtype, cos.dtype) != x.dtype for x in (q, k)))
    ):
        return None
    queries, keys = (x.x.transpose(1, 2) if heads_dim == 1 else x.x for x in (q, k))
    form = one.rule.form
    result = qk_norm_rope(
        queries, keys, one.weight, other.weight, cos, sin, eps=one.eps, offset=form.offset,
        cast_before_weight=form.cast_before_weight, norm_over_heads=len(q.over) == 2, **options,
    )  # fmt: skip
    return result if heads_dim == 1 else (result[0].transpose(1, 2), result[1].transpose(1, 2))
