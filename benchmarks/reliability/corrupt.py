"""Every file of the newest checkpoint cut off, flipped, emptied or deleted, and `liger-trainer resume DIR`."""

import argparse
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.runs import KINDS, Bench, outcome, remove
from benchmarks.report import table
from liger_trainer.common.checkpoints import checkpoints_in
from liger_trainer.common.files import METRICS

TITLE = "A damaged checkpoint"
KIND = "kd"  # which has the most kinds of files


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


def measure(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    want = bench.undisturbed(KIND)
    interrupted = bench.folder / "interrupted"
    remove(interrupted)
    shutil.copytree(want.folder, interrupted)
    for path in (interrupted / METRICS, *interrupted.glob("*.safetensors")):
        path.unlink()
    names = sorted(
        path.relative_to(checkpoints_in(interrupted)[-1]).as_posix()
        for path in checkpoints_in(interrupted)[-1].rglob("*") if path.is_file()
    )  # fmt: skip
    return [_damage(bench, interrupted, names, damage, want.outcome) for damage in DAMAGES]


def lines(results: list[dict[str, Any]]) -> list[str]:
    titles = ("every file in turn", "files", "found and named", "the one before taken, same weights and numbers")
    rows = [
        (result["damage"], str(result["files"]), f"{result['named']} of {result['files']}",
         f"{result['same']} of {result['files']}") for result in results
    ]  # fmt: skip
    return [
        f"The newest checkpoint of a run ({KINDS[KIND][0]}),",
        "and then `liger-trainer resume DIR`.",
        "",
        *table(titles, rows),
    ]


def _damage(bench: Bench, interrupted: Path, names: list[str], damage: str, want: dict) -> dict[str, Any]:
    result: dict[str, Any] = {"damage": damage, "files": len(names), "named": 0, "same": 0, "failures": []}
    for name in names:
        out = bench.folder / "damaged"
        remove(out)
        shutil.copytree(interrupted, out)
        newest = checkpoints_in(out)[-1]
        DAMAGES[damage](newest / name)
        run = bench.start(["resume", str(out)], KIND)
        finished = run.wait()
        named = f"{newest.name} is passed over: {name}" in run.printed
        same = finished and outcome(out) == want
        result["named"] += named
        result["same"] += same
        if not (named and same):
            result["failures"].append(f"{name} {damage}: {run.printed[-2000:]}")
        print(f"{name} {damage}: {'found' if named else 'NOT found'}, {'same' if same else 'NOT the same'}", flush=True)
    return result
