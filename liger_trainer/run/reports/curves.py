"""The curves of a report: which charts there are, their points in log_history, and their drawing.

A chart is drawn once, in light colours. Its PNG has a white background; in its SVG the colours are CSS variables of the
page, which has other values for them in dark mode.
"""

import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..metric_rows import has_other_name
from .read_run import RunRecord, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2430", "#667085", "#d9dde3"
SERIES = ("#2563eb", "#d9480f", "#0a8f66", "#9333ea", "#b7791f", "#c2255c", "#0b7285", "#5c636a")
"""One for each run; of a single run, for training, evaluation and teacher."""
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", **{c: f"--s{i}" for i, c in enumerate(SERIES, 1)}}
SIZE = (4.5, 2.65)  # inches, at 72 points each the size in the page
TICKS = 7  # intervals of an axis: a fixed number, since its length depends on the labels
NICE = (1, 2, 2.5, 5, 10)  # distances of ticks, times a power of ten
HOVERED = 120  # points of a line that show their values, at most
SMOOTHED_FROM = 120  # points of a training curve: from here on a running mean lies over them
DECADES = 1.7  # from the lowest values (the 5 % quantile) to the highest: from here on a logarithmic axis


@dataclass(frozen=True)
class Chart:
    """A metric over the steps: `metric` of the training logs, `eval_metric` of evaluations, and the teacher's."""

    metric: str
    title: str
    teacher: str | None = None
    axis: str = "log"
    """log: logarithmic where values spread widely; linear: never; zero: never, and from 0"""

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
    kind: str
    """train, eval or teacher"""
    color: str
    steps: list[float]
    values: list[float]
    tokens: list[float | None]
    """trained on until then, where the logs say so"""


@dataclass(frozen=True)
class Drawing:
    """A chart for the page (SVG) and for a file (PNG)."""

    name: str
    title: str
    note: str
    svg: str
    png: bytes


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
        for place, (kind, metric) in enumerate(_series(chart, run)):
            color = SERIES[(place if len(runs) == 1 else index) % len(SERIES)]
            label = {"train": "training", "eval": "held out", "teacher": "teacher"}[kind]
            if len(runs) > 1:
                label = labels[index] if labels else run.name
            steps, values = points(run, metric)
            if steps:
                tokens = dict(zip(*points(run, "num_tokens"), strict=True))
                lines.append(Line(label, kind, color, steps, values, [tokens.get(step) for step in steps]))
    return lines


def _series(chart: Chart, run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "train", chart.metric
    yield "eval", f"eval_{chart.metric}"
    if chart.teacher:
        on_held_out = any(f"eval_{chart.teacher}" in entry for entry in run.log_history)
        yield "teacher", f"eval_{chart.teacher}" if on_held_out else chart.teacher


def different(charts: Sequence[Chart], runs: Sequence[RunRecord]) -> list[tuple[Chart, list[Chart]]]:
    """Return the charts that differ, each with the others of the same points: a loss of one term is drawn once. A term
    that is a metric too is left out beside it."""
    kept: dict[tuple, list[Chart]] = {}
    for chart in charts:
        lines = tuple(
            (line.kind, tuple(line.steps), tuple(f"{value:.5g}" for value in line.values))
            for line in lines_of(chart, runs)
        )
        kept.setdefault(lines, []).append(chart)
    shown = []
    for group in kept.values():
        names = {chart.metric for chart in group}
        first, *others = [
            chart
            for chart in group
            if chart.metric.removeprefix(TERM) == chart.metric or chart.metric.removeprefix(TERM) not in names
        ]
        shown.append((first, others))
    return shown


def draw(runs: Sequence[RunRecord], labels: Sequence[str] = ()) -> list[Drawing]:
    """Draw every chart of these runs, several runs overlaid. Imports matplotlib."""
    import matplotlib
    from matplotlib.backends import backend_agg, backend_svg  # noqa: F401  loaded before rc_context, not in it
    from matplotlib.figure import Figure

    drawn = []
    with matplotlib.rc_context(_STYLE):
        for chart, same in different(charts_of(runs), runs):
            lines = lines_of(chart, runs, labels)
            figure = Figure(figsize=SIZE, layout="constrained")
            note = _plot(figure.add_subplot(), chart, lines, len(runs) > 1)
            note = ", ".join(
                filter(None, (note, f"the same: {', '.join(other.title for other in same)}" if same else ""))
            )
            svg, png = _svg(figure, chart, lines), io.BytesIO()
            figure.axes[0].set_title(f"{chart.title} ({note})" if note else chart.title, loc="left", fontsize=9.5)
            figure.savefig(png, format="png", dpi=160, facecolor="white")
            drawn.append(Drawing(chart.name, chart.title, note, svg, png.getvalue()))
    return drawn


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


def _plot(axes: "Axes", chart: Chart, lines: list[Line], several: bool) -> str:
    """Draw the lines and return a note for the title."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    notes = []
    axes.grid(axis="y")
    axes.margins(x=0.02)
    values = sorted(value for line in lines for value in line.values)
    if chart.axis == "log" and values[0] > 0 and values[-1] > values[len(values) // 20] * 10**DECADES:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=TICKS))
        notes.append("logarithmic")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(TICKS, steps=NICE))
        axes.yaxis.set_major_formatter("{x:g}")
    for line in lines:
        _draw_line(axes, line, alpha=0.18 if several else 0.3)
    if chart.axis == "zero":
        axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(TICKS, steps=NICE, integer=True))
    if len({line.label for line in lines}) > 1:
        named = [artist for artist in axes.get_lines() if not str(artist.get_label()).startswith("_")]
        handles = {str(artist.get_label()): artist for artist in reversed(named)}  # the first line of each run
        handles = dict(reversed(handles.items()))
        axes.figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3)
    return ", ".join(notes)


def _draw_line(axes: "Axes", line: Line, alpha: float) -> None:
    """Join the points. Of many, draw the running mean, and the points faintly behind it."""
    style: dict[str, Any] = {"color": line.color, "linewidth": 1.6, "label": line.label}
    if line.kind == "eval":
        style |= {"linestyle": (0, (4, 2)), "marker": "o", "markersize": 3.6 if len(line.steps) <= 30 else 2.2}
    elif line.kind == "teacher":
        style |= {"linestyle": (0, (1, 1.6)), "linewidth": 1.4}
    elif len(line.steps) == 1:
        style |= {"marker": "o", "markersize": 3.6}
    if line.kind != "train" or len(line.steps) < SMOOTHED_FROM:
        axes.plot(line.steps, line.values, **style)
        return
    axes.plot(line.steps, line.values, color=line.color, linewidth=0.8, alpha=alpha)
    axes.plot(line.steps, _running_mean(line.values, max(3, len(line.values) // 40)), **style)


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


def _running_mean(values: list[float], half: int) -> list[float]:
    """Return means over up to `half` neighbours on each side; near the ends over fewer, equally many on both."""
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        means.append(sum(window) / len(window))
    return means


def _svg(figure: "Figure", chart: Chart, lines: Sequence[Line]) -> str:
    """Write the figure as an element of the page, with the page's colours and font and ids of its own. Points show
    their values when the pointer is over them: SVG titles, which need no script."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'\bid="', f'id="{chart.name}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{chart.name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{chart.name}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*(; )?", "", svg)
    svg = svg.replace("</svg>", f"{_hover(figure, lines)}</svg>")
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    box, label = f"0 0 {SIZE[0] * 72:g} {SIZE[1] * 72:g}", html.escape(f"{chart.title} over steps")
    opening = f'<svg viewBox="{box}" role="img" aria-label="{label}">'
    return re.sub(r"\s*\n\s*", " ", re.sub(r"^<svg[^>]*>", opening, svg))


def _hover(figure: "Figure", lines: Sequence[Line]) -> str:
    """Return a circle over each point, which is seen when the pointer is over it, with the point's values as title."""
    axes, scale = figure.axes[0], 72 / figure.dpi
    circles = []
    for line in lines:
        every = -(-len(line.steps) // HOVERED)
        shown = sorted({*range(0, len(line.steps), every), len(line.steps) - 1})
        places = axes.transData.transform([(line.steps[i], line.values[i]) for i in shown]) * scale
        for i, (x, y) in zip(shown, places, strict=True):
            tokens = line.tokens[i]
            place = f"step {line.steps[i]:,.0f}" + ("" if tokens is None else f", {tokens:,.0f} tokens")
            title = html.escape(f"{place}: {line.label} {line.values[i]:.5g}")
            center = f'cx="{x:.1f}" cy="{SIZE[1] * 72 - y:.1f}"'
            circles.append(f'<circle {center} r="4.5" style="fill: {line.color}"><title>{title}</title></circle>')
    return f'<g class="points">{"".join(circles)}</g>'
