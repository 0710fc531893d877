"""The harness of the losses and the ops: every provider is checked against the truth before any is timed.

`run_case` draws a case's operands, checks every provider, and has the suite measure them when ours pass the gate.
A suite says what to measure and what its tables show; `LossSuite` and `OpSuite` are the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from .measure import Roofline, Spread, Stopwatch, explain, interleave, release_memory
from .operands import Operands, Restorer, bits
from .reference import Errors, Values, compare, error_bound, evaluate
from .report import head, row, table


@dataclass(frozen=True)
class Provider:
    """Who is measured: `build(case)` imports the peer and returns the function to time.

    `kinds` are the kinds of case it can do, `default_kinds` those it does unless `--providers` names it. `ours` marks
    what the accuracy gate holds to its bound.
    """

    name: str
    title: str
    build: Callable[[Any], Callable[..., Any]]
    kinds: tuple[str, ...]
    default_kinds: tuple[str, ...]
    ours: bool = False


@dataclass(frozen=True)
class Timing:
    """One pass: its times, how they were taken, and the ratio to the first of ours taken the same way."""

    method: str
    times: Spread
    ratio: Spread | None = None

    @staticmethod
    def of(method: str, times: list[float], ours: list[float] | None) -> Timing:
        return Timing(method, Spread.of(times), None if ours is None else Spread.of_ratios(times, ours))


@dataclass
class Result:
    """One provider on one case. `failure` says why there are no times, or is empty."""

    provider: Provider
    failure: str = ""
    errors: Errors = field(default_factory=dict)
    beyond_bound: list[str] = field(default_factory=list)
    writes_into: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)  # passes in which the host waits for the device
    memory: Any = None  # a dataclass of MiB, where the device counts memory
    passes: dict[str, Timing] = field(default_factory=dict)
    host: Timing | None = None
    not_captured: str = ""  # why a CUDA graph could not be captured
    step: Any = None
    norms: list[float] = field(default_factory=list)


@dataclass
class CaseResult:
    """One case: accuracy bound, floor of each pass, a result for each provider; `not_run` says why there is none."""

    case: Any
    bound: Errors = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)  # that each pass must move
    floors: dict[str, float] = field(default_factory=dict)  # in the unit of the suite's times
    results: list[Result] = field(default_factory=list)
    not_run: str = ""

    @property
    def by_name(self) -> dict[str, Result]:
        return {result.provider.name: result for result in self.results}

    @property
    def violations(self) -> list[str]:
        """Why the gate refuses: ours failed, was further from the truth than allowed, or waited for the device."""
        reasons = [
            (result, reason)
            for result in self.results
            if result.provider.ours
            for reason in (
                *([result.failure] if result.failure else result.beyond_bound),
                *(f"the host waits for the device in the {name}" for name in result.waits),
            )
        ]
        return [f"{self.case.name}: {result.provider.name}: {reason}" for result, reason in reasons]


@dataclass(frozen=True)
class Session:
    """One run of the benchmark: the device, and how long to measure. `deadline` in `time.monotonic` seconds."""

    device: torch.device
    stopwatch: Stopwatch
    rounds: int
    deadline: float = float("inf")


class Suite(ABC):
    """Cases, providers, how a case is measured, and what the report says of it."""

    name: ClassVar[str]
    title: ClassVar[str]
    method: ClassVar[str]  # the report's explanation
    cases: Sequence[Any]
    smoke_cases: Sequence[Any]
    providers: Sequence[Provider]
    smoke_providers: Sequence[str]
    may_write: ClassVar[bool]  # whether an op may write into its operands: they are put back for the next one
    step: ClassVar[Callable[..., Any]]  # (function, operands, case) -> with values()
    time_heads: ClassVar[Sequence[str]]  # of the columns of `time_cells`

    def run_case(self, case: Any, providers: Sequence[Provider], session: Session, timed: bool = True) -> CaseResult:
        """Check every provider on `case`; when ours pass and `timed`, measure those that ran."""
        torch.compiler.reset()  # each case compiles for its own shape: no limit on recompiles, no dynamic shapes
        outcome = CaseResult(case)
        with self.stream(session.device):
            operands = case.make_operands(session.device)
            truth = evaluate(case, operands, _high_precision(case, session.device))
            outcome.bound = error_bound(case, operands, truth)
            outcome.bytes = self.bytes_moved(case, operands)
            for provider in providers:
                if case.kind in provider.kinds:
                    outcome.results.append(self.check(case, provider, operands, truth, outcome.bound))
            del truth
            if timed and not outcome.violations:
                self.measure(outcome, operands, session)
        for result in outcome.results:
            result.step = None  # with it go the compiled code, the workspaces it holds and the graphs
        return outcome

    def check(self, case: Any, provider: Provider, operands: Operands, truth: Values, bound: Errors) -> Result:
        """Build the provider, compare a step with the truth and weigh another; what it raises becomes its row."""
        result = Result(provider)
        before = bits(operands)
        allocated = torch.cuda.memory_allocated() if operands.is_cuda else 0
        try:
            step = self.step(provider.build(case), operands, case)
            self._compare(result, step.values(), truth, bound)
            if operands.is_cuda:
                self.weigh(result, step, allocated)
            result.step = step
        except Exception as error:  # a peer that fails must not stop the others
            result.failure = explain(error)
        result.writes_into = [name for name, total in bits(operands).items() if total != before[name]]
        if result.writes_into and not self.may_write:
            result.failure, result.step = "wrote into its inputs", None
        if result.failure:
            release_memory()
        Restorer(case, [operands], result.writes_into)()
        return result

    def _compare(self, result: Result, values: Values, truth: Values, bound: Errors) -> None:
        result.errors = compare(values, truth)
        result.norms = norms(values.values())
        result.beyond_bound = [
            f"{name} error {error:.2e} exceeds {bound[name]:.2e}"
            for name, error in result.errors.items()
            if not error <= bound[name]  # a NaN is refused too
        ]

    def stream(self, device: torch.device) -> AbstractContextManager[None]:
        """Return the context in which a case runs."""
        return nullcontext()

    def bytes_moved(self, case: Any, operands: Operands) -> dict[str, int]:
        return {}

    @abstractmethod
    def floors(self, outcome: CaseResult, roofline: Roofline) -> dict[str, float]:
        """Return the least time that each pass can take at the measured limits."""

    @abstractmethod
    def weigh(self, result: Result, step: Any, allocated: int) -> None:
        """Fill in `result.memory`, on a CUDA device; `allocated` bytes were there before the provider was built."""

    @abstractmethod
    def measure(self, outcome: CaseResult, operands: Operands, session: Session) -> None:
        """Fill in the times of the results whose provider works."""

    # The report. When the gate has refused, it holds no time.

    @abstractmethod
    def summary(self, cases: Sequence[CaseResult]) -> list[str]:
        """Return the sections before the single cases."""

    @abstractmethod
    def sentence(self, outcome: CaseResult) -> str: ...

    @abstractmethod
    def time_cells(self, result: Result, outcome: CaseResult) -> list[str]: ...

    def notes(self, outcome: CaseResult) -> list[str]:
        """Return the lines below the table of a case."""
        return []

    def markdown(self, header: dict[str, Any], cases: Sequence[CaseResult], violations: Sequence[str]) -> str:
        if violations:
            reasons = [f"- {reason}" for reason in violations]
            summary = ["\n".join(["**The accuracy gate refused: no times.**", "", *reasons])]
        else:
            summary = self.summary(cases)
        details = [self._details(outcome, timed=not violations) for outcome in cases]
        sections = [f"# {self.title}", head(header), self.method, *summary, *details]
        return "\n\n".join(section for section in sections if section) + "\n"

    def _details(self, outcome: CaseResult, timed: bool) -> str:
        lines = [f"### {outcome.case.name}", ""]
        if outcome.not_run:
            return "\n".join([*lines, self.sentence(outcome), "", f"Not run: {outcome.not_run}."])
        times = self.time_heads if timed else ()
        rows = []
        for result in outcome.results:
            cells = [result.failure]
            if not result.failure:
                cells = self.time_cells(result, outcome) if timed else []
                cells += _error_cells(result.errors, outcome.bound)
            rows.append([result.provider.title, *cells])
        bound = row(["bound for ours", *[""] * len(times), *_error_cells(outcome.bound, outcome.bound)])
        heads = ["provider", *times, *(f"{name} error" for name in outcome.bound)]
        lines += [self.sentence(outcome), "", *table(heads, rows), bound]
        return "\n".join([*lines, *self.notes(outcome)])


def json_of(header: dict[str, Any], cases: Sequence[CaseResult], violations: Sequence[str]) -> dict[str, Any]:
    """Return what the JSON file holds; no times and no memory where the gate has refused."""
    left_out = ("provider", "step", "norms", *(("passes", "host", "memory") if violations else ()))
    rows = []
    for outcome in cases:
        results = [{"name": x.provider.name, **asdict(x)} for x in outcome.results]
        fields = {name: x for name, x in vars(outcome.case).items() if isinstance(x, (str, int, float, tuple))}
        rows.append({
            **fields, "kind": outcome.case.kind, "dtype": str(outcome.case.dtype).removeprefix("torch."),
            "bytes": outcome.bytes, "floors": outcome.floors, "not_run": outcome.not_run, "bound": outcome.bound,
            "providers": [{key: x for key, x in result.items() if key not in left_out} for result in results],
        })  # fmt: skip
    return {"header": header, "gate": list(violations), "cases": rows}


def _high_precision(case: Any, device: torch.device) -> torch.dtype:
    """fp64, but fp32 where that is far more precise than the case's dtype and fp64 of large tensors is a burden."""
    return torch.float32 if device.type == "cuda" and case.dtype.itemsize == 2 else torch.float64


def norms(values: Iterable[torch.Tensor]) -> list[float]:
    return [float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64)) for x in values]


def time_calls(
    results: Iterable[Result], calls_of: Callable[[Result], Mapping[str, Any]], clock: Any, warm_ups: int
) -> dict[str, Any]:
    """Return the calls of all providers that survive their warm-up; the others get their failure."""
    calls: dict[str, Any] = {}
    for result in results:
        if result.step is None:
            continue
        try:
            passes = calls_of(result)
            interleave(passes, clock, warm_ups)
            calls |= passes
        except Exception as error:
            result.failure, result.step = explain(error), None
            release_memory()
    return calls


def _error_cells(errors: Errors, bound: Errors) -> list[str]:
    return [f"{errors[name]:.1e}{'' if errors[name] <= bound[name] else ' !'}" for name in bound]
