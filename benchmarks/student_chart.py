"""What students lose against how fast they write: a chart of the sizes that `benchmarks.students` has trained."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from .student_page import half_width, values
from .student_ways import SIZES

LINES = {"distilled": "distilled", "tuned": "fine-tuned"}
PANELS = {"forward_kl": "forward KL, nats a token", "agreement_at_1": "agreement@1"}
Point = tuple[float, float, float, str]  # tokens a second, mean over the seeds, half its interval, size


def points(content: dict[str, Any], line: str, metric: str) -> list[Point]:
    """Return the sizes of which quality and speed are known. A fine-tuned student is as fast as a distilled one."""
    found = []
    for size in SIZES:
        speed, seen = content["speed"].get(f"distilled_{size}"), values(content["runs"], f"{line}_{size}", metric)
        if speed and seen:
            found.append((speed["tokens_per_second"], mean(seen), half_width(seen) or 0.0, size))
    return found


def draw(content: dict[str, Any], path: Path) -> bool:
    """Write the chart as an SVG; return whether there are two sizes to draw."""
    if any(len(points(content, line, "forward_kl")) < 2 for line in LINES):
        return False
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    teacher = content["speed"].get("teacher")
    speeds = {point[0] for point in points(content, "distilled", "forward_kl")}
    ticks = sorted(speeds | ({teacher["tokens_per_second"]} if teacher else set()))
    with plt.rc_context({"svg.hashsalt": "liger-trainer", "svg.fonttype": "none"}):  # the same file each time
        figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for panel, (metric, title) in zip(panels, PANELS.items(), strict=True):
            for line, name in LINES.items():
                x, y, half, sizes = zip(*points(content, line, metric), strict=True)
                panel.errorbar(x, y, yerr=half, marker="o", capsize=3, label=name)
                for place, size in zip(zip(x, y, strict=True), sizes, strict=True):
                    panel.annotate(size, place, xytext=(0, 8), textcoords="offset points", ha="center")
            if teacher:
                at = teacher["tokens_per_second"], float(metric == "agreement_at_1")
                panel.plot(*at, marker="*", markersize=10, linestyle="none", color="black", label="the teacher")
            panel.set(xlabel="tokens a second, one text at a time", ylabel=title, xscale="log")
            panel.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.margins(0.1)
        panels[0].legend(frameon=False)
        figure.suptitle("Students of 0.8, 0.5 and 0.25 of the teacher's parameters: quality and speed of writing")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    return True
