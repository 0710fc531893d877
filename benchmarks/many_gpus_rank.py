"""One process of a row of `benchmarks.many_gpus`: `python -m benchmarks.many_gpus_rank FOLDER`, started by a launcher.

It imports, waits until it is told to go, trains as `benchmarks.trainer_worker` does, and leaves its answer in the
folder; see `benchmarks.many_gpus_launch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .many_gpus_cases import PLAN, ManyCase, layer_options
from .measure import MIB, explain
from .shapes import random_model
from .trainer_cases import SPECIAL, TINY_PLAN, make_rows
from .trainer_providers import STUDENT, TRAINERS, Provider, Run, prepare
from .trainer_worker import held, notes_of, teachers_of, train

TASK, GO = "task.pickle", "go"


@dataclass(frozen=True)
class Task:
    """What all processes of a row are told."""

    case: ManyCase
    provider: Provider
    gpus: int
    tiny: bool


class SharedRun(Run):
    """Models with fewer layers than their shapes, and trained weights in fp32, as FSDP2 keeps them."""

    case: ManyCase

    def student(self) -> Any:
        model = super().student()
        return model.float() if self.case.lora_dropout is None else model

    def random(self, shape: str, seed: int) -> Any:
        layers = self.case.layers if seed == STUDENT else self.case.teacher_layers
        options = {**SPECIAL, **layer_options(layers, self.tiny)}
        model = random_model(shape, self.tiny, self.device, seed, **options)
        return model.float() if self.tiny else model


def run(task: Task) -> dict[str, Any]:
    """Train, and return what was measured and what this process held.

    Raises:
        RuntimeError: the trainer is not on FSDP2, or has no checkpointed layers where it should.
    """
    case, provider, device = task.case, task.provider, "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    plan = TINY_PLAN if task.tiny else PLAN
    with tempfile.TemporaryDirectory() as folder, _engine(task.gpus, device):
        rows = make_rows(case.on(task.gpus), plan, task.tiny)
        options = prepare(case, provider, task.tiny, device, folder, rows, plan.steps)
        trainer = TRAINERS[provider.trainer](SharedRun(**vars(options)))
        if (task.gpus > 1) != bool(trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2):
            raise RuntimeError(f"{task.gpus} processes, but the engine is {trainer.accelerator.distributed_type}")
        shares = Shares(trainer)
        trainer.add_callback(_callback(trainer, case, shares))
        measured = train(trainer, plan, folder, alike=True)
        measured.notes = notes_of(trainer, provider)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return {"measured": asdict(measured), "shares": shares.mib}


@contextlib.contextmanager
def _engine(processes: int, device: str) -> Iterator[None]:
    """On GPUs accelerate's launcher has chosen FSDP2. On a CPU accelerate has none: the tests know how to have it."""
    if device == "cuda" or processes == 1:
        yield
        return
    from engines.fsdp2_on_cpu import fsdp2  # pyright: ignore[reportMissingImports] # tests/support

    with fsdp2():
        yield


class Shares:
    """MiB of weights, gradients and optimizer state that this process holds, by the names of `estimate`'s parts."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.mib: dict[str, float] = {}

    def note(self) -> None:
        """Before an optimizer's step, when gradients are there; the states are those of the step before."""
        parameters = list(self.trainer.model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        states = [x for state in self.trainer.optimizer.state.values() for x in state.values() if x.ndim]
        parts = {
            "student weights": frozen, "adapter weights": trained, "gradients": [p.grad for p in trained],
            "optimizer state": states,
            "teacher weights": [p for model in teachers_of(self.trainer) for p in model.parameters()],
        }  # fmt: skip
        if not frozen:
            parts |= {"student weights": trained, "adapter weights": []}
        self.mib = {part: sum(held(x).nbytes for x in tensors) / MIB for part, tensors in parts.items() if tensors}


def _callback(trainer: Any, case: ManyCase, shares: Shares) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if case.selective:
                spare_every_second(trainer.model)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            shares.note()

    return Callback()


def spare_every_second(model: Any) -> None:
    """Have every second checkpointed layer keep its activations: torchtitan's selective checkpointing by layers.

    Raises:
        RuntimeError: fewer than two layers are checkpointed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    if len(layers) < 2:
        raise RuntimeError(f"expected layers with gradient checkpointing, got {len(layers)}")
    for layer in layers[1::2]:
        layer.gradient_checkpointing = False


def main(folder: Path) -> int:
    """Answer in the folder. 1: it failed."""
    rank = os.environ.get("RANK", "0")
    task: Task = pickle.loads((folder / TASK).read_bytes())
    import peft  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    if task.provider.trainer == "ours":
        import liger_trainer.trainers.distill_trainer  # noqa: F401
    (folder / f"ready-{rank}").touch()
    while not (folder / GO).exists():
        if not folder.exists():
            return 1
        time.sleep(0.05)
    try:
        answer: dict[str, Any] = run(task)
    except Exception as error:
        traceback.print_exc()
        answer = {"failure": explain(error)}
    staged = folder / f"staged-{rank}"
    staged.write_text(json.dumps(answer))
    staged.replace(folder / f"rank-{rank}.json")
    return int("failure" in answer)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
