"""The accuracy gate, then time and memory of ours and of peers in one interleaved run: fused losses, or layers' ops.

    python -m benchmarks.run                                  # the fused losses, on a GPU, into docs/results
    python -m benchmarks.run --cases 'ce-*' --providers liger,trl --rounds 15
    python -m benchmarks.run --suite ops                      # the ops of the layers, forward and backward apart
    python -m benchmarks.run --smoke                          # tiny shapes, CPU, a few seconds
    python -m benchmarks.run --cases '*-tokens-*,*-vocab-*' --name sweeps

Every provider's outputs and gradients are compared with plain torch in high precision on the same inputs.
Ours must be within twice the error of plain torch in the case's own dtype plus a floor, else the exit code is
1 and no time is printed or written. Exit code 2: an option that names nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import report
from .losses import LossSuite
from .measure import Roofline, Stopwatch, settle_libraries
from .ops import OpSuite
from .report import matching
from .suite import CaseResult, Provider, Session, Suite, json_of

SUITES: dict[str, type[Suite]] = {suite.name: suite for suite in (LossSuite, OpSuite)}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    suite: Suite = args.suite
    deadline = time.monotonic() + args.time_limit
    device = torch.device("cpu" if args.smoke else "cuda")
    torch.manual_seed(0)
    session = Session(device, Stopwatch(device), args.rounds, deadline)
    roofline = Roofline.measure(session.stopwatch, device)
    settle_libraries(device)
    header = report.describe(device, roofline, sys.argv[1:] if argv is None else list(argv), args.rounds)
    name = f"{args.name or suite.name}-{'smoke' if args.smoke else report.slug(header['device'])}"

    results: list[CaseResult] = []
    violations: list[str] = []
    for case in args.cases:
        if time.monotonic() > deadline:
            outcome = CaseResult(case, not_run=f"time limit of {args.time_limit:g} s reached")
        else:
            started = time.monotonic()
            outcome = suite.run_case(case, args.providers, session, timed=not violations)
            print(f"{case.name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        outcome.floors = suite.floors(outcome, roofline)
        results.append(outcome)
        violations += outcome.violations
        if args.output:  # after every case, so that a run that is cut off leaves its results
            data = json_of(header, results, violations)
            report.write(args.output / name, data, suite.markdown(header, results, violations))
    print(suite.markdown(header, results, violations))
    return 1 if violations else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--suite", choices=SUITES, default="losses", help="losses: fused losses (default); ops: the ops of the layers")
    add("--cases", help="comma-separated names or globs; default: the suite's tables")
    add("--providers", help="comma-separated names or globs; ours is always run")
    add("--rounds", type=int, help="interleaved rounds (default 10; 3 with --smoke)")
    add("--grad-output", type=float, help="upstream gradient of every loss (default: the case's, 1)")
    add("--time-limit", type=float, default=float("inf"), help="seconds after which no case starts")
    add("--output", type=Path, help="folder of the JSON and Markdown (default docs/results)")
    add("--name", help="first part of their names, before the device's (default: the suite's)")
    add("--smoke", action="store_true", help="tiny shapes on a CPU; writes only if --output is given")
    add("--list", action="store_true", help="print the cases and providers, and stop")
    args = parser.parse_args(argv)
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


if __name__ == "__main__":
    sys.exit(main())
