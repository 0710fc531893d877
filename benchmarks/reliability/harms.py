"""The table of harms: what is done to a run, and the exit code and the sentence that the run must end with.

To add one, write a function that yields a `Trial` for each run that it disturbs, and a row of HARMS.
"""

import argparse
import functools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from planted import PLACES, Plant
from safetensors.torch import load_file

import liger_trainer
from benchmarks.reliability.bench import KINDS, SETTINGS, STEPS, Bench, Run, hashes, outcome, remove, wait_for
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


# disk: a tmpfs without a byte left from one call on that makes something durable, and space again for `resume`

SIZE, MOMENTS = "16m", 10


def full(bench: Bench, options: Options) -> Iterator[Trial]:
    disk = bench.folder / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], check=True)  # takes root
    try:
        yield from _full(bench, disk, disk / "out")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _full(bench: Bench, disk: Path, out: Path) -> Iterator[Trial]:
    # every checkpoint stays, so that all can be compared
    command = ["run", "kd.yaml", f"output_dir={out}", "~save_total_limit", "~load_best_model_at_end"]
    run, note = bench.end(command, before=bench.counting(out / CONFIG)), bench.folder / "before.json"
    calls, want = bench.counted(), outcome(out)
    assert run.code == 0 and calls > MOMENTS, run.printed

    def saved() -> dict[str, str]:
        return {f"{path.name}/{name}": digest for path in checkpoints_in(out) for name, digest in hashes(path).items()}

    def fill() -> None:
        note.write_text(json.dumps(saved()))
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))

    for moment in range(MOMENTS):
        remove(out)
        call = 1 + moment * (calls - 1) // MOMENTS
        run = bench.end(command, before=bench.counting(out / CONFIG, call, fill))
        intact, printed = json.loads(note.read_text()).items() <= saved().items(), run.printed
        (disk / "filler").unlink()
        after = bench.end(["resume", str(out)]).code == 0 and outcome(out) == want
        yield Trial(f"call {call} of {calls}", run.code, printed, intact, after)


# signals: to a launcher of two processes or to one of them, at a random moment

LONG = 1200  # steps
MODULE = ["-m", "liger_trainer", "run", "run.yaml", "ddp_backend=gloo"]
TWO = ["--multi_gpu", "--num_processes", "2"]  # without it accelerate starts one process where there is no GPU
LAUNCHERS = {
    "`liger-trainer run`": [*MODULE, "--", *TWO],
    "`torchrun`": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *MODULE],
    "`accelerate launch`": ["-m", "accelerate.commands.launch", *TWO, *MODULE],
}
OTHERS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = [
    *((launcher, to, (signal.SIGTERM,)) for launcher in LAUNCHERS for to in ("launcher", "rank 0", "rank 1")),
    *(("`liger-trainer run`", to, OTHERS) for to in ("launcher", "rank 1")),
    ("`torchrun`", "launcher", (signal.SIGINT, signal.SIGUSR1)), ("`accelerate launch`", "launcher", (signal.SIGINT,)),
]  # fmt: skip


def signalled(
    bench: Bench, options: Options, launcher: str, to: str, numbers: tuple[signal.Signals, ...]
) -> Iterator[Trial]:
    folder, want = _long_run(bench)
    for number in numbers:
        out, log = folder / "out", folder / "log"
        remove(out)
        family = _launch(LAUNCHERS[launcher], folder, log)
        ranks = {process.environ()["RANK"]: process for process in family if "RANK" in process.environ()}
        time.sleep(random.Random(f"{launcher} {to} {number} {options.seed}").uniform(0, 2))
        try:
            (family[0] if to == "launcher" else ranks[to.removeprefix("rank ")]).send_signal(number)
            psutil.wait_procs(family, timeout=60)
            left = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]
            code = None if family[0].is_running() else family[0].returncode
        finally:
            for process in family:
                if process.is_running():
                    process.kill()
        saved = re.findall(rf"Stopped at step (\d+) of {LONG}; saved \S*/checkpoint-\1\b", log.read_text())
        bench.end(["resume", str(out)], "ranks")
        intact = not left and len(saved) == 1  # one checkpoint, no process
        printed = log.read_text(errors="replace").replace("Traceback", "")  # torchrun's own
        yield Trial(number.name, code, printed, intact, outcome(out) == want)


@functools.cache
def _long_run(bench: Bench) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a configuration of many steps, and the outcome of the run that nobody disturbs."""
    folder = bench.folder / "signals"
    folder.mkdir()
    settings = {
        **SETTINGS, **KINDS["ranks"][1], "max_steps": LONG, "eval_strategy": "no", "save_strategy": "no",
        "logging_steps": 50, "model_name_or_path": str(bench.folder / "student"), "disable_tqdm": False,
        "dataset_name": str(bench.folder / "rows.jsonl"),
    }  # fmt: skip
    for name, out in (("run", "out"), ("undisturbed", "undisturbed")):
        (folder / f"{name}.yaml").write_text(json.dumps({**settings, "output_dir": str(folder / out)}))
    run = bench.end(["run", str(folder / "undisturbed.yaml")], "ranks")
    assert run.code == 0, run.printed
    return folder, outcome(folder / "undisturbed")


def _launch(command: list[str], folder: Path, log: Path) -> list[Any]:
    """Return the launcher and its processes, in their second step or later."""
    paths = {"PYTHONPATH": str(Path(liger_trainer.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in {**os.environ, **paths}.items() if key not in ("RANK",)}
    with log.open("w") as file:
        launcher = psutil.Popen(
            [sys.executable, *command], env=environment, cwd=folder, stdout=file, stderr=file, start_new_session=True
        )
    end = time.monotonic() + 120
    while not re.search(rf"[1-9]\d*/{LONG}\b", log.read_text()):
        assert launcher.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    return [launcher, *launcher.children(recursive=True)]


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
    Harm("disk", "full while a run trains", full, (8,), "liger-trainer: * cannot be written: * bytes are free in ",
         "with space: " + RESUMED),
    *(
        Harm("signals", f"{', '.join(number.name for number in numbers)} to the {to} of {launcher}",
             functools.partial(signalled, launcher=launcher, to=to, numbers=numbers),
             (130,) if launcher == "`liger-trainer run`" else None, f"Stopped at step * of {LONG}; saved ", RESUMED)
        for launcher, to, numbers in SIGNALS
    ),
)  # fmt: skip
