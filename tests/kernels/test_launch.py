"""Launches that are kept: what goes to Triton, what straight to a compiled kernel, and with which arguments."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_losses import EVERY
from kernel_checks import PATHS, Place, assert_same, evaluate
from op_table import CASES

from liger_trainer.kernels import _gated, _triton
from liger_trainer.kernels._triton import Launch
from liger_trainer.kernels.swiglu import swiglu


class Memory:
    """As much of a tensor as a launch looks at."""

    def __init__(self, address: int, dtype=torch.float32, device: int = 0):
        self.address, self.dtype, self.device = address, dtype, torch.device("cuda", device)

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device.index


class Kernel:
    """Stands for a @triton.jit function: records the launches that Triton itself makes, and the others."""

    arg_names = ("x_ptr", "y_ptr", "n", "FIRST", "SECOND")

    def __init__(self):
        self.by_triton: list[tuple] = []
        self.direct: list[tuple] = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.by_triton.append((grid, args, constants))
            return SimpleNamespace(
                run=lambda *args: self.direct.append(args), function="function", packed_metadata="metadata"
            )

        return launch

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.by_triton), len(self.direct)


@pytest.fixture
def machine(monkeypatch):
    """One with two GPUs, the first of them current, and no profiler."""
    state = SimpleNamespace(current=0, used=[], hooks=SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None))

    class Use:
        def __init__(self, index: int):
            self.index = index

        def __enter__(self):
            state.was, state.current = state.current, self.index
            state.used.append(self.index)

        def __exit__(self, *_):
            state.current = state.was

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: state.current)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device=Use))
    monkeypatch.setattr(_triton, "_stream_of", lambda: lambda device: f"stream of {device}")
    monkeypatch.setattr(_triton, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=state.hooks)))
    return state


def test_the_second_launch_takes_addresses_to_the_compiled_kernel(machine):
    kernel = Kernel()
    launch: Any = Launch(kernel, (7,), 3, num_warps=4, SECOND="b", FIRST="a")
    x, y = Memory(32), Memory(64)
    launch(x, y)
    assert kernel.by_triton == [((7, 1, 1), (x, y, 3), {"num_warps": 4, "SECOND": "b", "FIRST": "a"})]
    launch(Memory(128), Memory(256))
    launch(Memory(128), Memory(512))
    given = (7, 1, 1, "stream of 0", "function", "metadata", None, None, None)
    assert kernel.direct == [(*given, 128, 256, 3, "a", "b"), (*given, 128, 512, 3, "a", "b")]
    assert kernel.counts == (1, 2)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param((Memory(32, torch.float16), Memory(64)), id="another dtype"),
        pytest.param((Memory(32), None), id="none"),
        pytest.param((Memory(32), Memory(72)), id="an address that 16 does not divide"),
        pytest.param((Memory(32, device=1), Memory(64, device=1)), id="another device"),
    ],
)
def test_what_differs_is_left_to_triton(machine, second):
    kernel = Kernel()
    launch: Any = Launch(kernel, (7,), 3)
    launch(Memory(32), Memory(64))
    launch(*second)
    assert kernel.counts == (2, 0)
    launch(Memory(96), Memory(64))
    assert kernel.counts == (2, 1)


def test_unaligned_addresses_are_never_kept(machine):
    kernel = Kernel()
    launch: Any = Launch(kernel, (7,), 3)
    for expected in ((1, 0), (2, 0)):
        launch(Memory(40), Memory(64))
        assert kernel.counts == expected
    launch(Memory(32), Memory(64))  # not by what served the others
    assert kernel.counts == (3, 0)


@pytest.mark.parametrize("chain", [True, False], ids=["a chain of hooks", "one hook"])
@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_hear_of_every_launch(machine, which, chain):
    kernel, hook = Kernel(), SimpleNamespace(calls=[]) if chain else None
    setattr(machine.hooks, which, hook)
    launch: Any = Launch(kernel, (7,), 3)
    for _ in range(2):
        launch(Memory(32), Memory(64))
    assert kernel.counts == (1, 1)
    setattr(machine.hooks, which, SimpleNamespace(calls=[print]) if chain else print)
    launch(Memory(32), Memory(64))
    assert kernel.counts == (2, 1)


def test_the_tensors_device_is_current_while_launching(machine):
    kernel = Kernel()
    seen: list[int] = []
    launch: Any = Launch(kernel, (7,), 3)
    for _ in range(2):
        launch(Memory(32, device=1), Memory(64, device=1))
        seen.append(machine.current)
    assert machine.used == [1, 1] and seen == [0, 0]
    assert kernel.direct[0][3] == "stream of 1"


def test_tensors_of_two_devices_are_an_error(machine):
    launch: Any = Launch(Kernel(), (7,), 3)
    with pytest.raises(ValueError, match="must share a device, got cuda:0 and cuda:1"):
        launch(Memory(32), Memory(64, device=1))


def test_the_interpreter_and_other_gpus_are_left_to_triton(machine, monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(_triton, "_stream_of", lambda: None)
    launch: Any = Launch(kernel, (7,), 3)
    for _ in range(3):
        launch(Memory(32), Memory(64))
    assert kernel.counts == (3, 0)


class Nvidia:
    def __call__(self, gridX, gridY, gridZ, stream, function, *args): ...


class Later:
    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args,
    ): ...  # fmt: skip


class Unknown:
    def __call__(self, grid, stream, function, *args): ...


@pytest.mark.parametrize("launcher", [Nvidia, Later, Unknown])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_who_launches(monkeypatch, launcher, vendor):
    monkeypatch.setattr(launcher, "__module__", f"triton.backends.{vendor}.driver")
    driver = SimpleNamespace(launcher_cls=launcher, get_current_stream="streams")
    runtime = SimpleNamespace(driver=SimpleNamespace(active=driver))
    monkeypatch.setattr(_triton, "triton", SimpleNamespace(runtime=runtime, __version__="4.0"))
    for interpreted in (False, True):
        monkeypatch.setattr(_triton, "INTERPRETED", interpreted)
        known = launcher is not Unknown and vendor == "nvidia" and not interpreted
        assert _triton._stream_of.__wrapped__() == ("streams" if known else None)


def test_the_installed_triton_is_known():
    """Or else every launch would take Triton's way, and the host as long as before."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    names = tuple(_triton.inspect.signature(driver.CudaLauncher.__call__).parameters)[1:]
    assert names in _triton.LAUNCHERS


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to("cuda", torch.bfloat16)


@pytest.mark.gpu
def test_straight_to_the_kernel_on_gpu():
    gate, up = random(512, 1024), random(512, 1024)
    swiglu(gate, up)
    launch = _gated._flat_launch(_gated._forward_flat_kernel, gate.numel(), "silu", _gated.FORWARD)
    assert _triton._stream_of() is not None and len(launch._compiled) == 1


@pytest.mark.gpu
def test_addresses_that_16_does_not_divide_on_gpu():
    rows = random(513, 1024).flatten()
    for first in (0, 1, 8, 3):
        gate, up = rows[first : first + 2**19].view(512, 1024), rows[: 2**19].view(512, 1024)
        torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up, rtol=2e-2, atol=1e-2)


def results(name: str, device: str) -> dict[str, torch.Tensor]:
    """Outputs and gradients of an op of the layers or of a fused loss."""
    if name in EVERY:
        loss = EVERY[name]
        return evaluate(loss.op, loss.inputs(40, 24, 301, device=device, ignored=0.3), loss.upstream(40))
    case = CASES[name]
    tensors = case.inputs(Place("triton", device, torch.float32))
    return evaluate(case.function, tensors, None, leaves=case.leaves_of(tensors), **case.options)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", [*EVERY, *(name for name, case in CASES.items() if name == case.op)])
def test_on_a_gpu_that_is_not_current_on_gpu(name):
    expected = results(name, "cuda:0")
    for _ in range(2):
        got = results(name, "cuda:1")
        assert {x.device.index for x in got.values()} == {1} and torch.cuda.current_device() == 0
        assert_same(
            {k: x.cpu() for k, x in got.items()}, {k: x.cpu() for k, x in expected.items()}, rtol=1e-2, atol=1e-2
        )


@pytest.mark.gpu
def test_on_another_stream_on_gpu():
    expected = results("rms_norm", "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = results("rms_norm", "cuda")
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(got, expected)


def test_these_tests_run_the_kernels():
    """Without a GPU by the interpreter, which must be chosen before Triton is imported."""
    assert ("triton" in PATHS) == _triton.INSTALLED
