"""One case of the second suite: every provider is checked against the truth, then the ones that passed are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from .failures import explain, release_memory
from .measure import Roofline, Spread, Stopwatch, interleave
from .op_cases import OpCase, Operands, bytes_moved, make_operands
from .op_measure import (
    CAPTURED_MIB,
    Held,
    HostClock,
    Pass,
    PassClock,
    Restorer,
    Step,
    bits,
    norms,
    number_of_copies,
    passes_by_graphs,
    passes_by_launches,
    passes_that_wait,
    values_of,
    weigh_step,
)
from .providers import Provider
from .reference import FLOOR, exact_products, relative_l2

PASSES = ("forward", "backward")
HOST_TOKENS = 512
HOST_PROVIDERS = ("ours", "ours_inplace", "ours_unfused", "eager", "liger")
ROWS_AT_ONCE = 2**27  # elements of a loss's rows that the truth is computed from at a time
WARM_UPS = 2
Errors = dict[str, float]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Timing:
    """One pass: microseconds, how they were taken, and the ratio to the first of ours taken the same way."""

    method: str
    us: Spread
    ratio: Spread | None = None


@dataclass
class OpResult:
    """One provider on one case. `failure` says why there are no times, or is empty."""

    provider: Provider
    failure: str = ""
    errors: Errors = field(default_factory=dict)
    beyond_bound: list[str] = field(default_factory=list)
    writes_into: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)  # passes in which the host waits for the device
    held: Held | None = None
    passes: dict[str, Timing] = field(default_factory=dict)
    host: Timing | None = None
    not_captured: str = ""  # why a capture was tried and failed
    step: Step | None = None
    norms: list[float] = field(default_factory=list)


@dataclass
class OpCaseResult:
    """One case: accuracy bound, traffic of each pass, a result for each provider; `not_run` says why there is none."""

    case: OpCase
    bound: Errors = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    floor_us: dict[str, float] = field(default_factory=dict)
    results: list[OpResult] = field(default_factory=list)
    not_run: str = ""

    def set_floor(self, roofline: Roofline) -> None:
        """The time that each pass's traffic or products would take at the measured rates, whichever is longer."""
        for name, moved in self.bytes.items():
            self.floor_us[name] = max(
                moved / roofline.copy_gbs / 1e3, self.case.flops(name) / roofline.gemm_tflops / 1e6
            )

    @property
    def violations(self) -> list[str]:
        """Why the gate refuses: ours failed, was further from the truth than allowed, or waited for the device."""
        found = []
        for result in self.results:
            if result.provider.ours:
                reasons = [result.failure] if result.failure else result.beyond_bound
                reasons = reasons + [f"the host waits for the device in the {name}" for name in result.waits]
                found += [f"{self.case.name}: {result.provider.name}: {reason}" for reason in reasons]
        return found


def run_case(
    case: OpCase,
    providers: Sequence[Provider],
    stopwatch: Stopwatch,
    device: torch.device,
    rounds: int,
    deadline: float,
    timed: bool = True,
) -> OpCaseResult:
    """Check every provider on `case`; when ours pass and `timed`, measure those that ran."""
    if any(provider.name == "compile" for provider in providers):
        torch.compiler.reset()  # each case compiles for its own shape: no limit on recompiles
    outcome = OpCaseResult(case)
    with side_stream(device):
        operands = make_operands(case, device)
        truth = evaluate(case, operands, torch.float32 if _is_short(case, device) else torch.float64)
        outcome.bound = error_bound(case, operands, truth)
        outcome.bytes = bytes_moved(case, sizes_of(operands))
        for provider in providers:
            if case.kind in provider.kinds:
                outcome.results.append(check(case, provider, operands, truth, outcome.bound))
        del truth
        if timed and not outcome.violations:
            time_passes(case, outcome.results, operands, device, stopwatch, rounds, deadline)
            if case.host:
                time_host(case, outcome.results, device, rounds)
    for result in outcome.results:
        result.step = None  # with it go the compiled code and the graphs
    return outcome


def sizes_of(operands: Operands) -> dict[str, int]:
    """Bytes of every input and, since a gradient has its output's size, of every output."""
    inputs = {name: x.nbytes for name, x in operands.tensors.items()}
    return inputs | {f"out{i}": x.nbytes for i, x in enumerate(operands.upstream)}


def _is_short(case: OpCase, device: torch.device) -> bool:
    """Whether fp32 is far more precise than the case's dtype, on a device where fp64 of large tensors is a burden."""
    return device.type == "cuda" and case.dtype.itemsize == 2


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """One stream for all that may be captured, since nothing on the default stream can be."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(_stream()):
        yield
    torch.cuda.synchronize()


def evaluate(case: OpCase, operands: Operands, dtype: torch.dtype) -> Values:
    """Outputs and gradients by plain torch in `dtype`; of a loss some rows at a time, so that they fit anywhere."""
    op = case.op
    rows = max(1, ROWS_AT_ONCE // max(1, case.width)) if op.is_loss else case.tokens
    parts: list[Values] = []
    with exact_products():
        for start in range(0, case.tokens, rows):
            chunk = slice(start, start + rows) if op.is_loss else slice(None)
            cast = {
                name: x.detach()[chunk]
                .to(dtype if x.is_floating_point() else x.dtype)
                .requires_grad_(name in op.leaves)
                for name, x in operands.tensors.items()
            }
            share = min(rows, case.tokens - start) / case.tokens
            upstream = [share * x.double() for x in operands.upstream] if op.is_loss else operands.upstream
            values = values_of(Step(op.plain, Operands(cast, upstream), op.leaves), op.leaves)
            parts.append({**values, "out0": share * values["out0"]} if op.is_loss else values)
    if len(parts) == 1:
        return parts[0]
    (gradient,) = parts[0].keys() - {"out0"}
    total = torch.stack([part["out0"] for part in parts]).sum(0, dtype=torch.float64)
    return {"out0": total, gradient: torch.cat([part.pop(gradient) for part in parts])}


def cast_to(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def compare(values: Values, truth: Values) -> Errors:
    """Relative L2 errors. Parts are short: large differences in fp64 need memory."""
    if values.keys() != truth.keys():
        raise ValueError(f"expected {', '.join(truth)}, got {', '.join(values)}")
    for name, right in truth.items():
        if values[name].shape != right.shape:
            raise ValueError(f"{name} is {tuple(values[name].shape)}, expected {tuple(right.shape)}")
    return {name: relative_l2(values[name].flatten(), x.flatten(), rows=2**26) for name, x in truth.items()}


def error_bound(case: OpCase, operands: Operands, truth: Values) -> Errors:
    """The gate: twice the error of plain torch in the case's dtype, plus a floor."""
    own = compare(evaluate(case, operands, case.dtype), truth)
    return {name: 2 * error + FLOOR[case.dtype] for name, error in own.items()}


def check(case: OpCase, provider: Provider, operands: Operands, truth: Values, bound: Errors) -> OpResult:
    """Build the provider, compare a step with the truth, weigh another; what it raises becomes its row."""
    result = OpResult(provider)
    before = bits(operands)
    try:
        result.step = _checked(case, result, operands, truth, bound)
    except Exception as error:
        result.failure = explain(error)
    if result.failure:
        release_memory(operands.upstream[0].device)
    result.writes_into = [name for name, total in bits(operands).items() if total != before[name]]
    Restorer(case, [operands], result.writes_into)()
    return result


def _checked(case: OpCase, result: OpResult, operands: Operands, truth: Values, bound: Errors) -> Step:
    step = Step(result.provider.build(case), operands, case.op.leaves)
    values = values_of(step, case.op.leaves)
    result.errors, result.norms = compare(values, truth), norms(list(values.values()))
    del values
    result.beyond_bound = [
        f"{name} error {error:.2e} exceeds {bound[name]:.2e}"
        for name, error in result.errors.items()
        if not error <= bound[name]
    ]
    if operands.upstream[0].is_cuda:
        result.held = weigh_step(step)
        result.waits = passes_that_wait(step)
    return step


def time_passes(
    case: OpCase,
    results: Sequence[OpResult],
    operands: Operands,
    device: torch.device,
    stopwatch: Stopwatch,
    rounds: int,
    deadline: float,
) -> None:
    """Fill in the times of the results whose provider works.

    By graphs where a pass can be captured. Where one of any provider cannot be, ours are timed the other way as well,
    so that ratios compare like with like.
    """
    copies = [operands]
    copies += [make_operands(case, device, seed) for seed in range(1, number_of_copies(operands))]
    # Each pass starts from what the case drew, whoever wrote into it before.
    restore = Restorer(case, copies, sorted({name for result in results for name in result.writes_into}))
    clock = PassClock(stopwatch)
    calls: dict[str, Pass] = {}
    for result in results:
        if result.step is not None:
            try:
                found = passes_of(case, result, copies, restore)
                passes = {f"{result.provider.name} {name}": x for name, x in found.items()}
                interleave(passes, clock, WARM_UPS)
                calls |= passes
            except Exception as error:
                result.failure = explain(error)
                release_memory(device)
    working = [result for result in results if result.step is not None and not result.failure]
    ours = next((result for result in working if result.provider.name == "ours"), None)
    if ours and len({call.method for call in calls.values()}) > 1 and calls["ours forward"].method == "graph":
        calls |= {f"base {name}": x for name, x in _launches(case, ours, copies, restore).items()}
    interleave(calls, clock, 1)
    times = interleave(calls, clock, rounds, deadline)
    for who in {key.split()[0] for key in calls}:
        times[f"{who} both"] = [a + b for a, b in zip(*(times[f"{who} {name}"] for name in PASSES), strict=True)]
    for result in working:
        method = calls[f"{result.provider.name} forward"].method
        same = next(
            (x for x in ("ours", "base") if f"{x} forward" in calls and calls[f"{x} forward"].method == method), ""
        )
        for name in (*PASSES, "both"):
            us = times[f"{result.provider.name} {name}"]
            result.passes[name] = timing(method, us, times.get(f"{same} {name}"))


def timing(method: str, us: list[float], ours: list[float] | None) -> Timing:
    ratio = None if ours is None else Spread.of([a / b for a, b in zip(us, ours, strict=True)])
    return Timing(method, Spread.of(us), ratio)


def _launches(case: OpCase, result: OpResult, copies: Sequence[Operands], restore: Restorer) -> dict[str, Pass]:
    assert result.step is not None
    return passes_by_launches([Step(result.step.function, x, case.op.leaves) for x in copies], restore)


def passes_of(case: OpCase, result: OpResult, copies: Sequence[Operands], restore: Restorer) -> dict[str, Pass]:
    """The provider's passes: captured if it never waits for the device and there is memory for it."""
    assert result.step is not None
    if result.held is None or result.waits or result.held.peak * len(copies) > CAPTURED_MIB:
        return _launches(case, result, copies, restore)
    steps = [Step(result.step.function, operands, case.op.leaves) for operands in copies]
    try:
        passes, values = passes_by_graphs(steps, restore)
    except Exception as error:
        result.not_captured = explain(error)
        return _launches(case, result, copies, restore)
    passes["backward"].prepare()
    passes["backward"].run()
    for was, now in zip(result.norms, norms(values), strict=True):
        if not abs(now - was) <= 0.01 * was:
            raise RuntimeError(f"the captured graph computes something else: a norm of {now:.4g} instead of {was:.4g}")
    return passes


def time_host(case: OpCase, results: Sequence[OpResult], device: torch.device, rounds: int) -> None:
    """Fill in the wall time of a forward and backward of a short sequence, called from Python."""
    operands = make_operands(replace(case, tokens=min(HOST_TOKENS, case.tokens)), device)
    working = [x for x in results if x.step is not None and not x.failure and x.provider.name in HOST_PROVIDERS]
    steps = {x.provider.name: Step(x.step.function, operands, case.op.leaves) for x in working if x.step}
    calls = {name: step.both for name, step in steps.items()}
    clock = HostClock(device)
    interleave(calls, clock, WARM_UPS)
    times = interleave(calls, clock, 3 * rounds)
    for result in working:
        us = times[result.provider.name]
        result.host = timing("wall clock", us, times.get("ours"))
