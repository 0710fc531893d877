"""Providers that take turns on one device, each in a process of its own: Liger-Kernel patches module globals.

A benchmark of this kind is a `Benchmark`, and its command line `main`.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .report import git_commit

FLOOR = 1e-3  # of the gate: relative error


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
    loss_mib: float | None = None  # of the loss alone, where that is measured

    @property
    def median(self) -> float | None:
        return statistics.median(self.ms) if self.ms else None


def build_all(shape: str, providers: Iterable[Provider], cases: Sequence[Any]) -> list[Result]:
    """Have all providers make the same model; a result for each case and provider. RuntimeError if weights differ."""
    for provider in providers:  # at once: each waits for imports, not for the device
        provider.start("build", shape)
    built = {provider.name: provider.result() for provider in providers}
    if len({value for value, failure in built.values() if failure is None}) > 1:
        raise RuntimeError(f"The providers' weights differ: {built}")
    return [Result(case, p.name, failure=built[p.name][1]) for case in cases for p in providers]


@contextlib.contextmanager
def truth_of(provider: Provider, shape: str) -> Iterator[str]:
    """The file of what the plain model gives in fp32, written by a provider. RuntimeError if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "truth.pt")
        _, failure = provider.call("truth", shape, path)
        if failure is not None:
            raise RuntimeError(f"{provider.name} could not compute the truth: {failure}")
        yield path


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
                result.loss_mib = measured.get("loss_mib")


def _mib(what: str) -> "Column":
    return lambda result, ours: "" if getattr(result, what) is None else f"{getattr(result, what):.0f}"


def _of_ours(what: str) -> "Column":
    def share(result: Result, ours: Result | None) -> str:
        theirs, own = getattr(result, what), getattr(ours, what, None)
        return f"{theirs / own:.2f}" if theirs and own else ""

    return share


def _error(name: str) -> "Column":
    return lambda result, ours: f"{(result.errors or {})[name]:.1e}"


Column = Callable[[Result, Result | None], str]
"""What a table says of a result, beside ours of the same case."""
COLUMNS: dict[str, Column] = {
    "ms": lambda result, ours: f"{result.median:.1f}",
    "MiB": _mib("peak_mib"),
    "loss, MiB": _mib("loss_mib"),
    "of ours: time": _of_ours("median"),
    "memory": _of_ours("peak_mib"),
    "of ours: loss": _of_ours("loss_mib"),
    "loss error": _error("loss"),
    "norm error": _error("gradient norm"),
    "gradient error": _error("gradients"),
}


@dataclass(frozen=True)
class Benchmark:
    """What `main` runs.

    Attributes:
        name: of the files it writes; `title` and `what` are of the table, `what` with the header's values in braces.
        providers: their titles by name; ours begin with "ours".
        reference: the provider that ours may err twice as much as. It runs whether asked for or not.
        packages: whose versions are told.
        batch: what the header says of the batch, tiny or not.
        columns: of the table, heads in COLUMNS.
        check: builds a shape in all providers and has each held against the truth.
    """

    name: str
    title: str
    what: str
    doc: str | None
    worker: Callable[[str, bool], Any]
    shapes: Sequence[str]
    providers: Mapping[str, str]
    reference: str
    packages: Sequence[str]
    batch: Callable[[bool], dict[str, Any]]
    columns: Sequence[str]
    check: Callable[[str, dict[str, Provider]], list[Result]]
    rounds: int
    seconds: float

    def run(self, shape: str, providers: dict[str, Provider], rounds: int, deadline: float) -> list[Result]:
        """Times only of what passes the gate."""
        results = self.check(shape, providers)
        if not self.beyond_bound(results):
            for _, group in _by_case(results):
                take_turns(list(group), providers, rounds, deadline)
        return results

    def beyond_bound(self, results: Sequence[Result]) -> list[str]:
        """What is wrong with ours: failures, and errors beyond twice those of the reference plus FLOOR."""
        wrong = []
        known = {r.case: r.errors for r in results if r.provider == self.reference and r.errors}
        for result in (r for r in results if r.provider.startswith("ours")):
            who = f"{result.case}, {self.providers[result.provider]}"
            if result.failure:
                wrong.append(f"{who}: {result.failure}")
            for name, off in (result.errors or {}).items():
                bound = 2 * known[result.case][name] + FLOOR if result.case in known else 0.0
                if not off <= bound:
                    wrong.append(f"{who}: {name} off by {off:.1e}, over {bound:.1e}")
        return wrong

    def markdown(self, header: dict[str, Any], results: Sequence[Result], wrong: Sequence[str]) -> str:
        packages = ", ".join(f"{name} {number}" for name, number in header["packages"].items())
        where = f"{header['device']}, {header['date']}, commit {header['commit']}, {packages}."
        lines = [f"# {self.title}", "", f"{where} {self.what.format(**header)}", ""]
        if wrong:
            return "\n".join([*lines, "No times: the gate refused.", "", *(f"- {reason}" for reason in wrong), ""])
        for case, group in _by_case(results):
            lines += [f"## {case}", "", f"| | {' | '.join(self.columns)} |", "|---" * (len(self.columns) + 1) + "|"]
            rows = sorted(group, key=lambda r: list(self.providers).index(r.provider))
            ours = next((r for r in rows if r.provider == "ours"), None)
            lines += [*(self._row(row, ours) for row in rows), ""]
        return "\n".join(lines)

    def _row(self, result: Result, ours: Result | None) -> str:
        if result.failure or result.median is None or result.errors is None:
            cells = [result.failure or "not run: out of time"] + [""] * (len(self.columns) - 1)
        else:
            cells = [COLUMNS[head](result, ours) for head in self.columns]
        return f"| {self.providers[result.provider]} | {' | '.join(cells)} |"


def _by_case(results: Sequence[Result]) -> Iterator[tuple[Any, Iterator[Result]]]:
    return itertools.groupby(results, key=lambda r: r.case)


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if the gate refused."""
    options = _options(benchmark, arguments)
    deadline = time.monotonic() + options.seconds
    chosen = [name for name in benchmark.providers if name in (*options.providers, benchmark.reference)]
    providers = {name: Provider(benchmark.worker, name, options.tiny) for name in chosen}
    try:
        runs = (benchmark.run(shape, providers, options.rounds, deadline) for shape in options.shapes)
        results = [result for run in runs for result in run]
    finally:
        for provider in providers.values():
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
