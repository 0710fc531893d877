"""Providers that take turns on one device, each in a process of its own: Liger-Kernel patches module globals."""

import multiprocessing
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def serve(connection: Any, worker_class: Callable[[str, bool], Any], provider: str, tiny: bool) -> None:
    """Answer (method, arguments) by ("done", result) or ("failed", why) until None comes."""
    worker = worker_class(provider, tiny)
    while (request := connection.recv()) is not None:
        method, arguments = request
        try:
            connection.send(("done", getattr(worker, method)(*arguments)))
        except Exception as error:  # a peer that fails must not stop the others
            traceback.print_exc()
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            connection.send(("failed", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"))


class Provider:
    """The parent's end of a worker."""

    def __init__(self, worker_class: Callable[[str, bool], Any], name: str, tiny: bool):
        context = multiprocessing.get_context("spawn")
        self.name, (self._connection, theirs) = name, context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, worker_class, name, tiny), daemon=True)
        self._process.start()

    def start(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))

    def result(self) -> tuple[Any, str | None]:
        """(result, None), or (None, why it failed)."""
        status, value = self._connection.recv()
        return (value, None) if status == "done" else (None, value)

    def call(self, method: str, *arguments: Any) -> tuple[Any, str | None]:
        self.start(method, *arguments)
        return self.result()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(timeout=20)


@dataclass
class Result:
    """What one provider did in one case."""

    case: Any
    provider: str
    errors: dict[str, float] | None = None
    ms: list[float] | None = None
    peak_mib: float | None = None
    loss: float | None = None
    failure: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.ms) if self.ms else None


def take_turns(group: list[Result], providers: dict[str, Provider], rounds: int, deadline: float) -> None:
    """Rounds of measurements, in each of which every provider has its turn; the first is done in any case."""
    shuffle = random.Random(0).shuffle
    for done in range(rounds):
        if done and time.monotonic() > deadline:
            return
        shuffle(group)
        for result in (r for r in group if r.failure is None):
            measured, result.failure = providers[result.provider].call("measure", result.case)
            if measured is not None:
                result.ms = [*(result.ms or []), *measured["ms"]]
                result.peak_mib, result.loss = measured["peak_mib"], measured["loss"]


def versions(packages: Sequence[str]) -> dict[str, str]:
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
