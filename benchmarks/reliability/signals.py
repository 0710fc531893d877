"""Signals to a launcher of two processes or to one of them, and `liger-trainer resume DIR`."""

import argparse
import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reliability.launched import ACCELERATE, OURS, TORCHRUN, Launched
from benchmarks.reliability.runs import KINDS, SETTINGS, Bench, outcome, remove
from benchmarks.report import table

TITLE = "Signals"
KIND, MAX_STEPS = "ranks", 1200
LAUNCHERS = {"`liger-trainer run`": OURS, "`torchrun`": TORCHRUN, "`accelerate launch`": ACCELERATE}
SIGTERM, OTHERS = signal.SIGTERM, (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TRIALS = [
    *((launcher, target, SIGTERM) for launcher in LAUNCHERS for target in ("launcher", "first rank", "second rank")),
    *(("`liger-trainer run`", target, number) for number in OTHERS for target in ("launcher", "second rank")),
    *((launcher, "launcher", signal.SIGINT) for launcher in ("`torchrun`", "`accelerate launch`")),
    ("`torchrun`", "launcher", signal.SIGUSR1),  # ends torchrun itself
]


def measure(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    folder = bench.folder / "signals"
    folder.mkdir(exist_ok=True)
    settings = {**SETTINGS, **KINDS[KIND][1], "max_steps": MAX_STEPS, "eval_strategy": "no", "save_strategy": "no",
                "logging_steps": 50, "model_name_or_path": str(bench.folder / "student"),
                "dataset_name": str(bench.folder / "rows.jsonl"), "disable_tqdm": False}  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps({**settings, "output_dir": str(folder / "out")}))
    (folder / "undisturbed.yaml").write_text(json.dumps({**settings, "output_dir": str(folder / "undisturbed")}))
    run = bench.start(["run", str(folder / "undisturbed.yaml")], KIND)
    assert run.wait(), run.printed
    want, rng = outcome(folder / "undisturbed"), random.Random(f"signals {options.seed}")
    results: dict[tuple, dict[str, Any]] = {}
    for launcher, target, number in TRIALS:
        name = number.name if number == SIGTERM else "others"
        result = results.setdefault((launcher, target, name), {
            "launcher": launcher, "to": target, "signal": [], "saved": 0, "ended": 0, "same": 0, "failures": [],
        })  # fmt: skip
        result["signal"].append(number.name)
        good, text = _signalled(bench, folder, LAUNCHERS[launcher], target, number, rng.uniform(0, 2), want)
        for what, holds in good.items():
            result[what] += bool(holds)
            if not holds:
                result["failures"].append(f"{launcher}, {number.name} to the {target}: not {what}\n{text[-3000:]}")
        print(f"{launcher} {number.name} {target}: {', '.join(what for what in good if good[what])}", flush=True)
    return list(results.values())


def lines(results: list[dict[str, Any]]) -> list[str]:
    titles = ("two processes started by", "signal to the", "signals", "one checkpoint saved", "no process left",
              "resumed, same weights and numbers")  # fmt: skip
    rows = [
        (result["launcher"], result["to"], ", ".join(result["signal"]),
         *(f"{result[what]} of {len(result['signal'])}" for what in ("saved", "ended", "same"))) for result in results
    ]  # fmt: skip
    return [
        f"Real launchers, each run {MAX_STEPS} steps; the signal comes at a random moment.",
        "",
        *table(titles, rows),
    ]


def _signalled(
    bench: Bench, folder: Path, command: list[str], target: str, number: signal.Signals, pause: float, want: dict
) -> tuple[dict[str, Any], str]:  # fmt: skip
    out = folder / "out"
    remove(out)
    launched = Launched(command, folder, MAX_STEPS)
    ranks = {process.environ()["RANK"]: process for process in launched.ranks}
    time.sleep(pause)
    try:
        {"launcher": launched.launcher, "first rank": ranks["0"], "second rank": ranks["1"]}[target].send_signal(number)
        psutil.wait_procs(launched.processes, timeout=60)
        left = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]
        code = None if launched.launcher.is_running() else launched.launcher.returncode
    finally:
        launched.kill()
    log = launched.log.read_text(errors="replace")
    stopped = re.findall(rf"Stopped at step (\d+) of {MAX_STEPS}; saved \S*/checkpoint-(\d+)", log)
    run = bench.start(["resume", str(out)], KIND)
    run.wait()
    good = {
        "saved": len(stopped) == 1 and len(set(stopped[0])) == 1 and code and (command is not OURS or code == 130),
        "ended": not left,
        "same": outcome(out) == want,
    }
    return good, f"{log}\nexit code {code}, left: {left}\n{run.printed}"
