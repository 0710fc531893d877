"""Ways to a better student, each in the same time: on the dataset's rows, on-policy, on rows that the teacher wrote, by
depth and width, smaller, and quantised students. docs/results/students-<device>.md is its page.

    python -m benchmarks.students --train-seconds 60 --seconds 560
    python -m benchmarks.students --ways one_stage on_policy --seeds 0    # adds to what the .json has
    python -m benchmarks.students --ways one_stage on_policy mixed prefix tuned_first distilled_first --together \
        --train-seconds 290 --seconds 530 --name whose-completions
    python -m benchmarks.students --ways one_stage on_policy --together --train-seconds 600 --name students-10-minutes
    python -m benchmarks.students --page                                   # writes the page again from the .json

Every training is a run of a recipe, from one configuration, which ends after a time instead of a number of steps. All
ways of one seed train at once and share the device, so each has the same seconds next to the same neighbours; with
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest import mock

from transformers import TrainerCallback

from .measure import release_memory
from .processes import Process, context_for, say
from .report import join_versions, provenance, slug, table, without_output, write

CONFIG, TEACHER = "smollm2/distill_layerdrop", "demo:smollm2-135m-instruct"
PACKAGES = ("torch", "triton", "transformers", "trl")
WARMUP = 0.05  # share of a training's time in which the learning rate rises
LENGTHENING = 0.6  # share of it in which completions become longer
PREPARING, MEASURING = 90.0, 60.0  # seconds, about: before a wave's trainings, and after them
LOSING_LAYERS = "~keep_every_nth_layer"
METRICS = {
    "forward_kl": ("forward KL", 3, -1),
    "reverse_kl": ("reverse KL", 3, -1),
    "agreement_at_1": ("agreement@1", 3, 1),
    "student_perplexity": ("perplexity", 1, -1),
}  # their titles, digits, and 1 where more is better
# The 97.5 % quantile of Student's t with 1, 2, ... degrees of freedom.
STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
Runs = dict[str, dict[str, Any]]


# The ways


@dataclass(frozen=True)
class Student:
    """What a student keeps of its teacher.

    Attributes:
        every_nth: keep every nth layer and the last.
        layers: or this share of the layers, evenly spaced, the first and the last among them.
        width: share of the units of each MLP, the most active ones; `init-student` makes these.
    """

    every_nth: int | None = None
    layers: float = 1.0
    width: float = 1.0

    def settings(self, count: int) -> list[str]:
        """Return the keys that make it, of a teacher with `count` layers."""
        if self.every_nth is not None:
            return [f"keep_every_nth_layer={self.every_nth}"]
        keep = max(2, round(self.layers * count))
        kept = sorted({round(i * (count - 1) / (keep - 1)) for i in range(keep)})
        return [LOSING_LAYERS] if self.layers == 1 else [LOSING_LAYERS, f"keep_layers={kept}"]


# Of SmolLM2-135M: 30 layers of 3.5 M parameters, 28 M in the embeddings, which are the head too.
STUDENTS = {
    "half": Student(every_nth=2),
    "both": Student(layers=2 / 3, width=2 / 3),  # 20 layers of 1,024 units: the parameters of 15 layers of 1,536
    "0.8": Student(layers=22 / 30),
    "0.5": Student(layers=11 / 30),
    "0.25": Student(layers=3 / 30, width=1 / 3),
    "whole": Student(),
}
SIZES, FORMATS = ("0.8", "0.5", "0.25"), ("int4", "nvfp4")


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        settings: what differs from the configuration.
        rows: what it trains on: "docstrings", or "answers", which the teacher wrote.
        use: settings of its training that its measurement needs too.
        base: the way that it is compared with.
        first: settings of a run before, from which it goes on; empty: there is none.
        first_share: of the time that the run before has. What the second takes to load is in the time too, so that all
            trainings end at one moment.
        first_tokens: of a completion at first; their number grows with the time, until LENGTHENING of it is over, as a
            schedule of max_completion_length grows with the steps.
    """

    title: str
    settings: tuple[str, ...] = ()
    student: str = "half"
    rows: str = "docstrings"
    use: tuple[str, ...] = ()
    base: str = ""
    first: tuple[str, ...] = ()
    first_share: float = 0.5
    first_tokens: int | None = None


BASE = "one_stage"
FINE_TUNING = ("recipe=sft", "~teacher_model_name_or_path", "~beta")
ON_POLICY = ("beta=1.0", "lmbda=1.0", "max_completion_length=96")
LATER = (*ON_POLICY, "learning_rate=2e-4")  # a fifth of the first run's
# To compare another way, add it here.
WAYS = {
    BASE: Way("one stage: forward KL on the docstrings"),
    "on_policy": Way("on-policy only: reverse KL", ON_POLICY, base=BASE),
    "prefix": Way(
        "on-policy only, from 16 tokens to 96 in the first 60 % of the time",
        ON_POLICY,
        base="on_policy",
        first_tokens=16,
    ),
    "mixed": Way("half of the batches on-policy: JSD", (*ON_POLICY, "beta=0.5", "lmbda=0.5"), base=BASE),
    "tuned_first": Way("half of the time fine-tuned, then on-policy", LATER, base=BASE, first=FINE_TUNING),
    "distilled_first": Way(
        "half of the time forward KL on the docstrings, then on-policy", LATER, base=BASE, first=("beta=0.0",)
    ),
    "answers": Way("data from the teacher: the docstrings' prompts, its answers", rows="answers", base=BASE),
    "both": Way("depth and width: 2/3 of the layers, 2/3 of their units", student="both", base=BASE),
    **{
        f"distilled_{size}": Way(f"distilled, {size} of the parameters", student=size, base=f"tuned_{size}")
        for size in SIZES
    },
    **{f"tuned_{size}": Way(f"fine-tuned, {size} of the parameters", FINE_TUNING, student=size) for size in SIZES},
    **{
        f"quantised_{qat}": Way(f"{qat}, quantised", ("learning_rate=5e-5",), "whole", use=(f"qat={qat}",))
        for qat in FORMATS
    },
}


@dataclass(frozen=True)
class Setup:
    """What all trainings have in common: `folder` has all that is written on the way, `rows` held-out rows measure."""

    folder: Path
    teacher: str
    layers: int
    seconds: float
    overrides: tuple[str, ...] = ()
    rows: int = 256

    def common(self, rows: str) -> list[str]:
        return [
            f"teacher_model_name_or_path={self.teacher}", f"dataset_name={self.folder / 'rows' / rows}",
            "max_length=256", "per_device_train_batch_size=16", "per_device_eval_batch_size=16", "disable_tqdm=true",
            "cuda_graphs=never", *self.overrides,
        ]  # fmt: skip

    def runs(self, way: str, seed: int) -> list[tuple[float, list[str]]]:
        """Return the runs of a training, mostly one: until which share of its time each has, and what it has over the
        configuration. Their own measurements are short: all students are measured alike afterwards."""
        chosen, student = WAYS[way], STUDENTS[WAYS[way].student]
        where = self.folder / "runs" / f"{way}-{seed}"
        common = [
            *self.common(chosen.rows), f"seed={seed}", "max_steps=1000000", "logging_steps=10", "max_eval_rows=8",
            "num_sample_completions=0",
        ]  # fmt: skip
        if student.width == 1:
            start = [f"model_name_or_path={self.teacher}", *student.settings(self.layers)]
        else:
            start = [f"model_name_or_path={self.folder / 'students' / chosen.student}", LOSING_LAYERS]
        runs: list[tuple[float, list[str]]] = []
        if chosen.first:
            first = f"{where}-first"
            runs = [(chosen.first_share, [*common, f"output_dir={first}", *start, *chosen.first])]
            start = [f"model_name_or_path={first}", LOSING_LAYERS]
        return [*runs, (1.0, [*common, f"output_dir={where}", *start, *chosen.settings, *chosen.use])]


# What a process does


def learning_rate_at(share: float) -> float:
    """Return the factor of the learning rate after a share of the time: up in a line, down as half a cosine."""
    if share < WARMUP:
        return share / WARMUP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARMUP) / (1 - WARMUP))))


class ByTime(TrainerCallback):
    """Ends a run after so many seconds, which the learning rate follows. The clock starts with the first step.

    Args:
        wait: called before, so that all trainings start at once.
        start: when the training's clock has started, of a run that is not its first; 0: with this run.

    Attributes:
        start: the same, once the run has begun.
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


class Longer(TrainerCallback):
    """Has a trainer sample longer completions with the time of a clock, from `first` tokens on."""

    def __init__(self, trainer: Any, clock: ByTime, first: int):
        self.trainer, self.clock, self.first, self.last = trainer, clock, first, trainer.max_completion_length
        trainer.max_completion_length = first

    def on_step_end(self, args, state, control, **kwargs):
        share = min(1.0, self.clock.share() / LENGTHENING)
        self.trainer.max_completion_length = math.ceil(self.first + (self.last - self.first) * share)


class StudentWorker:
    """Makes, trains and measures students. What it prints goes to a log in the folder."""

    def __init__(self, name: str, tiny: bool):
        self.name, self.tiny = name, tiny

    def do(self, method: str, setup: Setup, *arguments: Any) -> Any:
        log = os.open(setup.folder / f"{self.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            return getattr(self, method)(setup, *arguments)
        finally:
            release_memory()  # other processes share the device

    def export_rows(self, setup: Setup, dataset: str) -> dict[str, int]:
        """Write the docstrings once, so that not every training has to collect them."""
        from liger_trainer.config.run_config import load_run_config
        from liger_trainer.run.data.datasets import load_run_datasets

        data = load_run_datasets(load_run_config(CONFIG, [f"dataset_name={dataset}", "~max_eval_rows"], exact=True))
        for split, rows in (("train", data.train), ("test", data.test)):
            rows.to_json(setup.folder / "rows" / "docstrings" / f"{split}.jsonl", force_ascii=False)
        return {"train": len(data.train), "test": len(data.test)}

    def write_answers(self, setup: Setup) -> int:
        """Have the teacher answer the docstrings' prompts by `liger-trainer generate`; return the number of rows."""
        import torch

        from liger_trainer.extras.generate.options import GenerateOptions
        from liger_trainer.extras.generate.run import generate

        count, batch, tokens = (3, 4, 8) if self.tiny else (1500, 512, 192)
        options = GenerateOptions(
            num_rows=count, batch_size=batch, seed=0, keep_unfinished=True, max_new_tokens=tokens,
            prompts=str(setup.folder / "rows" / "docstrings"), max_prompt_tokens=96,
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
        )  # fmt: skip
        return generate(setup.teacher, setup.folder / "rows" / "answers", options).rows

    def make_student(self, setup: Setup, name: str) -> dict[str, int]:
        """Make a student of fewer units by `init-student`, which measures them on training rows."""
        from liger_trainer.config.run_config import load_run_config
        from liger_trainer.extras.students.make import make_student
        from liger_trainer.run.models import open_model

        student, rows = STUDENTS[name], setup.folder / "rows" / "docstrings" / "train.jsonl"
        settings = [*setup.common("docstrings"), f"model_name_or_path={setup.teacher}", *student.settings(setup.layers)]
        settings += [f"dataset_name={rows}", "dataset_test_split=train", "max_eval_rows=64"]
        files = open_model(load_run_config(CONFIG, settings, exact=True), "model_name_or_path")
        units = round(student.width * files.config.get_text_config(decoder=True).intermediate_size)
        settings += [f"student_output_dir={setup.folder / 'students' / name}", f"student_intermediate_size={units}"]
        return make_student(load_run_config(CONFIG, settings, exact=True).on_this_machine())[1].parameters

    def train(self, setup: Setup, way: str, seed: int, together: int) -> dict[str, Any]:
        """Train a student, measure it against the teacher, and return what the page needs.

        `together`: how many trainings wait for each other before their first step.
        """
        from liger_trainer.config.run_config import load_run_config

        def wait() -> None:
            (setup.folder / f"ready-{way}-{seed}").touch()
            until = time.monotonic() + 600
            while len(list(setup.folder.glob("ready-*"))) < together and time.monotonic() < until:
                time.sleep(0.02)

        start, facts, output = 0.0, dict[str, Any](), Path()
        try:
            for until, settings in setup.runs(way, seed):
                config = load_run_config(CONFIG, settings, exact=True)
                clock = ByTime(setup.seconds * until, wait, start)
                run_by_clock(config, clock, WAYS[way].first_tokens)
                start, output = clock.start, Path(config["output_dir"])
                training = json.loads((output / "metrics.json").read_text())["training"]
                facts = {key: facts.get(key, 0) + training[key] for key in ("steps", "tokens", "seconds")}
                facts |= {key: training[key] for key in ("parameters", "peak_memory_mib")}
                release_memory()
        finally:  # the others do not wait for one that fails
            (setup.folder / f"ready-{way}-{seed}").touch()
        return {"held_out": self.measure(setup, way, str(output)), **facts, "neighbours": together - 1}

    def measure(self, setup: Setup, way: str, student: str) -> dict[str, float]:
        """Return what `liger-trainer eval` says of a student, used as those of a way are, on held-out docstrings."""
        from liger_trainer.tools.evaluate import evaluate, subject_of

        where = [f"model_name_or_path={student}", LOSING_LAYERS, f"max_eval_rows={setup.rows}"]
        metrics = evaluate(subject_of(CONFIG, [*setup.common("docstrings"), *where, *WAYS[way].use])).metrics
        return {name: metrics[name] for name in METRICS if name in metrics}


def run_by_clock(config: Any, clock: ByTime, first_tokens: int | None) -> None:
    """Run a configuration's recipe until the time is over."""
    from liger_trainer.recipes import distill, sft

    recipe = {"sft": sft, "distill": distill}[config.recipe]
    load = recipe.load_trainer

    def load_trainer(*args: Any, **kwargs: Any) -> Any:
        trainer = load(*args, **kwargs)
        trainer.add_callback(clock)
        if first_tokens is not None:
            trainer.add_callback(Longer(trainer, clock, first_tokens))
        return trainer

    with mock.patch.object(recipe, "load_trainer", load_trainer):
        recipe.main(config.on_this_machine())


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
        if failure is not None:
            self.content["failures"][name] = failure
        elif part == "runs":
            way, _, seed = name.rpartition("-")
            self.content["runs"].setdefault(way, {})[seed] = result
            self.content["failures"].pop(name, None)
        else:
            self.content[part][name] = result
        self.save()

    def save(self) -> None:
        write(self.path.with_suffix(""), self.content, page(self.content))


def together(part: str, tasks: dict[str, tuple[Any, ...]], record: Record, tiny: bool, deadline: float) -> None:
    """Run all tasks at once, each in a process, and record them. What is not done by the deadline is a failure."""
    context = context_for("liger_trainer.recipes.distill", "liger_trainer.tools.evaluate")
    processes = {name: Process(StudentWorker, name, tiny, context) for name in tasks}
    try:
        for name, process in processes.items():
            process.start("do", *tasks[name])
        for name, process in processes.items():
            left = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            record.put(part, name, *process.result(left))
    finally:
        for process in processes.values():
            process.close()


def run(options: argparse.Namespace, setup: Setup, record: Record) -> None:
    """Prepare, then train wave after wave: what shares the device, of which there is no result yet."""
    deadline, runs = time.monotonic() + options.seconds, record.content["runs"]
    waves = [[(w, s) for w in WAYS if w in options.ways and str(s) not in runs.get(w, {})] for s in options.seeds]
    waves = [wave for wave in ([sum(waves, [])] if options.together else waves) if wave]
    ways = [WAYS[way] for way in dict.fromkeys(way for wave in waves for way, _ in wave)]
    together("before", {"rows": ("export_rows", setup, options.dataset)}, record, options.tiny, deadline)
    tasks: dict[str, tuple[Any, ...]] = {
        f"student-{name}": ("make_student", setup, name)
        for name in dict.fromkeys(way.student for way in ways) if STUDENTS[name].width < 1
    }  # fmt: skip
    tasks |= {"answers": ("write_answers", setup)} if any(way.rows == "answers" for way in ways) else {}
    tasks |= {name: ("measure", setup, name, setup.teacher) for name, way in WAYS.items() if way.use and way in ways}
    if not options.tiny:  # so that the kernels are compiled before all trainings ask for them at once
        short = replace(setup, seconds=min(4.0, setup.seconds), rows=16)
        tasks |= {
            f"warm-{way}": ("train", short, way, 1000, 1)
            for way in (BASE, "tuned_0.5", "on_policy")
            if WAYS[way] in ways
        }
    together("before", tasks, record, options.tiny, min(deadline, time.monotonic() + PREPARING))
    for wave in waves:
        if time.monotonic() + 0.9 * (options.train_seconds + MEASURING) > deadline:
            say(f"seed {wave[0][1]}", "no time is left for it")
            break
        for ready in setup.folder.glob("ready-*"):
            ready.unlink()
        trainings = {f"{way}-{seed}": ("train", setup, way, seed, len(wave)) for way, seed in wave}
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
    runs: Runs = content["runs"]
    seconds, titles = content["conditions"]["train_seconds"], [title for title, _, _ in METRICS.values()]
    neighbours = sorted({run["neighbours"] for seeds in runs.values() for run in seeds.values()})
    lines = [f"# Better students, in the same {seconds:g} seconds", ""]
    for call in content.get("calls", []):
        lines += [f"- {call['device']}, {call['date']}, commit {call['commit']}: `{call['command']}`; "
                  f"{join_versions(call['packages'])}"]  # fmt: skip
    lines += [
        f"- Each training has {seconds:g} seconds of wall-clock time, next to "
        f"{' or '.join(map(str, neighbours)) or 'no'} others that start at the same moment and share the device: "
        "that is what equal time means here. Loading and measuring are not counted. The learning rate rises for 5 % of "
        "the time, and falls as half a cosine.",
        "- SmolLM2-135M-Instruct teaches, on docstrings of the Python standard library, 16 rows of up to 256 tokens a "
        "step. Every student is measured by `liger-trainer eval` on held-out rows against the teacher as it was. KLs "
        "in nats a token.",
        "- Mean over the seeds ± half of the 95 % confidence interval (Student's t); no interval for one seed.", "",
    ]  # fmt: skip
    rows = [["nothing yet: " + WAYS[way].title, "", *(f"{before[m]:.{METRICS[m][1]}f}" for m in METRICS), "", "", ""]
            for way, before in content["before"].items() if way in WAYS and WAYS[way].use]  # fmt: skip
    rows += [_row(way, list(runs[way].values())) for way in WAYS if way in runs]
    lines += table(["", "parameters", *titles, "steps", "tokens learned from", "seeds"], rows)
    compared = [way for way in WAYS if way in runs and WAYS[way].base in runs]
    if compared:
        lines += ["", "Paired by seed; better and worse where the interval leaves 0 out:", ""]
        cells = [[f"{WAYS[way].title}, less: {WAYS[WAYS[way].base].title}",
                  *(difference(runs, way, WAYS[way].base, m) for m in METRICS)] for way in compared]  # fmt: skip
        lines += table(["", *titles], cells)
    failures = [f"- {name}: {why}" for name, why in content["failures"].items()]
    return "\n".join([*lines, *(["", "## Not measured", "", *failures] if failures else [])]) + "\n"


def _row(way: str, each: list[dict[str, Any]]) -> list[str]:
    held_out = [interval([run["held_out"][m] for run in each if m in run["held_out"]], METRICS[m][1]) for m in METRICS]
    counts = [f"{mean(run[key] for run in each):,.0f}" for key in ("steps", "tokens")]
    return [WAYS[way].title, f"{each[0]['parameters']:,}", *held_out, *counts, str(len(each))]


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one wave each")
    parser.add_argument("--together", action="store_true", help="one wave of all seeds")
    parser.add_argument("--train-seconds", type=float, default=60.0, help="of each training")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the whole call")
    parser.add_argument("--teacher", default=TEACHER)
    parser.add_argument("--dataset", default="demo:python_docstrings")
    parser.add_argument("--tiny", action="store_true", help="few rows and tokens: it runs, its figures mean nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the .json, and measure nothing")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for the .md and the .json")
    parser.add_argument("--name", default="students", help="what their names begin with")
    options, overrides = parser.parse_known_args(arguments)
    where = provenance(PACKAGES)
    path = options.output / f"{options.name}-{slug(where['device'])}.json"
    if options.page:
        return Record(path, {}).save()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # what is free is free for the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoConfig

    from liger_trainer.extras.demo import resolve_model

    layers = AutoConfig.from_pretrained(resolve_model(options.teacher)).num_hidden_layers  # builds the demo model
    conditions = {"device": where["device"], "train_seconds": options.train_seconds, "teacher": options.teacher}
    record = Record(path, {**conditions, "overrides": overrides})
    call = {"command": f"python -m benchmarks.students {shlex.join(without_output(arguments))}".strip(), **where}
    record.content.setdefault("calls", []).append(call)
    with tempfile.TemporaryDirectory(prefix="students-", ignore_cleanup_errors=True) as name:
        (Path(name) / "rows" / "docstrings").mkdir(parents=True)
        rows = 4 if options.tiny else 256
        run(options, Setup(Path(name), options.teacher, layers, options.train_seconds, tuple(overrides), rows), record)
    record.save()
    print(page(record.content))


if __name__ == "__main__":
    main()
