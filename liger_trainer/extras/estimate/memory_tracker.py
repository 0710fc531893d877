"""Track the bytes of live tensors by purpose, as CUDA's caching allocator would allocate them.

A storage counts from the operation that returns it until it is freed, rounded up as the allocator does. The tensors may
have no data (torch's FakeTensorMode): a training step on them takes seconds and no memory, and has the peak of a real
step. What a CUDA kernel allocates and frees inside is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.torch_internals import CAST, TorchDispatchMode, tree_leaves

BLOCK = 512  # bytes that the caching allocator rounds sizes up to
AUTOCAST = "autocast copies"


@dataclass
class Peak:
    """The most bytes that were live in a phase, by part."""

    bytes: int = 0
    parts: Counter[str] = field(default_factory=Counter)

    def add(self, part: str, size: int) -> None:
        """Add bytes that were live during the whole phase."""
        self.bytes += size
        self.parts[part] += size


class MemoryTracker(TorchDispatchMode):
    """Counts every new storage in the current `part`, within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()  # part -> bytes, now
        self.peaks: dict[str, Peak] = {}  # phase -> its peak
        self.phase, self.part = "forward", "activations"
        # the pool of memory that new storages come from, such as CUDA graphs'; None: the allocator's own
        self.pool: str | None = None
        self.pools: dict[str | None, int] = {}  # pool -> the most bytes that were live in it
        self.outside: dict[str, Peak] = {}  # phase -> its peak of what was live in no pool
        self._live_outside: Counter[str] = Counter()
        self._live_in: Counter[str | None] = Counter()
        self._storages: dict[int, tuple[weakref.ref, int, str, str | None]] = {}

    @property
    def bytes(self) -> int:
        return self.live.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls; they allocate nothing
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        part = self.part
        # Copies of weights that autocast makes are a part by themselves: sharded models do not have them.
        if func is CAST and "weights" in (self.part_of(args[0]) or ""):
            part = AUTOCAST
        self._count(tree_leaves(result), part)
        return result

    def add(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count tensors that existed before, or move them to another part."""
        for tensor in tensors:
            entry = self._storages.get(id(tensor.untyped_storage()))
            if entry is None:
                self._count([tensor], part)
                continue
            storage, size, before, pool = entry
            self._change(before, pool, -size)
            self._change(part, pool, size)
            self._storages[id(tensor.untyped_storage())] = storage, size, part, pool

    def part_of(self, tensor: Tensor) -> str | None:
        entry = self._storages.get(id(tensor.untyped_storage()))
        return entry[2] if entry else None

    @contextmanager
    def during(self, phase: str, part: str | None = None) -> Iterator[None]:
        """Count new storages in `part`, or in a part named like the phase."""
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
            # A view, or what was done in place.
            if key in self._storages:
                continue
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            # The callback runs when the last tensor of the storage is gone, as the allocator would free it.
            self._storages[key] = weakref.ref(storage, lambda _, key=key: self._freed(key)), size, part, self.pool
            self._change(part, self.pool, size)
        self._note_peak()

    def keep(self, pool: str, size: int) -> None:
        """Count bytes that a pool keeps, and that nothing has without the pool."""
        self._live_in[pool] += size
        self.pools[pool] = max(self.pools.get(pool, 0), self._live_in[pool])

    def leave_out(self, part: str, pool: str) -> None:
        """Count what is live of a part in a pool as in none: the steps without that pool have it."""
        for key, (storage, size, own, where) in self._storages.items():
            if own == part and where == pool:
                self._live_in[pool] -= size
                self._live_in[part] += size
                self._storages[key] = storage, size, own, part

    def _freed(self, key: int) -> None:
        _, size, part, pool = self._storages.pop(key)
        self._change(part, pool, -size)

    def _change(self, part: str, pool: str | None, size: int) -> None:
        self.live[part] += size
        self._live_in[pool] += size
        if pool is None:
            self._live_outside[part] += size

    def _note_peak(self) -> None:
        # Graph pools do not give memory back, so what is outside of them has a peak by itself.
        for peaks, live in ((self.peaks, self.live), (self.outside, self._live_outside)):
            peak, now = peaks.setdefault(self.phase, Peak()), live.total()
            if now > peak.bytes:
                peak.bytes, peak.parts = now, Counter(live)
        self.pools[self.pool] = max(self.pools.get(self.pool, 0), self._live_in[self.pool])


class GraphPool:
    """The pool of memory that the graphs of a model's layers have: what the layers allocate, forward and backward."""

    def __init__(self, name: str, tracker: MemoryTracker):
        self._name, self._tracker = name, tracker
        self._before: list[str | None] = []

    def watch(self, layers: Sequence[nn.Module], recomputed: bool) -> None:
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave)
            if recomputed:
                layer.register_forward_hook(self._keep_output)
                layer.register_forward_hook(self._drop_copies)
        # The backward comes into the pool at the last layer's output, and leaves it when it is through all layers.
        layers[0].register_forward_pre_hook(
            lambda _, *inputs: self._when_its_gradient_comes(inputs, None), with_kwargs=True
        )
        layers[-1].register_forward_hook(lambda _, args, output: self._when_its_gradient_comes(output, self._name))

    def _enter(self, *_: Any) -> None:
        self._before.append(self._tracker.pool)
        self._tracker.pool = self._name

    def _leave(self, *_: Any) -> None:
        self._tracker.pool = self._before.pop()

    def _keep_output(self, _: Any, args: Any, output: Any) -> None:
        """Count what a layer returns when its gradient comes: it stays until the last graph is recorded."""
        hidden = _first_trained(output)
        if hidden is not None:
            hidden.register_hook(lambda gradient: self._tracker.keep(self._name, gradient.nbytes))

    def _drop_copies(self, *_: Any) -> None:
        """Drop the copies of weights that a layer's forward has made: graphs are recorded without autocast's cache."""
        self._tracker.leave_out(AUTOCAST, self._name)

    def _when_its_gradient_comes(self, tensors: Any, pool: str | None) -> None:
        """Set the pool when the gradient of the hidden states does: they are the first of `tensors` that have one."""
        hidden = _first_trained(tensors)
        if hidden is not None:
            hidden.register_hook(lambda _: setattr(self._tracker, "pool", pool))


def _first_trained(tensors: Any) -> Tensor | None:
    return next((x for x in tree_leaves(tensors) if isinstance(x, Tensor) and x.requires_grad), None)
