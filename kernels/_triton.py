"""Triton where it is installed, else a stand-in under which the op files still import; and how kernels are launched."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # what @triton.jit compiles is not Python to a type checker
    INSTALLED: bool
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # as with CPU builds of torch
        triton = SimpleNamespace(
            jit=lambda function: function, next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length()
        )
        tl = SimpleNamespace(constexpr=lambda value: value)
        INSTALLED = False
    else:
        INSTALLED = True

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LAUNCHERS = (  # what Triton 3.4 and 3.9 call the arguments of the object that launches on NVIDIA's GPUs
    ("gridX", "gridY", "gridZ", "stream", "function", "args"),
    (
        "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata", "launch_enter_hook",
        "launch_exit_hook", "args",
    ),
)  # fmt: skip


def use_triton(x: Tensor) -> bool:
    """Whether ops on x launch Triton kernels: on any accelerator, and on CPU tensors under the interpreter.

    The interpreter computes in numpy, which has no bf16; those tensors take the torch path.
    """
    if not x.is_cpu:
        return INSTALLED
    if _without_launches:
        return True
    return INSTALLED and INTERPRETED and x.element_size() in (2, 4) and x.dtype != torch.bfloat16


class Launch:
    """A launch of a @triton.jit function, complete but for its tensors.

        Launch(kernel, grid, *numbers, **constants)(*tensors)

    The kernel's parameters have this order: pointers (a tensor or None is given for each), numbers, constants; among
    the latter may be options like num_warps. The kernel runs on the device of the first tensor, current or not.

    Triton classifies each argument (type, 1, divisible by 16) each time, for longer than a small kernel runs. A launch
    that is kept, see `remembered`, leaves that to Triton for the first tensors of their dtypes, and hands the addresses
    of later ones straight to the kernel compiled for these. Left to Triton at all times are addresses that 16 does
    not divide, launches to which a profiler listens, and other GPUs than NVIDIA's.
    """

    __slots__ = ("_compiled", "constants", "grid", "kernel", "numbers")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: float, **constants: Any):
        self.kernel, self.grid, self.numbers, self.constants = kernel, (*grid, 1, 1)[:3], numbers, constants
        self._compiled: dict[tuple, tuple] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        first: Any = tensors[0]
        device = first.get_device()
        if device >= 0 and device != torch.accelerator.current_device_index():
            with torch.get_device_module(first.device).device(device):
                return self(*tensors)
        addresses, key, bits = [], [device], 0
        for x in tensors:
            if x is None:
                addresses.append(None)
                key.append(None)
                continue
            if x.get_device() != device:
                raise ValueError(f"The tensors of an op must share a device, got {first.device} and {x.device}.")
            address = x.data_ptr()
            addresses.append(address)
            key.append(x.dtype)
            bits |= address
        compiled = self._compiled.get(tuple(key))
        if compiled is None or bits % 16 or _hooked():
            return self._by_triton(tensors, tuple(key), aligned=not bits % 16)
        run, function, metadata, stream_of, rest = compiled
        run(*self.grid, stream_of(device), function, metadata, None, None, None, *addresses, *rest)

    def _by_triton(self, tensors: tuple[Tensor | None, ...], key: tuple, aligned: bool) -> None:
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
        stream_of = _stream_of()
        if stream_of is not None and aligned:
            constants = (self.constants[name] for name in self.kernel.arg_names if name in self.constants)
            rest = (*self.numbers, *constants)
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, stream_of, rest


_without_launches = False


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Within it ops on CPU tensors make the memory that they would make on a GPU, and launch nothing to fill it.

    For tensors without data, of which only the memory matters.
    """
    global _without_launches
    launch, before = Launch.__call__, _without_launches
    Launch.__call__, _without_launches = lambda self, *tensors: None, True
    try:
        yield
    finally:
        Launch.__call__, _without_launches = launch, before


remembered = functools.lru_cache(1024)  # of a function that makes launches: as many lengths of a batch are kept
kept_launch = functools.lru_cache(4096)(Launch)  # where what makes a launch is quickly told


@functools.cache
def _stream_of() -> Callable[[int], int] | None:
    """What gives the stream to launch on, from a device's index; None if launches are left to Triton.

    On AMD's GPUs what is compiled depends on a tensor's size as well.
    """
    driver: Any = None if INTERPRETED else triton.runtime.driver.active
    launcher = getattr(driver, "launcher_cls", None)
    if launcher is None or not launcher.__module__.startswith("triton.backends.nvidia"):
        return None
    taken = tuple(inspect.signature(launcher.__call__).parameters)[1:]
    return driver.get_current_stream if taken in LAUNCHERS else None


def _hooked() -> bool:
    """Whether a profiler listens to launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of hooks; in Triton 3.4 a hook or None
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


__all__ = [
    "INSTALLED", "INTERPRETED", "Launch", "kept_launch", "remembered", "tl", "triton", "use_triton", "without_launches",
]  # fmt: skip
