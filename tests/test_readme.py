"""README's two commands are the ones CI runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST = 'pip install -e ".[dev]" && pytest'
RUN = "liger-trainer run smollm2/distill_layerdrop"


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
