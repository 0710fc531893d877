"""Whole training steps on 1, 2, 4 and 8 GPUs, by DDP and FSDP2: ours, TRL's trainers and torchtitan.

    python -m benchmarks.many_gpus --output DIR               # DIR/many-gpus-<device>.json and .md
    python -m benchmarks.many_gpus --gpus 2 --rows sft-llama-3-8b:trl,trl_compiled,titan,titan_compiled,ours
    python -m benchmarks.many_gpus --rows heads-152k:ours,ours:vocab_parallel=always
    python -m benchmarks.many_gpus --cases 'memory-*' --gpus 1         # `estimate` and what one GPU holds
    python -m benchmarks.many_gpus --tiny --gpus 1 2          # processes on CPUs over gloo: does it still work

A row is a provider in a case on so many GPUs, a process each, in the environment that `accelerate launch` gives with
TRL's files. Options, what is equal and what is timed are as in `benchmarks.trainer_step`. A GPU's batch is the same
however many GPUs there are. Rows on one GPU run side by side, a GPU each.

Losses of all steps, averaged over the ranks, and the first gradient norm must be those of TRL's plain trainer on as
many GPUs and the same rows. Where one GPU holds the training, it also reads the rows of all GPUs, a micro-batch for
each, and ours on several must have its losses within ONE_GPU_LOSS, its first gradient norm within ONE_GPU_NORM. Else a
row has no times. The memory that was in use at most is shown next to what `liger-trainer estimate` predicts; what it
predicts not to fit is not run.

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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from .measure import MIB, Spread
from .processes import Process, context_for
from .report import join_versions, provenance, spread, table, without_output
from .trainer_cases import LOSS_TOLERANCE, NORM_TOLERANCE, REFERENCE, TINY_PLAN, Case, Plan, length_of, make_rows
from .trainer_providers import TRAINERS, Provider, lora_options, prepare
from .trainer_step import PRELOADED, Row, gaps, measure, pairs, parse, report
from .trainer_worker import Measured, TrainerWorker, notes_of, summed, train

COUNTS, TINY_COUNTS = (1, 2, 4, 8), (1, 2)
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate")
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0}  # dense bf16, NVIDIA's data sheets
AHEAD = 12  # rows whose processes import at a time
ONE_GPU_LOSS, ONE_GPU_NORM = 2e-3, 0.01  # distances from ours on one GPU with the same rows, relative
WHAT = (
    "{timed} timed steps after {warmup} of warm-up, in the trainers' own loops, under TRL's files for accelerate; rows "
    "of one length, the same number on each GPU; computing in {dtype}, trained weights in fp32 under FSDP2 and in "
    "{dtype} by DDP, sdpa, fused AdamW, random weights, NVLink multicast off. ms: median of the steps (quartiles), of "
    "the slowest rank. Efficiency: tokens/s a GPU over those of one GPU. MFU: the model's operations, without what is "
    "computed again and with all of attention, over the GPU's dense bf16 peak. In use: MiB of the fullest rank at "
    "most, without the memory of CUDA graphs. Held: with it, and with what the allocator keeps. What `estimate` "
    "predicts is compared with what is held where layers are in graphs, else with what is in use. Gaps: how far a "
    "step's loss is at most from TRL's plain trainer's on as many GPUs, over its first loss, and how far the first "
    "gradient norm is; beyond {loss_tolerance:g} or {norm_tolerance:g} a row is refused. One GPU: the same of ours on "
    "several from ours on one that reads the rows of all, a micro-batch for each; beyond {one_gpu_loss:g} or "
    "{one_gpu_norm:g} it is refused."
)
HEADS = (
    "GPUs", "trainer", "ms", "tokens/s a GPU", "of SFTTrainer's", "efficiency", "MFU", "in use, MiB", "estimate", "off",
    "held, MiB", "gaps: loss, norm", "one GPU: loss, norm",
)  # fmt: skip

STEPS: dict[str, Any] = {"plan": Plan(5, 10, 2)}
DDP: dict[str, Any] = {"engine": "ddp", **STEPS}
COMMON: dict[str, Any] = {"fp32": True, **STEPS}
# At the common 1e-4 these trainings from random weights are chaotic: two runs that differ by rounding part by more than
# the gate allows, so that it would refuse ours for nothing.
GENTLE: dict[str, Any] = {"gently": 5, **COMMON}
LLAMA: dict[str, Any] = {"checkpointing": True, **GENTLE}
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
    Case("sft-llama-3-8b", "Llama-3-8B", 1, 8192, selective=True, **LLAMA),
    Case("heads-152k", "Qwen3-8B", 4, 2048, **HEADS_ONLY),
    Case("heads-262k", "Qwen3-8B, V 262144", 4, 2048, **HEADS_ONLY),
    *(
        Case(f"memory-{kind}-{shape.lower()}{more}", shape, rows, 1024, **how, **options, **COMMON, default=False)
        for shape in ("Qwen3-0.6B", "Llama-3.2-1B")
        for kind, how in (
            ("sft", {}), ("lora", {"lora_dropout": 0.0}), ("kd", {"teacher": shape}),
            ("kd-lora", {"teacher": shape, "lora_dropout": 0.0}),
        )
        for more, rows, options in (("", 2, {}), ("-8-rows", 8, {}), ("-checkpointing", 8, {"checkpointing": True}))
    ),
)  # fmt: skip
TINY = "ddp-sft-qwen3-0.6b,sft-llama-3-8b,lora-qwen3-1.7b,kd-qwen3-1.7b-8b", "trl,ours"


# What is predicted


@dataclass(frozen=True)
class Prediction:
    """What `estimate` says of ours in a case on so many GPUs, in MiB, and the operations of a token.

    Attributes:
        graphs_mib: what CUDA graphs keep besides the peak, with whole weights under FSDP2, where there is room.
    """

    case: str
    gpus: int
    peak_mib: float
    flops: float
    graphs_mib: float = 0.0


def run_config(case: Case, tiny: bool, gpus: int = 1) -> Any:
    """Return what our trainers are given in a case, as a configuration. `predict` makes the folders of its models."""
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


def _halfway(memory: Any, other: Any) -> Any:
    """Return the memory of selective checkpointing: halfway between all layers and none."""
    from liger_trainer.extras.estimate.memory_tracker import Peak

    peaks = {}
    for phase, peak in memory.peaks.items():
        parts = Counter(peak.parts) + Counter(other.peaks[phase].parts)
        half = Counter({part: size // 2 for part, size in parts.items()})
        peaks[phase] = Peak(half.total(), half)
    return replace(memory, peaks=peaks)


@functools.cache
def predict(case: Case, gpus: int, tiny: bool) -> Prediction:
    from liger_trainer.extras.estimate.estimator import highest
    from liger_trainer.extras.estimate.step_spec import sharding_of

    config = run_config(case, tiny, gpus)
    memory, sharding = _memory(case, gpus > 1, tiny), sharding_of(config)
    peak, graphs = highest(memory, sharding)[1].bytes, sharding.graphs_bytes(memory) or 0
    return Prediction(case.name, gpus, peak / MIB, flops_of_token(case, tiny, memory.trainable), graphs / MIB)


@functools.cache
def _memory(case: Case, several: bool, tiny: bool) -> Any:
    """Return what `estimate` predicts of a step on one GPU or several: under FSDP2 it is the same on two and eight."""
    from liger_trainer.extras.estimate.simulate import simulate
    from liger_trainer.extras.estimate.step_spec import step_spec

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        case.config(tiny).save_pretrained("model")
        if case.teacher:
            case.config(tiny, teacher=True).save_pretrained("teacher")
        config = run_config(case, tiny, 2 if several else 1)
        spec = step_spec(config, length_of(case, tiny), padded=False, bf16=not tiny)
        memory = simulate(spec)
        return _halfway(memory, simulate(replace(spec, checkpointing=None))) if case.selective else memory


def flops_of_token(case: Case, tiny: bool, trained: int) -> int:
    """Return the model's operations for a token, as torchtitan counts them.

    Two for each weight of a product in the forward, four in the backward, but two where the weight is frozen; and
    attention's, without its causal half taken off. What checkpointing computes again is not counted.
    """
    products, attention = _products(case.config(tiny), length_of(case, tiny))
    adapted = 4 * products + 3 * attention + 6 * trained
    student = 3 * (2 * products + attention) if case.lora_dropout is None else adapted
    teacher = _products(case.config(tiny, teacher=True), length_of(case, tiny)) if case.teacher else (0, 0)
    return student + 2 * teacher[0] + teacher[1]


def _products(config: Any, length: int) -> tuple[int, int]:
    """Return the weights of layers and head, and the operations of all layers' attention in a forward."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = [*model.get_decoder().layers.parameters(), model.get_output_embeddings().weight]
    heads = config.num_attention_heads * config.head_dim
    return sum(math.prod(p.shape) for p in weights), 4 * config.num_hidden_layers * heads * length


# One of the processes of a row


class RankWorker(TrainerWorker):
    """Trains as one of several ranks."""

    def load_rank(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        self.load()

    def run_rank(
        self, case: Case, provider: Provider, gpus: int, micro_batches: int, environment: dict[str, str]
    ) -> Measured:
        """Train, and return what was measured.

        Raises:
            RuntimeError: the trainer is not on the case's engine, or has no checkpointed layers where it should.
        """
        os.environ.update(environment)
        device, plan = "cpu" if self.tiny else "cuda", TINY_PLAN if self.tiny else case.plan
        if self.tiny:
            torch.set_num_threads(1)
        else:
            if gpus == 1 and torch.cuda.device_count() > 1:
                raise RuntimeError(f"expected to see one GPU, got {torch.cuda.device_count()}")
            torch.cuda.set_device(int(environment.get("LOCAL_RANK", 0)))
        if micro_batches > 1:
            provider = replace(provider, options={**provider.options, "gradient_accumulation_steps": micro_batches})
        is_fsdp2 = gpus > 1 and case.engine == "fsdp2"
        with tempfile.TemporaryDirectory() as folder, fsdp2_on_cpu() if is_fsdp2 and self.tiny else nullcontext():
            rows = make_rows(replace(case, rows=case.rows * gpus * micro_batches), plan, self.tiny)
            trainer = TRAINERS[provider.trainer](prepare(case, provider, self.tiny, device, folder, rows, plan.steps))
            of_case = is_fsdp2, gpus > 1 and not is_fsdp2
            if (bool(trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2), uses_ddp(trainer)) != of_case:
                raise RuntimeError(f"{gpus} processes, but the engine is {trainer.accelerator.distributed_type}")
            if case.selective and provider.trainer != "titan":  # which checkpoints as it is told
                trainer.add_callback(SpareEverySecond())
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


def uses_ddp(trainer: Any) -> bool:
    engine = getattr(trainer.accelerator, "distributed_type", "FSDP")
    return getattr(engine, "value", engine) in ("MULTI_GPU", "MULTI_CPU")


class SpareEverySecond(TrainerCallback):
    """Has every second checkpointed layer keep its activations: torchtitan's selective checkpointing by layers."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
        if not layers:
            raise RuntimeError("expected layers with gradient checkpointing, got none")
        for layer in layers[1::2]:
            layer.gradient_checkpointing = False


# Rows


@dataclass(eq=False)
class GpuRow(Row):
    """A provider in a case on so many GPUs.

    Attributes:
        micro_batches: of a step on one GPU, which has the rows of as many GPUs.
        device: the GPU of a row on one.
        one_gpu_gaps: of ours on several GPUs: of losses and norm, from ours on one with the same rows.
    """

    gpus: int = 1
    micro_batches: int = 1
    device: int = 0
    predicted: Prediction | None = None
    one_gpu_gaps: tuple[float, float] | None = None

    @property
    def group(self) -> Any:
        return self.case.name, self.gpus * self.micro_batches

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
        seen = {"CUDA_VISIBLE_DEVICES": str(row.device)} if row.gpus == 1 else {}
        for rank in self.ranks:
            rank.start("load_rank", seen)
        row.predicted = predict(row.case, row.gpus, self.tiny)  # while they import
        peak, memory = row.predicted.peak_mib, options.memory_mib
        fits = memory is None or peak <= memory  # the others take more than ours
        self.failure = None if fits else f"not run: estimate says {peak:,.0f} MiB, the GPU has {memory:,.0f}"

    def start(self, method: str, *arguments: Any) -> None:
        row = self.row
        environment = environment_of(row.gpus, self.tiny, row.case.engine)
        for number, rank in enumerate(self.ranks):
            mine = {"RANK": str(number), "LOCAL_RANK": str(number)} if row.gpus > 1 else {}
            rank.start(f"{method}_rank", *arguments, row.gpus, row.micro_batches, environment | mine)

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


def together(rows: Sequence[GpuRow]) -> Iterator[Sequence[GpuRow]]:
    """Yield rows that run at the same time: those on one GPU as long as each has another, others one by one."""
    bunch: list[GpuRow] = []
    for row in rows:
        if bunch and (row.gpus > 1 or bunch[0].gpus > 1 or row.device in {other.device for other in bunch}):
            yield bunch
            bunch = []
        bunch.append(row)
    if bunch:
        yield bunch


def compared(measured: Iterator[GpuRow], rows: Sequence[GpuRow]) -> Iterator[GpuRow]:
    """Compare ours on several GPUs with ours on one with the same rows, as soon as that one is there."""
    for one in measured:
        if one.micro_batches > 1 and one.measured is not None:
            for row in rows:
                if row.group == one.group and row.provider.is_ours and row.gpus > 1 and row.measured:
                    compare(row, one.measured)
        yield one


def compare(row: GpuRow, one: Measured) -> None:
    row.one_gpu_gaps = gaps(row.measured, one)  # pyright: ignore[reportArgumentType]
    loss, norm = row.one_gpu_gaps
    if [tuple(rows) for rows in one.rows] != [tuple(rows) for rows in row.measured.rows]:
        row.failure = row.failure or "it trained on other rows than one GPU"
    elif not (loss <= ONE_GPU_LOSS and norm <= ONE_GPU_NORM):
        row.failure = row.failure or f"refused: from one GPU its loss is up to {loss:.1e}, its first norm {norm:.1e}"


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
    where = f"{header['device']}, {header['date']}, commit {header['commit']}, {join_versions(header['packages'])}."
    lines = ["# Training steps on several GPUs", "", f"{where} `{header['command']}`.", "", WHAT.format(**header), ""]
    for case, group in itertools.groupby(rows, key=lambda row: row.case):
        of_case = list(group)
        cells = [_cells(row, of_case, header["peak_tflops"]) for row in of_case]
        lines += [f"## {case}", "", f"`{case.name}`", "", *table(HEADS, cells), ""]
    return "\n".join(lines)


def _cells(row: GpuRow, rows: Sequence[GpuRow], peak_tflops: float | None) -> list[str]:
    micro_batches = f", {row.micro_batches} micro-batches" if row.micro_batches > 1 else ""
    head = [f"{row.gpus}{micro_batches}", row.provider.title]
    m, rate, predicted = row.measured, row.rate, row.predicted
    if m is None or rate is None or predicted is None:
        return [*head, row.failure or "", *[""] * (len(HEADS) - 3)]
    same = [r for r in rows if r.provider == row.provider and r.micro_batches == 1 and r.rate]
    fewest, base = min(((r.gpus, r.rate) for r in same), default=(1, None))
    reference = next((r.rate for r in rows if r.group == row.group and r.provider.name == REFERENCE), None)
    used = m.allocated_mib
    is_ours, graphs = row.provider.name == "ours", predicted.graphs_mib if m.graphed else 0.0
    estimated, compared = predicted.peak_mib + graphs if is_ours else None, m.reserved_mib if graphs else used
    return [
        *head, spread(Spread.of(m.ms), ".1f"), f"{rate:,.0f}",
        "" if not reference or row.provider.name == REFERENCE or micro_batches else f"{rate / reference:.2f}",
        "" if not base or row.gpus == fewest or micro_batches else f"{rate / base:.3f} of {fewest}",
        "" if peak_tflops is None else f"{rate * predicted.flops / peak_tflops / 1e12:.1%}",
        "" if used is None else f"{used:,.0f}",
        "" if estimated is None else f"{estimated:,.0f}",
        "" if estimated is None or compared is None else f"{estimated / compared - 1:+.1%}",
        "" if m.reserved_mib is None else f"{m.reserved_mib:,.0f}",
        f"{row.loss_gap:.1e}, {row.norm_gap:.1e}",
        "" if row.one_gpu_gaps is None else "{:.1e}, {:.1e}".format(*row.one_gpu_gaps),
    ]  # fmt: skip


def rows_of(options: argparse.Namespace) -> list[GpuRow]:
    """Return the rows that are asked for. Peers other than the reference, and shared heads, need several GPUs."""
    rows, most = [], max(options.gpus)
    for case, group in itertools.groupby(pairs(options), key=lambda pair: pair[0]):
        providers = [provider for _, provider in group]
        for gpus, provider in itertools.product(sorted(options.gpus, reverse=True), providers):
            if gpus > 1 or provider.name == REFERENCE or (provider.is_ours and not is_sharded(provider)):
                rows.append(GpuRow(case, provider, gpus=gpus))
        if most > 1:
            rows += [GpuRow(case, p, gpus=1, micro_batches=most) for p in providers if p.name == "ours"]
    return rows


def is_sharded(provider: Provider) -> bool:
    return "vocab_parallel" in provider.options


def main(arguments: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if arguments is None else list(arguments)

    def add_more(parser: argparse.ArgumentParser) -> None:
        help = "numbers of GPUs; default: all that are there"
        parser.add_argument("--gpus", type=int, nargs="+", choices=COUNTS, help=help)

    options = parse(argv, "many_gpus", __doc__, CASES, "trl,ours", TINY, add_more)
    there = max(TINY_COUNTS) if options.tiny else torch.cuda.device_count()
    options.gpus = options.gpus or [count for count in COUNTS if count <= there]
    if not there or max(options.gpus) > there:
        print(f"--gpus: {max(options.gpus, default=1)} wanted, {there} there. --tiny needs none.", file=sys.stderr)
        return 2
    options.memory_mib = None if options.tiny else torch.cuda.get_device_properties(0).total_memory / MIB
    where = provenance(PACKAGES, cuda=None if not options.tiny else False)
    header = {
        **where, "command": shlex.join(["python", "-m", "benchmarks.many_gpus", *without_output(argv)]),
        **asdict(TINY_PLAN if options.tiny else STEPS["plan"]), "dtype": "fp32" if options.tiny else "bf16",
        "peak_tflops": next((peak for name, peak in PEAK_TFLOPS.items() if name in where["device"]), None),
        "loss_tolerance": LOSS_TOLERANCE, "norm_tolerance": NORM_TOLERANCE, "one_gpu_loss": ONE_GPU_LOSS,
        "one_gpu_norm": ONE_GPU_NORM,
    }  # fmt: skip
    rows = rows_of(options)
    in_turn = sorted(rows, key=lambda row: row.gpus == 1)  # what a time limit cuts off are those on one
    for number, row in enumerate(row for row in in_turn if row.gpus == 1):
        row.device = number % there
    measured = compared(measure(in_turn, options, Ranks, AHEAD, together), rows)
    return report("many-gpus", options, header, rows, measured, markdown)


if __name__ == "__main__":
    sys.exit(main())
