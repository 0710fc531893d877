"""What `benchmarks.many_gpus` should find, predicted: memory by `liger-trainer estimate`, time by arithmetic.

Memory is that of LigerTrainer and LigerDistillTrainer. A step's time lies between the larger of two times and their
sum: computing at an assumed share of the GPU's peak, and moving bytes over an assumed bandwidth. How much of the second
hides behind the first is not predicted.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from .many_gpus_cases import ManyCase, Work
from .report import table
from .trainer_cases import length_of
from .trainer_providers import lora_options

MIB = 2**20
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0}  # dense bf16, NVIDIA's data sheets
ASSUMED_SHARE, ASSUMED_GBS = 0.45, 300.0
BYTES = 2  # of what FSDP2 moves: bf16
HELD = ("student weights", "adapter weights", "teacher weights", "gradients", "optimizer state")
FITS = ("H100 80GB", "H200 141GB")
ASSUMPTIONS = (
    "Predicted, not measured: no run on several GPUs has confirmed a number here. Memory is what `liger-trainer "
    "estimate` says of LigerTrainer and LigerDistillTrainer. "
    "Computing: the model's operations and what checkpointing computes again, at {share:.0%} of {peak:,.0f} TFLOP/s "
    "(H100 and H200, dense bf16); one H100 reached 46 to 50 % with the smaller models of "
    "[training steps](trainer-step-nvidia-h100-80gb-hbm3.md). Moving: the bytes that FSDP2 all-gathers and "
    "reduce-scatters in bf16, at {gbs:,.0f} GB/s of the 450 GB/s that NVLink 4 has each way. Step: from all of the "
    "moving hidden behind the computing to none of it. Optimizer, launches and waiting are not in it. MFU: the "
    "model's operations alone, in the shorter step."
)
HEADS = (
    "GPUs", "MiB a rank", "highest in", "fits", "computing, ms", "GB moved", "moving, ms", "step, ms",
    "tokens/s a GPU", "MFU", "efficiency",
)  # fmt: skip


@dataclass(frozen=True)
class Assumed:
    """A GPU and its links: the rate at which it computes, as a share of its peak, and GB/s that a GPU receives."""

    peak_tflops: float = PEAK_TFLOPS["H100"]
    share: float = ASSUMED_SHARE
    gbs: float = ASSUMED_GBS


@dataclass(frozen=True)
class Prediction:
    """A case on so many GPUs. Operations, bytes and tokens are those of one GPU in a step.

    Attributes:
        peak_mib, phase, parts_mib: as `estimate` has them.
        held_mib: parts that are there when the optimizer steps: weights, gradients and its state.
        flops, executed: the model's operations, and these with what is computed again.
    """

    case: str
    gpus: int
    peak_mib: float
    phase: str
    parts_mib: dict[str, float]
    held_mib: dict[str, float]
    tokens: int
    flops: float
    executed: float
    moved: float

    def ms(self, assumed: Assumed) -> tuple[float, float]:
        """Return the times of computing and of moving."""
        computing = self.executed / (assumed.peak_tflops * assumed.share * 1e9)
        return computing, self.moved / (assumed.gbs * 1e6)

    def steps(self, assumed: Assumed) -> tuple[float, float]:
        """Return the shortest and the longest step in ms."""
        both = self.ms(assumed)
        return max(both), sum(both)


def predict(case: ManyCase, counts: Sequence[int], tiny: bool) -> list[Prediction]:
    """Return the predictions of a case for numbers of GPUs."""
    from liger_trainer.tools.estimate.estimator import highest
    from liger_trainer.tools.estimate.step_spec import sharding_of

    length = length_of(case, tiny)
    predictions = []
    with _folder(case, tiny):
        memory = _memory(case, tiny, length)
        work = Work.of(case, length, tiny, memory.trainable)
        for gpus in counts:
            sharding, tokens = sharding_of(_config(case, gpus, tiny)), case.rows * length
            phase, peak = highest(memory, sharding)
            optimizer = sharding.per_process(memory)["optimizer"]
            prediction = Prediction(
                case.name, gpus, peak.bytes / MIB, phase, _mib(peak),
                held_mib={part: mib for part, mib in _mib(optimizer).items() if part in HELD},
                tokens=tokens,
                flops=tokens * work.flops,
                executed=tokens * (work.flops + work.recomputed),
                moved=BYTES * (work.gathered + work.reduced) * (gpus - 1) / gpus,
            )  # fmt: skip
            predictions.append(prediction)
    return predictions


def _mib(peak: Any) -> dict[str, float]:
    return {part: size / MIB for part, size in peak.parts.most_common() if size}


@contextlib.contextmanager
def _folder(case: ManyCase, tiny: bool) -> Iterator[None]:
    """Within, the models' configurations are in the folders `model` and `teacher` of the current folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        case.student_config(tiny).save_pretrained("model")
        if case.teacher:
            case.teacher_config(tiny).save_pretrained("teacher")
        yield


def _config(case: ManyCase, gpus: int, tiny: bool) -> Any:
    """Return what the trainers of `benchmarks.trainer_providers` are given, as a configuration."""
    from liger_trainer.config.run_config import check_text

    settings: dict[str, Any] = {
        "model_name_or_path": "model", "dataset_name": "rows.jsonl", "max_length": length_of(case, tiny),
        "max_steps": 1, "per_device_train_batch_size": case.rows, "gradient_checkpointing": case.checkpointing,
        "optim": "adamw_torch_fused", "bf16": not tiny, "use_cpu": tiny, "report_to": "none", "output_dir": "out",
    }  # fmt: skip
    if case.teacher:
        settings["teacher_model_name_or_path"] = "teacher"
    if case.lora_dropout is not None:
        lora = {key.removeprefix("lora_"): value for key, value in lora_options(case).items()}
        settings |= {f"lora_{key}": value for key, value in lora.items()}
        settings |= {"use_peft": True, "lora_target_modules": "all-linear", "dtype": "float32" if tiny else "bfloat16"}
    if gpus > 1:
        settings |= {"accelerate_config": "fsdp2", "num_processes": gpus}
    return check_text(yaml.safe_dump(settings), "many-gpus.yaml")


def _memory(case: ManyCase, tiny: bool, length: int) -> Any:
    """Return the memory of a step. That of selective checkpointing is halfway between none and all."""
    from liger_trainer.tools.estimate.memory_tracker import Peak
    from liger_trainer.tools.estimate.simulate import simulate
    from liger_trainer.tools.estimate.step_spec import step_spec

    spec = step_spec(_config(case, 1, tiny), length, padded=False, bf16=not tiny)
    memory = simulate(spec)
    if not case.selective:
        return memory
    none = simulate(replace(spec, checkpointing=None))
    peaks = {}
    for phase, peak in memory.peaks.items():
        parts = Counter(peak.parts) + Counter(none.peaks[phase].parts)
        half = Counter({part: size // 2 for part, size in parts.items()})
        peaks[phase] = Peak(half.total(), half)
    return replace(memory, peaks=peaks)


# The page


def markdown(header: dict[str, Any], cases: Sequence[ManyCase], predictions: Sequence[Prediction]) -> str:
    assumed = Assumed(**header["assumed"])
    where = f"{header['date']}, commit {header['commit']}. `{header['command']}`."
    what = ASSUMPTIONS.format(share=assumed.share, peak=assumed.peak_tflops, gbs=assumed.gbs)
    lines = ["# Training on several GPUs, predicted", "", where, "", what, ""]
    for case in cases:
        of_case = [p for p in predictions if p.case == case.name]
        rows = [_cells(p, of_case[0], assumed) for p in of_case]
        lines += [f"## {case}", "", f"`{case.name}`", "", *table(HEADS, rows), ""]
        parts = (f"{part} {size:,.0f}" for part, size in of_case[-1].parts_mib.items())
        lines += [f"MiB by part on {of_case[-1].gpus}: {', '.join(parts)}.", ""]
        lines += [case.note, ""] if case.note else []
    return "\n".join(lines)


def _cells(prediction: Prediction, base: Prediction, assumed: Assumed) -> list[str]:
    computing, moving = prediction.ms(assumed)
    shortest, longest = prediction.steps(assumed)
    mfu = prediction.flops / (shortest * assumed.peak_tflops * 1e9)
    worst, best = (step / of for step, of in zip(base.steps(assumed), (longest, shortest), strict=True))
    return [
        str(prediction.gpus), f"{prediction.peak_mib:,.0f}", prediction.phase, fits(prediction.peak_mib),
        f"{computing:,.0f}", f"{prediction.moved / 1e9:.1f}", f"{moving:,.0f}", _range(shortest, longest, ",.0f"),
        _range(1e3 * prediction.tokens / longest, 1e3 * prediction.tokens / shortest, ",.0f"), f"{mfu:.0%}",
        _range(worst, best, ".2f"),
    ]  # fmt: skip


def _range(low: float, high: float, digits: str) -> str:
    texts = dict.fromkeys(f"{value:{digits}}" for value in (low, high))
    return " to ".join(texts)


def fits(mib: float) -> str:
    """Return the GPUs that a peak fits on."""
    from liger_trainer.tools.estimate.estimator import gpu_named

    return ", ".join(name.split()[0] for name in FITS if mib <= gpu_named(name).usable_mib) or "none of these"


def as_data(predictions: Sequence[Prediction], assumed: Assumed) -> list[dict[str, Any]]:
    """Return what is written of predictions."""
    return [{**asdict(p), "computing_ms": p.ms(assumed)[0], "moving_ms": p.ms(assumed)[1]} for p in predictions]
