r"""Ways to a better student of a teacher that has learned three tasks, each in the same time on one device: its exact
match, and how far it is from the teacher. It writes docs/results/students-tasks-<device>.md.

    python -m benchmarks.students --teacher-seconds 45 --train-seconds 80 --folder work --ways \
        fine_tuned forward_kl kl_and_ce on_policy mixed tuned_first distilled_first
    python -m benchmarks.students --folder work --ways fine_tuned on_policy --seeds 3 4   # adds to what the .json has
    python -m benchmarks.students --folder work --train-steps 600 --name students-steps   # equal steps instead of time

First the teacher is fine-tuned on the tasks, by the clock too. Every training is a run of a recipe, from one
configuration, which ends after a time instead of a number of steps. All trainings of a call share the device from one
moment on, so each has the same seconds next to the same neighbours. What finishes is written at once; what is not done
after `--seconds` is left to the next call, which finds the teacher in `--folder`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest import mock

from transformers import TrainerCallback

from .measure import release_memory
from .processes import Process, context_for, say
from .report import join_versions, provenance, slug, table, without_output, write

CONFIG, TEACHER_CONFIG = "smollm2/distill_task", "smollm2/sft_task"
TASKS = [
    {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 3, "max_digits": 2}},
    {"name": "word_sequence_reversal", "config": {"min_words": 2, "max_words": 6}},
    {"name": "number_filtering", "config": {"min_numbers": 2, "max_numbers": 5, "max_decimals": 1}},
]
ROWS = 16000
PACKAGES = ("torch", "triton", "transformers", "trl", "reasoning-gym")
WARMUP = 0.05  # share of a training's time in which the learning rate rises
MEASURING = 45.0  # seconds, about, before and after the trainings
METRICS = {
    "exact_match": ("exact match", 3, 1),
    **{f"exact_match/{task['name']}": (task["name"], 3, 1) for task in TASKS},
    "forward_kl": ("forward KL", 3, -1),
    "reverse_kl": ("reverse KL", 3, -1),
    "agreement_at_1": ("agreement@1", 3, 1),
}  # their titles, digits, and 1 where more is better
COMPARED, OF_TEACHER = ("exact_match", "forward_kl", "agreement_at_1"), "teacher_"
# The 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom.
STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
Runs = dict[str, dict[str, Any]]


# The ways


@dataclass(frozen=True)
class Way:
    """A way to train: `settings` differ from the configuration; `rows` are "tasks", or the teacher's "answers".

    Attributes:
        first: settings of a run in the first half of the time, from which it goes on; empty: there is none. What the
            second takes to load is in the time too, so that all trainings end at one moment.
    """

    title: str
    settings: tuple[str, ...] = ()
    rows: str = "tasks"
    first: tuple[str, ...] = ()


BASE, TOKENS = "fine_tuned", "max_completion_length=40"
FINE_TUNING = ("recipe=sft", "~teacher_model_name_or_path", "~losses")
KL, ON_POLICY = ("~losses", "beta=0.0"), ("~losses", "beta=1.0", "lmbda=1.0", TOKENS)
LATER = (*ON_POLICY, "learning_rate=1e-4")  # a fifth of the first run's
CACHE = (*KL, "teacher=cache", "cache_kind=topk", "cache_entries=64")
# To compare another way, add it here.
WAYS = {
    BASE: Way("fine-tuned on the answers", FINE_TUNING),
    "forward_kl": Way("forward KL on the answers", KL),
    "kl_and_ce": Way("forward KL and cross-entropy on the answers, 0.5 each"),
    "on_policy": Way("on-policy: reverse KL", ON_POLICY),
    "mixed": Way("half of the batches on-policy: JSD", ("~losses", "beta=0.5", "lmbda=0.5", TOKENS)),
    "tuned_first": Way("half of the time fine-tuned, then on-policy", LATER, first=FINE_TUNING),
    "distilled_first": Way("half of the time forward KL, then on-policy", LATER, first=KL),
    "cache": Way("forward KL from a cache of 64 tokens", CACHE),
    "answers": Way("fine-tuned on the teacher's samples", FINE_TUNING, rows="answers"),
}


@dataclass(frozen=True)
class Setup:
    """What all trainings have in common: `folder` has all that is written on the way, `rows` held-out rows measure.

    Attributes:
        steps: of each training, which then ends by them and not by the clock.
    """

    folder: Path
    teacher: str
    seconds: float
    overrides: tuple[str, ...] = ()
    rows: int = 512
    steps: int | None = None

    def clock(self, until: float, runs: int, wait: Callable[[], None], start: float) -> ByTime:
        """Return what ends one of a training's runs, which has the training's time until a share of it."""
        if self.steps is not None:
            return BySteps(self.steps // runs, wait, start)
        return ByTime(self.seconds * until, wait, start)

    def common(self, of_teacher: bool = True) -> list[str]:
        return [
            "max_length=128", "max_new_tokens=40", "per_device_train_batch_size=32", "per_device_eval_batch_size=128",
            "learning_rate=5e-4", "disable_tqdm=true", "cuda_graphs=never", *self.overrides,
            *([f"teacher_model_name_or_path={self.teacher}", "~keep_layers"] if of_teacher else []),
        ]  # fmt: skip

    def generated(self, size: int) -> list[str]:
        """Return the settings of rows as they are generated; the held-out ones do not depend on how many there are."""
        tasks = json.dumps({"datasets": TASKS, "size": size})
        return ["dataset_name=reasoning_gym:composite", f"task_config={tasks}", f"max_eval_rows={self.rows}"]

    def training(self, rows: str, where: Path, seed: int, of_teacher: bool = True) -> list[str]:
        """Return the settings of a training. Its own measurements are short, and ask no question: all students are
        measured alike afterwards."""
        return [
            *self.common(of_teacher), f"dataset_name={self.folder / 'rows' / rows}", "~task_config", "max_eval_rows=8",
            f"seed={seed}", "max_steps=1000000", "num_sample_completions=0", f"output_dir={where}",
            "overwrite_output_dir=true",
        ]  # fmt: skip

    def runs(self, way: str, seed: int) -> list[tuple[float, list[str]]]:
        """Return the runs of a training, mostly one: until which share of its time each has, and what it has over the
        configuration."""
        chosen, where = WAYS[way], self.folder / "runs" / f"{way}-{seed}"
        start, runs = [f"model_name_or_path={self.teacher}", "keep_every_nth_layer=2"], list[tuple[float, list[str]]]()
        if chosen.first:
            first = where.with_name(f"{where.name}-first")
            runs = [(0.5, [*self.training(chosen.rows, first, seed), *start, *chosen.first])]
            start = [f"model_name_or_path={first}"]
        cache = [f"teacher_cache_dir={self.folder / 'cache'}"] if chosen.settings is CACHE else []
        return [*runs, (1.0, [*self.training(chosen.rows, where, seed), *start, *chosen.settings, *cache])]


# What a process does


def learning_rate_at(share: float) -> float:
    """Return the factor of the learning rate after a share of the time: up in a line, down as half a cosine."""
    return share / WARMUP if share < WARMUP else 0.5 + 0.5 * math.cos(math.pi * min(1, (share - WARMUP) / (1 - WARMUP)))


class ByTime(TrainerCallback):
    """Ends a run after so many seconds, which the learning rate follows. The clock starts with the first step.

    Args:
        wait: called before, so that all trainings start at once.
        start: when the training's clock has started, of a run that is not its first; 0: with this run.
    """

    def __init__(self, seconds: float, wait: Callable[[], None], start: float = 0.0):
        self.seconds, self.wait, self.start, self.began = seconds, wait, start, 0.0

    def share(self) -> float:
        return (time.monotonic() - self.began) / self.seconds if self.began else 0.0

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        schedule: Any = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate's holds torch's
        schedule.lr_lambdas = [lambda step: learning_rate_at(self.share())] * len(schedule.lr_lambdas)

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.began:
            if not self.start:
                self.wait()
            self.began = time.monotonic()
            self.start = self.start or self.began
            self.seconds = max(1e-3, self.seconds - (self.began - self.start))  # one step, where no time is left

    def on_step_end(self, args, state, control, **kwargs):
        if self.share() >= 1:
            control.should_training_stop = True


class BySteps(ByTime):
    """Ends a run after so many steps, which the learning rate follows; all trainings start at once likewise."""

    def __init__(self, steps: int, wait: Callable[[], None], start: float = 0.0):
        super().__init__(math.inf, wait, start)
        self.steps, self.done = steps, 0

    def share(self) -> float:
        return self.done / self.steps

    def on_step_end(self, args, state, control, **kwargs):
        self.done += 1
        super().on_step_end(args, state, control, **kwargs)


class StudentWorker:
    """Makes, trains and measures students. What it prints goes to a log in the folder."""

    def __init__(self, name: str, tiny: bool):
        self.name, self.tiny = name, tiny

    def do(self, method: str, setup: Setup, *arguments: Any) -> Any:
        log = os.open(setup.folder / f"{self.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        try:
            return getattr(self, method)(setup, *arguments)
        finally:
            release_memory()  # other processes share the device

    def export_rows(self, setup: Setup) -> dict[str, int]:
        """Write the rows once, so that not every training has to make them."""
        from liger_trainer.run.data.datasets import load_run_datasets

        data = load_run_datasets(read(CONFIG, setup.generated(40 if self.tiny else ROWS)))
        for split, rows in (("train", data.train), ("test", data.test)):
            rows.to_json(setup.folder / "rows" / "tasks" / f"{split}.jsonl", force_ascii=False)
        return {"train": len(data.train), "test": len(data.test)}

    def tune_teacher(self, setup: Setup, base: str) -> dict[str, Any]:
        """Fine-tune the teacher by the clock."""
        settings = setup.training("tasks", Path(setup.teacher), 0, of_teacher=False)
        settings += [f"model_name_or_path={base}", "learning_rate=2e-4"]
        return run_by_clock(read(TEACHER_CONFIG, settings), ByTime(setup.seconds, lambda: None))

    def write_answers(self, setup: Setup) -> None:
        """Have the teacher answer the rows' prompts."""
        rows, (count, batch) = setup.folder / "rows", (3, 4) if self.tiny else (12000, 1024)
        kept = ("keep_unfinished=true", "near_duplicates=1", "max_repetition=1")  # whatever it says
        command("generate", setup.teacher, str(rows / "answers"), f"prompts={rows / 'tasks'}", f"num_rows={count}",
                f"batch_size={batch}", "max_prompt_tokens=88", "max_new_tokens=40", *kept)  # fmt: skip

    def capture(self, setup: Setup) -> None:
        """Write the cache of the teacher's likeliest tokens."""
        command("cache", CONFIG, *setup.runs("cache", 0)[0][1])

    def train(self, setup: Setup, way: str, seed: int, together: int) -> dict[str, Any]:
        """Train a student, as soon as so many trainings together are ready, and measure it against the teacher."""

        def wait() -> None:
            (setup.folder / f"ready-{way}-{seed}").touch()
            until = time.monotonic() + 600
            while len(list(setup.folder.glob("ready-*"))) < together and time.monotonic() < until:
                time.sleep(0.02)

        start, facts, output = 0.0, dict[str, Any](), Path()
        try:
            runs = setup.runs(way, seed)
            for until, settings in runs:
                clock = setup.clock(until, len(runs), wait, start)
                training = run_by_clock(config := read(CONFIG, settings), clock)
                start, output = clock.start, Path(config["output_dir"])
                facts = {key: facts.get(key, 0) + training[key] for key in ("steps", "tokens", "seconds")}
                facts |= {key: training[key] for key in ("parameters", "peak_memory_mib")}
                release_memory()
        finally:  # the others do not wait for one that fails
            (setup.folder / f"ready-{way}-{seed}").touch()
        return {"held_out": self.measure(setup, str(output)), **facts, "neighbours": together - 1}

    def measure(self, setup: Setup, student: str) -> dict[str, float]:
        """Return what `liger-trainer eval` says of a student on held-out rows, against the teacher."""
        from liger_trainer.run.evaluate import evaluate, subject_of

        settings = [*setup.common(), *setup.generated(1), f"model_name_or_path={student}"]
        metrics = evaluate(subject_of(CONFIG, settings)).metrics
        return {name: x for name, x in metrics.items() if name.removeprefix(OF_TEACHER) in METRICS}


def read(config: str, settings: Sequence[str]) -> Any:
    from liger_trainer.config.run_config import load_run_config

    return load_run_config(config, settings, exact=True)


def command(*words: str) -> None:
    """Run `liger-trainer WORD ...` in this process."""
    from liger_trainer.cli.app import main

    try:
        main(list(words))
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"liger-trainer {words[0]} ended with exit code {end.code}") from None


def run_by_clock(config: Any, clock: ByTime) -> dict[str, Any]:
    """Run a configuration's recipe until the time is over; return the facts about its training."""
    recipe = import_module(f"liger_trainer.recipes.{config.recipe}")

    def load_trainer(*args: Any, load: Any = recipe.load_trainer, **kwargs: Any) -> Any:
        trainer = load(*args, **kwargs)
        trainer.add_callback(clock)
        return trainer

    with mock.patch.object(recipe, "load_trainer", load_trainer):
        return json.loads((recipe.main(config.on_this_machine()) / "metrics.json").read_text())["training"]


# Running


class Record:
    """The .json file: it is written after each result."""

    def __init__(self, path: Path, conditions: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {"conditions": conditions, "runs": {}, "before": {}, "failures": {}}
        if path.is_file():
            self.content = json.loads(path.read_text())
            before = {key: self.content["conditions"].get(key) for key in conditions}
            if before != conditions:
                sys.exit(f"{path} was measured with {before}, this is {conditions}: choose another --output.")

    def put(self, part: str, name: str, result: Any, failure: str | None) -> None:
        """Keep the result under `part` and `name`; a run's name is WAY-SEED."""
        say(name, failure or json.dumps(result)[:200])
        self.content["failures"].pop(name, None)
        if failure is not None:
            self.content["failures"][name] = failure
        elif part == "runs":
            way, _, seed = name.rpartition("-")
            self.content["runs"].setdefault(way, {})[seed] = result
        else:
            self.content[part][name] = result
        self.save()

    def save(self) -> None:
        write(self.path.with_suffix(""), self.content, page(self.content))


def together(part: str, tasks: dict[str, tuple[Any, ...]], record: Record, tiny: bool, deadline: float) -> None:
    """Run all tasks at once, each in a process, and record them. What is not done by the deadline is a failure."""
    context = context_for("liger_trainer.recipes.distill", "liger_trainer.run.evaluate")
    processes = {name: Process(StudentWorker, name, tiny, context) for name in tasks}
    for name, process in processes.items():
        process.start("do", *tasks[name])
    for name, process in processes.items():
        left = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        record.put(part, name, *process.result(left))
        process.close()


def prepare(options: argparse.Namespace, setup: Setup, record: Record, deadline: float) -> None:
    """Make what the trainings need, as far as the folder does not have it."""

    def make(**tasks: tuple[Any, ...]) -> None:
        left = {name: task for name, task in tasks.items() if not (setup.folder / f"done-{name}").is_file()}
        together("before", left, record, options.tiny, deadline)
        for name in left.keys() - record.content["failures"].keys():
            (setup.folder / f"done-{name}").touch()
        if failed := left.keys() & record.content["failures"].keys():
            sys.exit("; ".join(f"{name}: {record.content['failures'][name]}" for name in sorted(failed)))

    make(rows=("export_rows", setup))
    tasks = {"teacher": ("tune_teacher", replace(setup, seconds=options.teacher_seconds), options.base)}
    if not options.tiny:  # so that the kernels are compiled before all trainings ask for them at once
        short = replace(setup, teacher=options.base, seconds=3.0, rows=16, steps=None)
        warmed = {"kl_and_ce", "on_policy", "mixed"} & set(options.ways)
        tasks |= {f"warm-{way}": ("train", short, way, 1000, 1) for way in warmed}
    make(**tasks)
    tasks = {"answers": ("write_answers", setup), "cache": ("capture", setup)}
    make(**{way: task for way, task in tasks.items() if way in options.ways})


def run(options: argparse.Namespace, setup: Setup, record: Record) -> None:
    """Prepare, then train at once whatever there is no result of yet."""
    deadline, runs = time.monotonic() + options.seconds, record.content["runs"]
    left = [(way, seed) for seed in options.seeds for way in options.ways if str(seed) not in runs.get(way, {})]
    if not left:
        return
    prepare(options, setup, record, deadline)
    if time.monotonic() + 0.9 * (options.train_seconds + MEASURING) > deadline:
        say("trainings", "no time is left for them")
        return
    for ready in setup.folder.glob("ready-*"):
        ready.unlink()
    trainings = {f"{way}-{seed}": ("train", setup, way, seed, len(left)) for way, seed in left}
    together("runs", trainings, record, options.tiny, deadline)


# The page: means over the seeds, 95 % confidence intervals, differences paired by seed


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % confidence interval of the mean, t s / √n; None for less than two values."""
    count = len(values)
    return STUDENT_T[count - 2] * stdev(values) / math.sqrt(count) if 2 <= count <= len(STUDENT_T) + 1 else None


def interval(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Return the mean, and ± half the width of its interval."""
    if not values:
        return ""
    half, center = half_width(values), f"{mean(values):{sign}.{digits}f}"
    return center if half is None else f"{center} ± {half:.{digits}f}"


def difference(runs: Runs, way: str, base: str, metric: str) -> str:
    """Return `way` less `base`, paired by seed, of trainings with equally many neighbours; and which is better."""
    ours, theirs = runs[way], runs[base]
    seeds = [seed for seed in ours if seed in theirs and ours[seed]["neighbours"] == theirs[seed]["neighbours"]]
    held_out = [(ours[seed]["held_out"], theirs[seed]["held_out"]) for seed in seeds]
    values = [a[metric] - b[metric] for a, b in held_out if metric in a and metric in b]
    _, digits, better = METRICS[metric]
    half = half_width(values)
    if half is None:
        return interval(values, digits, "+")
    center = mean(values) * better
    verdict = "better" if center > half else "worse" if center < -half else "not told apart"
    return f"{interval(values, digits, '+')}, {verdict}"


def page(content: dict[str, Any]) -> str:
    """Return the Markdown of what the .json holds."""
    runs, conditions = content["runs"], content["conditions"]
    seconds, steps = conditions["train_seconds"], conditions["train_steps"]
    every = [run for seeds in runs.values() for run in seeds.values()]
    neighbours = " or ".join(str(count) for count in sorted({run["neighbours"] for run in every}))
    lines = [f"# Better students, in {f'{steps} equal steps' if steps else f'the same {seconds:g} seconds'}", ""]
    for call in content.get("calls", []):
        lines += [f"- {call['device']}, {call['date']}, commit {call['commit']}: `{call['command']}`; "
                  f"{join_versions(call['packages'])}"]  # fmt: skip
    lines += [
        f"- Teacher: `{conditions['base']}`, fine-tuned for {conditions['teacher_seconds']:g} seconds on three tasks "
        "of reasoning-gym. Every student begins as half of its layers.",
        f"- Each training has {f'{steps} steps of 32 rows' if steps else f'{seconds:g} seconds'}, next to "
        f"{neighbours or 'no'} others that start at the same moment and share the device"
        f"{'' if steps else ': that is what equal time means here'}. Loading and measuring are not counted. The "
        f"learning rate rises for 5 % of the {'steps' if steps else 'time'}, and falls as half a cosine.",
        "- Greedy answers to held-out questions, counted by reasoning-gym's own checkers; distance from the teacher on "
        "the right answers, KLs in nats a token. All by `liger-trainer eval`.",
        "- Mean over the seeds ± half of the 95 % confidence interval (Student's t); no interval for one seed.", "",
    ]  # fmt: skip
    rows = [_row("the teacher", every, OF_TEACHER)] if every else []
    rows += [_row(WAYS[way].title, list(runs[way].values())) for way in WAYS if way in runs]
    lines += table(["", *(title for title, *_ in METRICS.values()), "steps", "tokens learned from", "seeds"], rows)
    compared = [(way, base) for base in (BASE, "forward_kl") for way in WAYS if {way, base} <= runs.keys()
                and way not in (BASE, base)]  # fmt: skip
    if compared:
        lines += ["", "Differences, paired by seed; better and worse where the interval leaves 0 out:", ""]
        cells = [[f"{WAYS[way].title}, less: {WAYS[base].title}", *(difference(runs, way, base, m) for m in COMPARED)]
                 for way, base in compared]  # fmt: skip
        lines += table(["", *(METRICS[m][0] for m in COMPARED)], cells)
    failures = [f"- {name}: {why}" for name, why in content["failures"].items()]
    return "\n".join([*lines, *(["", "## Not measured", "", *failures] if failures else [])]) + "\n"


def _row(title: str, each: list[dict[str, Any]], of: str = "") -> list[str]:
    measured = {m: [run["held_out"][f"{of}{m}"] for run in each if f"{of}{m}" in run["held_out"]] for m in METRICS}
    held_out = [interval(values, METRICS[m][1]) for m, values in measured.items()]
    if of:  # one model, whatever is measured with it
        return [title, *(text.partition(" ")[0] for text in held_out), "", "", ""]
    counts = [f"{mean(run[key] for run in each):,.0f}" for key in ("steps", "tokens")]
    return [title, *held_out, *counts, str(len(each))]


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--train-seconds", type=float, default=60.0, help="of each training")
    parser.add_argument("--train-steps", type=int, help="end by them; --train-seconds is then a guess of their time")
    parser.add_argument("--teacher-seconds", type=float, default=60.0, help="of the teacher's")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the whole call")
    parser.add_argument("--base", default="demo:smollm2-135m-instruct", help="what becomes the teacher")
    parser.add_argument("--folder", type=Path, required=True, help="has the teacher and all else on the way")
    parser.add_argument("--tiny", action="store_true", help="few rows: its figures mean nothing")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    parser.add_argument("--name", default="students-tasks", help="what their names begin with")
    options, overrides = parser.parse_known_args(arguments)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # what is free is free for the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    where = provenance(PACKAGES)
    conditions = {name: getattr(options, name) for name in ("train_seconds", "train_steps", "teacher_seconds", "base")}
    path = options.output / f"{options.name}-{slug(where['device'])}.json"
    record = Record(path, {"device": where["device"], **conditions, "overrides": overrides})
    call = {"command": f"python -m benchmarks.students {shlex.join(without_output(arguments))}".strip(), **where}
    record.content.setdefault("calls", []).append(call)
    folder = options.folder.absolute()
    (folder / "rows" / "tasks").mkdir(parents=True, exist_ok=True)
    what = (options.train_seconds, tuple(overrides), 4 if options.tiny else 512, options.train_steps)
    run(options, Setup(folder, str(folder / "teacher"), *what), record)
    record.save()
    print(page(record.content))


if __name__ == "__main__":
    main()
