"""Time and memory of the fused losses against tokens and against vocabulary, drawn from a run's JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .loss_cases import BETA
from .loss_providers import PROVIDERS
from .report import slug

AXES = {"tokens": ("-tokens-", "tokens"), "vocabulary": ("-vocab-", "vocab_size")}
KINDS = ("ce", *BETA)
TITLES = {provider.name: provider.title for provider in PROVIDERS}
Series = dict[str, list[tuple[int, float, float | None]]]


def draw(source: Path, folder: Path) -> list[Path]:
    """One SVG for each loss and axis that `source` has several cases of, in `folder`; their paths."""
    run = json.loads(source.read_text())
    if run["gate"]:
        raise SystemExit(f"{source} holds no times: the accuracy gate refused.")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in KINDS:
        for axis, (mark, key) in AXES.items():
            cases = sorted((x for x in run["cases"] if x["kind"] == kind and mark in x["name"]), key=lambda x: x[key])
            if len(cases) > 1:
                paths.append(folder / f"{kind}-{axis}-{slug(run['header']['device'])}.svg")
                _figure(series(cases, key), f"{_title(cases, key)}\n{run['header']['device']}", axis, paths[-1])
    if not paths:
        raise SystemExit(f"{source} holds no sweep: run --cases '*-tokens-*,*-vocab-*' first.")
    return paths


def series(cases: Sequence[dict[str, Any]], key: str) -> Series:
    """(x, ms, peak MiB or None) of each provider, for the cases in which it ran."""
    found: Series = {}
    for case in cases:
        for result in case["providers"]:
            if "ms" in result:
                memory = result["memory_mib"]
                point = (case[key], result["ms"]["median"], memory and memory["peak"])
                found.setdefault(result["name"], []).append(point)
    return found


def _title(cases: Sequence[dict[str, Any]], key: str) -> str:
    case = cases[0]
    parts = [f"H {case['hidden_size']}"]
    parts += [f"teacher's H {case['teacher_hidden_size']}"] if case["teacher_hidden_size"] else []
    parts += [f"V {case['vocab_size']}"] if key == "tokens" else [f"{case['tokens']} tokens"]
    name = "cross-entropy" if case["kind"] == "ce" else case["kind"].replace("_", " ")
    return f"Fused linear {name}, forward and backward: {', '.join([*parts, case['dtype']])}"


def _figure(lines: Series, title: str, axis: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": "liger-trainer", "svg.fonttype": "none"}):  # the same file each time
        figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for panel, index, unit in zip(panels, (1, 2), ("ms", "peak MiB above the inputs"), strict=True):
            for name, points in lines.items():
                shown = [(point[0], point[index]) for point in points if point[index] is not None]
                style = {"linewidth": 2.5, "color": "black"} if name == "ours" else {}
                if shown:
                    x, y = zip(*shown, strict=True)
                    panel.plot(x, y, marker="o", markersize=3, label=TITLES.get(name, name), **style)
            panel.set(xlabel=axis, ylabel=unit, xscale="log", yscale="log")
            ticks = sorted({point[0] for points in lines.values() for point in points})
            panel.set_xticks(ticks, [f"{x // 1024}k" for x in ticks], minor=False)
            panel.minorticks_off()
            panel.yaxis.set_major_formatter("{x:g}")
            panel.grid(alpha=0.3)
        panels[0].legend(frameon=False)
        figure.suptitle(title)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
