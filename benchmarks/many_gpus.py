"""Whole training steps on 1, 2, 4 and 8 GPUs under FSDP2: TRL's trainers, with torch.compile, and ours.

    python -m benchmarks.many_gpus --output DIR               # DIR/many-gpus-<device>.json and .md
    python -m benchmarks.many_gpus --gpus 8 --cases sft-llama-3-8b --time-limit 540
    python -m benchmarks.many_gpus --predict --output docs/results     # no GPU: many-gpus-predicted.json and .md
    python -m benchmarks.many_gpus --tiny --gpus 1 2          # processes on CPUs over gloo: does it still work

A row is one launch of as many processes as GPUs, of a provider in a case; `benchmarks.trainer_step` says what is equal
and what is timed. Losses of all steps, meaned over the ranks, and the first gradient norm must be those of TRL's plain
trainer on as many GPUs and the same rows, else a row has no times. Efficiency is tokens/s a GPU over that of the fewest
GPUs of the case. The memory that was in use at most stands beside what `liger-trainer estimate` predicts; rows that it
predicts not to fit are not run. What is finished is written after every row.

Exit code 1: the gate refused a row of ours, or it failed. 2: a name that does not exist, or GPUs that are not there.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .choose import matching
from .many_gpus_cases import CASES, HEADS, PLAN, ManyCase, base_of, providers_of
from .many_gpus_launch import Launch
from .many_gpus_predict import (
    ASSUMED_GBS,
    ASSUMED_SHARE,
    MIB,
    PEAK_TFLOPS,
    Assumed,
    Prediction,
    as_data,
    predict,
)
from .many_gpus_predict import markdown as predicted_page
from .many_gpus_rank import Task
from .measure import Spread
from .report import join_versions, provenance, spread, table, without_output, write
from .trainer_cases import TINY_PLAN
from .trainer_providers import REFERENCE, Provider
from .trainer_step import LOSS_TOLERANCE, NORM_TOLERANCE, Row, measure, new_parser, report

COUNTS = (1, 2, 4, 8)
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate")
AHEAD = 4  # launches that import at a time
TINY_CASES, TINY_COUNTS = "sft-llama-3-8b,lora-qwen3-1.7b,kd-qwen3-1.7b-8b", (1, 2)
WHAT = (
    "{timed} timed steps after {warmup} of warm-up, in the trainers' own loops, under TRL's fsdp2.yaml; rows of one "
    "length, the same number on each GPU; trained weights in fp32, computing in {dtype}, sdpa, fused AdamW, random "
    "weights, NVLink multicast off. ms: median of the steps (quartiles), of the slowest rank. Efficiency: tokens/s a "
    "GPU over those of the fewest GPUs. MFU: the model's operations, without what is computed again and with all of "
    "attention, over the GPU's dense bf16 peak. In use: MiB of the fullest rank, and what `estimate` predicts. Held: "
    "with what the allocator keeps. Gaps: the largest distance of a step's loss from that of TRL's plain trainer on as "
    "many GPUs, over its first loss, and that of the first gradient norm; beyond {loss_tolerance:g} or "
    "{norm_tolerance:g} a row is refused."
)
COLUMNS = (
    "GPUs", "trainer", "ms", "tokens/s a GPU", "efficiency", "MFU", "in use, MiB", "estimate", "off", "held, MiB",
    "gaps: loss, norm",
)  # fmt: skip


@dataclass(eq=False)
class GpuRow(Row):
    """A provider in a case on so many GPUs.

    Attributes:
        predicted: what `estimate` says of ours.
        shares: MiB of weights, gradients and optimizer state that the fullest rank held.
    """

    case: ManyCase
    gpus: int = 1
    predicted: Prediction | None = None
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def group(self) -> Any:
        return self.case.name, self.gpus

    @property
    def rate(self) -> float | None:
        """Tokens a second of a GPU; None for a row that failed."""
        return (
            None if self.failure or self.measured is None else self.measured.tokens / self.measured.seconds / self.gpus
        )

    @property
    def estimated_mib(self) -> float | None:
        """What `estimate` predicts, of a row that it knows about."""
        return self.predicted.peak_mib if self.predicted and self.provider.name == "ours" else None


class RowLaunch(Launch):
    """The launch of a row, which gets the shares that the ranks held."""

    def __init__(self, row: GpuRow, options: argparse.Namespace):
        super().__init__(Task(row.case, row.provider, row.gpus, options.tiny))
        self.row = row

    def close(self) -> None:
        self.row.shares = self.shares
        super().close()


# Rows


def make_rows(options: argparse.Namespace) -> list[GpuRow]:
    return [
        GpuRow(case, provider, gpus=gpus)
        for case in options.cases
        for gpus in options.gpus
        for provider in options.chosen[case.name]
        if gpus > 1 or provider.name != HEADS  # one GPU has all rows of the head
    ]


def predict_all(options: argparse.Namespace) -> list[Prediction]:
    """Return the predictions of all cases, each made in a process of its own."""
    with ProcessPoolExecutor(len(options.cases), multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(predict, case, options.gpus, options.tiny) for case in options.cases]
        return [prediction for future in futures for prediction in future.result()]


def set_predictions(rows: Sequence[GpuRow], predictions: Sequence[Prediction], memory_mib: float | None) -> None:
    """Give rows their predictions, and let those be that are predicted not to fit: others' take more than ours."""
    by_group = {(p.case, p.gpus): p for p in predictions}
    for row in rows:
        row.predicted = by_group[row.group]
        if memory_mib is not None and row.predicted.peak_mib > memory_mib:
            row.failure = f"not run: estimate says {row.predicted.peak_mib:,.0f} MiB, the GPU has {memory_mib:,.0f}"


# The page


def markdown(header: dict[str, Any], rows: Sequence[GpuRow]) -> str:
    where = f"{header['device']}, {header['date']}, commit {header['commit']}, {join_versions(header['packages'])}."
    lines = ["# Training steps on several GPUs", "", f"{where} `{header['command']}`.", ""]
    lines += [WHAT.format(**header), ""]
    for case, group in itertools.groupby(rows, key=lambda row: row.case):
        of_case = list(group)
        cells = [_cells(row, of_case, header["peak_tflops"]) for row in of_case]
        lines += [f"## {case}", "", f"`{case.name}`", "", *table(COLUMNS, cells), ""]
        lines += [case.note, ""] if case.note else []
    return "\n".join(lines)


def efficiency(row: GpuRow, rows: Sequence[GpuRow]) -> tuple[float, int] | None:
    """Return tokens/s a GPU over those of the same provider on the fewest GPUs, and how many these are."""
    rates = [(r.gpus, r.rate) for r in rows if r.provider == row.provider and r.rate is not None]
    base = base_of(rates)
    return None if base is None or row.rate is None else (row.rate / base[1], base[0])


def _cells(row: GpuRow, rows: Sequence[GpuRow], peak_tflops: float | None) -> list[str]:
    head = [str(row.gpus), row.provider.title]
    m, rate, predicted = row.measured, row.rate, row.predicted
    if m is None or rate is None or predicted is None:
        return [*head, row.failure or "", *[""] * (len(COLUMNS) - 3)]
    ratio = efficiency(row, rows)
    mfu = None if peak_tflops is None else rate * predicted.flops / predicted.tokens / peak_tflops / 1e12
    estimated, used = row.estimated_mib, m.allocated_mib
    return [
        *head, spread(Spread.of(m.ms), ".1f"), f"{rate:,.0f}",
        "" if ratio is None else f"{ratio[0]:.2f} of {ratio[1]}",
        "" if mfu is None else f"{mfu:.1%}",
        "" if used is None else f"{used:,.0f}",
        "" if estimated is None else f"{estimated:,.0f}",
        "" if estimated is None or used is None else f"{estimated / used - 1:+.1%}",
        "" if m.reserved_mib is None else f"{m.reserved_mib:,.0f}",
        f"{row.loss_gap:.1e}, {row.norm_gap:.1e}",
    ]  # fmt: skip


def peak_of(device: str) -> float | None:
    """Return TFLOP/s of a device by its name; None where it is not known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


# The command line


def main(arguments: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(argv)
    command = shlex.join(["python", "-m", "benchmarks.many_gpus", *without_output(argv)])
    header = {**provenance(PACKAGES, cuda=None if not options.tiny else False), "command": command}
    return write_predictions(options, header) if options.predict else run(options, header)


def write_predictions(options: argparse.Namespace, header: dict[str, Any]) -> int:
    assumed = Assumed(share=options.assume_share, gbs=options.assume_gbs)
    predictions = predict_all(options)
    header = {**header, "assumed": asdict(assumed)}
    text = predicted_page(header, options.cases, predictions)
    if options.output:
        write(
            options.output / "many-gpus-predicted", {"header": header, "results": as_data(predictions, assumed)}, text
        )
    print(text)
    return 0


def run(options: argparse.Namespace, header: dict[str, Any]) -> int:
    plan = TINY_PLAN if options.tiny else PLAN
    header |= {
        **asdict(plan), "dtype": "fp32" if options.tiny else "bf16", "peak_tflops": peak_of(header["device"]),
        "loss_tolerance": LOSS_TOLERANCE, "norm_tolerance": NORM_TOLERANCE,
    }  # fmt: skip
    rows = make_rows(options)
    memory = None if options.tiny else torch.cuda.get_device_properties(0).total_memory / MIB
    set_predictions(rows, predict_all(options), memory)
    return report("many-gpus", options, header, rows, measure(rows, options, RowLaunch, AHEAD), markdown)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, with `cases`, `chosen` (providers by case) and `deadline`."""
    parser = new_parser("many_gpus", __doc__, time_limit=540, row_limit=240)
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", choices=COUNTS, help="numbers of GPUs; default: all that are there")
    add("--cases", help="comma-separated names or globs; default: those that --list does not mark")
    add("--providers", help=f"comma-separated names or globs; default: each case's own. {REFERENCE} always runs")
    add("--layers", type=int, help="the student has at most so many")
    add("--teacher-layers", type=int, help="the teacher has at most so many")
    add("--tiny", action="store_true", help="tiny models and rows, few steps, fp32, CPUs over gloo")
    add("--predict", action="store_true", help="predict memory and time, run nothing")
    add("--assume-share", type=float, default=ASSUMED_SHARE, help=f"of the peak, for --predict ({ASSUMED_SHARE})")
    add("--assume-gbs", type=float, default=ASSUMED_GBS, help=f"GB/s a GPU, for --predict ({ASSUMED_GBS:g})")
    options = parser.parse_args(argv)
    if options.list:
        print(listing())
        parser.exit()
    options.deadline = time.monotonic() + options.time_limit
    options.cases = _choose_cases(options, parser)
    options.gpus = _choose_counts(options, parser)
    options.chosen = _choose_providers(options, parser)
    return options


def _choose_cases(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[ManyCase]:
    patterns = options.cases or (TINY_CASES if options.tiny else None)
    names = None if patterns is None else matching(patterns, [case.name for case in CASES], "case", parser)
    chosen = [case for case in CASES if (case.default if names is None else case.name in names)]
    return [case.cut(options.layers, options.teacher_layers) for case in chosen]


def _choose_counts(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[int]:
    """Return the numbers of GPUs, most first: what a time limit cuts off are the fewest."""
    there = max(TINY_COUNTS) if options.tiny else max(COUNTS) if options.predict else torch.cuda.device_count()
    chosen = options.gpus or [count for count in COUNTS if count <= there]
    if not options.tiny and (not chosen or max(chosen) > there):
        parser.error(f"--gpus: {max(chosen, default=1)} wanted, {there} there. --tiny and --predict need none.")
    return sorted(set(chosen), reverse=not options.predict)


def _choose_providers(options: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, list[Provider]]:
    known = {case.name: providers_of(case) for case in options.cases}
    every = [name for providers in known.values() for name in providers]
    names = None if options.providers is None else matching(options.providers, every, "provider", parser)

    def runs(case: ManyCase, name: str) -> bool:
        return name == REFERENCE or (name in case.providers if names is None else name in names)

    return {
        case.name: [provider for name, provider in known[case.name].items() if runs(case, name)]
        for case in options.cases
    }


def listing() -> str:
    lines = [f"{case.name}: {case}{'' if case.default else ' (only by name)'}" for case in CASES]
    return "\n".join(
        line
        for case, text in zip(CASES, lines, strict=True)
        for line in (text, f"    {', '.join(case.providers)}; by name: {', '.join(providers_of(case))}")
    )


if __name__ == "__main__":
    sys.exit(main())
