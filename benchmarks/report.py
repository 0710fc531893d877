"""Results as JSON and Markdown. When the accuracy gate has refused, neither holds any time."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .cases import Case
from .measure import Roofline, Spread
from .providers import Provider
from .reference import Errors
from .results import CaseResult, Result

PACKAGES = ("torch", "triton", "liger-kernel", "trl", "cut-cross-entropy", "transformers")
TABLES = {False: "Fused linear cross-entropy", True: "Fused linear divergence"}
METHOD = """\
Forward and backward together, in one process, providers interleaved in an order drawn anew each round, after
three warm-ups; on a GPU by device events with L2 flushed before each measurement, on a CPU by the wall clock.
Times are medians (quartiles). Ratio: time over ours, paired by round, so above 1 is slower than ours. Memory:
peak above the inputs, gradients included. TFLOP/s count the matrix products that the supervised tokens need;
the floor is their time at the measured rate. Errors: relative L2 distance from plain torch at high precision
(fp32 without TF32 on a GPU, fp64 on a CPU) on the same inputs; `!` marks more than the bound, which is twice
the error of plain torch in the inputs' dtype plus a floor. Ours must stay within it."""


@dataclass(frozen=True)
class Header:
    """Where and how a run was made."""

    device: str
    date: str
    commit: str
    command: str
    python: str
    packages: dict[str, str]
    rounds: int
    roofline: Roofline


def describe(device: torch.device, roofline: Roofline, arguments: Sequence[str], rounds: int) -> Header:
    return Header(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=git_commit(),
        command=shlex.join(["python", "-m", "benchmarks.run", *_without_output(arguments)]),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        rounds=rounds,
        roofline=roofline,
    )


def _without_output(arguments: Sequence[str]) -> list[str]:
    """The arguments but for where the results go: a folder of this machine says nothing about them."""
    return [
        argument
        for before, argument in zip([None, *arguments], arguments, strict=False)
        if argument != "--output" and before != "--output" and not argument.startswith("--output=")
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_commit() -> str:
    """From the variable BENCH_COMMIT, for a copy without its history, or from git."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write(path: Path, header: Header, violations: Sequence[str], cases: Sequence[dict], text: str) -> None:
    """Write <path>.json and <path>.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"header": asdict(header), "gate": list(violations), "cases": list(cases)}
    path.with_name(f"{path.name}.json").write_text(json.dumps(data, indent=1) + "\n")
    path.with_name(f"{path.name}.md").write_text(text)


def case_data(outcome: CaseResult, timed: bool) -> dict:
    case = {**asdict(outcome.case), "dtype": str(outcome.case.dtype).removeprefix("torch.")}
    return {
        **case,
        "flops": outcome.case.flops,
        "gemm_floor_ms": outcome.floor_ms or None,
        "not_run": outcome.not_run,
        "error_bound": outcome.bound and asdict(outcome.bound),
        "providers": [_provider_data(outcome, result, timed) for result in outcome.results],
    }


def _provider_data(outcome: CaseResult, result: Result, timed: bool) -> dict:
    data = {
        "name": result.provider.name,
        "failure": result.failure,
        "errors": result.errors and asdict(result.errors),
        "beyond_bound": result.beyond_bound,
    }
    if timed and result.ms:
        data |= {
            "ms": asdict(result.ms),
            "ratio_to_ours": result.ratio and asdict(result.ratio),
            "tflops": outcome.case.flops / result.ms.median / 1e9,
            "fraction_of_gemm_roofline": outcome.floor_ms / result.ms.median,
            "memory_mib": result.memory and asdict(result.memory),
        }
    return data


def markdown(header: Header, cases: Sequence[CaseResult], violations: Sequence[str]) -> str:
    sections = ["# Fused losses beside their peers", header_lines(header), METHOD]
    if violations:
        sections.append(refusal(violations))
    else:
        sections += [_summary(cases, divergence) for divergence in TABLES]
    sections += [_details(outcome, timed=not violations) for outcome in cases]
    return "\n\n".join(section for section in sections if section) + "\n"


def refusal(violations: Sequence[str]) -> str:
    return "\n".join(["**The accuracy gate refused: no times.**", "", *(f"- {reason}" for reason in violations)])


def header_lines(header: Header) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in header.packages.items())
    limits = header.roofline
    return "\n".join(
        (
            f"- {header.device}, {header.date}, commit {header.commit}",
            f"- `{header.command}`: {header.rounds} rounds",
            f"- Python {header.python}, {packages}",
            f"- Measured limits: matrix product {limits.gemm_tflops:.3g} TFLOP/s ({limits.gemm_shape}), "
            f"copy {limits.copy_gbs:.0f} GB/s",
        )
    )


def _summary(cases: Sequence[CaseResult], divergence: bool) -> str:
    rows = [outcome for outcome in cases if outcome.case.is_divergence == divergence]
    titles = {result.provider.name: result.provider.title for outcome in rows for result in outcome.results}
    if not titles:
        return ""
    lines = [f"## {TABLES[divergence]}", "", "Median ms (ratio to ours) / peak MiB.", ""]
    lines += table_head(["case", "GEMM floor ms", *titles.values()])
    for outcome in rows:
        results = {result.provider.name: result for result in outcome.results}
        cells = [_summary_cell(results.get(name), outcome) for name in titles]
        lines.append(row([outcome.case.name, number(outcome.floor_ms or None), *cells]))
    return "\n".join(lines)


def _summary_cell(result: Result | None, outcome: CaseResult) -> str:
    if outcome.not_run:
        return "not run"
    if result is None:
        return ""
    if result.ms is None:
        return "out of memory" if result.failure == "out of memory" else "failed"
    ratio = f" ({result.ratio.median:.2f})" if result.ratio else ""
    mark = " !" if result.beyond_bound else ""
    return f"{number(result.ms.median)}{ratio} / {_memory(result)}{mark}"


def _details(outcome: CaseResult, timed: bool) -> str:
    case = outcome.case
    rounds = max((result.ms.count for result in outcome.results if timed and result.ms), default=0)
    lines = [f"### {case.name}", "", _sentence(case) + (f" {rounds} rounds." if rounds else "")]
    if outcome.not_run or outcome.bound is None:
        return "\n".join([*lines, "", f"Not run: {outcome.not_run}."])
    times = ["ms (quartiles)", "ratio (quartiles)", "peak MiB", "TFLOP/s", "of GEMM limit"] if timed else []
    lines += ["", *table_head(["provider", *times, "loss error", "dX error", "dW error"])]
    for result in outcome.results:
        if result.failure:
            lines.append(row([result.provider.title, result.failure]))
            continue
        cells = _time_cells(result, outcome) if timed else []
        lines.append(row([result.provider.title, *cells, *_error_cells(result.errors, outcome.bound)]))
    lines.append(row(["bound for ours", *[""] * len(times), *_error_cells(outcome.bound, outcome.bound)]))
    return "\n".join(lines)


def _sentence(case: Case) -> str:
    parts = [f"{case.kind.replace('_', ' ')}, {case.tokens} tokens", f"H {case.hidden_size}"]
    parts += [f"teacher's H {case.teacher_hidden_size}"] if case.is_divergence else []
    parts += [f"V {case.vocab_size}", str(case.dtype).removeprefix("torch."), f"{case.data} inputs"]
    parts += [f"{case.ignored:.0%} of the labels ignored"] if case.ignored else []
    parts += ["frozen head"] if case.frozen_head else []
    return ", ".join([*parts, f"grad_output {case.grad_output:g}."])


def _time_cells(result: Result, outcome: CaseResult) -> list[str]:
    assert result.ms is not None
    return [
        spread(result.ms, ".2f"),
        spread(result.ratio, ".3f") if result.ratio else "",
        _memory(result),
        f"{outcome.case.flops / result.ms.median / 1e9:.3g}",
        f"{outcome.floor_ms / result.ms.median:.0%}",
    ]


def _error_cells(errors: Errors | None, bound: Errors) -> list[str]:
    if errors is None:
        return []
    pairs = zip(asdict(errors).values(), asdict(bound).values(), strict=True)
    return ["" if error is None else f"{error:.1e}{'' if error <= limit else ' !'}" for error, limit in pairs]


def spread(of: Spread, digits: str) -> str:
    return f"{of.median:{digits}} ({of.p25:{digits}} to {of.p75:{digits}})"


def _memory(result: Result) -> str:
    if result.memory is None:
        return "-"
    kept = f" ({result.memory.kept:.0f} kept)" if result.memory.kept >= 1 else ""
    return f"{result.memory.peak:.0f}{kept}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def table_head(titles: Sequence[str]) -> list[str]:
    return [row(titles), row(["---"] * len(titles))]


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def listing(cases: Sequence[Case], providers: Sequence[Provider]) -> str:
    lines = [case.name + ("" if case.default else " (only by name)") for case in cases]
    lines += [f"{provider.name}: {provider.title} ({', '.join(provider.kinds)})" for provider in providers]
    return "\n".join(lines)
