"""Whole training steps through the trainers themselves: TRL's, with Liger-Kernel, with torch.compile, Unsloth, ours.

    python -m benchmarks.trainer_step --output DIR           # on a GPU: DIR/trainer-step-<device>.json and .md
    python -m benchmarks.trainer_step --cases 'sft-*,kd-*' --providers 'trl,trl_liger,ours' --time-limit 450
    python -m benchmarks.trainer_step --rows sft-qwen3-0.6b:ours lora-llama-3.2-1b:trl_liger,ours,ours:memory=balanced
    python -m benchmarks.trainer_step --rows sft-llama-3-8b-8bit:ours,trl_liger:optim=adamw_torch_8bit
    python -m benchmarks.trainer_step --tiny                 # some of it, small enough for a CPU: does it still work

A provider in a case has its own process, since Liger-Kernel and Unsloth patch module globals; the device has one at
a time. Weights, rows, their order, optimizer and all other options are the same. A callback in the trainer's own loop
times steps, and traces some more. Losses of all steps and the first gradient norm must be those of TRL's plain trainer
(with Liger-Kernel for 8B, where plain TRL does not fit) within LOSS_TOLERANCE and NORM_TOLERANCE, on the same rows,
else the row has no times.

Unsloth pins older packages than ours do: `pip install --target DIR unsloth`, and UNSLOTH_SITE=DIR.

`--rows` names the rows one by one, of any provider with or without an option, so that one call has just what is wanted.
What is finished is written after every row. Exit code 1: the gate refused a row of ours, or it failed. 2: a name that
does not exist.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from .bars import write_figures
from .measure import Spread
from .processes import Process, context_for, say
from .report import matching, provenance, slug, table, where, without_output, write
from .trainer_cases import CASES, LOSS_TOLERANCE, MEAN_LENGTH, NORM_TOLERANCE, PLAN, REFERENCE, TINY_PLAN, Case
from .trainer_providers import PROVIDERS, Provider, variant
from .trainer_worker import Measured, TrainerWorker

LEAST_FALL = 0.005  # of the plain trainer's loss: one that does not fall shows nothing
LEAST_LOSS = 0.05  # to which distances are related: GRPO's loss may be 0
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "liger-kernel", "bitsandbytes")
PRELOADED = ("datasets", "peft", "trl.trainer.sft_trainer")  # nothing of ours, which would change TRL's modules
AHEAD = 12  # processes that import at a time, before the first of them has its turn
TINY_CASES, TINY_PROVIDERS = "sft-qwen3-0.6b-packed,kd-qwen3-0.6b", f"{REFERENCE},ours"
SHOWN = (1, 5, 10, 20)  # steps whose losses the table has
WHAT = (
    "{timed} timed steps after {warmup} of warm-up, in the trainers' own loops; weights in {dtype}, sdpa, fused AdamW "
    "with a constant rate, no accumulation; random weights, token ids by Zipf's law, row lengths of packed and padded "
    "cases log-normal with mean {mean}. ms: median of the steps (quartiles). Busy: the time of a step in which "
    "something ran on the GPU, traced on {traced} further steps. Wall / busy: of steps with the same work. Tokens/s: "
    "real ones, with padding in brackets. MiB: the most that the process held, and that above the weights. Gaps: the "
    "largest distance of a step's loss from the first row's, over its first loss, and the relative distance of the "
    "first gradient norm; a row above {loss_tolerance:g} or {norm_tolerance:g} is refused (DPO and "
    "GRPO: 0.05). Where fla-core refuses a step of the delta rule's backward (Hopper, Triton 3.4.0 to 3.7.0), every "
    "row of a hybrid but Unsloth's has LigerTrainer's function for that step. Bold: the best of a column."
)
HEADS = (
    "ms", "of ours: time", "busy, ms", "kernels", "wall / busy", "tokens/s", "MiB", "above weights",
    "loss, steps " + " / ".join(map(str, SHOWN)), "gaps: loss, norm",
)  # fmt: skip


@dataclass(eq=False)
class Row:
    """A provider in a case, and what came of it."""

    case: Case
    provider: Provider
    measured: Measured | None = None
    failure: str | None = None
    started: bool = False
    took: float = 0.0  # seconds, with all that is not timed
    loss_gap: float | None = None
    norm_gap: float | None = None

    @property
    def group(self) -> Any:
        """What the rows have in common that are compared with one reference."""
        return self.case.name

    def data(self) -> dict[str, Any]:
        """Return what is written: a row that failed has no times."""
        times = ("ms", "seconds", "busy_ms", "traced_ms", "reserved_mib", "allocated_mib") if self.failure else ()
        values = {name: value for name, value in asdict(self).items() if name not in ("case", "provider", "measured")}
        measured = {} if self.measured is None else asdict(self.measured)
        values |= {name: value for name, value in measured.items() if name not in times}
        return {"case": self.case.name, "provider": self.provider.name, **values}


AnyRow = TypeVar("AnyRow", bound=Row)


# The gate


def judge(row: Row, reference: Row) -> None:
    """Compare a row with TRL's plain trainer in the same case, and refuse it if it trains another way."""
    if row.measured is None:
        return
    if reference.measured is None:
        row.failure = f"nothing to compare with: {reference.provider.title} failed"
        return
    got, want = row.measured, reference.measured
    row.loss_gap, row.norm_gap = gaps(got, want)
    loss_tolerance, norm_tolerance = row.case.tolerances
    if not row.case.method and not min(want.losses) <= (1 - LEAST_FALL) * want.losses[0]:
        row.failure = f"nothing is compared: the plain loss goes from {want.losses[0]:.4f} to {want.losses[-1]:.4f}"
    elif [tuple(rows) for rows in got.rows] != [tuple(rows) for rows in want.rows]:
        row.failure = "it trained on other rows, or in another order"
    elif not row.loss_gap <= loss_tolerance:
        row.failure = f"refused: its loss is up to {row.loss_gap:.1%} from the plain trainer's"
    elif not row.norm_gap <= norm_tolerance:
        row.failure = f"refused: its first gradient norm is {row.norm_gap:.1%} from the plain trainer's"


def gaps(got: Measured, want: Measured) -> tuple[float, float]:
    """Return how far a loss is at most, over the first wanted one, and how far the first gradient norm is."""
    first = max(abs(want.losses[0]), LEAST_LOSS)
    losses = _largest(abs(a - b) / first for a, b in zip(got.losses, want.losses, strict=True))
    return losses, abs(got.norms[0] / want.norms[0] - 1)


def _largest(gaps: Iterable[float]) -> float:
    """Return the largest; NaN, which is no number's equal, where there is one."""
    values = list(gaps)
    return max(values) if all(value == value for value in values) else float("nan")


# Running


def load(row: Row, options: argparse.Namespace) -> Process:
    """Return a process that imports what a row needs, and then answers.

    A compiler starts its own processes, and Unsloth, which is one, wants to be imported first: they import for
    themselves.
    """
    context = None if row.provider.compiles else context_for(*PRELOADED)
    process = Process(TrainerWorker, row.provider.name, options.tiny, context)
    process.start("load")
    return process


def measure(
    rows: Sequence[AnyRow],
    options: argparse.Namespace,
    load: Callable[[AnyRow, Any], Any] = load,
) -> Iterator[AnyRow]:
    """Run rows in turn, and judge each. Those behind a time limit, or of absent packages, say so.

    Those that compile, for minutes, come last: a run that is cut off has the others of all cases.
    """
    rows = sorted(rows, key=lambda row: row.provider.compiles)
    plain = {row.group: row for row in rows if row.provider.name == row.case.reference}
    size = min(AHEAD, os.cpu_count() or 1)
    for group in (rows[at : at + size] for at in range(0, len(rows), size)):
        for row in group:
            row.failure = row.failure or row.provider.missing(row.case) or _late(options)
        processes = {row: load(row, options) for row in group if row.failure is None}
        try:
            for row, process in processes.items():  # no import while another is timed
                row.failure = process.result(options.row_limit)[1]
            for row in group:
                row.failure = row.failure or _late(options)
                if row.failure is None:
                    _run(row, processes[row], options)
                    judge(row, plain[row.group])
                yield row
        finally:
            for process in processes.values():
                process.close()


def _run(row: Row, process: Any, options: argparse.Namespace) -> None:
    row.started, since = True, time.monotonic()
    process.start("run", row.case, row.provider)
    until = min(since + options.row_limit, max(since + 1.0, options.deadline))
    row.measured, row.failure = process.result(max(1.0, until - time.monotonic()))
    if row.failure and _late(options):
        row.failure = f"cut off: {options.time_limit:g} s were over"
    row.took = time.monotonic() - since
    say(row.case.name, f"{row.provider.name}: {row.took:.1f} s {row.failure or ''}")
    process.close()


def _late(options: argparse.Namespace) -> str | None:
    return f"not run: {options.time_limit:g} s were over" if time.monotonic() > options.deadline else None


# The page


def markdown(header: dict[str, Any], rows: Sequence[Row]) -> str:
    lines = ["# Training steps through the trainers", "", where(header), ""]
    lines += [WHAT.format(**header), ""]
    for case, group in itertools.groupby(rows, key=lambda row: row.case):
        rows = list(group)
        lines += [f"## {case}", "", *table([f"`{case.name}`", *HEADS], _table_rows(rows)), ""]
        unsloth = (row for row in rows if row.measured and row.provider.trainer == "unsloth")
        lines += [f"{row.provider.title}: {row.measured.notes}.\n" for row in unsloth]
    return "\n".join(lines)


def _table_rows(rows: list[Row]) -> list[list[str]]:
    ours = next((row for row in rows if row.provider.name == "ours"), None)
    good = [row.measured for row in rows if row.measured and not row.failure]
    best = (
        min((Spread.of(m.ms).median for m in good), default=0.0),
        max((m.tokens / m.seconds for m in good), default=0.0),
        min((m.reserved_mib for m in good if m.reserved_mib is not None), default=0.0),
    )
    return [[row.provider.title, *_cells(row, ours, *best)] for row in rows]


def _cells(row: Row, ours: Row | None, best_ms: float, best_rate: float, best_peak: float) -> list[str]:
    if row.failure or row.measured is None:
        return [row.failure or "", *[""] * (len(HEADS) - 1)]
    m, ms = row.measured, Spread.of(row.measured.ms)
    base = Spread.of(ours.measured.ms).median if ours and ours.measured and not ours.failure else None
    rate, peak = m.tokens / m.seconds, m.reserved_mib
    padding = f" ({m.padded_tokens / m.seconds:,.0f})" if m.padded_tokens != m.tokens else ""
    return [
        f"{_bold(f'{ms.median:.1f}', ms.median <= best_ms)} ({ms.p25:.1f} to {ms.p75:.1f})",
        "" if base is None else f"{ms.median / base:.2f}",
        "" if m.busy_ms is None else f"{m.busy_ms:.1f}",
        "" if m.kernels is None else f"{m.kernels:,.0f}",
        "" if m.busy_ms is None else f"{m.traced_ms / m.busy_ms:.2f}",
        _bold(f"{rate:,.0f}", rate >= best_rate) + padding,
        "" if peak is None else _bold(f"{peak:,.0f}", peak <= best_peak),
        "" if peak is None else f"{peak - m.weights_mib:,.0f}",
        " / ".join(f"{m.losses[step - 1]:.3f}" for step in SHOWN if step <= len(m.losses)),
        f"{row.loss_gap:.1e}, {row.norm_gap:.1e}",
    ]


def _bold(text: str, is_best: bool) -> str:
    return f"**{text}**" if is_best else text


# The command line


def main(arguments: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(argv)
    plan = TINY_PLAN if options.tiny else PLAN
    command = shlex.join(["python", "-m", "benchmarks.trainer_step", *without_output(argv)])
    header = {
        **provenance(PACKAGES), "command": command, **asdict(plan), "mean": MEAN_LENGTH,
        "dtype": "fp32" if options.tiny else "bf16", "loss_tolerance": LOSS_TOLERANCE,
        "norm_tolerance": NORM_TOLERANCE,
    }  # fmt: skip
    rows = [Row(case, provider) for case, provider in pairs(options)]
    code = report("trainer-step", options, header, rows, measure(rows, options), markdown)
    if options.output:
        for written in options.output.glob("trainer-step-*.json"):
            write_figures(written)
    return code


def pairs(options: argparse.Namespace) -> list[tuple[Case, Provider]]:
    """Return the rows that are asked for."""
    chosen = options.rows or [(case, options.chosen[case.kind]) for case in options.cases]
    return [(case, provider) for case, providers in chosen for provider in _after_reference(case, providers)]


def _after_reference(case: Case, providers: Sequence[Provider]) -> list[Provider]:
    """Return the providers, with the one first whose losses the others must have."""
    reference = next(provider for provider in PROVIDERS[case.kind] if provider.name == case.reference)
    return [reference, *(provider for provider in providers if provider is not reference)]


def report(
    name: str, options: argparse.Namespace, header: dict[str, Any], rows: Sequence[AnyRow], measured: Iterator[AnyRow],
    markdown: Callable[[dict[str, Any], Sequence[AnyRow]], str],
) -> int:  # fmt: skip
    """Write what is finished after every row that is measured, print all rows, and return the exit code."""
    finished: set[AnyRow] = set()
    if not options.output:
        say(name, "without --output the table is printed, and no step is kept")
    for row in measured:
        finished.add(row)
        if options.output:
            path = options.output / f"{name}-{'tiny' if options.tiny else slug(header['device'])}"
            shown = [row for row in rows if row in finished]
            write(path, {"header": header, "results": [row.data() for row in shown]}, markdown(header, shown))
    print(markdown(header, rows))
    return int(any(row.started and row.failure and row.provider.is_ours for row in rows))


def parse(
    argv: Sequence[str], module: str = "trainer_step", doc: str | None = __doc__, cases: Sequence[Case] = CASES,
    providers: str = "*", tiny: tuple[str, str] = (TINY_CASES, TINY_PROVIDERS),
    add_more: Callable[[argparse.ArgumentParser], Any] = lambda parser: None,
) -> argparse.Namespace:  # fmt: skip
    """Return the options, with `cases`, `chosen` (providers by kind of training) and `deadline`.

    Args:
        module, doc: of the benchmark that reads its command line; `add_more` adds further options.
        providers: those that run without being named; `tiny`: cases and providers with `--tiny`.
    """
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--output", type=Path, help=f"folder for {module.replace('_', '-')}-<device>.json and .md")
    add("--time-limit", type=float, default=480, help="seconds after which everything ends (480)")
    add("--row-limit", type=float, default=120, help="seconds that a row may take (120)")
    add("--list", action="store_true", help="print cases and providers, and stop")
    add("--cases", help="comma-separated names or globs; default: those that --list does not mark")
    add("--providers", help=f"comma-separated names or globs; default: {providers}. {REFERENCE} always runs")
    add("--rows", nargs="+", metavar="CASE:PROVIDERS", help="these rows; `ours:key=value` is one with an option")
    add("--tiny", action="store_true", help="tiny models and rows, few steps, fp32")
    add_more(parser)
    options = parser.parse_args(argv)
    if options.list:
        print(listing(cases))
        parser.exit()
    options.deadline = time.monotonic() + options.time_limit
    if options.tiny and not options.rows:
        options.cases, options.providers = options.cases or tiny[0], options.providers or tiny[1]
    names = None if options.cases is None else matching(options.cases, [case.name for case in cases], "case", parser)
    if options.rows and (names or options.providers):
        parser.error("--rows names all rows: leave --cases and --providers out")
    options.cases = [case for case in cases if (case.default if names is None else case.name in names)]
    known = [provider.name for each in PROVIDERS.values() for provider in each]
    chosen = {REFERENCE, *matching(options.providers or providers, known, "provider", parser)}
    options.chosen = {kind: [p for p in each if p.name in chosen] for kind, each in PROVIDERS.items()}
    options.rows = [choose_rows(words, cases, parser) for words in options.rows or ()]
    return options


def choose_rows(words: str, cases: Sequence[Case], parser: argparse.ArgumentParser) -> tuple[Case, list[Provider]]:
    """Return a case and its providers, from CASE:PROVIDER,..."""
    name, _, given = words.partition(":")
    case = next((case for case in cases if case.name == name), None)
    if case is None or not given:
        parser.error(f"--rows {words!r}: expected CASE:PROVIDER,... with a case that --list names")
    changed = [word for word in given.split(",") if ":" in word]
    others = ",".join(word for word in given.split(",") if word not in changed) or case.reference
    known = PROVIDERS[case.kind]
    names = {case.reference, *matching(others, [provider.name for provider in known], "provider", parser)}
    variants = []
    for of, _, words in (word.partition(":") for word in changed):
        for name in matching(of, [provider.name for provider in known], "provider", parser):
            variants.append(variant(_extra(words, parser), name)[case.kind])
    return case, [*(provider for provider in known if provider.name in names), *variants]


def _extra(words: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return further options of a provider, from KEY=VALUE,..., with values as YAML reads them."""
    import yaml

    from liger_trainer import LigerDistillConfig
    from liger_trainer.trainers.config import LigerConfig

    options: dict[str, Any] = {}
    for word in words.split(","):
        key, equals, value = word.partition("=")
        if not equals or not any(key in config.__dataclass_fields__ for config in (LigerConfig, LigerDistillConfig)):
            parser.error(f"--rows {word!r}: expected key=value with a key of LigerConfig or LigerDistillConfig")
        options[key] = yaml.safe_load(value)
    return options


def listing(cases: Sequence[Case]) -> str:
    lines = [f"{case.name}: {case}{'' if case.default else ' (only by name)'}" for case in cases]
    return "\n".join([*lines, *(f"{p.name}: {p.title} ({kind})" for kind, ps in PROVIDERS.items() for p in ps)])


if __name__ == "__main__":
    sys.exit(main())
