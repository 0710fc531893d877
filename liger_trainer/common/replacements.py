"""What was replaced in someone else's objects, and how to put it back."""

import types
from collections.abc import Callable
from typing import Any

from torch import nn

# where the forward of a module is, and where accelerate keeps it that of a module with a hook
_PLACES = {"forward": "_old_forward", "_old_forward": "forward"}


class _Absent:
    """The object had no such attribute of its own. A class, because a deep copy of it is itself."""


class Replacements:
    """A record of attributes replaced on modules and classes. `undo()` puts back what was there.

    It holds the objects that it changed, so a deep copy of a patched model has a record of its own.
    """

    def __init__(self) -> None:
        self._records: list[tuple[Any, str, Any, Any]] = []  # object, name, what was there, what is there now
        self._taken: set[int] = set()  # ids, of use only while a model is being patched

    def claim(self, module: nn.Module) -> None:
        """Say that a swapped module computes this one too, so that the parts that follow pass it over."""
        self._taken.add(id(module))

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a module is claimed, or something of it is replaced."""
        return id(module) in self._taken

    def __len__(self) -> int:
        return len(self._records)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`."""
        self._records.append((owner, name, vars(owner).get(name, _Absent), value))
        self._taken.add(id(owner))
        setattr(owner, name, value)

    def forward(self, module: nn.Module, forward: Callable) -> None:
        """`forward(module, ...)` in place of the module's forward, or of the one that an accelerate hook calls.

        It is bound as a method, so that a deep copy of the module runs on the copy.
        """
        hooked = hasattr(module, "_hf_hook") and hasattr(module, "_old_forward")
        self.set(module, "_old_forward" if hooked else "forward", types.MethodType(forward, module))

    def undo(self) -> None:
        """Put back what was there. Doing it twice does nothing."""
        self._taken.clear()
        while self._records:
            owner, name, before, ours = self._records.pop()
            other = _PLACES.get(name)
            if other and vars(owner).get(name) is not ours and vars(owner).get(other) is ours:
                name = other  # accelerate has put a hook on the module since, or taken it off
                before = types.MethodType(type(owner).forward, owner) if before is _Absent else before
            if before is not _Absent:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)
