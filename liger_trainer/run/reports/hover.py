"""What a chart shows under the pointer, or under a finger: the values of the points nearest to it.

Over the plot lie transparent strips, one for each place that has points; the one under the pointer shows its line, its
points and its values, by CSS alone.
"""

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .curves import Line
from .format import duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
