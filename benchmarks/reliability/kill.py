"""kill -9 at random moments, and `liger-trainer resume DIR` alone until the run is finished."""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.reliability.runs import KINDS, STEPS, Bench, Run, outcome, remove, wait_for
from benchmarks.report import table
from liger_trainer.common.checkpoints import STAGING, checkpoints_in, step_of
from liger_trainer.common.files import CONFIG, METRICS, STATE

TITLE = "Killed at a random moment"
AGAIN = 0.3  # of the runs are killed a second time, while they are resumed


def measure(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    return [_kind(bench, kind, options.moments, options.seed) for kind in options.kinds]


def lines(results: list[dict[str, Any]]) -> list[str]:
    titles = ("run", "kills", "finished by `resume` alone", "with the same weights and numbers", "it was killed")
    rows = [
        (
            KINDS[result["kind"]][0], str(result["kills"]), f"{result['finished']} of {result['moments']}",
            f"{result['same']} of {result['moments']}",
            ", ".join(f"{count} {moment}" for moment, count in sorted(result["at"].items())),
        ) for result in results
    ]  # fmt: skip
    return [
        "Half of the moments are times, spread evenly over the run from the moment that it has its",
        "`config.yaml` to its end, half are calls that make something durable, before or within a save;",
        "three in ten are killed again while they are resumed.",
        "",
        *table(titles, rows),
    ]


def _kind(bench: Bench, kind: str, moments: int, seed: int) -> dict[str, Any]:
    rng, want = random.Random(f"{kind} {seed}"), bench.undisturbed(kind)
    result: dict[str, Any] = {"kind": kind, "moments": 0, "kills": 0, "finished": 0, "same": 0, "failures": []}
    at: Counter[str] = Counter()
    while result["moments"] < moments:
        out = bench.folder / f"killed-{kind}"
        remove(out)
        command = ["run", f"{kind}.yaml", f"output_dir={out}"]
        if not _killed(bench, kind, command, out, rng):
            continue  # it was at its end already
        result["moments"] += 1
        result["kills"] += 1
        at[_moment(out)] += 1
        resume = ["resume", str(out)]
        if rng.random() < AGAIN and _killed(bench, kind, resume, out, rng):
            result["kills"] += 1
            at[_moment(out)] += 1
        run = None
        if not (out / METRICS).exists():  # else the second signal came after the end
            run = bench.start(resume, kind)
            run.wait()
        finished = (out / METRICS).exists()
        same = outcome(out) == want.outcome
        result["finished"] += finished
        result["same"] += same
        if not same:
            result["failures"].append(f"{kind}, moment {result['moments']}: {_difference(out, want.outcome, run)}")
        print(f"{kind} {result['moments']}/{moments}: {'same' if same else 'NOT the same'}", flush=True)
    return {**result, "at": dict(at)}


def _killed(bench: Bench, kind: str, command: list[str], out: Path, rng: random.Random) -> bool:
    """Start a command and kill it. Whether that came before its end."""
    want = bench.undisturbed(kind)
    if rng.random() < 0.5:
        run = bench.start(command, kind, bench.counting(out / CONFIG, rng.randint(1, want.calls)))
    else:
        run = bench.start(command, kind)
        wait_for(out / CONFIG, run)
        time.sleep(rng.uniform(0, want.seconds))
        run.kill()
    run.wait()
    unfinished = not (out / METRICS).exists()
    assert (out / CONFIG).exists() and (unfinished or all(code in (0, -9) for code in run.codes)), run.printed
    return unfinished


def _moment(out: Path) -> str:
    """Say where in its course a run was killed, by what is there."""
    if (out / STAGING).is_dir() and any((out / STAGING).iterdir()):
        return "in a save"
    found = checkpoints_in(out)
    if not found:
        return "before the first checkpoint"
    last = json.loads((found[-1] / STATE).read_text())["global_step"]
    assert last == step_of(found[-1])
    return "after the last step" if last == STEPS else "between checkpoints"


def _difference(out: Path, want: dict, run: Run | None) -> str:
    return f"expected {want}\n got {outcome(out)}\n{run.printed[-2000:] if run else ''}"
