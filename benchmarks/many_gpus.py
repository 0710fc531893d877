"""Whole training steps on 1, 2, 4 and 8 GPUs, by DDP and FSDP2: ours and TRL's trainers.

    python -m benchmarks.many_gpus --output DIR               # DIR/many-gpus-<device>.json and .md
    python -m benchmarks.many_gpus --gpus 2 --rows sft-llama-3-8b:trl,trl_compiled,ours
    python -m benchmarks.many_gpus --rows heads-152k:ours,ours:vocab_parallel=always
    python -m benchmarks.many_gpus --tiny --gpus 1 2          # processes on CPUs over gloo: does it still work

A row is a provider in a case on so many GPUs, a process each, in the environment that `accelerate launch` gives with
TRL's files. Options, what is equal and what is timed are as in `benchmarks.trainer_step`. A GPU's batch is the same
however many GPUs there are.

Losses of all steps, averaged over the ranks, and the first gradient norm must be those of TRL's plain trainer on as
many GPUs and the same rows, else a row has no times. The memory that was in use at most is shown next to what
`liger-trainer estimate` predicts; what it predicts not to fit is not run.

Exit code 1: the gate refused a row of ours, or it failed. 2: a name that does not exist, or GPUs that are not there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import multiprocessing.connection
import os
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from .measure import MIB, Spread
from .processes import Process, context_for
from .report import provenance, spread, table, where, without_output
from .trainer_cases import LOSS_TOLERANCE, NORM_TOLERANCE, REFERENCE, TINY_PLAN, Case, Plan, length_of, make_rows
from .trainer_providers import TRAINERS, Provider, lora_options, prepare
from .trainer_step import PACKAGES, PRELOADED, Row, measure, pairs, parse, report
from .trainer_worker import Measured, TrainerWorker, notes_of, summed, train

COUNTS = (1, 2, 4, 8)
WHAT = (
    "{timed} timed steps after {warmup} of warm-up, in the trainers' own loops, under TRL's files for accelerate; rows "
    "of one length, the same number on each GPU; computing in {dtype}, trained weights in fp32 under FSDP2 and in "
    "{dtype} by DDP, sdpa, fused AdamW, random weights, NVLink multicast off. ms: median of the steps (quartiles), of "
    "the slowest rank. Efficiency: tokens/s a GPU over those of one GPU. In use: MiB of the fullest rank at most, "
    "without the memory of CUDA graphs. Held: with it, and with what the allocator keeps. What `estimate` predicts is "
    "compared with what is held where layers are in graphs, else with what is in use. Gaps: how far a step's loss is "
    "at most from TRL's plain trainer's on as many GPUs, over its first loss, and how far the first gradient norm is; "
    "beyond {loss_tolerance:g} or {norm_tolerance:g} a row is refused."
)
HEADS = (
    "GPUs", "trainer", "ms", "tokens/s a GPU", "of SFTTrainer's", "efficiency", "in use, MiB", "estimate", "off",
    "held, MiB", "gaps: loss, norm",
)  # fmt: skip

STEPS: dict[str, Any] = {"plan": Plan(5, 10, 2)}
DDP: dict[str, Any] = {"engine": "ddp", **STEPS}
COMMON: dict[str, Any] = {"fp32": True, **STEPS}
# At the common 1e-4 these trainings from random weights are chaotic: two runs that differ by rounding part by more than
# the gate allows, so that it would refuse ours for nothing.
GENTLE: dict[str, Any] = {"gently": 5, **COMMON}
# To compare heads that are gathered with heads that stay on their ranks: untied ones, below few layers.
HEADS_ONLY: dict[str, Any] = {"layers": 8, "default": False, **GENTLE}
CASES = (  # `rows` are of one GPU
    Case("ddp-sft-qwen3-0.6b", "Qwen3-0.6B", 8, 1024, **DDP),
    Case("ddp-lora-qwen3-0.6b", "Qwen3-0.6B", 8, 1024, lora_dropout=0.0, **DDP),
    Case("ddp-kd-qwen3-0.6b", "Qwen3-0.6B", 8, 1024, teacher="Qwen3-1.7B", **DDP),
    Case("ddp-sft-qwen3-1.7b", "Qwen3-1.7B", 8, 1024, **DDP),
    Case("sft-qwen3-1.7b", "Qwen3-1.7B", 8, 1024, **GENTLE),
    Case("lora-qwen3-1.7b", "Qwen3-1.7B", 8, 1024, lora_dropout=0.0, **COMMON),
    Case("kd-qwen3-1.7b-8b", "Qwen3-1.7B", 8, 1024, teacher="Qwen3-8B", checkpointing=True, **COMMON),
    Case("sft-llama-3-8b", "Llama-3-8B", 1, 8192, checkpointing=True, **GENTLE),
    Case("heads-152k", "Qwen3-8B", 4, 2048, **HEADS_ONLY),
    Case("heads-262k", "Qwen3-8B, V 262144", 4, 2048, **HEADS_ONLY),
)
TINY = "ddp-sft-qwen3-0.6b,sft-llama-3-8b,lora-qwen3-1.7b,kd-qwen3-1.7b-8b", "trl,ours"


# What is predicted


def run_config(case: Case, tiny: bool, gpus: int = 1) -> Any:
    """Return what our trainers are given in a case, as a configuration. `simulated` makes the folders of its models."""
    from liger_trainer.config.run_config import check_text

    settings: dict[str, Any] = {
        "model_name_or_path": "model", "dataset_name": "rows.jsonl", "max_length": length_of(case, tiny),
        "max_steps": 1, "per_device_train_batch_size": case.rows, "gradient_checkpointing": case.checkpointing,
        "optim": "adamw_torch_fused", "bf16": not tiny, "use_cpu": tiny, "report_to": "none", "output_dir": "out",
        "dtype": "float32" if tiny or (case.fp32 and case.lora_dropout is None) else "bfloat16",
    }  # fmt: skip
    if case.teacher:
        settings["teacher_model_name_or_path"] = "teacher"
    if case.lora_dropout is not None:
        settings |= {f"lora_{key.removeprefix('lora_')}": value for key, value in lora_options(case).items()}
        settings |= {"use_peft": True, "lora_target_modules": "all-linear"}
    if gpus > 1:
        settings |= {"accelerate_config": case.engine, "num_processes": gpus}
    return check_text(yaml.safe_dump(settings), "case.yaml")


@functools.cache
def simulated(case: Case, gpus: int, tiny: bool) -> tuple[Any, Any]:
    """Return what `estimate` says of ours in a case on so many GPUs: the memory of a step, and how it is shared out."""
    from liger_trainer.extras.estimate.simulate import simulate
    from liger_trainer.extras.estimate.step_spec import sharding_of, step_spec

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        case.config(tiny).save_pretrained("model")
        if case.teacher:
            case.config(tiny, teacher=True).save_pretrained("teacher")
        config = run_config(case, tiny, gpus)
        return simulate(step_spec(config, length_of(case, tiny), padded=False, bf16=not tiny)), sharding_of(config)


def predict(case: Case, gpus: int, tiny: bool) -> tuple[float, float]:
    """Return the peak that `estimate` predicts, and what CUDA graphs keep besides it, with whole weights under FSDP2,
    where there is room. In MiB."""
    from liger_trainer.extras.estimate.estimator import highest

    memory, sharding = simulated(case, gpus, tiny)
    return highest(memory, sharding)[1].bytes / MIB, (sharding.graphs_bytes(memory) or 0) / MIB


# One of the processes of a row


class RankWorker(TrainerWorker):
    def load_rank(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        self.load()

    def run_rank(self, case: Case, provider: Provider, gpus: int, environment: dict[str, str]) -> Measured:
        """Train, and return what was measured.

        Raises:
            RuntimeError: the trainer is not on the case's engine, or has no checkpointed layers where it should.
        """
        os.environ.update(environment)
        device, plan = "cpu" if self.tiny else "cuda", TINY_PLAN if self.tiny else case.plan
        torch.set_num_threads(1) if self.tiny else torch.cuda.set_device(int(environment.get("LOCAL_RANK", 0)))
        is_fsdp2 = gpus > 1 and case.engine == "fsdp2"
        with tempfile.TemporaryDirectory() as folder, fsdp2_on_cpu() if is_fsdp2 and self.tiny else nullcontext():
            rows = make_rows(replace(case, rows=case.rows * gpus), plan, self.tiny)
            trainer = TRAINERS[provider.trainer](prepare(case, provider, self.tiny, device, folder, rows, plan.steps))
            engine = trainer.accelerator.distributed_type.value
            by_fsdp2 = bool(trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2)
            if (by_fsdp2, engine.startswith("MULTI")) != (is_fsdp2, gpus > 1 and not is_fsdp2):
                raise RuntimeError(f"{gpus} processes, but the engine is {engine}")
            measured = train(trainer, plan, folder, alike=True)
        measured.notes = notes_of(trainer, provider)
        reports = getattr(trainer, "graph_reports", {}).values()
        measured.graphed = any(not report.startswith("CUDA graphs: none") for report in reports)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return measured


def fsdp2_on_cpu() -> Any:
    """Accelerate has no FSDP2 on a CPU: the tests know how to have it."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from engines.fsdp2_on_cpu import fsdp2  # pyright: ignore[reportMissingImports]

    return fsdp2()


# Rows


@dataclass(eq=False)
class GpuRow(Row):
    """A provider in a case on so many GPUs. `predicted`: see `predict`."""

    gpus: int = 1
    predicted: tuple[float, float] | None = None

    @property
    def group(self) -> Any:
        return self.case.name, self.gpus

    @property
    def rate(self) -> float | None:
        """Tokens a second of a GPU; None for a row that failed."""
        m = self.measured
        return None if self.failure or m is None else m.tokens / m.seconds / self.gpus


class Ranks:
    """The processes of a row, with the methods of one `Process`."""

    def __init__(self, row: GpuRow, options: argparse.Namespace):
        self.row, self.tiny = row, options.tiny
        context = None if row.provider.compiles else context_for(*PRELOADED)
        self.ranks = [Process(RankWorker, row.provider.name, self.tiny, context) for _ in range(row.gpus)]
        # Before an import can look for GPUs: a process that saw several would train by torch's DataParallel.
        seen = {"CUDA_VISIBLE_DEVICES": "0"} if row.gpus == 1 else {}
        for rank in self.ranks:
            rank.start("load_rank", seen)
        row.predicted = predict(row.case, row.gpus, self.tiny)  # while they import
        peak, memory = row.predicted[0], options.memory_mib  # the others take more than ours
        self.failure = None if peak <= memory else f"not run: estimate says {peak:,.0f} MiB, the GPU has {memory:,.0f}"

    def start(self, method: str, *arguments: Any) -> None:
        row = self.row
        environment = environment_of(row.gpus, self.tiny, row.case.engine)
        for number, rank in enumerate(self.ranks):
            mine = {"RANK": str(number), "LOCAL_RANK": str(number)} if row.gpus > 1 else {}
            rank.start(f"{method}_rank", *arguments, row.gpus, environment | mine)

    def result(self, seconds: float | None = None) -> tuple[Measured | None, str | None]:
        """Wait for all of them, or for the first that fails: the others wait for it."""
        until, answers, waiting = time.monotonic() + (seconds or math.inf), {}, dict(enumerate(self.ranks))
        while waiting:
            connections = {rank.connection: number for number, rank in waiting.items()}
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            ready = multiprocessing.connection.wait(list(connections), left)
            for number in [connections[one] for one in ready] or [next(iter(waiting))]:
                answers[number], failure = waiting.pop(number).result(None if ready else 0.0)
                if failure:
                    return None, failure if ready else f"took more than {seconds:.0f} s"
        if answers[0] is None:  # they have imported
            return None, self.failure
        return merged([answers[number] for number in sorted(answers)]), None

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()


def environment_of(gpus: int, tiny: bool, engine: str) -> dict[str, str]:
    """Return what `accelerate launch` and torchrun set for all ranks."""
    if gpus == 1:
        return {"ACCELERATE_USE_CPU": "true"} if tiny else {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    if tiny:
        return {**common, "ACCELERATE_USE_CPU": "true"}
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    from liger_trainer.config.conflicts import accelerate_names

    words = ["--config_file", str(accelerate_names()[engine]), "--num_processes", str(gpus), "unused.py"]
    arguments = _validate_launch_command(launch_command_parser().parse_args(words))[0]
    arguments.main_process_port = int(port)
    return {**prepare_multi_gpu_env(arguments), **common, "NCCL_NVLS_ENABLE": "0"}  # not every host has multicast


def merged(ranks: Sequence[Measured]) -> Measured:
    """Return the ranks' measurements as one: means of losses, sums of tokens, the slowest and the largest.

    `rows` has the sums over the ranks' rows for each step: tokens, and a weighted sum of their ids, so that rows on
    another rank are other rows.
    """
    names = ("seconds", "busy_ms", "traced_ms", "reserved_mib", "weights_mib", "allocated_mib")
    columns = {name: [getattr(m, name) for m in ranks] for name in ("losses", "rows", "ms", *names)}
    steps = {name: list(zip(*columns[name], strict=True)) for name in ("losses", "rows", "ms")}
    return replace(
        ranks[0], **{name: None if None in columns[name] else max(columns[name]) for name in names},
        losses=[statistics.fmean(losses) for losses in steps["losses"]],
        rows=[summed(rows) for rows in steps["rows"]] if len(ranks) > 1 else ranks[0].rows,
        ms=[max(ms) for ms in steps["ms"]],
        tokens=sum(m.tokens for m in ranks), padded_tokens=sum(m.padded_tokens for m in ranks),
    )  # fmt: skip


# The page, and the command line


def markdown(header: dict[str, Any], rows: Sequence[GpuRow]) -> str:
    lines = ["# Training steps on several GPUs", "", where(header), "", WHAT.format(**header), ""]
    for case, group in itertools.groupby(rows, key=lambda row: row.case):
        of_case = list(group)
        cells = [_cells(row, of_case) for row in of_case]
        lines += [f"## {case}", "", f"`{case.name}`", "", *table(HEADS, cells), ""]
    return "\n".join(lines)


def _cells(row: GpuRow, rows: Sequence[GpuRow]) -> list[str]:
    head, m, rate = [str(row.gpus), row.provider.title], row.measured, row.rate
    if m is None or rate is None:
        return [*head, row.failure or "", *[""] * (len(HEADS) - 3)]
    same = [r for r in rows if r.provider == row.provider and r.rate]
    fewest, base = min(((r.gpus, r.rate) for r in same), default=(1, None))
    reference = next((r.rate for r in rows if r.group == row.group and r.provider.name == REFERENCE), None)
    peak, graphs = row.predicted if row.predicted and row.provider.name == "ours" else (None, 0.0)
    graphs = graphs if m.graphed else 0.0
    estimated, compared = peak and peak + graphs, m.reserved_mib if graphs else m.allocated_mib
    return [
        *head, spread(Spread.of(m.ms), ".1f"), f"{rate:,.0f}",
        "" if not reference or row.provider.name == REFERENCE else f"{rate / reference:.2f}",
        "" if not base or row.gpus == fewest else f"{rate / base:.3f} of {fewest}",
        "" if m.allocated_mib is None else f"{m.allocated_mib:,.0f}",
        "" if estimated is None else f"{estimated:,.0f}",
        "" if estimated is None or compared is None else f"{estimated / compared - 1:+.1%}",
        "" if m.reserved_mib is None else f"{m.reserved_mib:,.0f}",
        f"{row.loss_gap:.1e}, {row.norm_gap:.1e}",
    ]  # fmt: skip


def rows_of(options: argparse.Namespace) -> list[GpuRow]:
    """Return the rows that are asked for. Peers other than the reference, and shared heads, need several GPUs."""
    rows = []
    for _, group in itertools.groupby(pairs(options), key=lambda pair: pair[0]):
        for gpus, (case, provider) in itertools.product(sorted(options.gpus, reverse=True), list(group)):
            alone = provider.name == REFERENCE or (provider.is_ours and "vocab_parallel" not in provider.options)
            rows += [GpuRow(case, provider, gpus=gpus)] if gpus > 1 or alone else []
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if arguments is None else list(arguments)

    def add_more(parser: argparse.ArgumentParser) -> None:
        help = "numbers of GPUs; default: all that are there"
        parser.add_argument("--gpus", type=int, nargs="+", choices=COUNTS, help=help)

    options = parse(argv, "many_gpus", __doc__, CASES, "trl,ours", TINY, add_more)
    there = 2 if options.tiny else torch.cuda.device_count()
    options.gpus = options.gpus or [count for count in COUNTS if count <= there]
    if not there or max(options.gpus) > there:
        print(f"--gpus: {max(options.gpus, default=1)} wanted, {there} there. --tiny needs none.", file=sys.stderr)
        return 2
    options.memory_mib = math.inf if options.tiny else torch.cuda.get_device_properties(0).total_memory / MIB
    command = shlex.join(["python", "-m", "benchmarks.many_gpus", *without_output(argv)])
    header = {
        **provenance(PACKAGES, cuda=False if options.tiny else None), "command": command,
        **asdict(TINY_PLAN if options.tiny else STEPS["plan"]), "dtype": "fp32" if options.tiny else "bf16",
        "loss_tolerance": LOSS_TOLERANCE, "norm_tolerance": NORM_TOLERANCE,
    }  # fmt: skip
    rows = rows_of(options)
    in_turn = sorted(rows, key=lambda row: row.gpus == 1)  # what a time limit cuts off are those on one
    return report("many-gpus", options, header, rows, measure(in_turn, options, Ranks), markdown)


if __name__ == "__main__":
    sys.exit(main())
