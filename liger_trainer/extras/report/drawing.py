"""The charts of a report: which there are, and drawn as a PNG, and for the page as an SVG.

A chart is drawn in light colours. Its PNG has a white background; in its SVG the colours are CSS variables of the page,
which has other values for them in dark mode.
"""

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...run.metric_rows import has_other_name
from .tables import RunRecord, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The curves of a report: which charts there are, and their points in log_history.


# One for each run; of a single run, for training, evaluation and teacher.
SERIES = ("#2563eb", "#d9480f", "#0a8f66", "#9333ea", "#b7791f", "#c2255c", "#0b7285", "#5c636a")
SMOOTHED_FROM = 120  # points of a training curve: from here on a running mean lies over them
DECADES = 1.7  # from the lowest values (the 5 % quantile) to the highest: from here on a logarithmic axis


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
    Chart("jsd", "Jensen-Shannon divergence (nats/token)"),
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
    """One line of a chart."""

    label: str
    kind: str  # train, eval or teacher
    color: str
    steps: list[float]
    values: list[float]


def points(run: RunRecord, metric: str) -> tuple[list[float], list[float]]:
    """Return steps and values of a metric. Of a step that was logged twice, as in a resumed run, the later counts."""
    values: dict[float, float] = {}
    for entry in run.log_history:
        step, value = number(entry.get("step")), number(entry.get(metric))
        if step is not None and value is not None:
            values[step] = value
    return sorted(values), [values[step] for step in sorted(values)]


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts with two points or more: the loss, its terms, the others, and untitled metrics last.

    What is logged by two names is shown once: a term of the loss that has the values of the metric of its name, and a
    distillation loss that is all of the loss.
    """
    logged = dict.fromkeys(key for run in runs for entry in run.log_history for key in entry)
    titled = {name for chart in CHARTS for name in (chart.metric, chart.teacher)} | _NO_CURVES
    base = dict.fromkeys(key.removeprefix("eval_") for key in logged)
    others = [Chart(key, _title(key)) for key in base if key not in titled and not _NO_CURVES_LIKE.search(key)]
    terms = [chart for chart in others if chart.metric.startswith(TERM)]
    rest = [chart for chart in others if chart not in terms]
    twice = {chart.metric for chart in terms if _is_a_metric(chart.metric, runs)}
    if f"{TERM}ce" not in base:
        twice.add("kd_loss")
    measured = [{key.removeprefix("eval_") for entry in run.log_history for key in entry} for run in runs]
    charts = [c for c in (CHARTS[0], *terms, *CHARTS[1:], *rest) if not has_other_name(c.metric, measured)]
    return [c for c in charts if c.metric not in twice and any(len(line.steps) > 1 for line in lines_of(c, runs))]


def _is_a_metric(term: str, runs: Sequence[RunRecord]) -> bool:
    """Whether a term of the loss has the values of the metric of its name; at another temperature it has others."""
    for name in (term, f"eval_{term}"):
        for run in runs:
            (steps, values), (others, metric) = points(run, name), points(run, name.replace(TERM, ""))
            if steps != others or not all(map(partial(math.isclose, rel_tol=1e-3), values, metric)):
                return False
    return True


def _title(key: str) -> str:
    """`loss/forward_kl` is a term of the loss, `schedule/temperature` a value that moves."""
    group, _, name = key.rpartition("/")
    title = name.replace("_", " ")
    return f"{group.replace('_', ' ').capitalize()}: {title}" if group else title


def lines_of(chart: Chart, runs: Sequence[RunRecord], labels: Sequence[str] = ()) -> list[Line]:
    """Return the lines of a chart that have points."""
    lines = []
    for index, run in enumerate(runs):
        for place, (kind, metric) in enumerate(_series(chart, run)):
            color = SERIES[(place if len(runs) == 1 else index) % len(SERIES)]
            label = {"train": "training", "eval": "held out", "teacher": "teacher"}[kind]
            if len(runs) > 1:
                label = labels[index] if labels else run.name
            steps, values = points(run, metric)
            if steps:
                lines.append(Line(label, kind, color, steps, values))
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
HOVERED = 120  # points of a line that show their values under the pointer


@dataclass(frozen=True)
class Drawing:
    """A chart for the page (SVG) and for a file (PNG)."""

    name: str
    title: str
    note: str
    svg: str
    png: bytes


def draw(runs: Sequence[RunRecord], labels: Sequence[str] = ()) -> list[Drawing]:
    """Draw every chart of these runs, several runs overlaid. Imports matplotlib."""
    import matplotlib
    from matplotlib.backends import backend_agg, backend_svg  # noqa: F401  loaded before rc_context, not in it

    with matplotlib.rc_context(_STYLE):
        return [_drawing(chart, lines_of(chart, runs, labels), len(runs) > 1) for chart in charts_of(runs)]


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


def _drawing(chart: Chart, lines: list[Line], several: bool) -> Drawing:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.add_subplot()
    _plot(plot, chart, lines, several)
    note = "logarithmic" if plot.get_yscale() == "log" else ""
    plot.set_xlabel("step")
    plot.xaxis.set_major_locator(MaxNLocator(TICKS, steps=NICE, integer=True))
    png = io.BytesIO()
    title = plot.set_title(f"{chart.title} ({note})" if note else chart.title, loc="left", fontsize=9.5)
    figure.savefig(png, format="png", dpi=160, facecolor="white")
    title.set_text("")  # the page has it
    return Drawing(chart.name, chart.title, note, _svg(figure, chart, lines), png.getvalue())


def _plot(axes: "Axes", chart: Chart, lines: list[Line], several: bool) -> None:
    """Draw the lines over steps."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    axes.grid(axis="y")
    axes.margins(x=0.02)
    if logarithmic(chart, lines):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=TICKS))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(TICKS, steps=NICE))
        axes.yaxis.set_major_formatter("{x:g}")
    for line in lines:
        _draw_line(axes, line, 0.18 if several else 0.3)
    if chart.axis in ("zero", "percent"):
        axes.set_ylim(bottom=0, top=100 if chart.axis == "percent" else None)
    if len({line.label for line in lines}) > 1:
        handles: dict[str, Any] = {}
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)  # the first line of each run
        axes.figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3)


def _draw_line(axes: "Axes", line: Line, alpha: float) -> None:
    """Join the points. Of many, draw the running mean, and the points faintly behind it."""
    style: dict[str, Any] = {"color": line.color, "linewidth": 1.6, "label": line.label}
    if line.kind == "eval":
        style |= {"linestyle": (0, (4, 2)), "marker": "o", "markersize": 3.6 if len(line.steps) <= 30 else 2.2}
    elif line.kind == "teacher":
        style |= {"linestyle": (0, (1, 1.6)), "linewidth": 1.4}
    elif len(line.steps) == 1:
        style |= {"marker": "o", "markersize": 3.6}
    values = line.values
    if line.kind == "train" and len(line.steps) >= SMOOTHED_FROM:
        axes.plot(line.steps, values, color=line.color, linewidth=0.8, alpha=alpha)
        values = _running_mean(values, max(3, len(values) // 40))
    axes.plot(line.steps, values, **style)


def _running_mean(values: list[float], half: int) -> list[float]:
    """Return means over up to `half` neighbours on each side; near the ends over fewer, equally many on both."""
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        means.append(sum(window) / len(window))
    return means


def _svg(figure: "Figure", chart: Chart, lines: Sequence[Line]) -> str:
    """Write the figure as an element of the page, with the page's colours and font, and ids that no other has."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'\bid="', f'id="{chart.name}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{chart.name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{chart.name}-", svg)
    svg = re.sub(r'\b(?:d|x|y)="[^"]*"', lambda places: re.sub(r"(\.\d\d)\d+", r"\1", places[0]), svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*(; )?", "", svg)
    svg = svg.replace("</svg>", f"{_values(figure, lines)}</svg>")
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    box, label = f"0 0 {SIZE[0] * 72:g} {SIZE[1] * 72:g}", html.escape(f"{chart.title} over steps")
    opening = f'<svg viewBox="{box}" role="img" aria-label="{label}">'
    return re.sub(r"\s*\n\s*", " ", re.sub(r"^<svg[^>]*>", opening, svg))


def _values(figure: "Figure", lines: Sequence[Line]) -> str:
    """Return a circle over each of a line's points, of many some and the last, which says its value to the pointer."""
    plot, scale, height = figure.axes[0], 72 / figure.dpi, figure.get_figheight() * 72
    circles = ""
    for line in lines:
        places = plot.transData.transform(list(zip(line.steps, line.values, strict=True))) * scale
        last = len(places) - 1
        for i in sorted({*range(0, last, -(-len(places) // HOVERED)), last}):
            text = html.escape(f"{line.label} {line.values[i]:.5g} at step {line.steps[i]:,.0f}")
            x, y = places[i][0], height - places[i][1]
            circles += (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill: {line.color}"><title>{text}</title></circle>'
            )
    return f'<g class="values">{circles}</g>'
