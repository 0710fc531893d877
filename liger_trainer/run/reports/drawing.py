"""Draw the charts of a report: as a PNG, and for the page as an SVG for each thing that a curve can be over.

A chart is drawn in light colours. Its PNG has a white background; in its SVG the colours are CSS variables of the page,
which has other values for them in dark mode. The page shows one SVG of a chart at a time.
"""

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .curves import SERIES, SMOOTHED_FROM, Axis, Chart, Line, axes_of, charts_of, different, lines_of, logarithmic
from .read_run import RunRecord
from .tables import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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

    figure = Figure(figsize=SIZE, layout="constrained")
    plot = figure.add_subplot()
    curves = _plot(plot, chart, lines, several)
    notes = ["logarithmic"] if plot.get_yscale() == "log" else []
    note = ", ".join([*notes, *([f"the same curve: {', '.join(other.title for other in same)}"] if same else [])])
    _label_steps(plot)
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


def _label_steps(plot: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    plot.set_xlabel("step")
    plot.xaxis.set_major_locator(MaxNLocator(TICKS, steps=NICE, integer=True))


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
    """Write the figure as an element of the page, with the page's colours and font and ids of its own.

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
# its points and its values, by CSS alone.


HOVERED = 120  # places of a chart that show values, about
FEWEST = 20  # points of a line that show theirs, where there are many lines
NARROWEST = 0.5  # gap between places, in points of the page: nearer ones share a strip
LEADING = 10.5  # from one line of text to the next
Point = tuple[float, Line, int, float]
"""Place on the page from the left; line; index of the point in it; place from the top."""


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
