"""Providers that take turns on one device, each in a process of its own: Liger-Kernel patches module globals.

A benchmark of this kind is a `Benchmark`, and its command line `main`. What a process does is a `Worker`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .measure import explain, interleave, release_memory
from .report import join_versions, provenance, table, write

FLOOR = 1e-3  # of the gate: relative error


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


class Provider:
    """The parent's end of a worker. `context`: of multiprocessing; by default each process imports for itself."""

    def __init__(self, worker_class: Callable[[str, bool], Any], name: str, tiny: bool, context: Any = None):
        context = context or multiprocessing.get_context("spawn")
        self.name, (self._connection, theirs) = name, context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, worker_class, name, tiny), daemon=True)
        self._process.start()
        theirs.close()  # or the end of the process would not be noticed

    def start(self, method: str, *arguments: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended: `result` says so
            self._connection.send((method, arguments))

    def result(self, seconds: float | None = None) -> tuple[Any, str | None]:
        """Wait for it; a process that takes longer than `seconds`, or has ended, is a failure."""
        if not self._connection.poll(seconds):
            self._process.kill()
            return None, f"took more than {seconds:.0f} s"
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            return None, f"its process ended with exit code {self._process.exitcode}"

    def call(self, method: str, *arguments: Any) -> tuple[Any, str | None]:
        self.start(method, *arguments)
        return self.result()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended
            self._connection.send(None)
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()


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


def say(shape: str, what: str) -> None:
    print(f"{time.strftime('%X')} {shape}: {what}", file=sys.stderr, flush=True)


class Turns:
    """The clock of a round: a provider's turn is a few steps, which its result collects."""

    def __init__(self, providers: Mapping[str, Provider]):
        self.providers = providers

    def time(self, result: Result) -> None:
        if result.failure is not None:
            return
        measured, result.failure = self.providers[result.provider].call("measure", result.case)
        if measured is not None:
            result.ms = [*(result.ms or []), *measured.pop("ms")]
            for name, value in measured.items():
                setattr(result, name, value)


def _mib(what: str) -> Column:
    return lambda result, ours: "" if getattr(result, what) is None else f"{getattr(result, what):.0f}"


def _of_ours(what: str) -> Column:
    def share(result: Result, ours: Result | None) -> str:
        value, base = getattr(result, what), getattr(ours, what, None)
        return f"{value / base:.2f}" if value and base else ""

    return share


def _error(name: str) -> Column:
    return lambda result, ours: f"{(result.errors or {})[name]:.1e}"


# A cell of a table, from a result and ours of the same case.
Column = Callable[[Result, Result | None], str]
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
        name: of the files it writes. `title` and `what` head the table, `what` with the header's values in braces.
        providers: their titles by name; ours begin with "ours".
        reference: the provider that ours may err twice as much as. It runs whether asked for or not.
        packages: whose versions the table gives.
        batch: what the header says of the batch, tiny or not.
        columns: of the table, heads in COLUMNS.
        cases_of: the cases of a shape, all with one model.
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
    rounds: int
    seconds: float
    cases_of: Callable[[str], Sequence[Any]] = lambda shape: [shape]

    def run(self, shape: str, providers: dict[str, Provider], rounds: int, deadline: float) -> list[Result]:
        """Time only what passes the gate."""
        results = self.check(shape, providers)
        if not self.beyond_bound(results):
            for _, group in _by_case(results):
                interleave({result.provider: result for result in group}, Turns(providers), rounds, deadline)
        return results

    def check(self, shape: str, providers: dict[str, Provider]) -> list[Result]:
        """Build a shape in all providers, and compare a step of each with the reference in fp32."""
        results = self._build(shape, providers)
        say(shape, "built")
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "truth.pt")
            _, failure = providers[self.reference].call("truth", shape, path)
            if failure is not None:
                raise RuntimeError(f"{self.reference} could not compute the truth: {failure}")
            say(shape, "truth in fp32 computed")
            _pass_gate([result for result in results if result.failure is None], providers, path)
        say(shape, "held against the truth")
        return results

    def _build(self, shape: str, providers: dict[str, Provider]) -> list[Result]:
        for provider in providers.values():  # at once: each waits for imports, not for the device
            provider.start("build", shape)
        built = {name: provider.result() for name, provider in providers.items()}
        if len({value for value, failure in built.values() if failure is None}) > 1:
            raise RuntimeError(f"The providers' weights differ: {built}")
        return [Result(case, name, failure=built[name][1]) for case in self.cases_of(shape) for name in providers]

    def beyond_bound(self, results: Sequence[Result]) -> list[str]:
        """Return what is wrong with ours: failures, and errors beyond twice those of the reference plus FLOOR."""
        wrong = []
        allowed = {r.case: r.errors for r in results if r.provider == self.reference and r.errors}
        for result in (r for r in results if r.provider.startswith("ours")):
            who = f"{result.case}, {self.providers[result.provider]}"
            if result.failure:
                wrong.append(f"{who}: {result.failure}")
            for name, error in (result.errors or {}).items():
                bound = 2 * allowed[result.case][name] + FLOOR if result.case in allowed else 0.0
                if not error <= bound:
                    wrong.append(f"{who}: {name} off by {error:.1e}, over {bound:.1e}")
        return wrong

    def markdown(self, header: dict[str, Any], results: Sequence[Result], wrong: Sequence[str]) -> str:
        where = f"{header['device']}, {header['date']}, commit {header['commit']}, {join_versions(header['packages'])}."
        lines = [f"# {self.title}", "", f"{where} {self.what.format(**header)}", ""]
        if wrong:
            return "\n".join([*lines, "No times: the gate refused.", "", *(f"- {reason}" for reason in wrong), ""])
        for case, group in _by_case(results):
            ordered = sorted(group, key=lambda r: list(self.providers).index(r.provider))
            ours = next((r for r in ordered if r.provider == "ours"), None)
            rows = [self._cells(result, ours) for result in ordered]
            lines += [f"## {case}", "", *table(["", *self.columns], rows), ""]
        return "\n".join(lines)

    def _cells(self, result: Result, ours: Result | None) -> list[str]:
        if result.failure or result.median is None or result.errors is None:
            cells = [result.failure or "not run: out of time"] + [""] * (len(self.columns) - 1)
        else:
            cells = [COLUMNS[head](result, ours) for head in self.columns]
        return [self.providers[result.provider], *cells]


def _pass_gate(results: Sequence[Result], providers: dict[str, Provider], path: str) -> None:
    """Those that compile do so together; the others, which need more memory, one after another."""
    compiling = [result for result in results if result.provider.endswith("compiled")]
    for result in compiling:
        providers[result.provider].start("gate", result.case, path)
    for result in compiling:
        result.errors, result.failure = providers[result.provider].result()
    for result in (r for r in results if r not in compiling):
        result.errors, result.failure = providers[result.provider].call("gate", result.case, path)


def _by_case(results: Sequence[Result]) -> Iterator[tuple[Any, Iterator[Result]]]:
    return itertools.groupby(results, key=lambda r: r.case)


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Measure, write after each shape, and print; 1 if the gate refused."""
    options = _options(benchmark, arguments)
    deadline = time.monotonic() + options.seconds
    chosen = [name for name in benchmark.providers if name in (*options.providers, benchmark.reference)]
    providers = {name: Provider(benchmark.worker, name, options.tiny) for name in chosen}
    results: list[Result] = []
    text = ""
    try:
        for shape in options.shapes:
            results += benchmark.run(shape, providers, options.rounds, deadline)
            text = _report(benchmark, options, results)
    finally:
        for provider in providers.values():
            provider.close()
    print(text)
    return 1 if benchmark.beyond_bound(results) else 0


def _report(benchmark: Benchmark, options: argparse.Namespace, results: Sequence[Result]) -> str:
    """Write what is measured so far, so that a run that is stopped keeps it. Return the table."""
    header = {**provenance(benchmark.packages), **benchmark.batch(options.tiny), "rounds": options.rounds}
    wrong = benchmark.beyond_bound(results)
    text = benchmark.markdown(header, results, wrong)
    if options.output:
        rows = [] if wrong else [asdict(result) for result in results]
        write(options.output / benchmark.name, {"header": header, "gate": wrong, "results": rows}, text)
    return text


def _options(benchmark: Benchmark, arguments: Sequence[str] | None) -> argparse.Namespace:
    files = f"{benchmark.name}.json and {benchmark.name}.md"
    parser = argparse.ArgumentParser(description=benchmark.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=f"folder for {files}")
    for name in ("shapes", "providers"):
        choices = list(getattr(benchmark, name))
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=choices)
    parser.add_argument("--rounds", type=int, default=benchmark.rounds)
    parser.add_argument("--seconds", type=float, default=benchmark.seconds, help="start no further rounds after these")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    return parser.parse_args(arguments)
