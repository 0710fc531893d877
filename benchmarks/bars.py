"""README's figure: time and memory of whole models as bars, from the JSON of `benchmarks.trainer_step`.

    python -m benchmarks.bars docs/results/FILE.json       # writes FILE-light.svg and FILE-dark.svg next to it
    python -m benchmarks.bars docs/results/FILE.json --cases sft-qwen3-0.6b sft-llama-3.2-1b

`benchmarks.trainer_step --output` calls it. The SVG is written by hand instead of through matplotlib, so that it has
the same bytes everywhere and a test can check that the figure shows the file.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from .trainer_cases import CASES

SHOWN = "sft-qwen3-1.7b", "kd-qwen3-0.6b", "sft-gemma-3-1b", "lora-llama-3-8b"  # of README
TRAININGS = {case.name: str(replace(case, gently=1)) for case in CASES}  # without the rate
TITLES = {
    "ours": "liger-trainer", "trl_compiled": "TRL + torch.compile", "trl_liger": "TRL + Liger-Kernel", "trl": "TRL",
    "unsloth": "Unsloth",
}  # fmt: skip
THEMES = {
    "light": {"text": "#1f2328", "faint": "#59636e", "ours": "#0969da", "other": "#c4ccd6"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "ours": "#4493f8", "other": "#474e58"},
}
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
WIDTH, LABELS, BAR, PANEL = 860, 150, 240, 360  # pixels: all, the names, the longest bar, bar and number
TOP, LINE, THICK, GAP = 50, 24, 16, 40  # the heading, a bar's line, a bar, before each further model
GIB = 1024


def figure(run: dict[str, Any], theme: str, cases: Sequence[str] = SHOWN) -> str:
    """Return an SVG without a background: for each case ours, then peers by their time; ms left and GiB right.

    A case that several jobs measured is drawn from the one with the most peers, the first of them: rows of two jobs are
    not compared. Empty if nothing was measured.
    """
    groups = {case: group for case in cases if (group := _group(run["results"], case))}
    shown = [result for group in groups.values() for result in group]
    if not shown:
        return ""
    columns = [
        ("milliseconds a step", [statistics.median(result["ms"]) for result in shown]),
        ("GiB held", [result["reserved_mib"] / GIB for result in shown]),
    ]
    parts, y, row = [], 0, 0
    for case, group in groups.items():
        y += TOP if not y else GAP
        parts.append(_text(0, y - 12, TRAININGS.get(case, case), theme, "bold"))
        parts += [
            _text(LABELS + i * PANEL, y - 30, head, theme, "faint") for i, (head, _) in enumerate(columns) if not row
        ]
        for result in group:
            parts += _line(y, result["provider"], row, [values for _, values in columns], theme)
            y, row = y + LINE, row + 1
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    return "\n".join([f'{head} font-family="{FONT}" font-size="13">', *parts, "</svg>", ""])


def _group(results: Sequence[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """Return one job's rows of a case: ours, then peers by their time. Empty where ours or a peer is missing."""
    jobs: dict[tuple[str | None, str | None], list[dict[str, Any]]] = {}
    for result in results:
        if result["case"] == case and result["provider"] in TITLES and result.get("ms"):
            jobs.setdefault((result.get("commit"), result.get("job")), []).append(result)
    rows = max(jobs.values(), key=len, default=[])
    ordered = sorted(rows, key=lambda row: (row["provider"] != "ours", statistics.median(row["ms"])))
    return ordered if len(rows) > 1 and ordered[0]["provider"] == "ours" else []


def _line(y: int, provider: str, row: int, columns: Sequence[Sequence[float]], theme: str) -> list[str]:
    kind, style = ("ours", "bold") if provider == "ours" else ("other", "faint")
    parts = [_text(0, y + 13, TITLES[provider], theme, style)]
    for panel, values in enumerate(columns):
        x, long = LABELS + panel * PANEL, BAR * values[row] / max(values)
        fill = THEMES[theme][kind]
        parts.append(f'<rect x="{x}" y="{y}" width="{long:.1f}" height="{THICK}" rx="2" fill="{fill}"/>')
        parts.append(_text(x + long + 8, y + 13, f"{values[row]:.1f}", theme, style))
    return parts


def _text(x: float, y: int, text: str, theme: str, style: str) -> str:
    weight = ' font-weight="600"' if style == "bold" else ""
    fill = THEMES[theme]["text" if style == "bold" else "faint"]
    return f'<text x="{x:.1f}" y="{y}" fill="{fill}"{weight}>{escape(text)}</text>'


def write_figures(source: Path, cases: Sequence[str] = SHOWN) -> list[Path]:
    """Write the figure of a JSON next to it, in both themes, and return the paths; none if there is nothing to draw."""
    run, written = json.loads(source.read_text()), []
    for theme in THEMES:
        if drawn := figure(run, theme, cases):
            written.append(source.with_name(f"{source.stem}-{theme}.svg"))
            written[-1].write_text(drawn)
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the figures next to the JSON and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="JSON")
    parser.add_argument("--cases", nargs="+", default=SHOWN, help="draw these, in this order")
    options = parser.parse_args(arguments)
    print(*write_figures(options.source, options.cases), sep="\n")


if __name__ == "__main__":
    main()
