"""A record of attributes replaced on other people's objects, to put them back; and functions replaced for one call."""

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..compat.modules import FORWARD_PLACES, place_of_forward


def forward_of(module: nn.Module) -> Callable:
    """Return the forward in whose place `Replacements.forward` puts another."""
    return getattr(module, place_of_forward(module))


class _Absent:
    """The object itself had no such attribute. A class, because a deep copy of it is itself."""


class Replacements:
    """Attributes replaced on modules and classes. `undo()` puts the former ones back.

    The record holds the changed objects, so a deep copy of a patched model has its own record.
    """

    def __init__(self) -> None:
        self._records: list[tuple[Any, str, Any, Any]] = []  # object, name, what was there, what is there now
        self._claimed: set[int] = set()  # ids, used only while a model is being patched
        self._hooks: list[Any] = []  # handles

    def mark_as_patched(self, module: nn.Module) -> None:
        """Mark a module that a swapped one computes too, so that later steps of the patching pass it over."""
        self._claimed.add(id(module))

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module is claimed, or one of its attributes is replaced."""
        return id(module) in self._claimed

    def __len__(self) -> int:
        return len(self._records)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name = value` and remember the former value."""
        self._records.append((owner, name, vars(owner).get(name, _Absent), value))
        self._claimed.add(id(owner))
        setattr(owner, name, value)

    def forward(self, module: nn.Module, forward: Callable) -> None:
        """Put `forward(module, ...)` in place of the module's forward, or of the one that an accelerate hook calls.

        It is bound as a method, so that it runs on the copy in a deep copy of the module.
        """
        self.set(module, place_of_forward(module), types.MethodType(forward, module))

    def pre_hook(self, module: nn.Module, hook: Callable) -> None:
        """Call `hook(module, args, kwargs)` before the module's forward. See `nn.Module.register_forward_pre_hook`."""
        self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def undo(self) -> None:
        """Put the former attributes back. A second call does nothing."""
        self._claimed.clear()
        while self._hooks:
            self._hooks.pop().remove()
        while self._records:
            owner, name, before, ours = self._records.pop()
            other = FORWARD_PLACES.get(name)
            if other and vars(owner).get(name) is not ours and vars(owner).get(other) is ours:
                name = other  # accelerate has since put a hook on the module, or taken it off
                before = types.MethodType(type(owner).forward, owner) if before is _Absent else before
            if before is not _Absent:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within the context `owner` has these attributes."""
    replacements = Replacements()
    for name, value in attributes.items():
        replacements.set(owner, name, value)
    try:
        yield
    finally:
        replacements.undo()


_LOCK = threading.Lock()


class _ByThread:
    """A function that is another one in threads which have put their own in its place."""

    def __init__(self, before: Callable, absent: bool):
        self.before, self.absent = before, absent  # whether the owner itself had no such attribute
        self.own: dict[int, list[Callable]] = {}  # by thread: those of the calls that are running, outermost first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which cannot ask for the thread that it traces: only one may have its own
            own = next(iter(self.own.values())) if len(self.own) == 1 else None
        else:
            own = self.own.get(threading.get_ident())
        return (own[-1] if own else self.before)(*args, **kwargs)


@contextlib.contextmanager
def replaced_in_this_thread(owner: Any, name: str, function: Callable, before: Callable) -> Iterator[None]:
    """Within the context, and only in this thread, `owner.name` is `function`. Contexts may be nested.

    Args:
        before: what it is elsewhere, if the owner itself has no such attribute. What it has must be a function.
    """
    if torch.compiler.is_compiling():  # a graph has no threads
        former = vars(owner).get(name)
        setattr(owner, name, function)
        try:
            yield
        finally:
            vars(owner).pop(name)  # torch.compile traces a `del` wrongly where the class has the name too
            if former is not None:
                setattr(owner, name, former)
        return
    thread = threading.get_ident()
    with _LOCK:
        former = vars(owner).get(name)
        shared = former if isinstance(former, _ByThread) else _ByThread(former or before, former is None)
        if shared is not former:
            setattr(owner, name, shared)
        shared.own.setdefault(thread, []).append(function)
    try:
        yield
    finally:
        with _LOCK:
            shared.own[thread].pop()
            if not shared.own[thread]:
                del shared.own[thread]
            if not shared.own and vars(owner).get(name) is shared:
                delattr(owner, name) if shared.absent else setattr(owner, name, shared.before)


def own_attribute(owner: Any, name: str) -> Any:
    """Return an attribute of the object itself, None without one, as it is outside of `replaced_in_this_thread`."""
    value = vars(owner).get(name)
    return (None if value.absent else value.before) if isinstance(value, _ByThread) else value


def without_replacement(function: Any) -> Any:
    """Return the function that is called outside of `replaced_in_this_thread`."""
    return function.before if isinstance(function, _ByThread) else function
