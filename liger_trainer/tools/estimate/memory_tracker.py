"""Bytes of live tensors by what they are for, over time: what CUDA's caching allocator would have allocated.

A storage counts from the operation that returns it until it is freed, rounded up as the allocator does. So the tensors
may be without data, of torch's FakeTensorMode: a training step on such tensors takes seconds and no memory, and has the
peak of the step that it stands for, as far as the operations return their memory. What a CUDA kernel allocates and
frees inside is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes that the caching allocator rounds sizes up to
AUTOCAST = "autocast copies"


@dataclass
class Peak:
    """The most bytes that were live in a phase, and what they were for."""

    bytes: int = 0
    parts: Counter[str] = field(default_factory=Counter)

    def add(self, part: str, size: int) -> None:
        """`size` bytes more, that were live all through the phase."""
        self.bytes += size
        self.parts[part] += size


class MemoryTracker(TorchDispatchMode):
    """Within the context every new storage is counted in `part`, the name of the moment.

    Attributes:
        live: part -> bytes, now.
        peaks: phase -> `Peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, Peak] = {}
        self.phase, self.part = "forward", "activations"
        self._storages: dict[int, tuple[weakref.ref, int, str]] = {}

    @property
    def bytes(self) -> int:
        return self.live.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls, and nothing to count
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        part = self.part
        if func is torch.ops.aten._to_copy.default and "weights" in (self.part_of(args[0]) or ""):
            part = AUTOCAST
        self._count(tree_leaves(result), part)
        return result

    def add(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count tensors that were there before, or count them elsewhere from now on."""
        for tensor in tensors:
            known = self._storages.get(id(tensor.untyped_storage()))
            if known is None:
                self._count([tensor], part)
                continue
            storage, size, before = known
            self.live[before] -= size
            self.live[part] += size
            self._storages[id(tensor.untyped_storage())] = storage, size, part

    def part_of(self, tensor: Tensor) -> str | None:
        known = self._storages.get(id(tensor.untyped_storage()))
        return known[2] if known else None

    @contextmanager
    def during(self, phase: str, part: str | None = None) -> Iterator[None]:
        """Within it, new storages belong to `part`, or else are called as the phase."""
        before = self.phase, self.part
        self.enter(phase, part)
        try:
            yield
        finally:
            self.phase, self.part = before

    def enter(self, phase: str, part: str | None = None) -> None:
        self.phase, self.part = phase, part or phase
        self._note_peak()

    def _count(self, leaves: Iterable[Any], part: str) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key = id(storage)
            if key in self._storages:
                continue
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self._storages[key] = weakref.ref(storage, lambda _, key=key: self._freed(key)), size, part
            self.live[part] += size
        self._note_peak()

    def _freed(self, key: int) -> None:
        _, size, part = self._storages.pop(key)
        self.live[part] -= size

    def _note_peak(self) -> None:
        peak, now = self.peaks.setdefault(self.phase, Peak()), self.bytes
        if now > peak.bytes:
            peak.bytes, peak.parts = now, Counter(self.live)
