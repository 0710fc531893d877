"""How an op is measured: each pass separately, only its kernels by CUDA graphs; what it holds; what a call costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .measure import MIB, Stopwatch
from .op_cases import OpCase
from .operands import Operands, outputs_of
from .reference import Values

ROTATED_BYTES = 1024 * MIB  # of the operands that a timed pass goes through: many times an H100's L2
MOST_COPIES = 32
CALLS = 10  # in one measurement of the host's cost


class Step:
    """One provider's forward and backward on one set of operands."""

    def __init__(self, function: Callable, operands: Operands, case: OpCase):
        self.function, self.operands, self.case = function, operands, case
        self.leaves = [operands.tensors[name] for name in case.leaves]
        self.outputs: tuple[Tensor, ...] = ()

    def on(self, operands: Operands) -> Step:
        return Step(self.function, operands, self.case)

    def forward(self) -> None:
        self.outputs = ()  # frees the last graph first
        self.outputs = outputs_of(self.function(**self.operands.tensors))

    def backward(self) -> tuple[Tensor, ...]:
        """Return the leaves' gradients. The outputs stay, without what their backward had kept."""
        upstream = [g.to(x.dtype) for g, x in zip(self.operands.upstream, self.outputs, strict=True)]
        return torch.autograd.grad(self.outputs, self.leaves, upstream)

    def both(self) -> None:
        self.forward()
        self.backward()

    def values(self) -> Values:
        """Return the outputs and gradients of a step by name."""
        self.forward()
        gradients = self.backward()
        outputs = [x.detach() for x in self.outputs]
        self.outputs = ()
        return dict(zip(self.case.value_names(len(outputs)), [*outputs, *gradients], strict=True))


@dataclass(frozen=True)
class Pass:
    """A forward or a backward, ready to be timed: `prepare` runs untimed, then `run`, which makes `copies` calls."""

    method: str
    prepare: Callable[[], object]
    run: Callable[[], object]
    copies: int


class PassClock:
    """Times a `Pass`, in microseconds a call."""

    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch = stopwatch

    def time(self, call: Pass) -> float:
        call.prepare()
        if not self.stopwatch.is_cuda:
            return 1e3 * self.stopwatch.time(call.run) / call.copies
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stopwatch.flush.fill_(1)
        start.record()  # no wait for the flush: meanwhile the host launches, so that its latency is not measured
        call.run()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / call.copies


def passes_by_launches(steps: Sequence[Step], restore: Callable[[], object]) -> dict[str, Pass]:
    """Both passes, launched one call after the other: as called from Python, in a queue that is kept filled."""
    method = "events" if steps[0].leaves[0].is_cuda else "wall clock"

    def forward() -> None:
        for step in steps:
            step.forward()

    def backward() -> None:
        for step in steps:
            step.backward()

    def prepare() -> None:
        restore()
        forward()

    return {
        "forward": Pass(method, restore, forward, len(steps)),
        "backward": Pass(method, prepare, backward, len(steps)),
    }


def passes_by_graphs(steps: Sequence[Step], restore: Callable[[], object]) -> tuple[dict[str, Pass], list[Tensor]]:
    """Both passes captured, forward first and in one memory pool, and the first step's outputs and gradients.

    As in torch.cuda.make_graphed_callables, but for the current stream, on which everything here runs: a leaf's
    gradient belongs to the stream on which the leaf was first used, and a capture must not meet another stream.
    """
    for _ in range(2):
        for step in steps:
            step.both()
            step.outputs = ()
    stream = torch.cuda.current_stream()
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward, stream=stream):
        for step in steps:
            step.forward()
    values = list(steps[0].outputs)
    with torch.cuda.graph(backward, pool=forward.pool(), stream=stream):
        for step in steps:
            gradients = step.backward()
            if step is steps[0]:
                values += gradients
            del gradients  # its memory serves the next copy, as an optimiser's would the next step
    values = [x.detach() for x in values]
    for step in steps:
        step.outputs = ()

    def prepare() -> None:
        restore()
        forward.replay()

    passes = {
        "forward": Pass("graph", restore, forward.replay, len(steps)),
        "backward": Pass("graph", prepare, backward.replay, len(steps)),
    }
    return passes, values


def number_of_copies(operands: Operands) -> int:
    """How many sets of operands one timed pass goes through, so that none is still in a cache: one on a CPU."""
    tensors = operands.named().values()
    if not any(x.is_cuda for x in tensors):
        return 1
    return min(MOST_COPIES, -(-ROTATED_BYTES // sum(x.nbytes for x in tensors)))


@dataclass(frozen=True)
class Held:
    """MiB above the operands: the peak of a step, and what is held between its passes besides the outputs."""

    peak: float
    between: float


def weigh_step(step: Step) -> Held:
    """On a CUDA device, which counts memory."""
    step.outputs = ()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.forward()
    given = {x.untyped_storage().data_ptr() for x in step.operands.named().values()}
    outputs = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in step.outputs}
    own = sum(size for pointer, size in outputs.items() if pointer not in given)
    between = torch.cuda.memory_allocated() - before - own
    step.backward()
    peak = torch.cuda.max_memory_allocated() - before
    step.outputs = ()
    return Held(peak / MIB, max(0, between) / MIB)


def passes_that_wait(step: Step) -> list[str]:
    """The passes in which the host waits for the CUDA device, by torch.cuda.set_sync_debug_mode("error")."""
    waiting = []
    for name, call in (("forward", step.forward), ("backward", step.backward)):
        try:
            with waiting_is_an_error():
                call()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            waiting.append(name)
            if name == "forward":
                step.forward()  # for the backward
    step.outputs = ()
    return waiting


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class HostClock:
    """Wall time of a call in microseconds: `CALLS` of them in a row, then one wait for the device."""

    def __init__(self, device: torch.device):
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def time(self, call: Callable[[], object]) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        self.wait()
        return 1e6 * (time.perf_counter() - start) / CALLS
