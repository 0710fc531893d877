"""The curves of a report: which charts there are, and their points in log_history, by step, tokens or time."""

import bisect
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..metric_rows import has_other_name
from .read_run import RunRecord, number

Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")
"""What a curve can be over: optimizer steps; tokens trained on; seconds of training, evaluations and saves left out."""
SERIES = ("#2563eb", "#d9480f", "#0a8f66", "#9333ea", "#b7791f", "#c2255c", "#0b7285", "#5c636a")
"""One for each run; of a single run, for training, evaluation and teacher."""
SMOOTHED_FROM = 120  # points of a training curve: from here on a running mean lies over them
DECADES = 1.7  # from the lowest values (the 5 % quantile) to the highest: from here on a logarithmic axis
LINE = 0.015  # width of a line, as a share of a chart's height: curves that are no further apart look the same
NOISE = 0.1  # likewise: what two ways to average over batches differ by in training, where evaluations agree


@dataclass(frozen=True)
class Chart:
    """A metric over the steps: `metric` of the training logs, `eval_metric` of evaluations, and the teacher's."""

    metric: str
    title: str
    teacher: str | None = None
    axis: str = "log"
    """log: logarithmic where values spread widely; linear: never; zero: likewise, from 0; percent: from 0 to 100"""

    @property
    def name(self) -> str:
        """The metric's name as an id and a file's name."""
        return re.sub(r"\W+", "_", self.metric)


CHARTS = (
    Chart("loss", "Loss"),
    Chart("kd_loss", "Distillation loss"),
    Chart("ce_loss", "Cross-entropy (nats/token)"),
    Chart("forward_kl", "Forward KL (nats/token)"),
    Chart("reverse_kl", "Reverse KL (nats/token)"),
    Chart("jsd", "JSD (nats/token)"),
    Chart("agreement_at_1", "Agreement@1 with the teacher", axis="linear"),
    Chart("mean_token_accuracy", "Token accuracy", axis="linear"),
    Chart("perplexity", "Perplexity"),
    Chart("student_perplexity", "Student's perplexity", "teacher_perplexity"),
    Chart("entropy", "Entropy (nats/token)", "teacher_entropy"),
    Chart("aux_loss", "Router's load-balancing loss"),
    Chart("grad_norm", "Gradient norm"),
    Chart("learning_rate", "Learning rate", axis="linear"),
    Chart("tokens_per_second", "Tokens per second", axis="zero"),
    Chart("gpu_utilization", "GPU utilisation (%)", axis="percent"),
    Chart("peak_memory_mib", "Peak memory so far (MiB)", axis="zero"),
)
TERM = "loss/"  # before the name of a single term of the loss
# logged without a curve: counters, and what the page shows elsewhere
_NO_CURVES = {"step", "epoch", "num_tokens", "num_input_tokens_seen", "total_flos"}
_NO_CURVES_LIKE = re.compile(r"(^|_)(runtime|samples_per_second|steps_per_second|preparation_time)$|^train_")


@dataclass(frozen=True)
class Line:
    """One line of a chart. `tokens` and `seconds` say how far the run was at each point; None if its logs do not."""

    label: str
    kind: str
    """train, eval or teacher"""
    color: str
    steps: list[float]
    values: list[float]
    tokens: list[float] | None = None
    seconds: list[float] | None = None

    def over(self, axis: Axis) -> list[float]:
        """Return the points' places along an axis."""
        places = {"step": self.steps, "tokens": self.tokens, "time": self.seconds}[axis]
        assert places is not None
        return places


@dataclass(frozen=True)
class Course:
    """How far a run was at the steps that were logged: tokens, and seconds of training; None if no log says it."""

    steps: list[float]
    tokens: list[float] | None
    seconds: list[float] | None

    def at(self, steps: Sequence[float], values: list[float] | None) -> list[float] | None:
        """Return the tokens or seconds at any steps."""
        return None if values is None else [_between(self.steps, values, step) for step in steps]


def course_of(run: RunRecord) -> Course:
    """Read the tokens of all logs. Time is not logged: it is what the tokens between two logs took at their speed."""
    trained, anywhere = points(run, "num_tokens"), points(run, "eval_num_tokens")
    tokens_at = {0.0: 0.0, **dict(zip(*anywhere, strict=True)), **dict(zip(*trained, strict=True))}
    if len(tokens_at) < 2:
        return Course([], None, None)
    steps = sorted(tokens_at)
    tokens = [tokens_at[step] for step in steps]
    speeds = dict(zip(*points(run, "tokens_per_second"), strict=True))
    if not trained[0] or not all(speeds.get(step) for step in trained[0]):
        return Course(steps, tokens, None)
    ends, clock = [0.0], [0.0]
    for step, end in zip(*trained, strict=True):
        clock.append(clock[-1] + (end - ends[-1]) / speeds[step])
        ends.append(end)
    return Course(steps, tokens, [_between(ends, clock, end) for end in tokens])


def _between(places: list[float], values: list[float], place: float) -> float:
    """Interpolate linearly; go on as between the last two places behind them."""
    right = min(max(bisect.bisect_left(places, place), 1), len(places) - 1)
    (start, end), (low, high) = places[right - 1 : right + 1], values[right - 1 : right + 1]
    return high if end == start else low + (high - low) * (place - start) / (end - start)


def axes_of(runs: Sequence[RunRecord]) -> list[Axis]:
    """Return what the curves of these runs can be over: what all of them logged."""
    courses = [course_of(run) for run in runs]
    there = {"step": True, "tokens": all(c.tokens for c in courses), "time": all(c.seconds for c in courses)}
    return [axis for axis in AXES if there[axis]]


def points(run: RunRecord, metric: str) -> tuple[list[float], list[float]]:
    """Return steps and values of a metric. Of a step that was logged twice, as in a resumed run, the later counts."""
    values: dict[float, float] = {}
    for entry in run.log_history:
        step, value = number(entry.get("step")), number(entry.get(metric))
        if step is not None and value is not None:
            values[step] = value
    return sorted(values), [values[step] for step in sorted(values)]


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts with two points or more: the loss, its terms, the others, and untitled metrics last."""
    logged = dict.fromkeys(key for run in runs for entry in run.log_history for key in entry)
    titled = {name for chart in CHARTS for name in (chart.metric, chart.teacher)} | _NO_CURVES
    base = dict.fromkeys(key.removeprefix("eval_") for key in logged)
    others = [Chart(key, _title(key)) for key in base if key not in titled and not _NO_CURVES_LIKE.search(key)]
    terms = [chart for chart in others if chart.metric.startswith(TERM)]
    rest = [chart for chart in others if chart not in terms]
    measured = [{key.removeprefix("eval_") for entry in run.log_history for key in entry} for run in runs]
    charts = [c for c in (CHARTS[0], *terms, *CHARTS[1:], *rest) if not has_other_name(c.metric, measured)]
    return [chart for chart in charts if any(len(line.steps) > 1 for line in lines_of(chart, runs))]


def _title(key: str) -> str:
    """`loss/forward_kl` is a term of the loss, `schedule/temperature` a value that moves."""
    group, _, name = key.rpartition("/")
    title = name.replace("_", " ")
    return f"{group.replace('_', ' ').capitalize()}: {title}" if group else title


def lines_of(chart: Chart, runs: Sequence[RunRecord], labels: Sequence[str] = ()) -> list[Line]:
    """Return the lines of a chart that have points."""
    lines = []
    for index, run in enumerate(runs):
        course = course_of(run)
        for place, (kind, metric) in enumerate(_series(chart, run)):
            color = SERIES[(place if len(runs) == 1 else index) % len(SERIES)]
            label = {"train": "training", "eval": "held out", "teacher": "teacher"}[kind]
            if len(runs) > 1:
                label = labels[index] if labels else run.name
            steps, values = points(run, metric)
            if steps:
                far = course.at(steps, course.tokens), course.at(steps, course.seconds)
                lines.append(Line(label, kind, color, steps, values, *far))
    return lines


def _series(chart: Chart, run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "train", chart.metric
    yield "eval", f"eval_{chart.metric}"
    if chart.teacher:
        on_held_out = any(f"eval_{chart.teacher}" in entry for entry in run.log_history)
        yield "teacher", f"eval_{chart.teacher}" if on_held_out else chart.teacher


def logarithmic(chart: Chart, lines: Sequence[Line]) -> bool:
    """Whether the values spread so widely that the chart's axis is logarithmic."""
    values = sorted(value for line in lines for value in line.values)
    return chart.axis == "log" and values[0] > 0 and values[-1] > values[len(values) // 20] * 10**DECADES


def different(charts: Sequence[Chart], runs: Sequence[RunRecord]) -> list[tuple[Chart, list[Chart]]]:
    """Return the charts that look different, each with the others that look like it: a loss of one term is drawn once.
    A term that is a metric too is left out beside it."""
    groups: list[list[Chart]] = []
    for chart in charts:
        group = next((group for group in groups if _alike(group[0], chart, runs)), None)
        groups.append([chart]) if group is None else group.append(chart)
    shown = []
    for group in groups:
        names = {chart.metric for chart in group}
        first, *others = [
            chart
            for chart in group
            if chart.metric.removeprefix(TERM) == chart.metric or chart.metric.removeprefix(TERM) not in names
        ]
        shown.append((first, others))
    return shown


def _alike(first: Chart, second: Chart, runs: Sequence[RunRecord]) -> bool:
    """Whether two charts have the same lines, as far as the eye can see."""
    one, other = lines_of(first, runs), lines_of(second, runs)
    if [(line.label, line.kind, line.steps) for line in one] != [(x.label, x.kind, x.steps) for x in other]:
        return False
    height = math.log if logarithmic(first, one) else float
    if height is math.log and any(value <= 0 for line in other for value in line.values):
        return False
    shown = [height(value) for line in one for value in line.values]
    measured = any(line.kind == "eval" for line in one)
    return all(
        abs(height(a) - height(b)) <= (NOISE if measured and left.kind == "train" else LINE) * (max(shown) - min(shown))
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left.values, right.values, strict=True)
    )


def reading(runs: Sequence[RunRecord]) -> str:
    """Explain the lines of the charts."""
    lines = [line for chart in charts_of(runs) for line in lines_of(chart, runs)]
    kinds = {line.kind for line in lines}
    notes = []
    if any(line.kind == "train" and len(line.steps) >= SMOOTHED_FROM for line in lines):
        notes.append("Training logs are faint, their running mean bold.")
    if "eval" in kinds:
        notes.append("Dashed: the held-out rows.")
    if "teacher" in kinds:
        notes.append("Dotted: the teacher.")
    return " ".join(notes)
