"""Fused losses: the accuracy gate, then time and memory beside the peers in one interleaved run.

    python -m benchmarks.run                                  # both tables, on a GPU, into docs/results
    python -m benchmarks.run --cases 'ce-*' --providers liger,trl --rounds 15
    python -m benchmarks.run --smoke                          # tiny shapes, CPU, a few seconds

Every provider's loss, dX and dW are compared with plain torch in fp32 (fp64 on a CPU) on the same inputs.
Ours must be within twice the error of plain torch in the case's own dtype plus a floor, else the exit code is
1 and no time is printed or written. Exit code 2: an option that names nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch

from . import report
from .cases import CASES, SMOKE_CASES, Case, Inputs, make_inputs
from .measure import (
    Memory,
    Roofline,
    Spread,
    Stopwatch,
    forward_backward,
    interleave,
    settle_libraries,
    take_gradients,
    weigh,
)
from .providers import PROVIDERS, LossFunction, Provider
from .reference import Errors, Gradients, error_bound, errors, evaluate

WARM_UPS = 3  # the accuracy check and the memory measurement are the first two
SMOKE_PROVIDERS = ("ours", "ours_fp32", "eager", "trl")


@dataclass
class Result:
    """One provider on one case. `failure` says why there are no times, or is empty."""

    provider: Provider
    failure: str = ""
    errors: Errors | None = None
    beyond_bound: list[str] = field(default_factory=list)
    memory: Memory | None = None
    ms: Spread | None = None
    ratio: Spread | None = None  # to the first of ours, paired by round
    loss_of: LossFunction | None = None

    def step(self, case: Case, x: Inputs) -> Callable[[], object]:
        assert self.loss_of is not None
        return partial(forward_backward, case, self.loss_of, x)


@dataclass
class CaseResult:
    """One case: accuracy bound, GEMM floor, a result for each provider; `not_run` says why there is none."""

    case: Case
    bound: Errors | None = None
    floor_ms: float = 0.0
    results: list[Result] = field(default_factory=list)
    not_run: str = ""

    @property
    def violations(self) -> list[str]:
        """Why the gate refuses: ours failed, or was further from the truth than allowed."""
        return [
            f"{self.case.name}: {result.provider.name}: {reason}"
            for result in self.results
            if result.provider.ours
            for reason in ([result.failure] if result.failure else result.beyond_bound)
        ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device("cpu" if args.smoke else "cuda")
    torch.manual_seed(0)
    deadline = time.monotonic() + args.time_limit
    stopwatch = Stopwatch(device)
    roofline = Roofline.measure(stopwatch, device)
    settle_libraries(device)
    header = report.describe(device, roofline, sys.argv[1:] if argv is None else list(argv), args.rounds)

    case_results: list[CaseResult] = []
    violations: list[str] = []
    for case in args.cases:
        if time.monotonic() > deadline:
            result = CaseResult(case, not_run=f"time limit of {args.time_limit:g} s reached")
        else:
            started = time.monotonic()
            result = run_case(case, args.providers, stopwatch, device, args.rounds, deadline, not violations)
            print(f"{case.name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        result.floor_ms = roofline.floor_ms(case)
        case_results.append(result)
        violations += result.violations
        if args.output:  # after every case: a run that is cut off has not been for nothing
            report.write(args.output, header, case_results, violations, smoke=args.smoke)
    print(report.markdown(header, case_results, violations))
    return 1 if violations else 0


def run_case(
    case: Case,
    providers: Sequence[Provider],
    stopwatch: Stopwatch,
    device: torch.device,
    rounds: int,
    deadline: float,
    timed: bool = True,
) -> CaseResult:
    """Check every provider on `case`; when ours pass and `timed`, measure those that ran."""
    torch.compiler.reset()  # each case compiles for its own shape: no limit on recompiles, no dynamic shapes
    x = make_inputs(case, device)
    truth = evaluate(case, x, torch.float32 if device.type == "cuda" else torch.float64)
    bound = error_bound(case, x, truth)
    outcome = CaseResult(case, bound)
    for provider in providers:
        if case.kind in provider.kinds:
            outcome.results.append(check(case, provider, x, truth, bound))
    if timed and not outcome.violations:
        del truth
        time_providers(case, outcome.results, x, stopwatch, rounds, deadline)
    for result in outcome.results:
        result.loss_of = None  # with it go the compiled code and the workspaces it holds
    return outcome


def check(case: Case, provider: Provider, x: Inputs, truth: Gradients, bound: Errors) -> Result:
    """Build the provider, compare a step with the truth and weigh another; what it raises becomes its row."""
    result = Result(provider)
    before = torch.cuda.memory_allocated() if x.hidden.is_cuda else 0
    inputs = x.fingerprint()
    try:
        loss_of = provider.build(case)
        result.errors = errors(take_gradients(case, loss_of, x), truth)
        result.beyond_bound = result.errors.exceeding(bound)
        result.memory = weigh(case, loss_of, x, before)
        result.loss_of = loss_of
    except Exception as error:
        result.failure = explain(error)
    x.clear_grads()
    if x.fingerprint() != inputs:
        result.failure, result.loss_of = "wrote into its inputs", None
        restore(x, case)
    if result.failure:
        release_memory(x.hidden.device)
    return result


@torch.no_grad()
def restore(x: Inputs, case: Case) -> None:
    for tensor, original in zip(x, make_inputs(case, x.hidden.device), strict=True):
        if tensor is not None and original is not None:
            tensor.copy_(original)


def time_providers(
    case: Case, results: list[Result], x: Inputs, stopwatch: Stopwatch, rounds: int, deadline: float
) -> None:
    """Fill in times, and ratios to the first of ours, of the results whose provider works."""
    working = {result.provider.name: result for result in results if result.loss_of is not None}
    for name, result in list(working.items()):
        try:
            interleave({name: result.step(case, x)}, stopwatch, WARM_UPS - 2)
        except Exception as error:
            result.failure = explain(error)
            del working[name]
            x.clear_grads()
    calls = {name: result.step(case, x) for name, result in working.items()}
    times = interleave(calls, stopwatch, rounds, deadline)
    base = next((times[name] for name, result in working.items() if result.provider.ours), None)
    for name, result in working.items():
        result.ms = Spread.of(times[name])
        if base:
            result.ratio = Spread.of([mine / ours for mine, ours in zip(times[name], base, strict=True)])
    x.clear_grads()


def explain(error: Exception) -> str:
    """One line for the table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, ImportError):
        return f"not available: {error}"
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0][:160] if message else ''}"


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--cases", help="comma-separated names or globs; default: those of the two tables")
    add("--providers", help="comma-separated names or globs; ours is always run")
    add("--rounds", type=int, help="interleaved rounds (default 10; 3 with --smoke)")
    add("--grad-output", type=float, help="upstream gradient of every case (default: the case's, 1)")
    add("--time-limit", type=float, default=float("inf"), help="seconds after which no case starts")
    add("--output", type=Path, help="folder of the JSON and Markdown (default docs/results)")
    add("--smoke", action="store_true", help="tiny shapes on a CPU; writes only if --output is given")
    add("--list", action="store_true", help="print the cases and providers, and stop")
    args = parser.parse_args(argv)
    if args.list:
        print(report.listing(SMOKE_CASES if args.smoke else CASES, PROVIDERS))
        parser.exit()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device; --smoke runs small shapes on a CPU")
    args.rounds = args.rounds or (3 if args.smoke else 10)
    args.output = args.output or (None if args.smoke else Path("docs/results"))
    args.cases = choose(SMOKE_CASES if args.smoke else CASES, args.cases, parser)
    if args.grad_output is not None:
        args.cases = [replace(case, grad_output=args.grad_output) for case in args.cases]
    args.providers = choose_providers(args, parser)
    return args


def choose(cases: Sequence[Case], patterns: str | None, parser: argparse.ArgumentParser) -> list[Case]:
    if patterns is None:
        return [case for case in cases if case.default]
    names = matching(patterns, [case.name for case in cases], "case", parser)
    return [case for case in cases if case.name in names]


def choose_providers(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Provider]:
    """The providers asked for, with all they can do, and `ours`; else the default ones and kinds."""
    if args.providers is None:
        if args.smoke:
            return [provider for provider in PROVIDERS if provider.name in SMOKE_PROVIDERS]
        return [replace(provider, kinds=provider.default_kinds) for provider in PROVIDERS]
    names = {"ours", *matching(args.providers, [provider.name for provider in PROVIDERS], "provider", parser)}
    return [provider for provider in PROVIDERS if provider.name in names]


def matching(patterns: str, names: Sequence[str], what: str, parser: argparse.ArgumentParser) -> set[str]:
    """Names that match any of the comma-separated globs; a glob that matches none is an error."""
    chosen: set[str] = set()
    for pattern in patterns.split(","):
        found = {name for name in names if fnmatchcase(name, pattern.strip())}
        if not found:
            known = ", ".join(dict.fromkeys(names))
            parser.error(f"no {what} is called {pattern.strip()!r}; there are: {known}")
        chosen |= found
    return chosen


if __name__ == "__main__":
    sys.exit(main())
