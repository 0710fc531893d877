"""Memory into which packed weights are unpacked one after the other.

The weights are read by one product each. Were each unpacked into new memory, it would be taken between activations
that stay, and the allocator would hold more than the weights need.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._triton import use_triton


class Workspace:
    """Memory of one weight for each device and dtype, which is taken when it is first needed.

    Args:
        size: numbers of the largest weight.
    """

    def __init__(self, size: int):
        self.size = size
        # the stream that uses it, and the memory while nobody has it
        self._memory: dict[tuple[torch.device, torch.dtype, Any], tuple[Any, list[Tensor]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Workspace":
        memo[id(self)] = clone = Workspace(self.size)
        return clone

    @contextlib.contextmanager
    def lent(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fake_mode: Any = None
    ) -> Iterator[Tensor]:
        """Lend memory for a tensor. What reads it must be on the device's current stream before it is given back.

        A separate tensor is lent while another is, and on another stream than the first one: so CUDA graphs, which
        are recorded on a stream of theirs, have their own memory.

        Args:
            fake_mode: the FakeTensorMode of what is read into it; its tensors have no memory, and serve no other.
        """
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        key = device, dtype, fake_mode
        entry = self._memory.get(key)
        if entry is None:
            with torch.inference_mode(False):  # a tensor of that mode could not be used outside of it
                entry = stream, [torch.empty(self.size, dtype=dtype, device=device)]
            entry = self._memory.setdefault(key, entry)
        owner, free = entry
        numel = torch.Size(shape).numel()
        memory = None
        if owner == stream and numel <= self.size:
            with contextlib.suppress(IndexError):
                memory = free.pop()  # at once, so that only one of two threads gets it
        if memory is None:
            yield torch.empty(shape, dtype=dtype, device=device)
            return
        try:
            yield memory[:numel].view(shape)
        finally:
            free.append(memory)


class SharedUnpack:
    """An `unpack` of Projection whose weights the ops read from a workspace.

    Args:
        unpack: returns the dense weight in new memory, as for whoever keeps it.
        write: writes the dense weight into a tensor, by Triton.
        shape, dtype: of the dense weight.
    """

    def __init__(
        self, unpack: Callable[[Tensor], Tensor], write: Callable[[Tensor, Tensor], None], shape: tuple[int, ...],
        dtype: torch.dtype, workspace: Workspace,
    ):  # fmt: skip
        self.unpack, self.write, self.shape, self.dtype, self.workspace = unpack, write, shape, dtype, workspace

    def __call__(self, weight: Tensor) -> Tensor:
        return self.unpack(weight)

    @contextlib.contextmanager
    def lent(self, weight: Tensor) -> Iterator[Tensor]:
        """Lend the dense weight: see `Workspace.lent`."""
        if not use_triton(weight.new_empty(0, dtype=self.dtype)):
            yield self.unpack(weight)
            return
        fake_mode = getattr(weight, "fake_mode", None)
        with self.workspace.lent(self.shape, self.dtype, weight.device, fake_mode) as out:
            self.write(weight, out)
            yield out
