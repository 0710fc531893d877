"""Workers in processes: Liger-Kernel and Unsloth patch module globals, so each provider has a process to itself."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from .measure import explain, release_memory


def serve(connection: Any, worker_class: Callable[[str, bool], Any], provider: str, tiny: bool) -> None:
    """Answer (method, arguments) by (result, None) or (None, why it failed), until None comes."""
    worker = worker_class(provider, tiny)
    while (request := connection.recv()) is not None:
        method, arguments = request
        try:
            answer = getattr(worker, method)(*arguments), None
        except Exception as error:  # a peer that fails must not stop the others
            traceback.print_exc()
            answer = None, explain(error)
        if answer[1] is not None:  # only now, since the error's frames held their tensors
            release_memory()
        connection.send(answer)


class Process:
    """The parent's end of a worker. `context`: of multiprocessing; by default each process imports for itself."""

    def __init__(self, worker_class: Callable[[str, bool], Any], name: str, tiny: bool, context: Any = None):
        context = context or multiprocessing.get_context("spawn")
        self.name, (self.connection, theirs) = name, context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, worker_class, name, tiny), daemon=True)
        self._process.start()
        theirs.close()  # or the end of the process would not be noticed

    def start(self, method: str, *arguments: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended: `result` says so
            self.connection.send((method, arguments))

    def result(self, seconds: float | None = None) -> tuple[Any, str | None]:
        """Wait for it; a process that takes longer than `seconds`, or has ended, is a failure."""
        if not self.connection.poll(seconds):
            self._process.kill()
            return None, f"took more than {seconds:.0f} s"
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            return None, f"its process ended with exit code {self._process.exitcode}"

    def call(self, method: str, *arguments: Any) -> tuple[Any, str | None]:
        self.start(method, *arguments)
        return self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended
            self.connection.send(None)
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()


def _use_device() -> None:
    """Fail where the device cannot be used in this process."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


@functools.cache
def context_for(*modules: str) -> Any:
    """Return the context whose processes start fastest.

    Processes of a fork server have imported `modules` already. If they cannot use the device, for example because an
    import has touched it, each process imports for itself.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that an import may ask for the device
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    process = context.Process(target=_use_device, daemon=True)
    process.start()
    process.join()
    if process.exitcode == 0:
        return context
    print("The device cannot be used after a fork: each process imports for itself.", flush=True)
    return multiprocessing.get_context("spawn")


def say(shape: str, what: str) -> None:
    print(f"{time.strftime('%X')} {shape}: {what}", file=sys.stderr, flush=True)
