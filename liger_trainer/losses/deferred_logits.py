"""Logits that have not been computed: hidden states, a head, and the operations on their product so far.

While a loss is computed, the output head of a causal LM returns a `DeferredLogits` (deferring_head.py). The model's
own forward then scales, caps, casts and slices it and hands it to the loss, which takes it apart again. So we need no
copy of any model's forward. Every other operation computes the real logits: inside the forward with a warning that
names the operation, later silently.

Where an operation writes into the logits, or returns memory of theirs that somebody may write into, they are real from
then on: this object, and the views of it that were taken before, stand for one tensor. They are always those of the
forward: computed with its weights, adapters and autocast, or refused if the weights have changed.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from ..compat.torch_internals import parse_to, shares_memory, tree_leaves, version_of
from ..errors import ConfigError, MaterializedLogitsWarning
from .model_parts import Head

CHEAP = 2**24  # logits: one more product of a hundred rows or so, and 32 MiB in bf16


class DeferredPass:
    """One pass through a model."""

    # no dataclass: FSDP2 copies dataclasses that pass its hooks, and changes to a copy would be lost

    def __init__(self, model_name: str, running: bool = True):
        self.model_name = model_name
        self.running = running  # only then does a warning make sense
        self.why_not_deferred: str | None = None  # why its logits are real ones
        self.weights: Callable[[], Any] | None = None  # tells the state of the head's weights
        self.weights_then: Any = None

    def watch(self, weights: Callable[[], Any]) -> None:
        """Note the state of the head's weights."""
        if not torch.compiler.is_compiling():
            self.weights, self.weights_then = weights, weights()

    def check_weights(self) -> None:
        """Raise ConfigError if the weights have changed since, so that the logits of this pass are gone."""
        if self.weights is not None and not self.running and self.weights() != self.weights_then:
            raise ConfigError(
                f"The logits of this {self.model_name} are read after the weights of its output head have changed (a "
                "step of an optimizer, a merge, a load or a cast), and they were not stored. Read them before that: "
                "logits = outputs.logits.clone()."
            )


class _Memory:
    """What a tensor of logits shares with its views."""

    def __init__(self, value: Tensor | None):
        self.value = value  # the logits, once they are real
        self.is_viewed = False


def _of_real_ones_too(method: Callable) -> Callable:
    """Have a method of `DeferredLogits` be the tensor's once the logits are real, or with options that it lacks."""
    name = {"__mul__": "mul", "__truediv__": "div"}.get(method.__name__, method.__name__)

    @functools.wraps(method)
    def called(self, *args, **kwargs):
        if self.stored or kwargs.keys() - {"dtype", "device", "non_blocking"}:
            return _applied(name, _method(name), (self, *args), kwargs)
        return method(self, *args, **kwargs)

    return called


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """(..., V) logits: `after * tanh(before * product)` if capped, else `before * product`; product = head(hidden)."""

    hidden: Tensor  # (..., H)
    head: Head
    project: Callable[[Tensor], Tensor]  # what the head computes
    forward: DeferredPass
    before: float = 1.0
    capped: bool = False
    after: float = 1.0
    cast: torch.dtype | None = None
    autocast: tuple[torch.dtype, bool] | None = None  # under which the head was called; None: the reader's
    recorded: bool | None = None  # whether gradients were recorded then; None: as the reader does
    memory: _Memory = None  # pyright: ignore[reportAssignmentType]  (a factory of defaults torch.compile cannot trace)
    base: "DeferredLogits | None" = None  # what this is a view of
    views: tuple[tuple[str, tuple], ...] = ()  # methods that make it of that

    def __post_init__(self) -> None:
        if self.memory is None:
            object.__setattr__(self, "memory", _Memory(None))

    @classmethod
    def of(cls, hidden: Tensor, head: Head, project: Callable[[Tensor], Tensor], forward: DeferredPass) -> Self:
        """Return the logits of hidden states, as a head would compute them now."""
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return cls(
            hidden, head, project, forward, autocast=autocast, recorded=torch.is_grad_enabled(), memory=_Memory(None)
        )

    @property
    def scale(self) -> float:
        return self.before * self.after if self.capped else self.before

    @property
    def softcap(self) -> float | None:
        return self.after if self.capped else None

    @property
    def shape(self) -> torch.Size:
        return self.compute().shape if self.stored else torch.Size((*self.hidden.shape[:-1], self.head.vocab))

    @property
    def dtype(self) -> torch.dtype:
        if self.memory.value is not None:
            return self.memory.value.dtype
        autocast = self.autocast is not None and self.autocast[1] and self.hidden.dtype != torch.float64
        product = self.autocast[0] if autocast and self.autocast is not None else self.hidden.dtype
        return self.cast or product

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def is_cheap(self) -> bool:
        """Whether there are so few logits that nobody is served by waiting. Not of a head that has to be gathered."""
        return self.forward.weights is not None and math.prod(self.shape) <= CHEAP

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def operands(self, prefix: str = "", sharded: bool = False) -> dict[str, Any]:
        """Return hidden states, head and transform as the fused ops' arguments, one row a position.

        Args:
            sharded: the op takes `parallel`, so the head's rows may lie on several ranks. Otherwise they are gathered.

        Raises:
            ConfigError: they cannot be: FSDP2 would not sum the gradient over the ranks.
        """
        assert not self.stored, "real logits are no longer described by hidden states and head"
        head = self.head if sharded else self.head.whole()
        values = {
            "hidden": self.hidden.flatten(0, -2), "weight": head.weight, "bias": head.bias,
            "lora": head.lora, "scale": self.scale, "softcap": self.softcap,
        }  # fmt: skip
        if sharded:
            values["parallel"] = head.parallel
        return {prefix + name: value for name, value in values.items()}

    def _with(self, **changes: Any) -> Self:
        """Return another tensor of logits."""
        return dataclasses.replace(self, memory=_Memory(None), base=None, views=(), **changes)

    def of_states(self, hidden: Tensor) -> Self:
        """Return the logits of other hidden states, by the same head without gradient."""
        return self._with(hidden=hidden, head=self.head.detached())

    def _viewed(self, hidden: Tensor, name: str, *args: Any) -> Self:
        """Return a view of these logits: `hidden` under the same view."""
        self.memory.is_viewed = True
        base = self if self.base is None else self.base
        return dataclasses.replace(self, hidden=hidden, base=base, views=(*self.views, (name, args)))

    @_of_real_ones_too
    def __mul__(self, factor):
        if not isinstance(factor, Real):
            return _applied("multiplication by a tensor", operator.mul, (self, factor))
        return self._with(**self._scaled(float(factor)))

    __rmul__ = __mul__

    @_of_real_ones_too
    def __truediv__(self, divisor):
        if not isinstance(divisor, Real):
            return _applied("division by a tensor", operator.truediv, (self, divisor))
        return self._with(**self._scaled(1.0 / float(divisor)))

    mul, div = __mul__, __truediv__

    def _scaled(self, factor: float) -> dict[str, float]:
        name = "after" if self.capped else "before"
        return {name: getattr(self, name) * factor}

    def mul_(self, factor):
        """Multiply in place. Without views that would have to see it, the logits stay deferred."""
        if not isinstance(factor, Real) or self.stored or self.memory.is_viewed:
            return _applied("mul_", _method("mul_"), (self, factor))
        for name, value in self._scaled(float(factor)).items():
            object.__setattr__(self, name, value)
        return self

    def div_(self, divisor, **how):
        if not isinstance(divisor, Real) or how:
            return _applied("div_", _method("div_"), (self, divisor), how)
        return self.mul_(1.0 / float(divisor))

    __imul__, __itruediv__ = mul_, div_

    @_of_real_ones_too
    def tanh(self):
        if self.capped:
            return _applied("a second tanh", torch.tanh, (self,))
        return self._with(capped=True)

    @_of_real_ones_too
    def to(self, *args, **kwargs):
        device, dtype = parse_to(*args, **kwargs)
        if device is not None and torch.device(device) != self.device:
            return _applied("a move to another device", _method("to"), (self, *args), kwargs)
        return self if dtype in (None, self.dtype) else self._with(cast=dtype)

    def float(self):
        return self.to(torch.float32)

    @_of_real_ones_too
    def contiguous(self):
        return self if self.base is None or self.hidden.is_contiguous() else self._with()

    @_of_real_ones_too
    def view(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        *rows, last = shape
        width = self.hidden.shape[-1]
        if last != self.shape[-1] and not (last == -1 and math.prod(rows) * width == self.hidden.numel()):
            return _applied(f"view{shape}", _method("view"), (self, *shape))
        hidden = self.hidden.contiguous() if self.base is None else self.hidden  # what a head returns is contiguous
        reshaped = hidden.reshape(*rows, width)
        same = hidden.is_contiguous() or (not torch.compiler.is_compiling() and _shares(reshaped, hidden))
        return self._viewed(reshaped, "reshape", *shape) if same else self._with(hidden=reshaped)

    @_of_real_ones_too
    def reshape(self, *shape):
        return self.view(*shape)

    @_of_real_ones_too
    def __getitem__(self, index):
        items = index if isinstance(index, tuple) else (index,)
        if not _spares_last(items, self.ndim):
            return _applied(f"indexing by {index}", operator.getitem, (self, index))
        hidden = self.hidden[index]
        if all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
            return self._viewed(hidden, "__getitem__", index)
        return self._with(hidden=hidden)  # indices and masks copy

    def __setitem__(self, index, value):
        """Assign in place, as a model does to rule tokens out."""
        _applied("assignment to some of them", operator.setitem, (self, index, value))

    def retain_grad(self) -> None:
        """Keep the gradient that reaches the logits. A fused loss computes its gradient without them."""
        self.become_real("retain_grad")
        self.compute().retain_grad()

    def __reduce_ex__(self, protocol):
        """Copies and files (`torch.save`) have the tensor, without the head that computes it."""
        return self.compute("a copy or a file").__reduce_ex__(protocol)

    @property
    def stored(self) -> bool:
        """Whether the logits are real, so that hidden states and head no longer describe them."""
        return self.memory.value is not None

    def become_real(self, why: str | None = None) -> None:
        """Compute the tensor that these logits, and all views of it, stand for from now on."""
        if self.memory.value is None:
            self.memory.value = (self if self.base is None else self.base).compute(why)

    def compute(self, why: str | None = None) -> Tensor:
        """Return the real logits. `why` names the operation that needs them.

        Raises:
            ConfigError: the weights have changed since the forward.
        """
        if self.memory.value is not None:
            logits = self.memory.value
            for name, args in self.views:
                logits = getattr(logits, name)(*args)
            return logits
        self.forward.check_weights()
        if self.forward.running:
            _warn(
                f"{self.forward.model_name} computes its logits for {why or 'an unknown operation'}: the loss is not "
                "fused, and the logits of the whole batch are stored."
            )
        with contextlib.nullcontext() if torch.compiler.is_compiling() else self._as_then():
            logits = self.project(self.hidden)
            logits = logits if self.cast is None else logits.to(self.cast)
            logits = logits if self.before == 1.0 else logits * self.before
            logits = torch.tanh(logits) if self.capped else logits
            return logits if self.after == 1.0 else logits * self.after

    @contextlib.contextmanager
    def _as_then(self) -> Iterator[None]:
        """Within the context, products run under the autocast of the forward, with gradients if it had them."""
        grad = torch.is_grad_enabled() if self.recorded is None else self.recorded
        with torch.set_grad_enabled(grad), self.autocasting():
            yield

    def autocasting(self) -> contextlib.AbstractContextManager:
        """Return the autocast of the forward."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, *self.autocast)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        deferred = _DEFERRED.get(func)
        if deferred is not None and args and isinstance(args[0], cls) and "out" not in (kwargs or {}):
            return getattr(args[0], deferred)(*args[1:], **(kwargs or {}))
        return _applied(getattr(func, "__name__", str(func)), func, args, kwargs or {})

    def __getattr__(self, name: str):
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"logits have no attribute {name!r}")
        if callable(getattr(Tensor, name)):
            return lambda *args, **kwargs: _applied(f".{name}", _method(name), (self, *args), kwargs)
        return _applied(f".{name}", operator.attrgetter(name), (self,))


_DEFERRED = {
    torch.tanh: "tanh", torch.mul: "mul", torch.multiply: "mul", torch.div: "div", torch.true_divide: "div",
    torch.reshape: "reshape",
}  # fmt: skip


@torch.compiler.assume_constant_result  # warns while a graph is traced, and is no part of the graph
def _warn(message: str) -> None:
    warnings.warn(message, MaterializedLogitsWarning, stacklevel=4)


def _method(name: str) -> Callable:
    def call(self, *args, **kwargs):
        return getattr(self, name)(*args, **kwargs)

    return call


def _applied(why: str, function: Callable, args: tuple, kwargs: Any = None) -> Any:
    """Apply a function to real logits. They stay real where it wrote into them, or returned memory of theirs."""
    found: list[DeferredLogits] = []
    _find((args, kwargs), found)
    compiling = torch.compiler.is_compiling()  # so memory cannot be looked at
    for logits in found if compiling else ():
        logits.become_real(why)
    real = {id(logits): logits.compute(why) for logits in found}
    if compiling:
        return function(*_exchanged(args, real), **_exchanged(kwargs or {}, real))
    versions = {key: version_of(value) for key, value in real.items()}
    result = function(*_exchanged(args, real), **_exchanged(kwargs or {}, real))
    touched = [
        logits
        for logits in found
        if not logits.stored
        and (version_of(real[id(logits)]) != versions[id(logits)] or _shares(result, real[id(logits)]))
    ]
    for logits in touched:
        if logits.base is None:
            logits.memory.value = real[id(logits)]
    parts = [logits for logits in touched if not logits.stored]
    for logits in parts:
        logits.become_real()
    return _applied(why, function, args, kwargs) if parts else result  # again, on views of the whole


def _find(value: Any, found: list[DeferredLogits]) -> None:
    if isinstance(value, DeferredLogits):
        found.append(value)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _find(item, found)


def _exchanged(value: Any, real: dict[int, Tensor]) -> Any:
    if isinstance(value, DeferredLogits):
        return real[id(value)]
    if isinstance(value, dict):
        return {key: _exchanged(item, real) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = (_exchanged(item, real) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


_WITHOUT_MEMORY = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def _shares(result: Any, tensor: Tensor) -> bool:
    """Whether a result holds memory of a tensor, as far as can be seen: what is not known to have none, has."""
    if isinstance(result, (torch.Size, torch.Generator)):
        return False
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            if shares_memory(leaf, tensor):
                return True
        elif not isinstance(leaf, _WITHOUT_MEMORY):
            return True
    return False


def _operator(name: str):
    def compute_and_apply(self, *args):
        return _applied(name, _method(name), (self, *args))

    return compute_and_apply


# Python looks operators up on the class, not through __getattr__.
for _name in (
    "add", "radd", "sub", "rsub", "rtruediv", "neg", "pow", "rpow", "lt", "le", "gt", "ge", "eq", "ne", "matmul",
    "rmatmul", "len", "iter", "iadd", "isub", "ipow", "ifloordiv", "floordiv", "rfloordiv", "mod", "rmod", "abs", "pos",
    "bool", "float", "int", "contains", "invert",
):  # fmt: skip
    setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))


def settled(logits: Any) -> Any:
    """Return logits that have become real as the tensor that they are; all others as they come."""
    return logits.compute() if isinstance(logits, DeferredLogits) and logits.stored else logits


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
