"""The trainings that `benchmarks.students` compares, and how one of them is run and measured.

All are runs of the project's recipes, from one configuration. What differs from a run of a user's: a training ends
after a time instead of a number of steps, and its learning rate follows that time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import TrainerCallback

CONFIG = "smollm2/distill_layerdrop"
TEACHER = "demo:smollm2-135m-instruct"
WARMUP = 0.05  # share of a training's time in which the learning rate rises
INSTRUCTION = "You answer in Spanish only. Nunca respondes en inglés, siempre en español."
LOSING_LAYERS = "~keep_every_nth_layer"


@dataclass(frozen=True)
class Student:
    """What a student keeps of its teacher.

    Attributes:
        every_nth: keep every nth layer and the last.
        layers: or this share of the layers, evenly spaced, the first and the last among them.
        width: share of the units of each MLP, the most active ones; `init-student` makes these.
    """

    every_nth: int | None = None
    layers: float = 1.0
    width: float = 1.0

    def kept(self, count: int) -> list[int]:
        """Return the indices of the kept layers, of `count`."""
        keep = max(2, round(self.layers * count))
        return sorted({round(i * (count - 1) / (keep - 1)) for i in range(keep)})

    def settings(self, count: int) -> list[str]:
        """Return the keys that make it, of a teacher with `count` layers."""
        if self.every_nth is not None:
            return [f"keep_every_nth_layer={self.every_nth}"]
        return [LOSING_LAYERS] if self.layers == 1 else [LOSING_LAYERS, f"keep_layers={self.kept(count)}"]


# Of SmolLM2-135M: 30 layers of 3.5 M parameters, 28 M in the embeddings, which are the head too.
STUDENTS = {
    "half": Student(every_nth=2),
    "both": Student(layers=2 / 3, width=2 / 3),  # 20 layers of 1,024 units: the parameters of 15 layers of 1,536
    "0.8": Student(layers=22 / 30),
    "0.5": Student(layers=11 / 30),
    "0.25": Student(layers=3 / 30, width=1 / 3),
    "whole": Student(),
}
SIZES = ("0.8", "0.5", "0.25")
FORMATS = ("int4", "nvfp4")


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        settings: what differs from the configuration.
        rows: what it trains on: the docstrings, or rows that the teacher wrote.
        use: settings of its training that its measurement needs too.
    """

    title: str
    settings: tuple[str, ...] = ()
    student: str = "half"
    rows: str = "docstrings"
    use: tuple[str, ...] = ()


BASE = "one_stage"
FINE_TUNING = ("recipe=sft", "~teacher_model_name_or_path", "~beta")
WAYS = {
    BASE: Way("one stage: forward KL on the docstrings"),
    "on_policy": Way("on-policy alone: reverse KL", ("beta=1.0", "lmbda=1.0", "max_completion_length=48")),
    "drawn": Way("data from the teacher alone: prompts drawn", rows="drawn"),
    "answers": Way("data from the teacher: the docstrings' prompts, its answers", rows="answers"),
    "both": Way("depth and width: 2/3 of the layers, 2/3 of their units", student="both"),
    **{f"distilled_{size}": Way(f"distilled, {size} of the parameters", student=size) for size in SIZES},
    **{f"tuned_{size}": Way(f"fine-tuned, {size} of the parameters", FINE_TUNING, student=size) for size in SIZES},
    "privileged": Way(
        "privileged prompt",
        ("learning_rate=5e-5", f"teacher_prompt={json.dumps(INSTRUCTION, ensure_ascii=False)}", "lmbda=1.0",
         "max_completion_length=48"),
        student="whole",
    ),
    **{
        f"quantised_{qat}": Way(qat, ("learning_rate=5e-5",), student="whole", use=(f"qat={qat}",))
        for qat in FORMATS
    },
}  # fmt: skip
KEPT = ("forward_kl", "reverse_kl", "agreement_at_1", "student_perplexity")


@dataclass(frozen=True)
class Setup:
    """What all trainings have in common.

    Attributes:
        folder: of everything that is written on the way.
        seconds: of training, for each way.
        rows: held-out rows that every student is measured on. `prompts` of them are completed.
    """

    folder: Path
    teacher: str
    layers: int
    seconds: float
    overrides: tuple[str, ...] = ()
    rows: int = 256
    prompts: int = 6

    def data(self, rows: str) -> Path:
        return self.folder / "rows" / rows

    def student(self, name: str) -> list[str]:
        """Return the settings that a student starts with."""
        student = STUDENTS[name]
        if student.width == 1:
            return [f"model_name_or_path={self.teacher}", *student.settings(self.layers)]
        return [f"model_name_or_path={self.folder / 'students' / name}", LOSING_LAYERS]

    def common(self, rows: str) -> list[str]:
        return [
            f"teacher_model_name_or_path={self.teacher}", f"dataset_name={self.data(rows)}", "max_length=256",
            "per_device_train_batch_size=16", "per_device_eval_batch_size=16", "disable_tqdm=true",
            "cuda_graphs=never", *self.overrides,
        ]  # fmt: skip


def settings_of(way: str, seed: int, setup: Setup) -> list[str]:
    """Return the settings of a training over those of the configuration. Its own measurements are kept short, since
    all students are measured alike afterwards."""
    run = [
        f"seed={seed}", f"output_dir={output_of(way, seed, setup)}", "max_steps=1000000", "logging_steps=10",
        "max_eval_rows=8", "num_sample_completions=0",
    ]  # fmt: skip
    chosen = WAYS[way]
    return [*setup.common(chosen.rows), *run, *setup.student(chosen.student), *chosen.settings, *chosen.use]


def output_of(way: str, seed: int, setup: Setup) -> Path:
    return setup.folder / "runs" / f"{way}-{seed}"


def learning_rate_at(share: float) -> float:
    """Return the factor of the learning rate after a share of the time: up in a line, down as half a cosine."""
    if share < WARMUP:
        return share / WARMUP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARMUP) / (1 - WARMUP))))


class ByTime(TrainerCallback):
    """Ends a training after so many seconds, which the learning rate follows. The clock starts with the first step.

    Args:
        wait: called before, so that all trainings start at once.
    """

    def __init__(self, seconds: float, wait: Callable[[], None]):
        self.seconds, self.wait = seconds, wait
        self.began: float | None = None

    def share(self) -> float:
        return 0.0 if self.began is None else (time.monotonic() - self.began) / self.seconds

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        schedule: Any = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate's holds torch's
        schedule.lr_lambdas = [lambda step: learning_rate_at(self.share())] * len(schedule.lr_lambdas)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began is None:
            self.wait()
            self.began = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if self.share() >= 1:
            control.should_training_stop = True


@contextlib.contextmanager
def timed(seconds: float, wait: Callable[[], None]) -> Iterator[None]:
    """Have the training that a recipe starts in here wait for the others, and end after `seconds`."""
    from liger_trainer.recipes import distill, sft

    load = distill.load_trainer

    def load_trainer(*args: Any, **kwargs: Any) -> Any:
        trainer = load(*args, **kwargs)
        trainer.add_callback(ByTime(seconds, wait))
        return trainer

    with mock.patch.object(distill, "load_trainer", load_trainer), mock.patch.object(sft, "load_trainer", load_trainer):
        yield


def train(way: str, seed: int, setup: Setup, start: Any = None, keep: bool = False) -> dict[str, Any]:
    """Train a student, measure it against the teacher, and return what the page needs.

    Args:
        start: a barrier that all trainings of a wave wait at. Where one of them has failed it is broken, and the
            others go on.
        keep: leave the weights for `speeds`.
    """

    def wait() -> None:
        if start is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                start.wait(600)

    from liger_trainer.config.run_config import load_run_config
    from liger_trainer.recipes import distill, sft

    output = output_of(way, seed, setup)
    config = load_run_config(CONFIG, settings_of(way, seed, setup), exact=True)
    script = {"sft": sft, "distill": distill}[config.recipe]
    with timed(setup.seconds, wait):
        script.main(config.on_this_machine())
    release()
    began = time.monotonic()
    held_out = measure_way(way, str(output), setup)
    result: dict[str, Any] = {"held_out": held_out, **_facts(output)}
    if way == "privileged":
        from .student_speeds import followed

        result["followed"] = followed(str(output), setup, None)
    result["measuring"] = time.monotonic() - began
    if not keep:
        shutil.rmtree(output)
    return result


def measure_way(way: str, student: str, setup: Setup) -> dict[str, float]:
    """Measure a student as the students of a way are used."""
    metrics = measure(student, setup, *WAYS[way].use)
    return {name: metrics[name] for name in KEPT if name in metrics}


def _facts(output: Path) -> dict[str, Any]:
    """Return what the training of a run took. Tokens are those that are learned from."""
    run = json.loads((output / "metrics.json").read_text())
    training = run["training"]
    return {
        "parameters": training["parameters"],
        "steps": [training["steps"]],
        "tokens": training["tokens"],
        "seconds": training["seconds"],
        "peak_memory_mib": training["peak_memory_mib"],
        "device": training["device"],
        "versions": run["versions"],
    }


def release() -> None:
    """Free the memory: other processes share the device."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def measure(student: str, setup: Setup, *more: str) -> dict[str, float]:
    """Return what `liger-trainer eval` says of a student beside the teacher itself, on held-out docstrings."""
    from liger_trainer.tools.evaluate import evaluate, subject_of

    subject = subject_of(CONFIG, [
        *setup.common("docstrings"), f"model_name_or_path={student}", LOSING_LAYERS,
        f"max_eval_rows={setup.rows}", *more,
    ])  # fmt: skip
    return evaluate(subject).metrics


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
