"""Triton, or a stand-in with which the op files import if it isn't installed; and how kernels are launched."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # a type checker can't read what @triton.jit compiles as Python
    INSTALLED: bool
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # CPU builds of torch have none
        triton = SimpleNamespace(
            jit=lambda function: function, next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length()
        )
        tl = SimpleNamespace(constexpr=lambda value: value)
        INSTALLED = False
    else:
        INSTALLED = True

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LAUNCHERS = (  # argument names of the object that launches on NVIDIA's GPUs, in Triton 3.4 and 3.9
    ("gridX", "gridY", "gridZ", "stream", "function", "args"),
    (
        "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata", "launch_enter_hook",
        "launch_exit_hook", "args",
    ),
)  # fmt: skip


def use_triton(x: Tensor) -> bool:
    """Return whether ops on x launch Triton kernels: on any accelerator, and on CPU tensors under the interpreter.

    The interpreter computes in numpy, which has no bf16, so bf16 tensors take the torch path.
    """
    if not x.is_cpu:
        return INSTALLED
    if _without_launches:
        return True
    return INSTALLED and INTERPRETED and x.element_size() in (2, 4) and x.dtype != torch.bfloat16


class Launch:
    """A launch of a @triton.jit function that lacks only its tensors.

        Launch(kernel, grid, *numbers, **constants)(*tensors)

    The kernel's parameters must have this order: pointers (pass a tensor or None for each), numbers, constants.
    Constants may include options like num_warps. The kernel runs on the device of the first tensor, current or not.

    Triton classifies each argument (type, 1, divisible by 16) at every launch, which takes longer than a small kernel
    runs. A launch that is kept (see `remembered`) lets Triton do so once for each combination of dtypes. Later, it
    passes the addresses straight to the compiled kernel. It always leaves the launch to Triton if an address is not
    divisible by 16, if a profiler listens to launches, and on GPUs that aren't NVIDIA's.
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
    """Make ops on CPU tensors allocate the memory that they allocate on a GPU, without launching anything.

    Use it for tensors without data, if only the memory matters.
    """
    global _without_launches
    launch, before = Launch.__call__, _without_launches
    Launch.__call__, _without_launches = lambda self, *tensors: None, True
    try:
        yield
    finally:
        Launch.__call__, _without_launches = launch, before


remembered = functools.lru_cache(1024)  # for a function that makes launches: keeps this many lengths of a batch
kept_launch = functools.lru_cache(4096)(Launch)  # for launches whose arguments are quick to compute


@functools.cache
def _stream_of() -> Callable[[int], int] | None:
    """Return the function that gives the stream from a device's index, or None if launches are left to Triton.

    On AMD's GPUs the compiled kernel also depends on a tensor's size.
    """
    driver: Any = None if INTERPRETED else triton.runtime.driver.active
    launcher = getattr(driver, "launcher_cls", None)
    if launcher is None or not launcher.__module__.startswith("triton.backends.nvidia"):
        return None
    taken = tuple(inspect.signature(launcher.__call__).parameters)[1:]
    return driver.get_current_stream if taken in LAUNCHERS else None


def _hooked() -> bool:
    """Return whether a profiler listens to launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of hooks; in Triton 3.4 a hook or None
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


__all__ = [
    "INSTALLED", "INTERPRETED", "Launch", "kept_launch", "remembered", "tl", "triton", "use_triton", "without_launches",
]  # fmt: skip
