"""The suite of the ops on plain tensors: forward and backward separately, only the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch

from . import op_cases, op_providers
from .measure import Roofline, explain, interleave
from .op_cases import OpCase, bytes_moved
from .operands import Operands, Restorer
from .passes import (
    HostClock,
    Pass,
    PassClock,
    Step,
    number_of_copies,
    passes_by_graphs,
    passes_by_launches,
    passes_that_wait,
    weigh_step,
)
from .report import number, spread, table
from .suite import CaseResult, Result, Session, Suite, Timing, norms, time_calls

PASSES = ("forward", "backward")
HOST_TOKENS = 512
HOST_PROVIDERS = ("ours", "ours_inplace", "ours_unfused", "eager", "liger")
CAPTURED_MIB = 12288  # a step with a higher peak is timed by events: its kernels are long, and a graph keeps its memory
WARM_UPS = 2


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


class OpSuite(Suite):
    name = "ops"
    title = "Ops compared with their peers"
    method = """\
Forward and backward separately, in one process, providers interleaved in another order each round. On a GPU each pass
is captured in a CUDA graph, the forward with autograd on, and replayed with L2 flushed before it and so many sets of
operands in one replay that none of them is still in L2: only the kernels' time. A pass marked `*` is timed by events
around launches from Python, where the provider waits for the device and so cannot be captured, or where a step needs
more memory than graphs should keep; its ratio is to ours timed in that way too. On a CPU all is wall clock.

Times are medians (quartiles) in microseconds. Ratio: time over ours, paired by round, so above 1 is slower than ours.
Both: the sum, round by round. Floor: the time of the bytes that any implementation must read and write at the measured
rate of a copy, or of the matrix products at theirs. Memory, in MiB above the operands: the peak of a step, outputs and
gradients included; and what is held between its passes besides the outputs. Cost of calling: wall time of forward and
backward of 512 tokens, called through autograd from Python, ten in a row. Errors: relative L2 distance from plain torch
on the same operands in fp32 without TF32 (in fp64 for fp32 operands, and on a CPU); `!` marks more than the bound,
which is twice the error of plain torch in the operands' dtype plus a floor. Ours must stay within it, and must not wait
for the device."""
    smoke_providers = ("ours", "ours_inplace", "ours_unfused", "eager")
    may_write = True
    step = Step
    time_heads = ("forward us (quartiles)", "backward us (quartiles)", "forward ratio", "backward ratio")

    def __init__(self) -> None:
        self.cases, self.smoke_cases, self.providers = op_cases.CASES, op_cases.SMOKE_CASES, op_providers.PROVIDERS

    @contextmanager
    def stream(self, device: torch.device) -> Iterator[None]:
        """Run everything that may be captured on a separate stream: nothing on the default stream can be."""
        if device.type != "cuda":
            yield
            return
        torch.cuda.synchronize()
        with torch.cuda.stream(_stream()):
            yield
        torch.cuda.synchronize()

    def bytes_moved(self, case: OpCase, operands: Operands) -> dict[str, int]:
        return bytes_moved(case, operands)

    def floors(self, outcome: CaseResult, roofline: Roofline) -> dict[str, float]:
        """Return the time of each pass's traffic or products at the measured rates, whichever is longer."""
        return {
            name: max(moved / roofline.copy_gbs / 1e3, 1e3 * roofline.gemm_ms(outcome.case.flops(name)))
            for name, moved in outcome.bytes.items()
        }

    def weigh(self, result: Result, step: Step, allocated: int) -> None:
        result.memory = weigh_step(step)
        result.waits = passes_that_wait(step)

    def measure(self, outcome: CaseResult, operands: Operands, session: Session) -> None:
        time_passes(outcome, operands, session)
        if outcome.case.host:
            time_host(outcome, session)

    def summary(self, cases: Sequence[CaseResult]) -> list[str]:
        return [_times(cases), _memory(cases), _host(cases)]

    def sentence(self, outcome: CaseResult) -> str:
        case = outcome.case
        parts = [f"{case.kind}, {case.tokens} tokens"]
        parts += [f"{case.width} wide"] if case.width else [f"{case.heads[0]} and {case.heads[1]} heads of 128"]
        parts += ["heads outermost, as a view"] if case.transposed else []
        parts += [f"hidden size {case.hidden_size}"] if case.hidden_size else []
        parts += [f"window {case.window}"] if case.window else []
        parts += ["sinks"] if case.sinks else []
        parts += [f"grad_output {case.grad_output:g}"] if case.is_loss else []
        moved = [f"{name} {size / 1e6:.1f} MB" for name, size in outcome.bytes.items()]
        dtype = str(case.dtype).removeprefix("torch.")
        return ", ".join([*parts, dtype]) + "." + (f" Must move: {', '.join(moved)}." if moved else "")

    def time_cells(self, result: Result, outcome: CaseResult) -> list[str]:
        passes = [result.passes[name] for name in PASSES]
        ratios = [spread(x.ratio, ".3f") if x.ratio else "" for x in passes]
        return [*(spread(x.times, ".1f") + ("*" if x.method == "events" else "") for x in passes), *ratios]

    def notes(self, outcome: CaseResult) -> list[str]:
        """Tell what the tables don't: what a provider writes over, where it waits, why it was not captured."""
        lines = []
        for result in outcome.results:
            notes = [f"writes into {', '.join(result.writes_into)}"] if result.writes_into else []
            notes += [f"waits for the device in the {' and the '.join(result.waits)}"] if result.waits else []
            notes += [f"could not be captured ({result.not_captured})"] if result.not_captured else []
            if notes:
                lines.append(f"- {result.provider.title} {'; '.join(notes)}.")
        return ["", *lines] if lines else []


def time_passes(outcome: CaseResult, operands: Operands, session: Session) -> None:
    """Fill in the times of the results whose provider works.

    By graphs where a pass can be captured. Where one of any provider cannot be, ours are timed the other way as well,
    so that ratios compare like with like.
    """
    case, results = outcome.case, outcome.results
    copies = [operands]
    copies += [case.make_operands(session.device, seed) for seed in range(1, number_of_copies(operands))]
    # Each pass starts from what the case drew, whoever wrote into it before.
    restore = Restorer(case, copies, sorted({name for result in results for name in result.writes_into}))
    clock = PassClock(session.stopwatch)

    def calls_of(result: Result) -> dict[str, Pass]:
        passes = passes_of(result, copies, restore)
        return {f"{result.provider.name} {name}": x for name, x in passes.items()}

    calls: dict[str, Pass] = time_calls(results, calls_of, clock, WARM_UPS)
    ours = outcome.by_name.get("ours")
    if ours and ours.step and len({x.method for x in calls.values()}) > 1 and calls["ours forward"].method == "graph":
        launches = passes_by_launches([ours.step.on(x) for x in copies], restore)
        calls |= {f"base {name}": x for name, x in launches.items()}
    interleave(calls, clock, 1)
    times = interleave(calls, clock, session.rounds, session.deadline)
    for who in {key.split()[0] for key in calls}:
        times[f"{who} both"] = [a + b for a, b in zip(*(times[f"{who} {name}"] for name in PASSES), strict=True)]
    methods = {who: calls[f"{who} forward"].method for who in ("ours", "base") if f"{who} forward" in calls}
    for result in (x for x in results if x.step is not None):
        method = calls[f"{result.provider.name} forward"].method
        base = next((who for who, its_method in methods.items() if its_method == method), "")
        for name in (*PASSES, "both"):
            us = times[f"{result.provider.name} {name}"]
            result.passes[name] = Timing.of(method, us, times.get(f"{base} {name}"))


def passes_of(result: Result, copies: Sequence[Operands], restore: Restorer) -> dict[str, Pass]:
    """Return the provider's passes: captured if it never waits for the device and there is memory for it."""
    steps: list[Step] = [result.step.on(operands) for operands in copies]
    if result.memory is None or result.waits or result.memory.peak * len(copies) > CAPTURED_MIB:
        return passes_by_launches(steps, restore)
    try:
        passes, values = passes_by_graphs(steps, restore)
    except Exception as error:
        result.not_captured = explain(error)
        return passes_by_launches([result.step.on(operands) for operands in copies], restore)
    passes["backward"].prepare()
    passes["backward"].run()
    for was, now in zip(result.norms, norms(values), strict=True):
        if not abs(now - was) <= 0.01 * was:
            raise RuntimeError(f"the captured graph computes something else: a norm of {now:.4g} instead of {was:.4g}")
    return passes


def time_host(outcome: CaseResult, session: Session) -> None:
    """Fill in the wall time of a forward and backward of a short sequence, called from Python."""
    case = outcome.case
    operands = replace(case, tokens=min(HOST_TOKENS, case.tokens)).make_operands(session.device)
    working = [x for x in outcome.results if x.step is not None and x.provider.name in HOST_PROVIDERS]
    calls = {x.provider.name: x.step.on(operands).both for x in working}
    clock = HostClock(session.device)
    interleave(calls, clock, WARM_UPS)
    times = interleave(calls, clock, 3 * session.rounds)
    for result in working:
        result.host = Timing.of("wall clock", times[result.provider.name], times.get("ours"))


def _titles(cases: Sequence[CaseResult]) -> dict[str, str]:
    providers = {result.provider.name: result.provider for outcome in cases for result in outcome.results}
    return {x.name: x.title for x in sorted(providers.values(), key=lambda x: not x.ours)}


def _times(cases: Sequence[CaseResult]) -> str:
    titles, rows = _titles(cases), []
    for outcome in cases:
        results = outcome.by_name
        for name, floor in outcome.floors.items():
            ours = results["ours"].passes.get(name) if "ours" in results else None
            share = f"{floor / ours.times.median:.0%}" if ours else ""
            cells = [_cell(results.get(title), name) for title in titles]
            rows.append([outcome.case.name, name, number(floor), share, *cells])
    head = ["## Time of the kernels", "", "Median us (ratio to ours); of ours also the share of the limit.", ""]
    return "\n".join([*head, *table(["case", "pass", "floor us", "ours at", *titles.values()], rows)])


def _cell(result: Result | None, name: str) -> str:
    if result is None:
        return ""
    if name not in result.passes:
        return "out of memory" if result.failure == "out of memory" else "failed"
    return _timing(result.passes[name]) + (" !" if result.beyond_bound else "")


def _timing(timing: Timing) -> str:
    ratio = f" ({timing.ratio.median:.2f})" if timing.ratio else ""
    return number(timing.times.median) + ("*" if timing.method == "events" else "") + ratio


def _memory(cases: Sequence[CaseResult]) -> str:
    titles = _titles(cases)
    cells = [[x.case.name, *(_memory_cell(x.by_name.get(name)) for name in titles)] for x in cases]
    rows = [row for row in cells if any(row[1:])]
    head = ["## Memory", "", "Peak of a step / kept between its passes, MiB.", ""]
    return "\n".join([*head, *table(["case", *titles.values()], rows)]) if rows else ""


def _memory_cell(result: Result | None) -> str:
    return f"{result.memory.peak:.0f} / {result.memory.between:.0f}" if result and result.memory else ""


def _host(cases: Sequence[CaseResult]) -> str:
    measured = [x for x in cases if any(result.host for result in x.results)]
    if not measured:
        return ""
    titles = {name: title for name, title in _titles(measured).items() if name != "compile"}
    rows = []
    for outcome in measured:
        host = {name: result.host for name, result in outcome.by_name.items()}
        rows.append([outcome.case.name, *(_timing(x) if (x := host.get(name)) else "" for name in titles)])
    head = ["## Cost of calling", "", "Wall time of forward and backward, 512 tokens: median us (ratio to ours).", ""]
    return "\n".join([*head, *table(["case", *titles.values()], rows)])
