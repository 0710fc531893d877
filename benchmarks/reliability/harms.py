"""The table of harms: what is done to a run, and the exit code and the sentence that the run must end with.

To add one, write a function that yields a `Trial` for each run that it disturbs, and a row of HARMS.
"""

import argparse
import functools
import random
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planted import PLACES, Plant
from safetensors.torch import load_file

from benchmarks.reliability.bench import KINDS, STEPS, Bench, Run, outcome, remove, wait_for
from liger_trainer import LigerDistillTrainer
from liger_trainer.cli.app import main
from liger_trainer.common.checkpoints import checkpoints_in, step_of
from liger_trainer.common.files import CONFIG, METRICS, sha256

Options = argparse.Namespace


@dataclass(frozen=True)
class Trial:
    """One run: what was done to it, how it ended, and whether its data and what came afterwards are as expected.

    `named`: what its sentence names, in place of {}.
    """

    what: str
    code: int | None
    printed: str
    intact: bool = True
    after: bool = True
    named: str = ""


@dataclass(frozen=True)
class Harm:
    """What is done, and what is expected: exit codes (None: any), a sentence (* is any text), what comes afterwards."""

    part: str
    name: str
    trials: Callable[[Bench, Options], Iterator[Trial]]
    exit: tuple[int, ...] | None
    sentence: str
    after: str
    kind: str | None = None


RESUMED = "`resume`: same weights and numbers"

# kill: at random moments, and `liger-trainer resume DIR` until the run is finished


def killed(bench: Bench, options: Options, kind: str) -> Iterator[Trial]:
    """Half of the moments are times, spread evenly over the run from its `config.yaml` to its end; half are calls that
    make something durable. Three in ten are killed again while they are resumed."""
    rng, want, done = random.Random(f"{kind} {options.seed}"), bench.undisturbed(kind), 0
    while done < options.moments:
        out = bench.folder / f"killed-{kind}"
        remove(out)
        run = _kill(bench, kind, ["run", f"{kind}.yaml", f"output_dir={out}"], out, rng)
        if (out / METRICS).exists():
            continue  # it was at its end already
        done, resume = done + 1, ["resume", str(out)]
        if rng.random() < 0.3:
            _kill(bench, kind, resume, out, rng)
        if not (out / METRICS).exists():
            bench.end(resume, kind)
        yield Trial(f"moment {done}", run.code, run.printed, after=outcome(out) == want.outcome)


def _kill(bench: Bench, kind: str, command: list[str], out: Path, rng: random.Random) -> Run:
    want = bench.undisturbed(kind)
    if rng.random() < 0.5:
        run = bench.start(command, kind, bench.counting(out / CONFIG, rng.randint(1, want.calls)))
    else:
        run = bench.start(command, kind)
        wait_for(out / CONFIG, run)
        time.sleep(rng.uniform(0, want.seconds))
        run.kill()
    run.wait()
    return run


# corrupt: every file of the newest checkpoint, and `liger-trainer resume DIR`


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit flipped": _flip,
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
}


def damaged(bench: Bench, options: Options, damage: str) -> Iterator[Trial]:
    kind, out = "kd", bench.folder / "damaged"  # which has the most kinds of files
    want = bench.undisturbed(kind)
    newest = checkpoints_in(want.folder)[-1]
    for name in sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()):
        remove(out)
        shutil.copytree(want.folder, out)
        for path in (out / METRICS, *out.glob("*.safetensors")):  # as if it had been interrupted
            path.unlink()
        DAMAGES[damage](out / newest.name / name)
        run = bench.end(["resume", str(out)], kind)
        yield Trial(name, run.code, run.printed, after=outcome(out) == want.outcome, named=name)


# nonfinite: NaN planted in a step of `liger-trainer run`

SAVE_STEPS, PLANTED_IN = 4, (5, 8, STEPS)  # after a save, in the step of a save, in the last step
SAVING = {"max_steps": STEPS, "save_steps": SAVE_STEPS, "save_strategy": "steps", "logging_steps": 500}
Planter = Callable[[Any], object]  # is called with a trainer


def planted(out: Path, policy: str, plant: Planter = lambda trainer: None, resume: str | None = None) -> None:
    """Train as `liger-trainer` does, after `plant` was called with the trainer."""
    train = LigerDistillTrainer.train

    def plant_and_train(trainer: Any, **options: Any) -> Any:
        plant(trainer)
        try:
            return train(trainer, **options)
        finally:
            print(f"ended at step {trainer.state.global_step}", flush=True)

    LigerDistillTrainer.train = plant_and_train  # pyright: ignore[reportAttributeAccessIssue]
    run = ["run", "kd.yaml", f"output_dir={out}", f"on_non_finite={policy}", "eval_strategy=no", "~save_total_limit"]
    run += ["load_best_model_at_end=false", *(f"{key}={value}" for key, value in SAVING.items())]
    main(shlex.split(resume.removeprefix("liger-trainer ")) if resume else run)


def stopped(bench: Bench, options: Options, place: str) -> Iterator[Trial]:
    want, out = _weights(bench), bench.folder / "planted"
    for step in PLANTED_IN:
        remove(out)
        run = bench.end(functools.partial(planted, out, "stop", functools.partial(Plant, place=place, step=step)))
        printed, saved = run.printed, checkpoints_in(out)
        ended = re.search(r"ended at step (\d+)", printed)
        intact = [step_of(path) for path in saved] == list(range(SAVE_STEPS, step, SAVE_STEPS))
        intact &= _all_finite(out) and not list(out.glob("*.safetensors")) and bool(ended and int(ended[1]) <= step + 1)
        advice = re.search(r"^liger-trainer: .*: (liger-trainer resume .*)", printed, re.M)
        again = advice and bench.end(functools.partial(planted, out, "stop", resume=advice[1]))
        after = again is not None and again.code == 0 and _models(out) == want
        yield Trial(f"step {step}", run.code, printed.replace("Traceback", ""), intact, after, str(step))


def skipped(bench: Bench, options: Options, place: str) -> Iterator[Trial]:
    out = bench.folder / "planted"
    remove(out)
    run = bench.end(lambda: planted(out, "skip_step", functools.partial(Plant, place=place, step=5)))
    printed = run.printed.replace("Traceback", "")
    yield Trial("step 5", run.code, printed, _all_finite(out), f"ended at step {STEPS}" in printed or run.code == 5)


@functools.cache
def _weights(bench: Bench) -> dict[str, str]:
    """Return the weights of the training in which nothing is planted."""
    out = bench.folder / "unplanted"
    remove(out)
    run = bench.end(lambda: planted(out, "stop"))
    assert run.code == 0, run.printed
    return _models(out)


def _models(out: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in out.glob("*.safetensors")}


def _all_finite(out: Path) -> bool:
    tensors = (tensor for file in out.rglob("*.safetensors") for tensor in load_file(file).values())
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


# The table

HARMS = (
    *(
        Harm("kill", title, functools.partial(killed, kind=kind), (-signal.SIGKILL,), "", RESUMED, kind)
        for kind, (title, _, _) in KINDS.items()
    ),
    *(
        Harm("corrupt", f"every file of the newest checkpoint {damage}", functools.partial(damaged, damage=damage),
             (0,), "checkpoint-* is passed over: {}", "goes on from the one before: same weights and numbers")
        for damage in DAMAGES
    ),
    *(
        Harm("nonfinite", f"NaN in the {place}", functools.partial(stopped, place=place), (5,),
             "In step {} ", "the advised checkpoint leads to the same weights")
        for place in PLACES
    ),
    *(
        Harm("nonfinite", f"NaN in the {place}, `on_non_finite: skip_step`", functools.partial(skipped, place=place),
             (0, 5) if place == "weight" else (0,), "In step 5 ",
             "finite weights; a weight's NaN stops, since each step after it has it too")
        for place in PLACES
    ),
)  # fmt: skip
