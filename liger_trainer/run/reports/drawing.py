"""The charts of a report: which there are, and drawn as a PNG, and for the page as an SVG for each kind of x axis.

A chart is drawn in light colours. Its PNG has a white background; in its SVG the colours are CSS variables of the page,
which has other values for them in dark mode. The page shows one SVG of a chart at a time.
"""

import bisect
import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .tables import RunRecord, duration, has_other_name, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# The curves of a report: which charts there are, and their points in log_history, by step, tokens or time.


Axis = Literal["step", "tokens", "time"]
# What a curve can be over: optimizer steps; tokens trained on; seconds of training, evaluations and saves left out.
AXES: tuple[Axis, ...] = ("step", "tokens", "time")
# One for each run; of a single run, for training, evaluation and teacher.
SERIES = ("#2563eb", "#d9480f", "#0a8f66", "#9333ea", "#b7791f", "#c2255c", "#0b7285", "#5c636a")
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
    # log: logarithmic where values spread widely; linear: never; zero: likewise, from 0; percent: from 0 to 100
    axis: str = "log"

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
    kind: str  # train, eval or teacher
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
    A term that is a metric too is then left out."""
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


INK, MUTED, GRID = "#1f2430", "#667085", "#d9dde3"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", **{c: f"--s{i}" for i, c in enumerate(SERIES, 1)}}
SIZE = (4.5, 2.65)  # inches, at 72 points each the size in the page
TICKS = 7  # intervals of an axis: a fixed number, since its length depends on the labels
NICE = (1, 2, 2.5, 5, 10)  # distances of ticks, times a power of ten


@dataclass(frozen=True)
class Drawing:
    """A chart for the page (an SVG for each axis) and for a file (PNG)."""

    name: str
    title: str
    note: str
    svgs: dict[Axis, str]
    png: bytes


def draw(runs: Sequence[RunRecord], labels: Sequence[str] = ()) -> list[Drawing]:
    """Draw every chart of these runs, several runs overlaid. Imports matplotlib."""
    import matplotlib
    from matplotlib.backends import backend_agg, backend_svg  # noqa: F401  loaded before rc_context, not in it

    axes = axes_of(runs)
    with matplotlib.rc_context(_STYLE):
        return [
            _drawing(chart, lines_of(chart, runs, labels), same, len(runs) > 1, axes)
            for chart, same in different(charts_of(runs), runs)
        ]


_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.size": 3,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.6,
    "svg.fonttype": "none",  # keeps text as text, in the font of the page
}


def _drawing(chart: Chart, lines: list[Line], same: Sequence[Chart], several: bool, axes: Sequence[Axis]) -> Drawing:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.add_subplot()
    curves = _plot(plot, chart, lines, several)
    notes = ["logarithmic"] if plot.get_yscale() == "log" else []
    note = ", ".join([*notes, *([f"the same curve: {', '.join(other.title for other in same)}"] if same else [])])
    plot.set_xlabel("step")
    plot.xaxis.set_major_locator(MaxNLocator(TICKS, steps=NICE, integer=True))
    png, svgs = io.BytesIO(), {}
    title = plot.set_title(f"{chart.title} ({note})" if note else chart.title, loc="left", fontsize=9.5)
    figure.savefig(png, format="png", dpi=160, facecolor="white")
    title.set_text("")
    for axis in axes:
        label, unit = _unit(axis, lines)
        places = [[place / unit for place in line.over(axis)] for line in lines]
        if axis != "step":  # in the room that the steps left
            figure.set_layout_engine("none")
            _move(plot, curves, places, label)
        svgs[axis] = _svg(figure, chart, axis, list(zip(lines, places, strict=True)))
    return Drawing(chart.name, chart.title, note, svgs, png.getvalue())


def _unit(axis: Axis, lines: Sequence[Line]) -> tuple[str, float]:
    """Return what an axis is called, and the unit of its numbers."""
    if axis != "time":
        return axis, 1.0
    longest = max(max(line.over(axis)) for line in lines)
    name, unit = next((n, u) for n, u in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if longest >= 2 * u or u == 1.0)
    return f"time in training ({name})", unit


def _move(plot: "Axes", curves: "list[tuple[Line2D, int]]", places: list[list[float]], label: str) -> None:
    """Put the points of each curve at other places."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for curve, index in curves:
        curve.set_xdata(places[index])
    plot.relim()
    plot.autoscale(axis="x")
    plot.set_xlabel(label)
    plot.xaxis.set_major_locator(MaxNLocator(TICKS, steps=NICE))
    plot.xaxis.set_major_formatter(EngFormatter(sep="") if label == "tokens" else "{x:g}")


def _plot(axes: "Axes", chart: Chart, lines: list[Line], several: bool) -> "list[tuple[Line2D, int]]":
    """Draw the lines over steps; return the curves, each with the number of its line."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    axes.grid(axis="y")
    axes.margins(x=0.02)
    if logarithmic(chart, lines):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=TICKS))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(TICKS, steps=NICE))
        axes.yaxis.set_major_formatter("{x:g}")
    curves = [
        (curve, index) for index, line in enumerate(lines) for curve in _draw_line(axes, line, 0.18 if several else 0.3)
    ]
    if chart.axis in ("zero", "percent"):
        axes.set_ylim(bottom=0, top=100 if chart.axis == "percent" else None)
    if len({line.label for line in lines}) > 1:
        named = [curve for curve, _ in curves if not str(curve.get_label()).startswith("_")]
        handles = {str(curve.get_label()): curve for curve in reversed(named)}  # the first line of each run
        handles = dict(reversed(handles.items()))
        axes.figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3)
    return curves


def _draw_line(axes: "Axes", line: Line, alpha: float) -> "list[Line2D]":
    """Join the points. Of many, draw the running mean, and the points faintly behind it."""
    style: dict[str, Any] = {"color": line.color, "linewidth": 1.6, "label": line.label}
    if line.kind == "eval":
        style |= {"linestyle": (0, (4, 2)), "marker": "o", "markersize": 3.6 if len(line.steps) <= 30 else 2.2}
    elif line.kind == "teacher":
        style |= {"linestyle": (0, (1, 1.6)), "linewidth": 1.4}
    elif len(line.steps) == 1:
        style |= {"marker": "o", "markersize": 3.6}
    if line.kind != "train" or len(line.steps) < SMOOTHED_FROM:
        return axes.plot(line.steps, line.values, **style)
    faint = axes.plot(line.steps, line.values, color=line.color, linewidth=0.8, alpha=alpha)
    return [*faint, *axes.plot(line.steps, _running_mean(line.values, max(3, len(line.values) // 40)), **style)]


def _running_mean(values: list[float], half: int) -> list[float]:
    """Return means over up to `half` neighbours on each side; near the ends over fewer, equally many on both."""
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        means.append(sum(window) / len(window))
    return means


def _svg(figure: "Figure", chart: Chart, axis: Axis, lines: Sequence[tuple[Line, list[float]]]) -> str:
    """Write the figure as an element of the page, with the page's colours and font, and ids that no other has.

    Args:
        lines: each with the places of its points.
    """
    text, mark = io.StringIO(), f"{chart.name}-{axis}"
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'\bid="', f'id="{mark}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{mark}-', svg)
    svg = re.sub(r"url\(#", f"url(#{mark}-", svg)
    svg = re.sub(r'\b(?:d|x|y)="[^"]*"', lambda places: re.sub(r"(\.\d\d)\d+", r"\1", places[0]), svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*(; )?", "", svg)
    svg = svg.replace("</svg>", f"{hover(figure, lines)}</svg>")
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    over = {"step": "steps", "tokens": "tokens", "time": "time"}[axis]
    box, label = f"0 0 {SIZE[0] * 72:g} {SIZE[1] * 72:g}", html.escape(f"{chart.title} over {over}")
    opening = f'<svg class="by-{axis}" viewBox="{box}" role="img" aria-label="{label}">'
    return re.sub(r"\s*\n\s*", " ", re.sub(r"^<svg[^>]*>", opening, svg))


# What a chart shows under the pointer, or under a finger: the values of the points nearest to it.
#
# Over the plot lie transparent strips, one for each place that has points; the one under the pointer shows its line,
# its points and its values, by CSS without a script.
HOVERED = 120  # places of a chart that show values, about
FEWEST = 20  # points of a line that show theirs, where there are many lines
NARROWEST = 0.5  # gap between places, in points of the page: nearer ones share a strip
LEADING = 10.5  # from one line of text to the next
# Place on the page from the left; line; index of the point in it; place from the top.
Point = tuple[float, Line, int, float]


def hover(figure: "Figure", lines: Sequence[tuple[Line, list[float]]]) -> str:
    """Return the strips of a chart as SVG, in the figure's points from its upper left corner.

    Args:
        lines: each with the places of its points along the x axis.
    """
    plot, scale = figure.axes[0], 72 / figure.dpi
    height = figure.get_figheight() * 72
    left, bottom, right, top = (edge * scale for edge in plot.bbox.extents)
    points: list[Point] = []
    most = max(FEWEST, HOVERED // len({line.label for line, _ in lines}))
    shown = {round(places[i], 9) for line, places in lines for i in _some(len(line.steps), most)}
    for line, places in lines:
        pixels = plot.transData.transform(list(zip(places, line.values, strict=True))) * scale
        for index, (x, y) in enumerate(pixels):
            if round(places[index], 9) in shown:
                points.append((float(x), line, index, height - float(y)))
    at = _together(points)
    middles = list(at)
    edges = [left, *((a + b) / 2 for a, b in zip(middles, middles[1:], strict=False)), right]
    room = (left, right, height - top, height - bottom)
    strips = (_strip(x, at[x], edges[i : i + 2], room) for i, x in enumerate(middles))
    return f'<g class="values">{"".join(strips)}</g>'


def _together(points: list[Point]) -> dict[float, list[Point]]:
    """Return the points by their place from left to right, those that are near to one another at the first's."""
    at: dict[float, list[Point]] = {}
    for point in sorted(points, key=lambda point: point[0]):
        last = next(reversed(at), -math.inf)
        at.setdefault(last if point[0] - last < NARROWEST else point[0], []).append(point)
    return at


def _some(count: int, most: int) -> set[int]:
    """Return the indices of up to `most` points, and of the last."""
    return {*range(0, count, -(-count // most)), count - 1}


def _strip(x: float, points: Sequence[Point], edges: Sequence[float], room: tuple[float, float, float, float]) -> str:
    left, right, top, bottom = room
    apart = len({line.steps[i] for _, line, i, _ in points}) > 1
    texts = [(_place(points), "")]
    for _, line, i, _ in points:
        where = f" at step {line.steps[i]:,.0f}" if apart else ""
        texts.append((f"{line.label} {line.values[i]:.5g}{where}", line.color))
    start, side = (right, ' text-anchor="end"') if x < (left + right) / 2 else (left + 4, "")
    rows = ""
    for text, color in filter(lambda row: row[0], texts):
        style = f' style="fill: {color}"' if color else ""
        rows += f'<tspan x="{start:.0f}" dy="{LEADING}"{style}>{html.escape(text)}</tspan>'
    circles = "".join(
        f'<circle cx="{near:.1f}" cy="{y:.1f}" r="3" style="fill: {line.color}"/>' for near, line, _, y in points
    )
    area = f'<rect x="{edges[0]:.1f}" y="{top:.0f}" width="{edges[1] - edges[0]:.1f}" height="{bottom - top:.0f}"/>'
    rule = f'<path d="M{x:.1f} {top:.0f}V{bottom:.0f}"/>'
    return f'<g>{area}{rule}{circles}<text y="{top - 2:.0f}"{side}>{rows}</text></g>'


def _place(points: Sequence[Point]) -> str:
    """Say step, tokens and time, as far as the points agree: at one step two runs may have read different tokens."""
    steps = {f"step {line.steps[i]:,.0f}" for _, line, i, _ in points}
    tokens = {f"{line.tokens[i]:,.0f} tokens" if line.tokens else "" for _, line, i, _ in points}
    times = {duration(line.seconds[i]) if line.seconds else "" for _, line, i, _ in points}
    return ", ".join(text for texts in (steps, tokens, times) if len(texts) == 1 for text in texts if text)
