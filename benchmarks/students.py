"""Ways to a better student, each in the same time: on the dataset's rows, on-policy, on generated data,
by depth and width, smaller students and a privileged prompt. docs/results/students-<device>.md is its page.

    python -m benchmarks.students --train-seconds 60 --seconds 560
    python -m benchmarks.students --ways one_stage on_policy --seeds 0    # without what the .json has
    python -m benchmarks.students --ways one_stage on_policy --together --train-seconds 600 --name students-10-minutes
    python -m benchmarks.students --page                                   # the page anew from the .json

All ways of one seed train at once and share the device, so each has the same seconds beside the same neighbours; with
`--together`, those of all seeds do. What finishes is written at once; what is not done after `--seconds` is left to the
next call.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import student_chart as chart
from . import student_preparation as preparation
from . import student_speeds as speeds
from . import student_ways as ways
from .crew import Task, context_for, run_together, start_importing
from .report import provenance, slug, without_output, write
from .student_page import PACKAGES, page
from .student_ways import BASE, FORMATS, SIZES, STUDENTS, TEACHER, WAYS, Setup

ROWS = {"drawn": (4, 400), "answers": (1, 1500)}  # processes that sample, and the rows that each is to keep
PREPARING = 90.0  # seconds; rows that are not sampled by then are done without
MEASURING = 60.0  # seconds, about, of a wave after its trainings
PRELOAD = "benchmarks.preload"
FAST = tuple(f"distilled_{size}" for size in SIZES)


class Record:
    """The .json file: it is written after each result."""

    def __init__(self, path: Path, conditions: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {"conditions": conditions, "runs": {}, "speed": {}, "before": {}, "failures": {}}
        if path.is_file():
            self.content = json.loads(path.read_text())
            before = {key: self.content["conditions"].get(key) for key in conditions}
            if before != conditions:
                sys.exit(f"{path} was measured with {before}, this is {conditions}: choose another --output.")

    def has(self, way: str, seed: int) -> bool:
        return str(seed) in self.content["runs"].get(way, {})

    def put(self, part: str, name: str, value: Any) -> None:
        self.content[part][name] = value
        self.save()

    def put_run(self, way: str, seed: int, result: Any, failure: str | None, beside: int) -> None:
        print(f"{time.strftime('%X')} {way}, seed {seed}: {failure or _brief(result)}", file=sys.stderr, flush=True)
        if failure is not None:
            self.put("failures", f"{way}, seed {seed}", failure)
            return
        self.content["failures"].pop(f"{way}, seed {seed}", None)
        self.content["runs"].setdefault(way, {})[str(seed)] = {**result, "beside": beside}
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(self.path.with_suffix(""), self.content, page(self.content))

    def finish(self) -> None:
        """Draw the chart, if there is something to draw, and write the page with it."""
        path = self.path.with_name(f"{self.path.stem}-sizes.svg")
        if chart.draw(self.content, path):
            self.content["chart"] = path.name
        self.save()


def _brief(result: dict[str, Any]) -> str:
    held_out = {name: round(value, 4) for name, value in result["held_out"].items()}
    return (
        f"{held_out}, {result['steps']} steps, {result['peak_memory_mib']:.0f} MiB, {result['measuring']:.0f} s after"
    )


class Benchmark:
    """One call: what is prepared first, waves of trainings that share the device, the speeds of their students."""

    def __init__(self, options: argparse.Namespace, setup: Setup, record: Record):
        self.options, self.setup, self.record = options, setup, record
        self.deadline = time.monotonic() + options.seconds
        self.logs = options.logs or setup.folder / "logs"
        self.context = context_for(PRELOAD)
        self.kept: int | None = None  # the seed whose students are kept for their speeds

    def run(self) -> None:
        waves = [wave for wave in self._waves() if wave]
        self._prepare({way for wave in waves for way, _ in wave})
        seconds, self.kept = self.options.train_seconds + MEASURING, waves[0][0][1] if waves else None
        for number, wave in enumerate(waves, 1):
            if number == len(waves):  # before the wave that may be lost to the deadline
                self._speeds()
            began = time.monotonic()
            if began + 0.9 * seconds > self.deadline:
                print(f"seed {wave[0][1]}: no time is left for it", file=sys.stderr, flush=True)
                break
            self._train(wave)
            seconds = time.monotonic() - began
        self._speeds()

    def _waves(self) -> list[list[tuple[str, int]]]:
        """Return the ways and seeds that train at once, of which there is no result yet."""
        ways = [way for way in WAYS if way in self.options.ways]
        waves = [[(way, seed) for way in ways if not self.record.has(way, seed)] for seed in self.options.seeds]
        return [sum(waves, [])] if self.options.together else waves

    def _prepare(self, wanted: set[str]) -> None:
        """Make rows and students, compile the kernels, and ask the teacher about the privileged prompt."""
        done = self._note("preparing")
        self._together({"rows": (preparation.export_rows, (self.setup, self.options.dataset))}, done, "prepare")
        tasks: dict[str, Task] = {}
        for name in {WAYS[way].student for way in wanted}:
            if STUDENTS[name].width < 1:
                tasks[f"student-{name}"] = (preparation.make_student, (name, self.setup))
        kinds = {WAYS[way].rows for way in wanted} - {"docstrings"}
        for kind in kinds:
            parts, count = ROWS[kind]
            count, batch, tokens = (3, 4, 8) if self.options.tiny else (count, 512, 192)
            for part in range(parts):
                tasks[f"{kind}-{part}"] = (preparation.sample_rows, (kind, part, self.setup, count, batch, tokens))
        if "privileged" in wanted:
            tasks["plain"] = (speeds.followed, (self.setup.teacher, self.setup, None))
            tasks["prompted"] = (speeds.followed, (self.setup.teacher, self.setup, ways.INSTRUCTION))
        for way in wanted & {f"quantised_{qat}" for qat in FORMATS}:
            tasks[way] = (ways.measure_way, (way, self.setup.teacher, self.setup))
        if not self.options.tiny:
            for way in wanted & {BASE, "tuned_0.5"}:
                tasks[f"warm-{way}"] = (preparation.warm, (way, self.setup))
        self._together(tasks, done, "prepare", seconds=PREPARING)
        for kind in kinds:
            self.record.put("before", f"{kind} rows", preparation.join_rows(kind, self.setup))

    def _note(self, what: str) -> Any:
        def done(name: str, result: Any, failure: str | None) -> None:
            shown = failure or json.dumps(result)[:300]
            print(f"{time.strftime('%X')} {what} {name}: {shown}", file=sys.stderr, flush=True)
            if failure is not None:
                self.record.put("failures", f"{what} {name}", failure)
            elif not name.startswith("warm-"):
                self.record.put("before", name, result)

        return done

    def _together(
        self, tasks: dict[str, Task], done: Any, name: str, start: Any = None, seconds: float = math.inf
    ) -> None:
        deadline = min(self.deadline, time.monotonic() + seconds)
        run_together(tasks, self.context, self.logs / name, deadline, done, start)

    def _train(self, wave: list[tuple[str, int]]) -> None:
        start = self.context.Barrier(len(wave))
        runs = {f"{way}-{seed}": (way, seed) for way, seed in wave}
        tasks: dict[str, Task] = {
            name: (ways.train, (way, seed, self.setup, start, way in FAST and seed == self.kept))
            for name, (way, seed) in runs.items()
        }

        def done(name: str, result: Any, failure: str | None) -> None:
            self.record.put_run(*runs[name], result, failure, len(wave) - 1)

        self._together(tasks, done, f"wave-{wave[0][1]}", start)

    def _speeds(self) -> None:
        """Measure the speeds of trained students of one seed, alone on the device, where that is not done."""
        if self.options.no_speeds or self.kept is None:
            return
        outputs = {way: ways.output_of(way, self.kept, self.setup) for way in FAST}
        trained = {way: output for way, output in outputs.items() if (output / "metrics.json").is_file()}
        missing = {way: output for way, output in trained.items() if way not in self.record.content["speed"]}
        if missing and time.monotonic() < self.deadline:
            writers = {way: str(output) for way, output in missing.items()}
            task = (speeds.writing_speeds, ({"teacher": self.setup.teacher, **writers}, self.setup))
            self._together({"writing": task}, self._note_speed, "speeds")

    def _note_speed(self, name: str, result: Any, failure: str | None) -> None:
        print(f"{time.strftime('%X')} speed of {name}: {failure or result}", file=sys.stderr, flush=True)
        if failure is not None:
            self.record.put("failures", f"speed of {name}", failure)
            return
        self.record.content["failures"].pop(f"speed of {name}", None)
        for model, speed in result.items():
            self.record.put("speed", model, speed)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one wave each")
    parser.add_argument("--together", action="store_true", help="one wave of all seeds")
    parser.add_argument("--train-seconds", type=float, default=60.0, help="of each training")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the whole call")
    parser.add_argument("--teacher", default=TEACHER)
    parser.add_argument("--dataset", default="demo:python_docstrings")
    parser.add_argument("--no-speeds", action="store_true", help="leave the speeds of generation out")
    parser.add_argument("--tiny", action="store_true", help="few rows and tokens: it runs, its figures mean nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the .json, and measure nothing")
    parser.add_argument("--logs", type=Path, help="folder for what the trainings print; else it is thrown away")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    parser.add_argument("--name", default="students", help="what their names begin with")
    options, overrides = parser.parse_known_args(arguments)
    where = provenance(PACKAGES)
    path = options.output / f"{options.name}-{slug(where['device'])}.json"
    if options.page:
        (path,) = options.output.glob(f"{options.name}-[!0-9]*.json")
        return Record(path, {}).finish()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # what is free is free for the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    conditions = {
        "device": where["device"], "train_seconds": options.train_seconds, "teacher": options.teacher,
        "overrides": overrides,
    }  # fmt: skip
    record = Record(path, conditions)
    start_importing(PRELOAD)  # beside the demo model, which takes half a minute to build
    with tempfile.TemporaryDirectory(prefix="students-", ignore_cleanup_errors=True) as name:
        sizes = {"rows": 4, "prompts": 2} if options.tiny else {}
        layers = preparation.layers_of(options.teacher)
        setup = Setup(Path(name), options.teacher, layers, options.train_seconds, tuple(overrides), **sizes)
        call = {"command": f"python -m benchmarks.students {shlex.join(without_output(arguments))}".strip(), **where}
        record.content.setdefault("calls", []).append(call)
        record.content["setup"] = {k: v for k, v in asdict(setup).items() if k in ("layers", "rows", "prompts")}
        Benchmark(options, setup, record).run()
    record.finish()
    print(page(record.content))


if __name__ == "__main__":
    main()
