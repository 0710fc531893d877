"""NaN planted in a step, through the command and through Python, and what the message advises."""

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from planted import PLACES, Plant
from tiny import completions, tiny_model, tiny_tokenizer, train_args
from trl import SFTConfig, SFTTrainer

from benchmarks.reliability.runs import STEPS, Bench, Run, remove
from benchmarks.report import table
from liger_trainer import DistillationCallback, LigerDistillConfig, LigerDistillTrainer
from liger_trainer.cli import main
from liger_trainer.common.checkpoints import checkpoints_in, step_of
from liger_trainer.common.files import sha256
from liger_trainer.trainers.finite_report import is_finite

TITLE = "Numbers that are not finite"
SAVE_STEPS, STEPS_PLANTED = 4, (5, 8, STEPS)  # after a save, in the step of a save, in the last step
SETTINGS = {"max_steps": STEPS, "save_steps": SAVE_STEPS, "save_strategy": "steps", "logging_steps": 500}
COMMAND = ["eval_strategy=no", "load_best_model_at_end=false", "~save_total_limit",
           *(f"{key}={value}" for key, value in SETTINGS.items())]  # fmt: skip
PLACE_NAMES = {"loss": "the loss", "gradient": "a gradient", "weight": "a weight", "batch": "the batch's embeddings",
               "teacher": "the teacher's logits"}  # fmt: skip
Planter = Callable[[Any], object]  # called with a trainer


def by_command(out: Path, policy: str, plant: Planter, resume: str | None = None) -> None:
    train = LigerDistillTrainer.train
    LigerDistillTrainer.train = lambda self, **how: _train(self, train, plant, how)  # pyright: ignore
    run = ["run", "kd.yaml", f"output_dir={out}", f"on_non_finite={policy}", *COMMAND]
    main(shlex.split(resume.removeprefix("liger-trainer ")) if resume else run)


def by_trainer(out: Path, policy: str, plant: Planter, resume: str | None = None) -> None:
    args = train_args(LigerDistillConfig, output_dir=str(out), on_non_finite=policy, **SETTINGS)
    trainer = LigerDistillTrainer(
        tiny_model(), tiny_model(seed=1), args, train_dataset=completions(), processing_class=tiny_tokenizer()
    )
    _train(trainer, LigerDistillTrainer.train, plant, {"resume_from_checkpoint": resume})
    trainer.save_model()


def by_callback(out: Path, policy: str, plant: Planter, resume: str | None = None) -> None:
    teacher = tiny_model(seed=1)
    trainer = SFTTrainer(
        tiny_model(), args=train_args(SFTConfig, output_dir=str(out), **SETTINGS), train_dataset=completions(),
        processing_class=tiny_tokenizer(), callbacks=[DistillationCallback(teacher, on_non_finite=policy)],
    )  # fmt: skip
    trainer.teacher = teacher  # pyright: ignore[reportAttributeAccessIssue]  # where Plant looks for it
    _train(trainer, SFTTrainer.train, plant, {"resume_from_checkpoint": resume})
    trainer.save_model()


WAYS = {"`liger-trainer run`": by_command, "`LigerDistillTrainer`": by_trainer,
        "`SFTTrainer` with `DistillationCallback`": by_callback}  # fmt: skip


def measure(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    wants = {way: _weights(bench, way) for way in WAYS}
    return [_planted(bench, place, way, wants[way]) for way in WAYS for place in PLACES]


def lines(results: list[dict[str, Any]]) -> list[str]:
    titles = ("NaN in", "through", "stopped within a step", "no poisoned checkpoint",
              "the advised checkpoint leads to the same weights", "`on_non_finite: skip_step`")  # fmt: skip
    rows = [
        (PLACE_NAMES[result["place"]], result["way"],
         *(f"{result[what]} of {result['runs']}" for what in ("stopped", "clean", "resumed")), result["skipped"])
        for result in results
    ]  # fmt: skip
    return [
        f"{STEPS} steps of distillation, nothing logged, a checkpoint each {SAVE_STEPS}; NaN in steps "
        f"{', '.join(map(str, STEPS_PLANTED))}, a run for each.",
        "",
        *table(titles, rows),
    ]


def _planted(bench: Bench, place: str, way: str, want: dict[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {"place": place, "way": way, "runs": len(STEPS_PLANTED), "failures": []}
    result |= dict.fromkeys(("stopped", "clean", "resumed"), 0)
    out = bench.folder / "planted"
    for step in STEPS_PLANTED:
        remove(out)
        run = _run(bench, way, out, "stop", lambda trainer, step=step: Plant(trainer, place, step))
        ended = re.search(r"ended at step (\d+)", run.printed)
        saved = checkpoints_in(out)
        good = {
            "stopped": run.code == 5 and f"In step {step} " in run.printed and ended and int(ended[1]) <= step + 1,
            "clean": [step_of(path) for path in saved] == list(range(SAVE_STEPS, step, SAVE_STEPS))
            and all(map(is_finite, saved)) and not list(out.glob("*.safetensors")),
        }  # fmt: skip
        printed = run.printed
        advice = re.search(
            r"^liger-trainer: .*: (liger-trainer resume .*)|resume_from_checkpoint='(.*?)'", printed, re.M
        )
        if advice:
            run = _run(bench, way, out, "stop", lambda trainer: None, advice[1] or advice[2])
        good["resumed"] = advice is not None and run.code == 0 and _models(out) == want
        for what, holds in good.items():
            result[what] += bool(holds)
            if not holds:
                text = f"{way}, {place}, step {step}: not {what}\n{printed[-1500:]}\n{run.printed[-1500:]}"
                result["failures"].append(text)
        print(f"{way} {place} {step}: {', '.join(what for what in good if good[what])}", flush=True)
    return result | _skipping(bench, place, way, out, result["failures"])


def _skipping(bench: Bench, place: str, way: str, out: Path, failures: list[str]) -> dict[str, str]:
    remove(out)
    run = _run(bench, way, out, "skip_step", lambda trainer: Plant(trainer, place, 5))
    trained = run.code == 0 and "ended at step 12" in run.printed and "In step 5 " in run.printed
    finite = all(map(is_finite, checkpoints_in(out))) and all(map(_is_finite, out.glob("*.safetensors")))
    if place == "weight" and run.code == 5 and finite:
        return {"skipped": "stops: each step after it has the NaN too"}
    if not (trained and finite):
        failures.append(f"{way}, {place}, skip_step: exit code {run.code}\n{run.printed[-3000:]}")
        return {"skipped": "FAILED"}
    return {"skipped": "trained to the end, finite"}


def _run(bench: Bench, way: str, out: Path, policy: str, plant: Planter, resume: str | None = None) -> Run:
    return bench.end(lambda: WAYS[way](out, policy, plant, resume))


def _train(trainer: Any, train: Callable, plant: Planter, how: dict) -> Any:
    plant(trainer)
    try:
        return train(trainer, **how)
    finally:
        print(f"ended at step {trainer.state.global_step}", flush=True)


def _weights(bench: Bench, way: str) -> dict[str, str]:
    """Return the weights of the training in which nothing is planted."""
    out = bench.folder / "unplanted"
    remove(out)
    run = _run(bench, way, out, "stop", lambda trainer: None)
    assert run.code == 0, run.printed
    return _models(out)


def _models(out: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in out.glob("*.safetensors")}


def _is_finite(file: Path) -> bool:
    from safetensors.torch import load_file

    return all(bool(torch.isfinite(tensor).all()) for tensor in load_file(file).values())
