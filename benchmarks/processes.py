"""Providers that take turns on one device, each in a process of its own: Liger-Kernel patches module globals.

A benchmark of this kind is a `Benchmark`, and its command line `main`.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .report import git_commit


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


def build_all(shape: str, providers: Sequence[Provider], cases: Sequence[Any]) -> list[Result]:
    """Have all providers make the same model; a result for each case and provider. RuntimeError if weights differ."""
    for provider in providers:  # at once: each waits for imports, not for the device
        provider.start("build", shape)
    built = {provider.name: provider.result() for provider in providers}
    if len({value for value, failure in built.values() if failure is None}) > 1:
        raise RuntimeError(f"The providers' weights differ: {built}")
    return [Result(case, p.name, failure=built[p.name][1]) for case in cases for p in providers]


def compute_truth(provider: Provider, shape: str, path: str) -> None:
    """Have a provider write what the plain model gives in fp32. RuntimeError if it cannot."""
    _, failure = provider.call("truth", shape, path)
    if failure is not None:
        raise RuntimeError(f"{provider.name} could not compute the truth: {failure}")


def say(shape: str, what: str) -> None:
    print(f"{time.strftime('%X')} {shape}: {what}", file=sys.stderr, flush=True)


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


@dataclass(frozen=True)
class Benchmark:
    """What `main` runs."""

    name: str  # of the files it writes
    doc: str | None
    worker: Callable[[str, bool], Any]
    shapes: Sequence[str]
    providers: Sequence[str]
    packages: Sequence[str]  # whose versions are told
    batch: Callable[[bool], dict[str, Any]]  # what the header says of the batch, tiny or not
    run_shape: Callable[[str, Sequence[Provider], int, float], list[Result]]
    beyond_bound: Callable[[Sequence[Result]], list[str]]
    markdown: Callable[[dict[str, Any], Sequence[Result], Sequence[str]], str]
    rounds: int
    seconds: float
    held_against: frozenset[str] = frozenset()  # providers that run whether asked for or not


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if the gate refused."""
    options = _options(benchmark, arguments)
    deadline = time.monotonic() + options.seconds
    chosen = {*options.providers, *benchmark.held_against}
    providers = [Provider(benchmark.worker, name, options.tiny) for name in benchmark.providers if name in chosen]
    try:
        runs = (benchmark.run_shape(shape, providers, options.rounds, deadline) for shape in options.shapes)
        results = [result for run in runs for result in run]
    finally:
        for provider in providers:
            provider.close()
    header, wrong = _header(benchmark, options), benchmark.beyond_bound(results)
    text = benchmark.markdown(header, results, wrong)
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        rows = [] if wrong else [asdict(result) for result in results]
        data = json.dumps({"header": header, "gate": wrong, "results": rows}, indent=1)
        (options.output / f"{benchmark.name}.json").write_text(data + "\n")
        (options.output / f"{benchmark.name}.md").write_text(text)
    return 1 if wrong else 0


def _options(benchmark: Benchmark, arguments: Sequence[str] | None) -> argparse.Namespace:
    files = f"{benchmark.name}.json and {benchmark.name}.md"
    parser = argparse.ArgumentParser(description=benchmark.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=f"folder for {files}")
    for name in ("shapes", "providers"):
        known = list(getattr(benchmark, name))
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=known)
    parser.add_argument("--rounds", type=int, default=benchmark.rounds)
    parser.add_argument("--seconds", type=float, default=benchmark.seconds, help="start no further rounds after these")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    return parser.parse_args(arguments)


def _header(benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": git_commit(),
        "packages": {name: _version(name) for name in benchmark.packages},
        **benchmark.batch(options.tiny),
        "rounds": options.rounds,
    }


def opening(title: str, header: Mapping[str, Any], what: str, wrong: Sequence[str]) -> list[str]:
    """The first lines of the Markdown: where it was measured and how; the gate's reasons where it refused."""
    packages = ", ".join(f"{name} {number}" for name, number in header["packages"].items())
    lines = [
        f"# {title}",
        "",
        f"{header['device']}, {header['date']}, commit {header['commit']}, {packages}. {what}",
        "",
    ]
    if wrong:
        lines += ["No times: the gate refused.", "", *(f"- {reason}" for reason in wrong), ""]
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
