"""Whole training steps on 1, 2, 4 and 8 GPUs under FSDP2: TRL's trainers and ours, and the memory that is predicted.

    python -m benchmarks.many_gpus --output DIR               # DIR/many-gpus-<device>.json and .md
    python -m benchmarks.many_gpus --gpus 8 --cases sft-llama-3-8b --providers trl,trl_compiled,ours
    python -m benchmarks.many_gpus --cases 'kd-llama-*' --ours vocab_parallel=always
    python -m benchmarks.many_gpus --cases 'memory-*' --gpus 1         # `estimate` and what one GPU holds
    python -m benchmarks.many_gpus --tiny --gpus 1 2          # processes on CPUs over gloo: does it still work

A row is a provider in a case on so many GPUs, a process each, in the environment that `accelerate launch` gives with
TRL's fsdp2.yaml. Options, what is equal and what is timed are as in `benchmarks.trainer_step`. A GPU's batch is the
same however many GPUs there are. Losses of all steps, averaged over the ranks, and the first gradient norm must be
those of TRL's plain trainer on as many GPUs and the same rows, else a row has no times. The memory that was in use at
most is shown next to what `liger-trainer estimate` predicts; what it predicts not to fit is not run.

Exit code 1: the gate refused a row of ours, or it failed. 2: a name that does not exist, or GPUs that are not there.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from .measure import MIB, Spread
from .processes import Process, context_for
from .report import join_versions, provenance, spread, table, without_output
from .trainer_cases import LOSS_TOLERANCE, NORM_TOLERANCE, TINY_PLAN, Case, Plan, length_of, make_rows
from .trainer_providers import TRAINERS, Provider, lora_options, prepare
from .trainer_step import PRELOADED, Row, measure, pairs, parse, report
from .trainer_worker import Measured, TrainerWorker, held, notes_of, teachers_of, train

COUNTS, TINY_COUNTS = (1, 2, 4, 8), (1, 2)
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate")
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0}  # dense bf16, NVIDIA's data sheets
PARTS = ("student weights", "adapter weights", "teacher weights", "gradients", "optimizer state")
AHEAD = 4  # rows whose processes import at a time
WHAT = (
    "{timed} timed steps after {warmup} of warm-up, in the trainers' own loops, under TRL's fsdp2.yaml; rows of one "
    "length, the same number on each GPU; trained weights in fp32, computing in {dtype}, sdpa, fused AdamW, random "
    "weights, NVLink multicast off. ms: median of the steps (quartiles), of the slowest rank. Efficiency: tokens/s a "
    "GPU over those of the fewest GPUs. MFU: the model's operations, without what is computed again and with all of "
    "attention, over the GPU's dense bf16 peak. In use: MiB of the fullest rank, and what `estimate` predicts. Held: "
    "with what the allocator keeps. Gaps: how far a step's loss is at most from TRL's plain trainer's on as "
    "many GPUs, over its first loss, and how far the first gradient norm is; beyond {loss_tolerance:g} or "
    "{norm_tolerance:g} a row is refused. For comparison, torchtitan's own numbers for Llama-3.1-8B on 8 H100 with 96 "
    "GB at 500 W, 2 rows of 8192 tokens a GPU, selective checkpointing: 5,762 tokens/s a GPU and 82.4 GiB, 6,667 and "
    "77.0 with torch.compile, 8,532 and 76.8 with torch.compile and float8."
)
HEADS = (
    "GPUs", "trainer", "ms", "tokens/s a GPU", "efficiency", "MFU", "in use, MiB", "estimate", "off", "held, MiB",
    "gaps: loss, norm",
)  # fmt: skip

COMMON: dict[str, Any] = {"plan": Plan(4, 10, 2), "fp32": True}
# At the common 1e-4 its training from random weights is chaotic: two runs that differ by rounding part by more than the
# gate allows, so that it would refuse ours for nothing.
LLAMA: dict[str, Any] = {"checkpointing": True, "gently": 5, **COMMON}
CASES = (  # `rows` are of one GPU
    Case("sft-llama-3-8b", "Llama-3-8B", 1, 8192, selective=True, **LLAMA),
    Case("sft-llama-3-8b-2-rows", "Llama-3-8B", 2, 8192, selective=True, default=False, **LLAMA),
    Case("kd-llama-3-8b-70b", "Llama-3-8B", 1, 4096, teacher="Llama-3-70B", teacher_layers=24, **LLAMA),
    Case("sft-qwen3-1.7b", "Qwen3-1.7B", 2, 2048, **COMMON),
    Case("lora-qwen3-1.7b", "Qwen3-1.7B", 2, 2048, lora_dropout=0.0, **COMMON),
    Case("kd-qwen3-1.7b-8b", "Qwen3-1.7B", 2, 2048, teacher="Qwen3-8B", checkpointing=True, **COMMON),
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
TINY = "sft-llama-3-8b,lora-qwen3-1.7b,kd-qwen3-1.7b-8b", "trl,ours"


# What is predicted


@dataclass(frozen=True)
class Prediction:
    """What `estimate` says of ours in a case on so many GPUs, in MiB, and the operations of a token.

    `held_mib`: by PARTS, when the optimizer steps.
    """

    case: str
    gpus: int
    peak_mib: float
    held_mib: dict[str, float]
    flops: float


def run_config(case: Case, tiny: bool, gpus: int = 1) -> Any:
    """Return what our trainers are given in a case, as a configuration. `predict` makes the folders of its models."""
    from liger_trainer.config.run_config import check_text

    settings: dict[str, Any] = {
        "model_name_or_path": "model", "dataset_name": "rows.jsonl", "max_length": length_of(case, tiny),
        "max_steps": 1, "per_device_train_batch_size": case.rows, "gradient_checkpointing": case.checkpointing,
        "optim": "adamw_torch_fused", "bf16": not tiny, "use_cpu": tiny, "report_to": "none", "output_dir": "out",
    }  # fmt: skip
    if case.teacher:
        settings["teacher_model_name_or_path"] = "teacher"
    if case.lora_dropout is not None:
        settings |= {f"lora_{key.removeprefix('lora_')}": value for key, value in lora_options(case).items()}
        settings |= {"use_peft": True, "lora_target_modules": "all-linear", "dtype": "float32" if tiny else "bfloat16"}
    if gpus > 1:
        settings |= {"accelerate_config": "fsdp2", "num_processes": gpus}
    return check_text(yaml.safe_dump(settings), "case.yaml")


def _halfway(memory: Any, other: Any) -> Any:
    """Return the memory of selective checkpointing: halfway between all layers and none."""
    from liger_trainer.tools.estimate.memory_tracker import Peak

    peaks = {}
    for phase, peak in memory.peaks.items():
        parts = Counter(peak.parts) + Counter(other.peaks[phase].parts)
        half = Counter({part: size // 2 for part, size in parts.items()})
        peaks[phase] = Peak(half.total(), half)
    return replace(memory, peaks=peaks)


def predict(case: Case, counts: Sequence[int], tiny: bool) -> list[Prediction]:
    from liger_trainer.tools.estimate.estimator import highest
    from liger_trainer.tools.estimate.simulate import simulate
    from liger_trainer.tools.estimate.step_spec import sharding_of, step_spec

    predictions = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        case.config(tiny).save_pretrained("model")
        if case.teacher:
            case.config(tiny, teacher=True).save_pretrained("teacher")
        memories: dict[bool, Any] = {}  # FSDP2 has another step than one process, the same on two GPUs and on eight
        for gpus in counts:
            config = run_config(case, tiny, gpus)
            if (gpus > 1) not in memories:
                spec = step_spec(config, length_of(case, tiny), padded=False, bf16=not tiny)
                memories[gpus > 1] = simulate(spec)
                if case.selective:
                    other = simulate(replace(spec, checkpointing=None))
                    memories[gpus > 1] = _halfway(memories[gpus > 1], other)
            memory, sharding = memories[gpus > 1], sharding_of(config)
            flops = flops_of_token(case, tiny, memory.trainable)
            parts, peak = sharding.per_process(memory)["optimizer"].parts, highest(memory, sharding)[1]
            held_mib = {part: parts[part] / MIB for part in PARTS if parts[part]}
            predictions.append(Prediction(case.name, gpus, peak.bytes / MIB, held_mib, flops))
    return predictions


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

    def run_rank(self, case: Case, provider: Provider, gpus: int, environment: dict[str, str]) -> tuple[Measured, Any]:
        """Train, and return what was measured, and MiB of PARTS that this process held.

        Raises:
            RuntimeError: the trainer is not on FSDP2, or has no checkpointed layers where it should.
        """
        from transformers import TrainerCallback

        os.environ.update(environment)
        device, plan = "cpu" if self.tiny else "cuda", TINY_PLAN if self.tiny else case.plan
        engine: Any = contextlib.nullcontext()
        if self.tiny:
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(int(environment.get("LOCAL_RANK", 0)))
        if self.tiny and gpus > 1:  # accelerate has no FSDP2 on a CPU: the tests know how to have it
            sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
            from engines.fsdp2_on_cpu import fsdp2  # pyright: ignore[reportMissingImports]

            engine = fsdp2()
        with tempfile.TemporaryDirectory() as folder, engine:
            rows = make_rows(replace(case, rows=case.rows * gpus), plan, self.tiny)
            trainer = TRAINERS[provider.trainer](prepare(case, provider, self.tiny, device, folder, rows, plan.steps))
            if (gpus > 1) != bool(trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2):
                raise RuntimeError(f"{gpus} processes, but the engine is {trainer.accelerator.distributed_type}")
            shares: dict[str, float] = {}
            do = {"on_pre_optimizer_step": lambda self, *_, **__: shares.update(shares_of(trainer))}
            if case.selective:
                do["on_train_begin"] = lambda self, *_, **__: spare_every_second(trainer.model)
            trainer.add_callback(type("Shares", (TrainerCallback,), do)())
            measured = train(trainer, plan, folder, alike=True)
        measured.notes = notes_of(trainer, provider)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return measured, shares


def shares_of(trainer: Any) -> dict[str, float]:
    """Return MiB that this process holds before a step of the optimizer, whose state the step before has left."""
    parameters = list(trainer.model.parameters())
    trained, frozen = ([p for p in parameters if p.requires_grad is wanted] for wanted in (True, False))
    teachers = [p for model in teachers_of(trainer) for p in model.parameters()]
    states = [x for state in trainer.optimizer.state.values() for x in state.values() if x.ndim]
    tensors = (frozen or trained, trained if frozen else [], teachers, [p.grad for p in trained], states)
    return {part: sum(held(x).nbytes for x in of) / MIB for part, of in zip(PARTS, tensors, strict=True) if of}


def spare_every_second(model: Any) -> None:
    """Have every second checkpointed layer keep its activations: torchtitan's selective checkpointing by layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    if not layers:
        raise RuntimeError("expected layers with gradient checkpointing, got none")
    for layer in layers[1::2]:
        layer.gradient_checkpointing = False


# Rows


@dataclass(eq=False)
class GpuRow(Row):
    """A provider in a case on so many GPUs. `shares`: MiB of PARTS that the fullest rank held."""

    gpus: int = 1
    predicted: Prediction | None = None
    shares: dict[str, float] = field(default_factory=dict)

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
        for rank in self.ranks:
            rank.start("load")

    def start(self, method: str, *arguments: Any) -> None:
        gpus, environment = self.row.gpus, environment_of(self.row.gpus, self.tiny)
        for number, rank in enumerate(self.ranks):
            mine = {"RANK": str(number), "LOCAL_RANK": str(number)} if gpus > 1 else {}
            rank.start(f"{method}_rank", *arguments, gpus, environment | mine)

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
        if answers[0] is None:
            return None, None
        shares = [shares for _, shares in answers.values()]
        self.row.shares = {part: max(of[part] for of in shares) for part in shares[0]}
        return merged([answers[number][0] for number in sorted(answers)]), None

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()


def environment_of(gpus: int, tiny: bool) -> dict[str, str]:
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

    words = ["--config_file", str(accelerate_names()["fsdp2"]), "--num_processes", str(gpus), "unused.py"]
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
        rows=[(sum(n for n, _ in rows), sum(i * ids for i, (_, ids) in enumerate(rows, 1))) for rows in steps["rows"]],
        ms=[max(ms) for ms in steps["ms"]],
        tokens=sum(m.tokens for m in ranks), padded_tokens=sum(m.padded_tokens for m in ranks),
    )  # fmt: skip


def predict_all(rows: Sequence[GpuRow], options: argparse.Namespace, memory_mib: float | None) -> None:
    """Give rows their predictions; leave out what is predicted not to fit, since the others take more than ours."""
    by_group: dict[Any, Prediction] = {}
    for row in rows:
        if row.group not in by_group:
            by_group |= {(p.case, p.gpus): p for p in predict(row.case, options.gpus, options.tiny)}
        row.predicted = by_group[row.group]
        if memory_mib is not None and row.predicted.peak_mib > memory_mib:
            row.failure = f"not run: estimate says {row.predicted.peak_mib:,.0f} MiB, the GPU has {memory_mib:,.0f}"


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
    head = [str(row.gpus), row.provider.title]
    m, rate, predicted = row.measured, row.rate, row.predicted
    if m is None or rate is None or predicted is None:
        return [*head, row.failure or "", *[""] * (len(HEADS) - 3)]
    fewest, base = min((r.gpus, r.rate) for r in rows if r.provider == row.provider and r.rate is not None)
    estimated, used = predicted.peak_mib if row.provider.name == "ours" else None, m.allocated_mib
    return [
        *head, spread(Spread.of(m.ms), ".1f"), f"{rate:,.0f}", f"{rate / base:.2f} of {fewest}",
        "" if peak_tflops is None else f"{rate * predicted.flops / peak_tflops / 1e12:.1%}",
        "" if used is None else f"{used:,.0f}",
        "" if estimated is None else f"{estimated:,.0f}",
        "" if estimated is None or used is None else f"{estimated / used - 1:+.1%}",
        "" if m.reserved_mib is None else f"{m.reserved_mib:,.0f}",
        f"{row.loss_gap:.1e}, {row.norm_gap:.1e}",
    ]  # fmt: skip


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
    where = provenance(PACKAGES, cuda=None if not options.tiny else False)
    header = {
        **where, "command": shlex.join(["python", "-m", "benchmarks.many_gpus", *without_output(argv)]),
        **asdict(TINY_PLAN if options.tiny else COMMON["plan"]), "dtype": "fp32" if options.tiny else "bf16",
        "peak_tflops": next((peak for name, peak in PEAK_TFLOPS.items() if name in where["device"]), None),
        "loss_tolerance": LOSS_TOLERANCE, "norm_tolerance": NORM_TOLERANCE,
    }  # fmt: skip
    most_first = sorted(options.gpus, reverse=True)  # what a time limit cuts off are the fewest
    rows = [
        GpuRow(case, provider, gpus=gpus)
        for case, group in itertools.groupby(pairs(options), key=lambda pair: pair[0])
        for gpus, (_, provider) in itertools.product(most_first, list(group))
        if gpus > 1 or "vocab_parallel" not in provider.options  # one GPU has all rows of the head
    ]
    predict_all(rows, options, None if options.tiny else torch.cuda.get_device_properties(0).total_memory / MIB)
    return report("many-gpus", options, header, rows, measure(rows, options, Ranks, AHEAD), markdown)


if __name__ == "__main__":
    sys.exit(main())
