"""The accuracy gate, then time and memory beside the peers in one interleaved run: fused losses, or layers' ops.

    python -m benchmarks.run                                  # the fused losses, on a GPU, into docs/results
    python -m benchmarks.run --cases 'ce-*' --providers liger,trl --rounds 15
    python -m benchmarks.run --suite ops                      # the ops of the layers, forward and backward apart
    python -m benchmarks.run --smoke                          # tiny shapes, CPU, a few seconds
    python -m benchmarks.run --cases '*-tokens-*,*-vocab-*' --name sweeps && \\
        python -m benchmarks.run --plots docs/results/sweeps-<device>.json

Every provider's outputs and gradients are compared with plain torch in high precision on the same inputs.
Ours must be within twice the error of plain torch in the case's own dtype plus a floor, else the exit code is
1 and no time is printed or written. Exit code 2: an option that names nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import op_cases, op_providers, op_report, op_run, plots, report
from .cases import CASES, SMOKE_CASES, Case, Inputs, make_inputs
from .failures import explain, release_memory
from .measure import (
    Roofline,
    Spread,
    Stopwatch,
    interleave,
    settle_libraries,
    take_gradients,
    weigh,
)
from .providers import PROVIDERS, Provider
from .reference import Errors, Gradients, error_bound, errors, evaluate
from .results import CaseResult, Result

WARM_UPS = 3  # the accuracy check and the memory measurement are the first two
SMOKE_PROVIDERS = ("ours", "ours_fp32", "eager", "trl")
OP_SMOKE = ("ours", "ours_inplace", "ours_unfused", "eager")


class Suite(NamedTuple):
    """What `main` needs to know of a suite. `report` has `markdown` and `case_data`."""

    name: str
    cases: Sequence[Any]
    smoke_cases: Sequence[Any]
    providers: Sequence[Provider]
    smoke_providers: Sequence[str]
    run_case: Callable[..., Any]
    result: type
    report: ModuleType


def losses() -> Suite:
    return Suite("losses", CASES, SMOKE_CASES, PROVIDERS, SMOKE_PROVIDERS, run_case, CaseResult, report)


def ops() -> Suite:
    cases, smoke = op_cases.CASES, op_cases.SMOKE_CASES
    return Suite("ops", cases, smoke, op_providers.PROVIDERS, OP_SMOKE, op_run.run_case, op_run.OpCaseResult, op_report)


SUITES = {"losses": losses, "ops": ops}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.plots:
        print("\n".join(str(path) for path in plots.draw(args.plots, args.output or args.plots.parent)))
        return 0
    suite: Suite = args.suite
    device = torch.device("cpu" if args.smoke else "cuda")
    torch.manual_seed(0)
    deadline = time.monotonic() + args.time_limit
    stopwatch = Stopwatch(device)
    roofline = Roofline.measure(stopwatch, device)
    settle_libraries(device)
    header = report.describe(device, roofline, sys.argv[1:] if argv is None else list(argv), args.rounds)
    name = f"{args.name or suite.name}-{'smoke' if args.smoke else report.slug(header.device)}"

    results: list[Any] = []
    violations: list[str] = []
    for case in args.cases:
        if time.monotonic() > deadline:
            result = suite.result(case, not_run=f"time limit of {args.time_limit:g} s reached")
        else:
            started = time.monotonic()
            result = suite.run_case(case, args.providers, stopwatch, device, args.rounds, deadline, not violations)
            print(f"{case.name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        result.set_floor(roofline)
        results.append(result)
        violations += result.violations
        if args.output:  # after every case: a run that is cut off has not been for nothing
            data = [suite.report.case_data(x, timed=not violations) for x in results]
            text = suite.report.markdown(header, results, violations)
            report.write(args.output / name, header, violations, data, text)
    print(suite.report.markdown(header, results, violations))
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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--suite", choices=SUITES, default="losses", help="losses: fused losses (default); ops: the ops of the layers")
    add("--cases", help="comma-separated names or globs; default: those of the suite's tables")
    add("--providers", help="comma-separated names or globs; ours is always run")
    add("--rounds", type=int, help="interleaved rounds (default 10; 3 with --smoke)")
    add("--grad-output", type=float, help="upstream gradient of every loss (default: the case's, 1)")
    add("--time-limit", type=float, default=float("inf"), help="seconds after which no case starts")
    add("--output", type=Path, help="folder of the JSON and Markdown (default docs/results)")
    add("--name", help="first part of their names, before the device's (default: the suite's)")
    add("--smoke", action="store_true", help="tiny shapes on a CPU; writes only if --output is given")
    add("--plots", type=Path, metavar="JSON", help="measure nothing: draw this file's *-tokens-* and *-vocab-* cases")
    add("--list", action="store_true", help="print the cases and providers, and stop")
    args = parser.parse_args(argv)
    if args.plots:
        return args
    args.suite = suite = SUITES[args.suite]()
    cases = suite.smoke_cases if args.smoke else suite.cases
    if args.list:
        print(report.listing(cases, suite.providers))
        parser.exit()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device; --smoke runs small shapes on a CPU")
    args.rounds = args.rounds or (3 if args.smoke else 10)
    args.output = args.output or (None if args.smoke else Path("docs/results"))
    args.cases = choose(cases, args.cases, parser)
    if args.grad_output is not None:
        args.cases = [replace(case, grad_output=args.grad_output) for case in args.cases]
    args.providers = choose_providers(args, parser)
    return args


def choose(cases: Sequence[Any], patterns: str | None, parser: argparse.ArgumentParser) -> list[Any]:
    if patterns is None:
        return [case for case in cases if case.default]
    names = matching(patterns, [case.name for case in cases], "case", parser)
    return [case for case in cases if case.name in names]


def choose_providers(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Provider]:
    """The providers asked for, with all they can do, and `ours`; else the default ones and kinds."""
    providers = args.suite.providers
    if args.providers is None:
        if args.smoke:
            return [provider for provider in providers if provider.name in args.suite.smoke_providers]
        return [replace(provider, kinds=provider.default_kinds) for provider in providers]
    names = {"ours", *matching(args.providers, [provider.name for provider in providers], "provider", parser)}
    return [provider for provider in providers if provider.name in names]


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
