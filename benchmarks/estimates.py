"""The memory that `liger-trainer estimate` predicts for a run, beside what the run takes.

    python -m benchmarks.estimates --output DIR       # on a GPU: DIR/estimates.json and .md
    python -m benchmarks.estimates --tiny             # small enough for a CPU: does it still work

Each point is a configuration with rows of token ids, all of full length, and a model of a known shape with random
weights. A worker estimates it, trains it for three steps with the trainer of its recipe, and reads
`torch.cuda.max_memory_allocated` after each part of a step, so that a wrong part shows. JOBS workers, each a process,
share the device: a peak does not depend on what others do.
"""

import argparse
import contextlib
import gc
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from .report import provenance, write
from .shapes import config_of

MIB = 2**20
JOBS, STEPS, BOUND = 3, 3, 0.1
LENGTH = 1024
SHAPES = ("Qwen3-0.6B", "Llama-3.2-1B")
RUNS: dict[str, dict[str, Any]] = {
    "SFT full": {},
    "SFT LoRA": {"use_peft": True},
    "distil full": {"teacher_model_name_or_path": "model"},
    "distil LoRA": {"teacher_model_name_or_path": "model", "use_peft": True},
}
LORA = {"dtype": "bfloat16", "lora_r": 16, "lora_target_modules": "all-linear", "lora_dropout": 0.0}


@dataclass(frozen=True)
class Point:
    shape: str
    run: str
    rows: int
    checkpointing: bool = False

    def settings(self, tiny: bool) -> dict[str, Any]:
        """The configuration. The model is in the folder `model`, the rows are in rows.jsonl."""
        adapted = LORA if RUNS[self.run].get("use_peft") else {}
        return {
            "model_name_or_path": "model", "dataset_name": "rows.jsonl", "max_length": None, "max_steps": STEPS,
            "per_device_train_batch_size": self.rows, "gradient_checkpointing": self.checkpointing,
            "bf16": not tiny, "use_cpu": tiny, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
            "output_dir": "out", **adapted, **RUNS[self.run],
        }  # fmt: skip


def points(tiny: bool) -> list[Point]:
    """Two shapes, four ways to train, two batch sizes; and the larger batch with gradient checkpointing."""
    sizes = (1, 2) if tiny else (2, 8)
    plain = [Point(shape, run, rows) for shape in SHAPES for run in RUNS for rows in sizes]
    return plain + [Point(shape, run, sizes[1], True) for shape in SHAPES for run in ("SFT full", "SFT LoRA")]


@dataclass
class Result:
    """MiB. Peaks are of parts of a step; `loaded` is what is allocated before the first."""

    point: Point
    estimated: float = 0.0
    estimated_peaks: dict[str, float] = field(default_factory=dict)
    estimated_parts: dict[str, float] = field(default_factory=dict)
    measured: float | None = None
    measured_peaks: dict[str, float] = field(default_factory=dict)
    loaded: float | None = None
    after: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str | None = None

    @property
    def error(self) -> float | None:
        return None if not self.measured else self.estimated / self.measured - 1


# In a worker


def measure(point: Point, tiny: bool) -> Result:
    """Run a point in a folder of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            result = run_point(point, tiny)
        except Exception as error:  # the others are measured all the same
            result = Result(point, failure=f"{type(error).__name__}: {error}"[:300])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    result.seconds = round(time.monotonic() - started, 1)
    print(point, result.estimated, result.measured, result.failure or "", file=sys.stderr, flush=True)
    return result


def run_point(point: Point, tiny: bool) -> Result:
    """Estimate it, then train it in the current folder."""
    from liger_trainer.config.run_config import check_text
    from liger_trainer.tools.estimate.estimator import LIBRARIES, estimate

    _write_files(point, tiny)
    config = check_text(yaml.safe_dump(point.settings(tiny)), "point.yaml")
    Path("point.yaml").write_text(yaml.safe_dump(point.settings(tiny)))
    prediction, result = estimate(config, None), Result(point)
    extra = LIBRARIES[1] / MIB
    before_backward = max(prediction.peaks_mib.get(phase, 0.0) for phase in ("teacher", "forward", "loss"))
    result.estimated, result.estimated_parts = prediction.peak_mib, prediction.parts_mib
    result.estimated_peaks = {
        "forward": before_backward + extra,
        "backward": prediction.peaks_mib["backward"] + extra,
        "optimizer": prediction.peaks_mib["optimizer"] + extra,
    }
    memory = Memory(torch.cuda.is_available() and not tiny)
    _train(config, memory)
    result.measured, result.measured_peaks = memory.peak, memory.peaks
    result.loaded, result.after = memory.loaded, memory.after
    return result


def _write_files(point: Point, tiny: bool) -> None:
    """A model's configuration and a tokenizer of as many words, and rows that are all of full length."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = config_of(point.shape, tiny, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    config.save_pretrained("model")
    vocab, length = config.vocab_size, 64 if tiny else LENGTH
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained("model")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocab, (point.rows * STEPS * 2, length), generator=generator).tolist()
    Path("rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))


class Memory:
    """Peaks of the parts of a step: what was allocated at most since the part before."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self.peaks: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.loaded: float | None = None
        self.base = torch.cuda.memory_allocated() / MIB if on_gpu else 0.0  # left of the point before

    @property
    def peak(self) -> float | None:
        return max(self.peaks.values()) if self.peaks else None

    def start(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
            self.loaded = torch.cuda.memory_allocated() / MIB - self.base
            torch.cuda.reset_peak_memory_stats()

    def end(self, part: str) -> None:
        if not self.on_gpu:
            return
        torch.cuda.synchronize()
        self.peaks[part] = max(self.peaks.get(part, 0.0), torch.cuda.max_memory_allocated() / MIB - self.base)
        self.after[part] = torch.cuda.memory_allocated() / MIB - self.base
        torch.cuda.reset_peak_memory_stats()


def _train(config: Any, memory: Memory) -> None:
    trainer = _trainer(config)
    forward, step = trainer.compute_loss, trainer.training_step

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        memory.end("optimizer")  # of the step before
        loss = forward(*args, **kwargs)
        memory.end("forward")
        return loss

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        memory.end("backward")
        return loss

    trainer.compute_loss, trainer.training_step = compute_loss, training_step
    memory.start()
    trainer.train()
    memory.end("optimizer")


def _trainer(config: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import get_peft_config

    from liger_trainer import LigerDistillTrainer, LigerTrainer
    from liger_trainer.run.data.datasets import load_run_datasets
    from liger_trainer.run.models import open_model

    def random(dtype: torch.dtype) -> Any:
        with torch.device("cuda" if args.device.type == "cuda" else "cpu"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"), dtype=dtype)

    args, data = config.training_args(), load_run_datasets(config)
    tokenizer = open_model(config, "model_name_or_path").tokenizer
    common = {
        "args": args, "train_dataset": data.train, "processing_class": tokenizer,
        "peft_config": get_peft_config(config.model_args()),
    }  # fmt: skip
    student = random(getattr(torch, config["dtype"]))
    if config.recipe == "sft":
        return LigerTrainer(student, **common)
    return LigerDistillTrainer(student, teacher_model=random(torch.bfloat16 if args.bf16 else torch.float32), **common)


# In the parent


def in_turns(chosen: Sequence[Point]) -> list[Point]:
    """A large one, a small one, the next large one, ...: so that what runs at a time fits."""
    ordered = sorted(chosen, key=lambda p: (p.checkpointing, "full" not in p.run, -p.rows, "Llama" not in p.shape))
    small = ordered[len(ordered) // 2 :][::-1]
    return [p for pair in itertools.zip_longest(ordered[: len(ordered) // 2], small) for p in pair if p is not None]


def markdown(header: dict[str, Any], results: Sequence[Result]) -> str:
    lines = [
        "# Memory, estimated and measured",
        "",
        f"{header['device']}, {header['date']}, commit {header['commit']}. `liger-trainer estimate` beside "
        "`torch.cuda.max_memory_allocated`",
        f"of {STEPS} steps with rows of {LENGTH} tokens, bf16 autocast, sdpa, AdamW; weights in fp32, but in bf16",
        "under LoRA (rank 16, all linear layers) and of the teacher, which has the student's shape. MiB. Peaks: in the",
        "forward with the loss, in the backward, in the optimizer's step.",
        "",
        "| model | run | rows | checkpointing | estimated | measured | error | peaks estimated | peaks measured |",
        "|---|---|---:|---|---:|---:|---:|---|---|",
    ]
    for r in results:
        cells = [r.point.shape, r.point.run, str(r.point.rows), "yes" if r.point.checkpointing else "no"]
        if r.failure:
            lines.append(f"| {' | '.join(cells)} | failed: {r.failure} | | | | |")
            continue
        error = "" if r.error is None else f"{r.error:+.1%}"
        measured = "" if r.measured is None else f"{r.measured:,.0f}"
        peaks = (" / ".join(f"{p:,.0f}" for p in of.values()) for of in (r.estimated_peaks, _ordered(r.measured_peaks)))
        lines.append(f"| {' | '.join([*cells, f'{r.estimated:,.0f}', measured, error, *peaks])} |")
    errors = [abs(r.error) for r in results if r.error is not None]
    if errors:
        lines += ["", f"Largest error: {max(errors):.1%} of {len(errors)} points."]
    lines += ["", "## Parts of the estimates", ""]
    for r in results:
        allocated = (
            ""
            if r.loaded is None
            else f"; measured before the first step {r.loaded:,.0f}, after "
            + ", ".join(f"{part} {size:,.0f}" for part, size in r.after.items())
        )
        parts = ", ".join(f"{part} {size:,.0f}" for part, size in r.estimated_parts.items())
        name = f"{r.point.shape}, {r.point.run}, {r.point.rows} rows{', checkpointing' * r.point.checkpointing}"
        lines.append(f"- {name}: {parts}{allocated}")
    return "\n".join(lines) + "\n"


def _ordered(peaks: dict[str, float]) -> dict[str, float]:
    return {part: peaks[part] for part in ("forward", "backward", "optimizer") if part in peaks}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if a point failed or is further off than BOUND."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for estimates.json and estimates.md")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--jobs", type=int, default=JOBS, help="points at a time")
    parser.add_argument("--points", type=int, nargs="+", help="only these, by number from 0")
    options = parser.parse_args(arguments)
    chosen = points(options.tiny)
    if options.points:
        chosen = [chosen[i] for i in options.points]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {point: pool.submit(measure, point, options.tiny) for point in in_turns(chosen)}
        results = [futures[point].result() for point in chosen]
    header = provenance(("torch",))
    header["versions"] = header.pop("packages")
    text = markdown(header, results)
    print(text)
    if options.output:
        rows = [{**asdict(result), "error": result.error} for result in results]
        write(options.output / "estimates", {"header": header, "results": rows}, text)
    return int(any(r.failure or abs(r.error or 0.0) > BOUND for r in results))


if __name__ == "__main__":
    sys.exit(main())
