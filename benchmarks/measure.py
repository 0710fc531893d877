"""How time is taken: providers interleaved, medians with quartiles, and the machine's own limits."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

MIB = 2**20
FLUSH_BYTES = 256 * MIB  # five times an H100's L2


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    p25: float
    p75: float
    count: int

    @staticmethod
    def of(values: list[float]) -> Spread:
        several = len(values) > 1
        p25, median, p75 = statistics.quantiles(values, n=4, method="inclusive") if several else values * 3
        return Spread(median, p25, p75, len(values))

    @staticmethod
    def of_ratios(values: list[float], base: list[float]) -> Spread:
        """Pair the values by round, so that a drift of the clock rate cancels."""
        return Spread.of([a / b for a, b in zip(values, base, strict=True)])


class Stopwatch:
    """Time a call in milliseconds: by device events on CUDA, after flushing L2; by the wall clock elsewhere."""

    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"
        self.flush = torch.empty(FLUSH_BYTES if self.is_cuda else 0, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[], object]) -> float:
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        allocations = _driver_allocations()
        elapsed = self._time_on_device(call)
        # Another provider may have pushed out memory that the allocator then asks the driver for: that is no part
        # of the call, and the second time it is there.
        return elapsed if _driver_allocations() == allocations else self._time_on_device(call)

    def _time_on_device(self, call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.fill_(1)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def _driver_allocations() -> int:
    stats = torch.cuda.memory_stats()
    return stats["segment.all.allocated"] + stats["num_alloc_retries"]


class Clock(Protocol):
    """Time a call, in any unit."""

    def time(self, call: Any, /) -> Any: ...


def interleave(
    calls: Mapping[str, Any], clock: Clock, rounds: int, deadline: float = float("inf")
) -> dict[str, list[Any]]:
    """Measure every call once a round. After `deadline` (`time.monotonic` seconds) only the first round starts.

    Each round has another order, so that no provider always follows the one that heats the chip.
    """
    shuffle = random.Random(0).shuffle
    times: dict[str, list[Any]] = {name: [] for name in calls}
    for finished in range(rounds):
        if finished and time.monotonic() > deadline:
            break
        order = list(calls)
        shuffle(order)
        for name in order:
            times[name].append(clock.time(calls[name]))
    return times


@dataclass(frozen=True)
class Roofline:
    """Measured limits: TFLOP/s of a large matrix product, GB/s (read plus written) of a large copy."""

    gemm_tflops: float
    gemm_shape: str
    copy_gbs: float

    @staticmethod
    def measure(stopwatch: Stopwatch, device: torch.device, repeats: int = 20) -> Roofline:
        cuda = device.type == "cuda"
        size = 8192 if cuda else 256
        dtype = torch.bfloat16 if cuda else torch.float32
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        source = torch.empty((1024 if cuda else 8) * MIB, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        calls = {"gemm": lambda: torch.mm(a, b), "copy": lambda: target.copy_(source)}
        interleave(calls, stopwatch, rounds=3)
        ms = {name: statistics.median(times) for name, times in interleave(calls, stopwatch, repeats).items()}
        shape = f"{size}^3 {str(dtype).removeprefix('torch.')}"
        return Roofline(2 * size**3 / ms["gemm"] / 1e9, shape, 2 * source.numel() / ms["copy"] / 1e6)

    def gemm_ms(self, flops: int) -> float:
        """Return the time that matrix products of so many operations take at the measured rate."""
        return flops / self.gemm_tflops / 1e9


def settle_libraries(device: torch.device) -> None:
    """Have the matrix library allocate its workspaces, for this thread and autograd's, before memory is counted."""
    a, b = (torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    (a @ b).sum().backward()


def explain(error: Exception) -> str:
    """Return one line for the table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, ImportError):
        return f"not available: {error}"
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0][:160] if message else ''}"


def release_memory() -> None:
    """Collect cycles first: a model or an exception's frames may still hold tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
