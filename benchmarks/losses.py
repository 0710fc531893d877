"""The suite of the fused losses: time and memory of forward and backward together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import loss_cases, loss_providers
from .loss_cases import Case
from .measure import MIB, Roofline, interleave
from .operands import Operands
from .reference import Values
from .report import number, spread, table
from .suite import CaseResult, Result, Session, Suite, Timing, time_calls

STEP = "step"  # the only pass: fused losses compute gradients in their forward, so the two are never timed apart
TABLES = {False: "Fused linear cross-entropy", True: "Fused linear divergence"}


@dataclass(frozen=True)
class Memory:
    """MiB above what was allocated before the provider's first call.

    `peak` is a step's; `kept` stays between steps (cached workspaces), and the peak includes it.
    """

    peak: float
    kept: float


class LossStep:
    """A forward and backward that leave gradients on the leaves, as a training step does."""

    def __init__(self, function: Callable[..., Tensor], operands: Operands, case: Case):
        self.function, self.operands, self.case = function, operands, case
        self.leaves = [operands.tensors[name] for name in case.leaves]

    def run(self) -> Tensor:
        self.clear()
        loss = self.function(**self.operands.tensors)
        # A grad_output of 1 is left to autograd, as `loss.backward()` does.
        loss.backward(None if self.case.grad_output == 1.0 else torch.full_like(loss, self.case.grad_output))
        return loss.detach()

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def values(self) -> Values:
        """Return the loss and its gradients, taken off the leaves so that nothing else can write into them."""
        loss = self.run()
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        if len(gradients) < len(self.leaves):
            raise RuntimeError("backward left no gradient on the hidden states or on the head")
        self.clear()
        return dict(zip(self.case.value_names(1), [loss, *gradients], strict=True))


class LossSuite(Suite):
    name = "losses"
    title = "Fused losses compared with their peers"
    method = """\
Forward and backward together, in one process, providers interleaved in another order each round, after
three warm-ups; on a GPU by device events with L2 flushed before each measurement, on a CPU by the wall clock.
Times are medians (quartiles). Ratio: time over ours, paired by round, so above 1 is slower than ours. Memory:
peak above the inputs, gradients included. TFLOP/s count the matrix products that the supervised tokens need;
the floor is their time at the measured rate. Errors: relative L2 distance from plain torch at high precision
(fp32 without TF32 on a GPU, fp64 on a CPU) on the same inputs; `!` marks more than the bound, which is twice
the error of plain torch in the inputs' dtype plus a floor. Ours must stay within it."""
    smoke_providers = ("ours", "ours_fp32", "eager", "trl")
    may_write = False
    step = LossStep
    time_heads = ("ms (quartiles)", "ratio (quartiles)", "peak MiB", "TFLOP/s", "of GEMM limit")

    def __init__(self) -> None:
        self.cases, self.smoke_cases = loss_cases.CASES, loss_cases.SMOKE_CASES
        self.providers = loss_providers.PROVIDERS

    def floors(self, outcome: CaseResult, roofline: Roofline) -> dict[str, float]:
        return {STEP: roofline.gemm_ms(outcome.case.flops)}

    def weigh(self, result: Result, step: LossStep, allocated: int) -> None:
        kept = torch.cuda.memory_allocated() - allocated
        torch.cuda.reset_peak_memory_stats()
        step.run()
        torch.cuda.synchronize()
        result.memory = Memory((torch.cuda.max_memory_allocated() - allocated) / MIB, kept / MIB)
        step.clear()

    def measure(self, outcome: CaseResult, operands: Operands, session: Session) -> None:
        # The accuracy check and the weighing were the first two warm-ups.
        calls = time_calls(outcome.results, lambda r: {r.provider.name: r.step.run}, session.stopwatch, warm_ups=1)
        times = interleave(calls, session.stopwatch, session.rounds, session.deadline)
        working = [result for result in outcome.results if result.provider.name in times]
        base = next((times[result.provider.name] for result in working if result.provider.ours), None)
        for result in working:
            result.passes[STEP] = Timing.of("events", times[result.provider.name], base)
            result.step.clear()

    def summary(self, cases: Sequence[CaseResult]) -> list[str]:
        return [_summary([x for x in cases if x.case.is_divergence == kind], title) for kind, title in TABLES.items()]

    def sentence(self, outcome: CaseResult) -> str:
        case = outcome.case
        parts = [f"{case.kind.replace('_', ' ')}, {case.tokens} tokens", f"H {case.hidden_size}"]
        parts += [f"teacher's H {case.teacher_hidden_size}"] if case.is_divergence else []
        parts += [f"V {case.vocab_size}", str(case.dtype).removeprefix("torch."), f"{case.data} inputs"]
        parts += [f"{case.ignored:.0%} of the labels ignored"] if case.ignored else []
        parts += ["frozen head"] if case.frozen_head else []
        rounds = max((x.passes[STEP].times.count for x in outcome.results if x.passes), default=0)
        return ", ".join([*parts, f"grad_output {case.grad_output:g}."]) + (f" {rounds} rounds." if rounds else "")

    def time_cells(self, result: Result, outcome: CaseResult) -> list[str]:
        timing = result.passes[STEP]
        median = timing.times.median
        return [
            spread(timing.times, ".2f"),
            spread(timing.ratio, ".3f") if timing.ratio else "",
            _memory(result),
            f"{outcome.case.flops / median / 1e9:.3g}",
            f"{outcome.floors[STEP] / median:.0%}",
        ]


def _summary(cases: Sequence[CaseResult], title: str) -> str:
    titles = {result.provider.name: result.provider.title for outcome in cases for result in outcome.results}
    if not titles:
        return ""
    rows = [
        [x.case.name, number(x.floors[STEP] or None), *(_cell(x.by_name.get(name), x) for name in titles)]
        for x in cases
    ]
    head = [f"## {title}", "", "Median ms (ratio to ours) / peak MiB.", ""]
    return "\n".join([*head, *table(["case", "GEMM floor ms", *titles.values()], rows)])


def _cell(result: Result | None, outcome: CaseResult) -> str:
    if outcome.not_run:
        return "not run"
    if result is None:
        return ""
    if not result.passes:
        return "out of memory" if result.failure == "out of memory" else "failed"
    timing = result.passes[STEP]
    ratio = f" ({timing.ratio.median:.2f})" if timing.ratio else ""
    return f"{number(timing.times.median)}{ratio} / {_memory(result)}{' !' if result.beyond_bound else ''}"


def _memory(result: Result) -> str:
    if result.memory is None:
        return "-"
    kept = f" ({result.memory.kept:.0f} kept)" if result.memory.kept >= 1 else ""
    return f"{result.memory.peak:.0f}{kept}"
