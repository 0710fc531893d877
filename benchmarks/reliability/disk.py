"""A disk that fills up at one moment after another: of a training, a capture, a merge, a report."""

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.runs import Bench, Run, hashes, outcome, remove
from benchmarks.report import table
from liger_trainer.common.checkpoints import checkpoints_in
from liger_trainer.common.files import CONFIG
from liger_trainer.trainers import capture as cache_capture

TITLE = "A disk that is full"
SIZE = "16m"
MOMENTS = {"training": 10, "capture": 5}  # spread evenly over the calls that make something durable
SHARES = {"merge": (0.0, 0.05, 0.5, 0.95), "report": (0.0, 0.5, 0.95)}  # of the room that the command needs
SETTINGS = ["~save_total_limit", "~load_best_model_at_end"]  # every checkpoint stays, so all can be compared


def measure(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    disk = bench.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], check=True)  # by root alone
    try:
        return [_training(bench, disk), _capture(bench, disk), _merge(bench, disk), _report(bench, disk)]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def lines(results: list[dict[str, Any]]) -> list[str]:
    titles = ("full during", "moments", "exit code 8 and one message", "earlier data intact", "then, with space")
    counts = ("clear", "intact", "finished")
    rows = [
        (result["during"], str(result["moments"]), *(f"{result[what]} of {result['moments']}" for what in counts))
        for result in results
    ]  # fmt: skip
    return [
        f"A tmpfs of {SIZE.upper()}iB that has no byte left from a call on that makes something durable, spread over",
        "training and capture, or that has too little room for what `merge` and `report` write. With space again",
        "the run is resumed, or the same command given, and ends with the same files as if nothing had been.",
        "",
        *table(titles, rows),
    ]


def _training(bench: Bench, disk: Path) -> dict[str, Any]:
    out = disk / "out"
    command = ["run", "kd.yaml", f"output_dir={out}", *SETTINGS]

    def data() -> dict[str, str]:
        return {f"{path.name}/{name}": digest for path in checkpoints_in(out) for name, digest in hashes(path).items()}

    def again() -> Run:
        return bench.end(["resume", str(out)])

    return _at_calls(bench, "training", disk, out / CONFIG, command, again, data, lambda: outcome(out))


def _capture(bench: Bench, disk: Path) -> dict[str, Any]:
    cache = disk / "cache"
    command = ["cache", "kd.yaml", f"teacher_cache_dir={cache}", *SETTINGS, "~schedules", "cache_shard_mb=1"]
    cache_capture.MIB, cache_capture.SECONDS_OF_A_PART = 2048, 0.0  # many shards

    def shards() -> dict[str, str]:  # parts go when their shard is whole
        return {name: digest for name, digest in hashes(cache).items() if re.fullmatch(r"shard-\d+\.safetensors", name)}

    def again() -> Run:
        return bench.end(command)

    return _at_calls(bench, "capture", disk, disk, command, again, shards, lambda: hashes(cache))


def _merge(bench: Bench, disk: Path) -> dict[str, Any]:
    adapter, merged = bench.undisturbed("lora").folder, disk / "merged"
    command = ["merge", str(adapter), str(merged)]
    return _with_room(bench, "merge", disk, command, merged, lambda: {**hashes(disk), **hashes(adapter)})


def _report(bench: Bench, disk: Path) -> dict[str, Any]:
    shutil.copytree(bench.undisturbed("sft").folder, disk / "run")
    run = bench.end(["report", str(disk / "run")])
    assert run.code == 0, run.printed
    command = ["report", str(disk / "run"), "--output", str(disk / "run" / "report.html")]
    return _with_room(bench, "report", disk, command, disk / "run" / "report.html", lambda: hashes(disk))


def _at_calls(
    bench: Bench, during: str, disk: Path, begun: Path, command: list[str], again: Callable[[], Run],
    data: Callable[[], dict], results: Callable[[], dict],
) -> dict[str, Any]:  # fmt: skip
    """Fill the disk at calls that a command makes; `data` must stay and `results` be the same after it goes on."""
    run, note = bench.end(command, bench.counting(begun)), bench.folder / "before.json"
    calls, want, tested = bench.counted(), results(), []
    assert run.code == 0 and calls > MOMENTS[during], run.printed

    def fill() -> None:
        note.write_text(json.dumps(data()))
        _leave(disk, 0)

    for moment in range(MOMENTS[during]):
        _empty(disk)
        call = 1 + moment * (calls - 1) // MOMENTS[during]
        run = bench.end(command, bench.counting(begun, call, fill))
        intact = json.loads(note.read_text()).items() <= data().items()
        (disk / "filler").unlink()
        printed = run.printed
        finished = again().code == 0 and results() == want
        tested.append((f"call {call} of {calls}", run.code, printed, intact, finished))
    _empty(disk)
    return _judged(during, tested)


def _with_room(bench: Bench, during: str, disk: Path, command: list[str], out: Path, data: Callable[[], dict]) -> dict:
    free = shutil.disk_usage(disk).free
    tested = []
    run = bench.end(command)
    assert run.code == 0, run.printed
    size = max(free - shutil.disk_usage(disk).free, out.stat().st_size if out.is_file() else 0)
    remove(out)
    for share in SHARES[during]:
        before = data()
        _leave(disk, int(share * size))
        run = bench.end(command)
        (disk / "filler").unlink()
        printed, intact = run.printed, data() == before
        finished = bench.end(command).code == 0
        remove(out)
        tested.append((f"room for {share:.0%}", run.code, printed, intact, finished))
    _empty(disk)
    return _judged(during, tested)


def _judged(during: str, tested: list[tuple[str, int | None, str, bool, bool]]) -> dict[str, Any]:
    result = {"during": during, "moments": len(tested), "clear": 0, "intact": 0, "finished": 0, "failures": []}
    for moment, code, printed, intact, finished in tested:
        messages = re.findall(r"liger-trainer: (\S+ cannot be written: .*)", printed)
        good = {
            "clear": code == 8 and "Traceback" not in printed and len(messages) == 1
            and printed.rstrip().endswith(messages[0]) and " bytes are free in " in messages[0],
            "intact": intact, "finished": finished,
        }  # fmt: skip
        for what, holds in good.items():
            result[what] += holds
            if not holds:
                result["failures"].append(f"{during}, {moment}: not {what}, exit code {code}\n{printed[-3000:]}")
        print(f"{during}, {moment}: exit code {code}, {', '.join(what for what in good if good[what])}", flush=True)
    return result


def _leave(disk: Path, size: int) -> None:
    """Fill the disk until so many bytes are free."""
    (disk / "filler").write_bytes(bytes(max(0, shutil.disk_usage(disk).free - size)))


def _empty(disk: Path) -> None:
    for path in disk.iterdir():
        path.unlink() if path.is_file() else remove(path)
