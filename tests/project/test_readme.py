"""README's two commands are the ones CI runs, and its figure shows the file it is drawn from."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import bars

ROOT = Path(__file__).parents[2]
TEST = 'pip install -e ".[dev]" && pytest'
RUN = "liger-trainer run smollm2/distill_pruned"


def readme_commands() -> list[str]:
    """Lines of README's fenced shell blocks."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    return [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]


def test_readme_and_ci_install_and_test_alike():
    assert TEST in readme_commands()
    assert f"\nstep '{TEST}'\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("lines", [readme_commands, lambda: (ROOT / ".ci" / "run").read_text().splitlines()])
def test_readme_and_ci_run_the_demo(lines):
    assert any(re.search(rf"(^|\s|'){re.escape(RUN)}(\s|$)", line) for line in lines())


def test_the_figure_shows_the_measured_file():
    pictures = re.findall(r'(?:src|srcset)="(docs/[^"]+)"', (ROOT / "README.md").read_text())
    assert len(pictures) == len(bars.THEMES)
    for picture in pictures:
        name, _, theme = picture.removesuffix(".svg").rpartition("-")
        run = json.loads((ROOT / f"{name}.json").read_text())
        assert (ROOT / picture).read_text() == bars.figure(run, theme), "python -m benchmarks.bars renews it"


def test_the_figures_alternative_text_has_its_numbers():
    text = (ROOT / "README.md").read_text()
    alternative = re.findall(r'alt="([^"]+)"', text)[0]
    picture = (ROOT / re.findall(r' src="(docs/[^"]+)"', text)[0]).read_text()
    numbers = re.findall(r">(\d+\.\d)<", picture)
    assert sorted(numbers) == sorted(re.findall(r"(?<![-\w.])\d+\.\d\b", alternative))
