"""How it is measured: one forward and backward, timed and weighed, and the machine's own limits."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .cases import Case, Inputs
from .providers import LossFunction
from .reference import Gradients

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


def forward_backward(case: Case, loss_of: LossFunction, x: Inputs) -> torch.Tensor:
    """Run one step and leave fresh gradients on the inputs. Fused losses compute gradients in their forward,
    so the two are never timed apart. A `grad_output` of 1 is left to autograd, as `loss.backward()` does."""
    x.clear_grads()
    loss = loss_of(x)
    loss.backward(None if case.grad_output == 1.0 else torch.full_like(loss, case.grad_output))
    return loss.detach()


def take_gradients(case: Case, loss_of: LossFunction, x: Inputs) -> Gradients:
    """The step's loss and gradients, removed from the inputs so that nothing else can write into them."""
    loss = forward_backward(case, loss_of, x)
    if x.hidden.grad is None or (x.weight.grad is None and not case.frozen_head):
        raise RuntimeError("backward left no gradient on the hidden states or on the head")
    gradients = Gradients(loss, x.hidden.grad, x.weight.grad)
    x.clear_grads()
    return gradients


class Stopwatch:
    """Times a call in milliseconds: device events on CUDA, after flushing L2; the wall clock elsewhere."""

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
        # The allocator had to ask the driver for memory that another provider pushed out: it has it now.
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


@dataclass(frozen=True)
class Memory:
    """MiB above what was allocated before the provider's first call: the peak of a step, and what it keeps
    between steps (cached workspaces), which the peak includes."""

    peak: float
    kept: float


def weigh(case: Case, loss_of: LossFunction, x: Inputs, before: int) -> Memory | None:
    """Peak memory of a step, gradients included, above `before` bytes; None where no device counts it."""
    if x.hidden.device.type != "cuda":
        return None
    x.clear_grads()
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    forward_backward(case, loss_of, x)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    x.clear_grads()
    return Memory(peak / MIB, kept / MIB)


class Clock(Protocol):
    """Times what it is given, in a unit of its own."""

    def time(self, call: Any, /) -> float: ...


def interleave(
    calls: Mapping[str, Any], clock: Clock, rounds: int, deadline: float = float("inf")
) -> dict[str, list[float]]:
    """Times of every call, one each a round, in an order drawn anew each round: no provider always follows
    the one that heats the chip. After `deadline` (`time.monotonic` seconds) no round but the first starts."""
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(rounds):
        if done and time.monotonic() > deadline:
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

    def floor_ms(self, case: Case) -> float:
        """The time that the matrix products alone would take at the measured rate."""
        return case.flops / self.gemm_tflops / 1e9


def settle_libraries(device: torch.device) -> None:
    """Have the matrix library allocate its workspaces, for this thread and autograd's, before any counting."""
    a, b = (torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    (a @ b).sum().backward()
