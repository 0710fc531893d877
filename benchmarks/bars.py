"""README's figure: time and memory of whole models as bars, from the JSON of `benchmarks.trainer_step`.

    python -m benchmarks.bars docs/results/FILE.json       # writes FILE-light.svg and FILE-dark.svg next to it
    python -m benchmarks.bars docs/results/FILE.json --cases sft-qwen3-0.6b sft-llama-3.2-1b

The SVG is written by hand instead of through matplotlib, so that it has the same bytes everywhere and a test can check
that the figure shows the file. Also reads the JSON of `benchmarks.compiled`, a script of the commits up to d2208ce.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

TITLES = {
    "ours": "liger-trainer", "trl_compiled": "torch.compile", "trl_liger": "Liger-Kernel", "trl": "TRL",
    "plain_compiled": "torch.compile", "liger": "Liger-Kernel", "plain": "transformers",
}  # fmt: skip
THEMES = {
    "light": {"text": "#1f2328", "faint": "#59636e", "ours": "#0969da", "other": "#c4ccd6"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "ours": "#4493f8", "other": "#474e58"},
}
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
WIDTH, LABELS, BAR, PANEL = 860, 130, 250, 370  # pixels: all, the names, the longest bar, bar and number
TOP, LINE, THICK, GAP = 34, 24, 16, 40  # the heading, a bar's line, a bar, before each further model
GIB = 1024


def figure(run: dict[str, Any], theme: str, cases: Sequence[str] = ()) -> str:
    """Return an SVG without a background: a line for each of TITLES in each case, milliseconds left and GiB right.

    Raises:
        SystemExit: the run has no times, since its accuracy gate refused.
    """
    if run.get("gate"):
        raise SystemExit("no times to draw: the accuracy gate refused.")
    timed = [result for result in run["results"] if result["provider"] in TITLES and result.get("ms")]
    shown = [result for result in timed if not cases or result["case"] in cases]
    columns = [
        ("milliseconds", [statistics.median(result["ms"]) for result in shown]),
        ("GiB above the weights", [_above_weights(result) / GIB for result in shown]),
    ]
    rows = {(x["case"], x["provider"]): number for number, x in enumerate(shown)}
    parts, y = [], 0
    for shape, group in itertools.groupby(shown, key=lambda result: result["case"]):
        y += TOP if not y else GAP
        parts.append(_text(0, y - 12, shape, theme, "bold"))
        parts += [
            _text(LABELS + i * PANEL, y - 12, head, theme, "faint") for i, (head, _) in enumerate(columns) if y == TOP
        ]
        present = {result["provider"] for result in group}
        for provider in (name for name in TITLES if name in present):
            parts += _line(y, provider, rows[shape, provider], [values for _, values in columns], theme)
            y += LINE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    return "\n".join([f'{head} font-family="{FONT}" font-size="13">', *parts, "</svg>", ""])


def _above_weights(result: dict[str, Any]) -> float:
    return result["peak_mib"] if "peak_mib" in result else result["reserved_mib"] - result["weights_mib"]


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the figures next to the JSON and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="JSON")
    parser.add_argument("--cases", nargs="+", default=(), help="draw only these")
    options = parser.parse_args(arguments)
    source: Path = options.source
    run = json.loads(source.read_text())
    for theme in THEMES:
        path = source.with_name(f"{source.stem}-{theme}.svg")
        path.write_text(figure(run, theme, options.cases))
        print(path)


if __name__ == "__main__":
    main()
