"""Files that say the same thing in two places: versions, pages, commands, figures; and how prose is wrapped."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import liger_trainer
from benchmarks import bars

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
MADE = {"index.md", "contributing.md", "changelog.md", "security.md"}  # by docs/mkdocs_hooks.py, from files at the top
TEST = 'pip install -e ".[dev]" && pytest'
DEMO = "liger-trainer run smollm2/distill_pruned"


def test_the_changelog_and_the_citation_are_of_this_version():
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    versions = [title.partition(" ")[0].strip("[]") for title in titles if not title.startswith("Unreleased")]
    assert versions[0] == liger_trainer.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(citation["version"]), citation["license"]) == (liger_trainer.__version__, PROJECT["license"])


def pages_of(nav) -> list[str]:
    """The pages of mkdocs' nav, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(item)]


def test_the_sites_navigation_is_that_of_the_index():
    """Page by page in one order, so that a reader finds on the site what the index on a code host promises."""
    docs = ROOT / "docs"
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    given = ["README.md" if page == "pages.md" else page for page in pages_of(config["nav"])]
    nav = [page for page in given if page not in MADE and not page.startswith("api/")]
    assert sorted(nav) == sorted(page.relative_to(docs).as_posix() for page in docs.rglob("*.md"))
    index, of_results = (
        re.findall(r"\]\(([\w/.-]+\.md)\)", (docs / page).read_text(encoding="utf-8"))
        for page in ("README.md", "results/README.md")
    )
    listed = [page for page in index if not page.startswith(("..", "results/"))]
    results = [f"results/{page}" for page in ("README.md", *of_results) if "/" not in page]
    assert [page for page in nav if not page.startswith("results/")] == ["README.md", *listed]
    assert sorted(page for page in nav if page.startswith("results/")) == sorted(results)


def test_the_hooks_before_a_commit_have_ci_s_ruff():
    (wanted,) = (line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("ruff"))
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    used = [line for hook in hooks for line in hook.get("additional_dependencies", [])]
    assert used == [wanted, wanted]


def test_the_workflow_runs_what_a_developer_runs():
    steps = {step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step}
    assert TEST in steps
    for script in (step for step in steps if step.startswith(".ci/")):
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} is not executable"
    assert {".ci/run", ".ci/floors"} <= steps


def test_readme_and_ci_install_test_and_run_the_demo_alike():
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", README, re.M | re.S)
    commands = [line.removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert TEST in commands and f"\nstep '{TEST}'\n" in ci
    for lines in (commands, ci.splitlines()):
        assert any(re.search(rf"(^|\s|'){re.escape(DEMO)}(\s|$)", line) for line in lines)


def test_the_figure_shows_the_measured_file_and_so_does_its_alternative_text():
    pictures = re.findall(r'(?:src|srcset)="(docs/[^"]+)"', README)
    assert len(pictures) == len(bars.THEMES)
    for picture in pictures:
        name, _, theme = picture.removesuffix(".svg").rpartition("-")
        run = json.loads((ROOT / f"{name}.json").read_text())
        assert (ROOT / picture).read_text() == bars.figure(run, theme), "python -m benchmarks.bars renews it"
    alternative = re.findall(r'alt="([^"]+)"', README)[0]
    picture = (ROOT / re.findall(r' src="(docs/[^"]+)"', README)[0]).read_text()
    numbers = re.findall(r">(\d+\.\d)<", picture)
    assert sorted(numbers) == sorted(re.findall(r"(?<![-\w.])\d+\.\d\b", alternative))


def test_readme_s_first_screen_is_short_and_leads_to_the_questions_of_beginners():
    assert len(README.splitlines()) <= 120
    for page in ("choose", "choose.md#questions-and-troubleshooting", "distributed", "cli.md#resume", "measured"):
        assert f"](docs/{page}" in README
    assert "git clone" in README and README.index("<picture>") < README.index("## Two commands")
    assert README.index("Qwen3") < README.index("Llama")  # models of today first


def test_a_figure_has_one_job_a_case_and_ours_first():
    def row(provider, ms, commit):
        return {"case": "sft-x", "provider": provider, "ms": [ms], "reserved_mib": 2048, "commit": commit}

    rows = [row("trl", 9.0, "a"), row("ours", 7.0, "a"), row("trl", 6.0, "b"), row("trl_liger", 5.0, "b")]
    rows += [row("ours", 4.0, "b"), row("ours:memory=balanced", 1.0, "b")]
    drawn = re.findall(r">(\d\.\d)<", bars.figure({"results": rows}, "light", ["sft-x"]))
    assert drawn == ["4.0", "2.0", "5.0", "2.0", "6.0", "2.0"]
    assert bars.figure({"results": rows[:1]}, "light", ["sft-x"]) == ""  # nothing to compare


def test_nothing_installs_the_package_from_an_index():
    """It is on none yet."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    texts = {path: path.read_text(encoding="utf-8") for path in (*pages, *(ROOT / "liger_trainer").rglob("*.*y*"))
             if path.suffix in (".md", ".ipynb", ".py", ".yaml")}  # fmt: skip
    assert len(texts) > 200
    named = r"(?:pip3?|uv|uv pip|pipx) (?:install|add) [^\n&]*?(?<![/\w])[\"']?liger[-_]trainer(?![-\w/])"
    wrapped = r"(?<!`)`[^`]+`(?!`)"  # a command in prose may go on in the next line
    joined = {path: re.sub(wrapped, lambda code: code[0].replace("\n", " "), text) for path, text in texts.items()}
    assert [path for path, text in joined.items() if re.search(named, text)] == []


def test_the_matrix_begins_at_the_oldest_python():
    versions = WORKFLOW["jobs"]["run"]["strategy"]["matrix"]["python"]
    assert f">={versions[0]}" == PROJECT["requires-python"]
    floors = next(step["with"] for step in WORKFLOW["jobs"]["oldest"]["steps"] if "with" in step)
    assert floors["python-version"] == versions[0]


def test_every_make_command_that_is_named_is_there():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = ROOT / ".ci/run", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), ROOT / ".github/workflows/ci.yml"
    words = {
        word for path in named for word in re.findall(r"(?:[`']|[{;] )make (\w+)", path.read_text(encoding="utf-8"))
    }
    assert words and words <= targets


# Prose in Markdown is wrapped; tables, code, HTML and lines without a space to break at are not.

WIDTH = 100
SKIPPED = {"node_modules", "outputs", "site", "build", "dist"}
WRITTEN_BY_CODE = {"docs/configs.md", "docs/models.md", "docs/results/reliability.md"}


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
