"""Who records what functions launch: CUDA graphs in one pool of memory. Tests have another for CPUs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = list[Tensor]


class Recorder(Protocol):
    """Records what functions launch on a device."""

    device_type: str

    def __init__(self, device: torch.device) -> None: ...

    def has_room(self) -> bool:
        """Return whether the device has the memory that graphs may take besides a step without them."""
        ...

    def rehearsing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a function runs once before it is recorded; it may not wait for the device."""
        ...

    def record(self, function: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """Return the tensors that `function` made, and what computes them again in the same memory."""
        ...

    def take_turn(self) -> None:
        """Have what is launched next wait for the replays before it, on whatever stream: all use one memory."""
        ...

    def unowned(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same memory that does not keep later recordings from using it."""
        ...


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that a GPU can still give, those among them that the allocator holds; None for a CPU."""
    if device.type != "cuda":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def memory_of_graphs(device: torch.device) -> int:
    """Return the bytes that the graphs of a shape may take on a GPU, after steps without them."""
    # these have needed `step` besides weights and optimizer; graphs took up to 1.3 times that, 3 GiB more where little
    # was kept for backward
    step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return int(1.3 * step) + (3 << 30)


class CudaRecorder:
    """Records CUDA graphs on a separate stream, in one pool of memory."""

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._replays_on: torch.cuda.Stream | None = None

    def has_room(self) -> bool:
        free = free_memory(self._device)
        assert free is not None
        return free > memory_of_graphs(self._device)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what passes without graphs have left; the pool is apart from it
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # what the rehearsal has left: nothing else allocates on its stream

    def record(self, function: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # other threads, which pin batches or watch NCCL, may go on meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tensors = function()
            finally:
                graph.capture_end()
        self._graphs.append(graph)
        return tensors, graph.replay

    def take_turn(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._replays_on is not None and self._replays_on != stream:
            stream.wait_stream(self._replays_on)
        self._replays_on = stream

    def unowned(self, tensor: Tensor) -> Tensor:
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        memory = _Memory(tensor.data_ptr(), span * tensor.element_size(), self._graphs)
        at = torch.as_tensor(memory, device=tensor.device)
        return at.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Bytes of a GPU, for whoever reads the CUDA array interface. They exist as long as the graphs of their pool."""

    def __init__(self, address: int, size: int, graphs: list[torch.cuda.CUDAGraph]):
        self.graphs = graphs
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
