"""Prose in Markdown is wrapped at 100 columns; tables, code, HTML and lines without a space to break at are not."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH = 100
SKIPPED = {"node_modules", "outputs", "site", "build", "dist"}
WRITTEN_BY_CODE = {
    "docs/configs.md", "docs/models.md", "docs/results/many-gpus-predicted.md", "docs/results/reliability.md",
}  # fmt: skip


def pages() -> list[str]:
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    visible = (path for path in paths if not any(part.startswith(".") or part in SKIPPED for part in path.parts))
    # What a benchmark writes carries the name of its device.
    return sorted(path.as_posix() for path in visible if not re.search(r"-(nvidia|cpu)", path.name))


def long_lines(text: str) -> list[str]:
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    lines = (line for line in text.splitlines() if len(line) > WIDTH)
    return [line for line in lines if not re.match(r"\s*([|<#]|\[.*\]: )", line) and " " in line[:WIDTH].strip("-* ")]


@pytest.mark.parametrize("page", [page for page in pages() if page not in WRITTEN_BY_CODE])
def test_prose_is_wrapped(page):
    assert long_lines((ROOT / page).read_text(encoding="utf-8")) == []
