"""Triton, or a stand-in with which the op files import if it isn't installed; and how kernels are launched."""

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # a type checker can't read what @triton.jit compiles as Python
    INSTALLED: bool
    triton: Any = ...
    tl: Any = ...
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
OFF = os.environ.get("LIGER_TRAINER_TRITON") == "0"  # on GPUs too, every op runs in plain torch
STRICT = os.environ.get("LIGER_TRAINER_STRICT") == "1"  # an error in place of plain torch where Triton fails
LAUNCHERS = (  # argument names of the object that launches on NVIDIA's GPUs, in Triton 3.4 and 3.9
    ("gridX", "gridY", "gridZ", "stream", "function", "args"),
    (
        "gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata", "launch_metadata", "launch_enter_hook",
        "launch_exit_hook", "args",
    ),
)  # fmt: skip

SLOW_LAUNCHES = "each launch takes the host longer"  # what follows of an unknown launcher


def use_triton(x: Tensor) -> bool:
    """Return whether ops on x launch Triton kernels: on accelerators where it works, and under the interpreter.

    The kernels compute in fp32, so fp64 tensors take the torch path. The interpreter computes in numpy, which has no
    bf16: so do bf16 tensors on a CPU.

    Raises:
        LaunchError: Triton does not work on x's GPU, and LIGER_TRAINER_STRICT is 1.
    """
    # An accelerator of any maker: Triton has backends for several, and `works_on` tries.
    if not x.is_cpu:
        return INSTALLED and x.dtype != torch.float64 and works_on(x.device)
    # A measurement of memory: pretend that kernels run, so that ops take the memory that they take on a GPU.
    if _without_launches:
        return True
    return INSTALLED and INTERPRETED and x.element_size() in (2, 4) and x.dtype != torch.bfloat16


class LaunchError(RuntimeError):
    """Triton could not compile a kernel. The message says which, where and why."""


@triton.jit
def _probe_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1.0)


@functools.cache
def works_on(device: torch.device) -> bool:
    """Return whether Triton runs a small kernel on this GPU. If not, say so once.

    It needs a C compiler, which slim containers lack, and a GPU and a driver that it knows.
    """
    if OFF:
        return False
    x = torch.zeros(16, device=device)
    try:
        with torch.get_device_module(device).device(device):
            _probe_kernel[(1,)](x, BLOCK=16)
        if x.sum().item() == 16:  # each of 16 zeros became 1
            return True
        reason = f"a kernel that adds 1 to 0 returned {x.tolist()}"
    except torch.OutOfMemoryError:  # says nothing about Triton, and the caller handles it
        raise
    except Exception as error:  # of many kinds: a missing compiler, a driver that cannot load the kernel, ...
        reason = _in_short(error)
    fall_back_to_torch(f"Triton does not work on {_name_of(device)} ({reason}). Every op runs in plain torch there")
    return False


def fall_back_to_torch(what: str, cause: Exception | None = None) -> None:
    """Warn that torch computes instead, or raise under STRICT."""
    if STRICT:
        raise LaunchError(f"{what}, but LIGER_TRAINER_STRICT is 1.") from cause
    warnings.warn(f"{what}: slower, and in more memory. LIGER_TRAINER_STRICT=1 makes this an error.", stacklevel=4)


def _name_of(device: torch.device) -> str:
    return f"{torch.get_device_module(device).get_device_name(device)} with Triton {triton.__version__}"


def _in_short(error: Exception) -> str:
    """Return the last line: a compiler's error quotes the kernel's source before it."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


class Launch:
    """A launch of a @triton.jit function that lacks only its tensors.

        Launch(kernel, grid, *numbers, **constants)(*tensors)

    The kernel's parameters must have this order: pointers (pass a tensor or None for each), numbers, constants.
    Constants may include options like num_warps. The kernel runs on the device of the first tensor, current or not.

    Triton classifies each argument (type, 1, divisible by 16) at every launch, which takes longer than a small kernel
    runs. A launch that is kept (see `remembered`) lets Triton do so once for each combination of dtypes. Later, it
    passes the addresses straight to the compiled kernel. It always leaves the launch to Triton if an address is not
    divisible by 16, if a profiler listens to launches, and on GPUs that aren't NVIDIA's.

    It returns False, having launched nothing, if Triton cannot compile the kernel and `has_twin` says that the caller
    can compute in torch instead. Without a twin that is a LaunchError.
    """

    __slots__ = ("_compiled", "constants", "grid", "kernel", "numbers")  # read in each call, and quicker than a dict

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: float | tuple[float, ...], **constants: Any):
        self.kernel, self.grid, self.numbers, self.constants = kernel, (*grid, 1, 1)[:3], numbers, constants
        self._compiled: dict[tuple, tuple] = {}

    def __call__(self, *tensors: Tensor | None, has_twin: bool = False) -> bool:
        first: Any = tensors[0]
        device = first.get_device()
        # -1: a CPU. Triton launches on the current device, whatever device the pointers are of.
        if device >= 0 and device != torch.accelerator.current_device_index():
            with torch.get_device_module(first.device).device(device):
                return self(*tensors, has_twin=has_twin)
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
            bits |= address  # its low four bits are 0 if those of every address are
        compiled = self._compiled.get(tuple(key))
        if compiled is None or bits % 16 or _hooked():
            return self._by_triton(tensors, tuple(key), not bits % 16, has_twin)
        # The three None below are metadata for launch hooks, and the hooks on entering and leaving: nobody listens,
        # as `_hooked` said.
        run, function, metadata, stream_of, rest = compiled
        run(*self.grid, stream_of(device), function, metadata, None, None, None, *addresses, *rest)
        return True

    def _by_triton(self, tensors: tuple[Tensor | None, ...], key: tuple, aligned: bool, has_twin: bool) -> bool:
        variant = (id(self.kernel), *self.constants.values())  # what is compiled: one failure stands for all sizes
        first: Any = tensors[0]
        if variant in _not_compiled and has_twin:
            return False
        try:
            compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
        except Exception as error:
            # Only where Triton could not make the kernel. A wrong argument, or a bug, is not what torch should hide.
            of_compiler = isinstance(error, triton.errors.TritonError) or "PassManager" in str(error)
            if INTERPRETED or not of_compiler:
                raise
            what = f"Triton cannot compile {self.kernel.__name__} for {_name_of(first.device)} ({_in_short(error)})"
            if not has_twin:
                raise LaunchError(f"{what}. LIGER_TRAINER_TRITON=0 runs every op in plain torch.") from error
            fall_back_to_torch(f"{what}. Plain torch takes its place", error)
            _not_compiled.add(variant)
            return False
        stream_of = _stream_of()
        # A kernel that was compiled for unaligned addresses is right for aligned ones, but slow: wait for those.
        if stream_of is not None and aligned:
            # The launcher takes constants too, and skips them. Options such as num_warps are no arguments.
            constants = (self.constants[name] for name in self.kernel.arg_names if name in self.constants)
            rest = (*self.numbers, *constants)
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, stream_of, rest
        return True


_not_compiled: set[tuple] = set()


_without_launches = False


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Make ops on CPU tensors allocate the memory that they allocate on a GPU, without launching anything.

    Use it for tensors without data, if only the memory matters.
    """
    global _without_launches
    launch, before = Launch.__call__, _without_launches
    Launch.__call__, _without_launches = lambda self, *tensors, **options: True, True
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
    unknown = _why_unknown(launcher)
    if unknown:
        warnings.warn(f"{unknown}: {SLOW_LAUNCHES}.", stacklevel=4)
    return None if unknown else driver.get_current_stream


def _why_unknown(launcher: Any) -> str:
    """Say so if what launches kernels on NVIDIA's GPUs does not take the arguments that `Launch` hands it."""
    taken = tuple(inspect.signature(launcher.__call__).parameters)[1:]  # without self
    return "" if taken in LAUNCHERS else f"Triton {triton.__version__} launches kernels in a way that we do not know"


def unknown_launcher() -> str:
    """Say so if Triton launches kernels on this machine's GPU in a way that we do not know; empty if it does not."""
    if not INSTALLED or INTERPRETED or torch.version.cuda is None or not torch.cuda.is_available():
        return ""
    launcher = getattr(triton.runtime.driver.active, "launcher_cls", None)
    return "" if launcher is None else _why_unknown(launcher)


def _hooked() -> bool:
    """Return whether a profiler listens to launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of hooks; in Triton 3.4 a hook or None
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


__all__ = [
    "INSTALLED", "INTERPRETED", "Launch", "LaunchError", "kept_launch", "remembered", "tl", "triton", "use_triton",
    "without_launches",
]  # fmt: skip
