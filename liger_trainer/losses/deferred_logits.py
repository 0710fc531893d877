"""Logits that have not been computed: hidden states, a head, and the operations on their product so far.

While a loss is computed, the output head of a causal LM returns a `DeferredLogits`. The model's own forward then
scales, caps, casts and slices it and hands it to the loss, which takes it apart again. So we need no copy of any
model's forward. Every other operation computes the real logits: inside the forward with a warning that names the
operation, later silently.

Without gradients a model returns its deferred logits as `LazyLogits`. An evaluation loop gathers every tensor of an
output and cannot say in advance whether its metrics need logits. `LazyLogits` is a tensor without memory, so a
loss-only evaluation never computes the logits.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..common.zero3 import gathered, is_partitioned
from ..errors import ConfigError, MaterializedLogitsWarning
from .model_parts import Head, gather, output_module, reader_of
from .sharded_heads import ShardedHead


class Forward:
    """One pass through a model."""

    # no dataclass: FSDP2 copies dataclasses that pass its hooks, and changes to a copy would be lost

    def __init__(self, model_name: str, running: bool = True):
        self.model_name = model_name
        self.running = running  # only then does a warning make sense
        self.obstacle: str | None = None  # why its logits are real ones


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """(..., V) logits: `after * tanh(before * product)` if capped, else `before * product`; product = head(hidden)."""

    hidden: Tensor  # (..., H)
    head: Head
    project: Callable[[Tensor], Tensor]  # the head module's own forward
    forward: Forward
    before: float = 1.0
    capped: bool = False
    after: float = 1.0
    cast: torch.dtype | None = None

    @property
    def scale(self) -> float:
        return self.before * self.after if self.capped else self.before

    @property
    def softcap(self) -> float | None:
        return self.after if self.capped else None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.vocab))

    @property
    def dtype(self) -> torch.dtype:
        return self.cast or self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def operands(self, prefix: str = "", sharded: bool = False) -> dict[str, Any]:
        """Return hidden states, head and transform as the fused ops' arguments, one row a position.

        Args:
            sharded: the op takes `parallel`, so the head's rows may lie on several ranks. Otherwise they are gathered.

        Raises:
            ConfigError: they cannot be: FSDP2 would not sum the gradient over the ranks.
        """
        head = self.head if sharded else self.head.whole()
        values = {
            "hidden": self.hidden.flatten(0, -2), "weight": head.weight, "bias": head.bias,
            "lora": head.lora, "scale": self.scale, "softcap": self.softcap,
        }  # fmt: skip
        if sharded:
            values["parallel"] = head.parallel
        return {prefix + name: value for name, value in values.items()}

    def _with(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def __mul__(self, factor):
        if not isinstance(factor, Real):
            return self.compute("multiplication by a tensor") * factor
        name = "after" if self.capped else "before"
        return self._with(**{name: getattr(self, name) * float(factor)})

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        if not isinstance(divisor, Real):
            return self.compute("division by a tensor") / divisor
        return self * (1.0 / float(divisor))

    mul, div = __mul__, __truediv__

    def tanh(self):
        return self.compute("a second tanh").tanh() if self.capped else self._with(capped=True)

    def to(self, *args, **kwargs):
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if device is not None and torch.device(device) != self.device:
            return self.compute("a move to another device").to(*args, **kwargs)
        return self if dtype is None else self._with(cast=dtype)

    def float(self):
        return self._with(cast=torch.float32)

    def contiguous(self):
        return self

    def view(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        *rows, last = shape
        width = self.hidden.shape[-1]
        if last == self.shape[-1] or (last == -1 and math.prod(rows) * width == self.hidden.numel()):
            return self._with(hidden=self.hidden.reshape(*rows, width))
        return self.compute(f"view{shape}").view(shape)

    reshape = view

    def __getitem__(self, index):
        items = index if isinstance(index, tuple) else (index,)
        if _spares_last(items, self.ndim):
            return self._with(hidden=self.hidden[index])
        return self.compute(f"indexing by {index}")[index]

    def __setitem__(self, index, value):
        """Assign in place, as a model does to rule tokens out. This object then holds real logits."""
        logits = self.compute("assignment to some of them")
        logits[index] = value
        real = {"hidden": logits, "project": _as_they_are, "before": 1.0, "capped": False, "after": 1.0, "cast": None}
        for name, changed in real.items():
            object.__setattr__(self, name, changed)

    @property
    def stored(self) -> bool:
        """Whether the logits are computed already, so that hidden states and head no longer describe them."""
        return self.project is _as_they_are

    def compute(self, why: str | None = None) -> Tensor:
        """Return the real logits. `why` names the operation that needs them."""
        if self.forward.running and not self.stored:
            _warn(
                f"{self.forward.model_name} computes its logits for {why or 'an unknown operation'}: the loss is not "
                "fused, and the logits of the whole batch are stored."
            )
        logits = self.project(self.hidden)
        logits = logits if self.cast is None else logits.to(self.cast)
        logits = logits if self.before == 1.0 else logits * self.before
        logits = torch.tanh(logits) if self.capped else logits
        return logits if self.after == 1.0 else logits * self.after

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        deferred = _DEFERRED.get(func)
        if deferred is not None and args and isinstance(args[0], cls):
            return getattr(args[0], deferred)(*args[1:], **kwargs)
        name = getattr(func, "__name__", str(func))
        return func(*_computed(args, name), **{k: _computed(v, name) for k, v in kwargs.items()})

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.compute(f".{name}"), name)


_DEFERRED = {
    torch.tanh: "tanh", torch.mul: "mul", torch.multiply: "mul", torch.div: "div", torch.true_divide: "div",
    torch.reshape: "reshape",
}  # fmt: skip


@torch.compiler.assume_constant_result  # warns while a graph is traced, and is no part of the graph
def _warn(message: str) -> None:
    warnings.warn(message, MaterializedLogitsWarning, stacklevel=4)


def _as_they_are(logits: Tensor) -> Tensor:
    return logits


def _operator(name: str):
    def compute_and_apply(self, *args):
        return getattr(self.compute(name), name)(*args)

    return compute_and_apply


for _name in (
    "add", "radd", "sub", "rsub", "rtruediv", "neg", "pow", "lt", "le", "gt", "ge", "eq", "ne", "matmul", "len", "iter",
):  # fmt: skip
    setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _computed(value: Any, name: str) -> Any:
    if isinstance(value, DeferredLogits):
        return value.compute(name)
    if isinstance(value, (tuple, list)):
        return type(value)(_computed(item, name) for item in value)
    return value


def _spares_last(items: tuple, ndim: int) -> bool:
    """Whether an index leaves the vocabulary's dimension, the last one, whole."""
    if items and isinstance(items[-1], slice) and items[-1] == slice(None):
        return True
    masks = [item for item in items if isinstance(item, Tensor) and item.dtype == torch.bool]
    ellipsis = any(item is Ellipsis for item in items)
    # a boolean mask indexes as many dimensions as it has, None indexes none
    indexed = sum(item.dim() for item in masks) + sum(
        1 for item in items if item is not None and item is not Ellipsis and not any(item is mask for mask in masks)
    )
    return indexed < ndim and (not ellipsis or items[-1] is Ellipsis)


@contextlib.contextmanager
def deferred_logits(
    model: nn.Module, *, outlive: bool = False, make: Callable[..., DeferredLogits] = DeferredLogits
) -> Iterator[Forward]:
    """Within the context, the output head of `model` returns `DeferredLogits`.

    Yields the pass; its `obstacle` says afterwards why the head could not be deferred and computed real logits.

    Args:
        outlive: the logits are used after the pass, when FSDP2 or ZeRO-3 may have freed the weights that it gathered.
            The head then keeps whole weights of its own, without gradient. FSDP2's are read before the pass.
        make: makes them of the fields of `DeferredLogits` without defaults, in order.
    """
    module = output_module(model)
    state, shards = Forward(type(model).__name__), ShardedHead.of(module)
    if shards is not None:
        with _deferred_on_ranks(shards, state):
            yield state
        return
    read = reader_of(module)
    if isinstance(read, str):
        state.obstacle = read
        yield state
        return
    assert module is not None
    partitioned = any(map(is_partitioned, module.parameters()))
    project = functools.partial(_project_gathered, module, module.forward) if partitioned else module.forward
    early = read(module) if outlive and not partitioned else None

    def forward(hidden: Tensor, **kwargs):
        head = early
        if head is None and outlive:
            head = read(module)
            head = head if isinstance(head, str) else head.detached()
        elif head is None:
            gather(module, model)
            head = read(module)
        if isinstance(head, str):
            state.obstacle = head
            return project(hidden, **kwargs)
        if not kwargs:
            return make(hidden, head, project, state)
        with_kwargs = functools.partial(project, **kwargs)
        return DeferredLogits(hidden, head, with_kwargs, state).compute(
            f"an output head called with {', '.join(kwargs)}"
        )

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield state
    finally:
        vars(module).pop("forward")  # torch.compile traces a `del` wrongly where the class has the name too
        state.running = False


def _project_gathered(module: nn.Module, project: Callable[..., Tensor], hidden: Tensor, **kwargs: Any) -> Tensor:
    """Run a head's forward on weights that ZeRO-3 may have freed."""
    with gathered(module):
        return project(hidden, **kwargs)


@contextlib.contextmanager
def _deferred_on_ranks(shards: ShardedHead, state: Forward) -> Iterator[None]:
    """Within the context, a head whose rows lie on ranks returns `DeferredLogits` of this rank's rows."""
    module, replaced = shards.module, vars(shards.module).get("forward")
    project = replaced or shards.project  # that of tensor parallelism gathers logits itself

    def forward(hidden: Tensor, **kwargs):
        if kwargs:
            raise ConfigError(
                f"{state.model_name} calls its output head with {', '.join(kwargs)}, which a head whose rows stay on "
                "their ranks does not take. Set vocab_parallel to never."
            )
        hidden = shards.inputs(hidden)
        head = Head(*shards.rows(), parallel=shards.parallel, gather=shards.whole)
        return DeferredLogits(hidden, head, project, state)

    module.forward = forward
    try:
        with shards.without_gathering():
            yield
    finally:
        vars(module).pop("forward")
        if replaced is not None:
            module.forward = replaced
        state.running = False


# These describe a tensor without reading it. `.T`, `.data` and the like are views and reach __torch_dispatch__.
_DESCRIBES = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip


class LazyLogits(Tensor):
    """(..., V) logits with the shape, dtype and device that they will have. Any operation computes them first."""

    _real: functools.partial

    @staticmethod
    @torch.compiler.disable(reason="logits that may never be read are made outside of a graph")
    def of(deferred: DeferredLogits) -> "LazyLogits":
        """Return logits that will be computed as they would be now: without gradient, under the present autocast."""
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
        dtype = _cast_of(func, args, kwargs)
        if dtype is not None:  # mixed precision casts what a model returns, read or not
            return args[0] if args[0].dtype == dtype else args[0]._cast(dtype)
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))

    def _cast(self, dtype: torch.dtype) -> "LazyLogits":
        deferred, autocast = self._real.args
        lazy = LazyLogits.of(deferred.to(dtype))
        lazy._real = functools.partial(_compute, deferred.to(dtype), autocast)
        return lazy


def _cast_of(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype that a call casts logits to, if it does nothing else: `x.float()` or `x.to(dtype)`."""
    if func is Tensor.float:
        return torch.float32
    alone = func is Tensor.to and len(args) == 2 and not kwargs and isinstance(args[0], LazyLogits)
    return args[1] if alone and isinstance(args[1], torch.dtype) and args[1].is_floating_point else None


def _compute(deferred: DeferredLogits, autocast: Any) -> Tensor:
    with torch.no_grad(), autocast():
        return deferred.compute().to(deferred.dtype)


def _real(value: Any) -> Any:
    return value._real() if isinstance(value, LazyLogits) else value
