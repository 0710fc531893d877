"""The memory that `liger-trainer estimate` predicts for a training, and the memory that the training takes.

    python -m benchmarks.estimates --output DIR       # on a GPU: DIR/estimates.json and .md
    python -m benchmarks.estimates --tiny             # small enough for a CPU: does it still work

Each point is a case of the trainers' harness with rows of full length and trained weights in fp32. A worker simulates
a step of it, trains it for three steps, and reads `torch.cuda.max_memory_allocated` after each part of a step, so that
a wrong part shows. Several workers share the device, each in a process: a peak does not depend on what others do.
Exit code 1: a point failed, or the estimate is off by more than BOUND.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from .measure import MIB, explain, release_memory
from .report import provenance, table, write
from .trainer_cases import Case, Plan, length_of, make_rows
from .trainer_providers import PROVIDERS, TRAINERS, lora_options, prepare

JOBS, STEPS, BOUND = 3, 3, 0.1
LENGTH, SHAPES = 1024, ("Qwen3-0.6B", "Llama-3.2-1B")
PHASES = ("forward", "backward", "optimizer")


def points(tiny: bool) -> list[Case]:
    """Return two shapes, four ways to train, two batch sizes; and the larger batch with gradient checkpointing."""
    plan, found = Plan(0, STEPS, 0), []
    for shape, teaches, adapted in itertools.product(SHAPES, (False, True), (False, True)):
        name = f"{'distil' if teaches else 'SFT'} {'LoRA' if adapted else 'full'}"
        how: dict[str, Any] = {"teacher": shape if teaches else None, "lora_dropout": 0.0 if adapted else None}
        for rows in (1, 2) if tiny else (2, 8):
            found.append(Case(name, shape, rows, LENGTH, **how, fp32=True, plan=plan))
        if not teaches:
            found.append(replace(found[-1], checkpointing=True))
    return found


# The estimate


def run_config(case: Case, tiny: bool, gpus: int = 1) -> Any:
    """Return what our trainers are given in a case, as a configuration; its models are in `simulated`'s folder."""
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


@contextlib.contextmanager
def simulated(case: Case, tiny: bool) -> Iterator[Any]:
    """Within, the current folder has the models' configurations; gives the memory of a step on one GPU."""
    from liger_trainer.tools.estimate.simulate import simulate
    from liger_trainer.tools.estimate.step_spec import step_spec

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        case.config(tiny).save_pretrained("model")
        if case.teacher:
            case.config(tiny, teacher=True).save_pretrained("teacher")
        spec = step_spec(run_config(case, tiny), length_of(case, tiny), padded=False, bf16=not tiny)
        memory = simulate(spec)
        yield _halfway(memory, simulate(replace(spec, checkpointing=None))) if case.selective else memory


def _halfway(memory: Any, other: Any) -> Any:
    """Return the memory of selective checkpointing: halfway between all layers and none."""
    from liger_trainer.tools.estimate.memory_tracker import Peak

    peaks = {}
    for phase, peak in memory.peaks.items():
        parts = Counter(peak.parts) + Counter(other.peaks[phase].parts)
        half = Counter({part: size // 2 for part, size in parts.items()})
        peaks[phase] = Peak(half.total(), half)
    return replace(memory, peaks=peaks)


# A point, in a worker


@dataclass
class Result:
    """MiB. Peaks are of parts of a step; `loaded` is what is allocated before the first."""

    point: Case
    estimated: float = 0.0
    estimated_peaks: dict[str, float] = field(default_factory=dict)
    estimated_parts: dict[str, float] = field(default_factory=dict)
    measured: float | None = None
    measured_peaks: dict[str, float] = field(default_factory=dict)
    loaded: float | None = None
    failure: str | None = None

    @property
    def error(self) -> float | None:
        return self.estimated / self.measured - 1 if self.measured else None


def run_point(point: Case, tiny: bool) -> Result:
    """Estimate a training, then train it."""
    from liger_trainer.tools.estimate.estimator import LIBRARIES, highest
    from liger_trainer.tools.estimate.sharding import Sharding

    result = Result(point)
    try:
        with simulated(point, tiny) as memory:
            _, peak = highest(memory, Sharding())
            peaks = {phase: (of.bytes + LIBRARIES[1]) / MIB for phase, of in memory.peaks.items()}
        result.estimated = peak.bytes / MIB
        result.estimated_parts = {part: size / MIB for part, size in peak.parts.most_common() if size}
        forward = max(peaks.pop(phase, 0.0) for phase in ("teacher", "forward", "loss"))
        result.estimated_peaks = {"forward": forward, **{phase: peaks[phase] for phase in PHASES[1:]}}
        train(result, tiny)
    except Exception as error:  # the others are measured all the same
        result.failure = explain(error)
    release_memory()
    print(point, result.estimated, result.measured, result.failure or "", file=sys.stderr, flush=True)
    return result


def train(result: Result, tiny: bool) -> None:
    """Train and note, where there is a GPU, what was allocated at most in each part of a step."""
    case = result.point
    device = "cuda" if torch.cuda.is_available() and not tiny else "cpu"
    base = torch.cuda.memory_allocated() / MIB if device == "cuda" else 0.0  # left by the point before
    ours = next(provider for provider in PROVIDERS[case.kind] if provider.name == "ours")
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(case, case.plan, tiny)
        trainer = TRAINERS[ours.trainer](prepare(case, ours, tiny, device, folder, rows, STEPS))
        forward, step = trainer.compute_loss, trainer.training_step

        def end(part: str) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() / MIB - base
                result.measured_peaks[part] = max(result.measured_peaks.get(part, 0.0), peak)
                torch.cuda.reset_peak_memory_stats()

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            end("optimizer")  # of the step before
            loss = forward(*args, **kwargs)
            end("forward")
            return loss

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            end("backward")
            return loss

        trainer.compute_loss, trainer.training_step = compute_loss, training_step
        if device == "cuda":
            result.loaded = torch.cuda.memory_allocated() / MIB - base
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        end("optimizer")
    result.measured = max(result.measured_peaks.values(), default=None)


# The page


def markdown(header: dict[str, Any], results: Sequence[Result]) -> str:
    lines = [
        "# Memory, estimated and measured", "",
        f"{header['device']}, {header['date']}, commit {header['commit']}. `liger-trainer estimate` and "
        "`torch.cuda.max_memory_allocated`",
        f"of {STEPS} steps with rows of {LENGTH} tokens, bf16 autocast, sdpa, fused AdamW; weights in fp32, in bf16",
        "under LoRA (rank 16, all linear layers) and of the teacher, which has the student's shape. MiB. Peaks: in the",
        "forward with the loss, in the backward, in the optimizer's step.", "",
    ]  # fmt: skip
    heads = ("model", "run", "rows", "checkpointing", "estimated", "measured", "error", "peaks estimated",
             "peaks measured")  # fmt: skip
    lines += table(heads, map(_cells, results))
    errors = [abs(result.error) for result in results if result.error is not None]
    lines += ["", f"Largest error: {max(errors):.1%} of {len(errors)} points."] if errors else []
    lines += ["", "## Parts of the estimates", ""]
    for result in results:
        parts = ", ".join(f"{part} {size:,.0f}" for part, size in result.estimated_parts.items())
        loaded = "" if result.loaded is None else f"; measured before the first step {result.loaded:,.0f}"
        lines.append(f"- {result.point}: {parts}{loaded}")
    return "\n".join(lines) + "\n"


def _cells(result: Result) -> list[str]:
    case = result.point
    cells = [case.shape, case.name, str(case.rows), "yes" if case.checkpointing else "no"]
    if result.failure:
        return [*cells, f"failed: {result.failure}", *[""] * 4]
    measured, error = result.measured, result.error
    cells += [f"{result.estimated:,.0f}", "" if measured is None else f"{measured:,.0f}"]
    cells.append("" if error is None else f"{error:+.1%}")
    return cells + [
        " / ".join(f"{of[phase]:,.0f}" for phase in PHASES if phase in of)
        for of in (result.estimated_peaks, result.measured_peaks)
    ]


def in_turns(chosen: Sequence[Case]) -> list[Case]:
    """Return a large one, a small one, the next large one, ...: so that what runs at a time fits."""
    ordered = sorted(chosen, key=lambda case: (case.checkpointing, case.lora_dropout is not None, -case.rows))
    small = ordered[len(ordered) // 2 :][::-1]
    pairs = itertools.zip_longest(ordered[: len(ordered) // 2], small)
    return [case for pair in pairs for case in pair if case is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for estimates.json and estimates.md")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--jobs", type=int, default=JOBS, help="points at a time")
    parser.add_argument("--points", type=int, nargs="+", help="only these, by number from 0")
    options = parser.parse_args(arguments)
    every = points(options.tiny)
    chosen = [every[i] for i in options.points] if options.points else every
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {point: pool.submit(run_point, point, options.tiny) for point in in_turns(chosen)}
        results = [futures[point].result() for point in chosen]
    header = provenance(("torch", "transformers", "trl"))
    text = markdown(header, results)
    print(text)
    if options.output:
        rows = [{**asdict(result), "error": result.error} for result in results]
        write(options.output / "estimates", {"header": header, "results": rows}, text)
    return int(any(result.failure or abs(result.error or 0.0) > BOUND for result in results))


if __name__ == "__main__":
    sys.exit(main())
