"""Files that say the same thing in two places: versions, pages, commands."""

import re
import tomllib
from pathlib import Path

import yaml

import liger_trainer

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
MADE = {"start.md", "contributing.md", "changelog.md", "security.md"}  # by docs/mkdocs_hooks.py, from files at the top


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
    nav = [page for page in pages_of(config["nav"]) if page not in MADE and not page.startswith("api/")]
    assert sorted(nav) == sorted(page.relative_to(docs).as_posix() for page in docs.rglob("*.md"))
    index = re.findall(r"\]\(([\w/.-]+\.md)\)", (docs / "README.md").read_text(encoding="utf-8"))
    of_results = [f"results/{page}" for page in index_of_results()]
    listed = [page for page in index if not page.startswith("..") and not page.startswith("results/")]
    assert [page for page in nav if not page.startswith("results/")] == ["README.md", *listed]
    assert sorted(page for page in nav if page.startswith("results/")) == sorted(["results/README.md", *of_results])


def index_of_results() -> list[str]:
    return re.findall(r"\]\(([\w.-]+\.md)\)", (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8"))


def test_the_hooks_before_a_commit_have_ci_s_ruff():
    (wanted,) = (line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("ruff"))
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    used = [line for hook in hooks for line in hook.get("additional_dependencies", [])]
    assert used == [wanted, wanted]


def test_the_workflow_runs_what_a_developer_runs():
    steps = {step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'pip install -e ".[dev]" && pytest' in steps and 'pip install -e ".[dev]" && pytest' in readme
    for script in (step for step in steps if step.startswith(".ci/")):
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} is not executable"
    assert {".ci/run", ".ci/floors"} <= steps


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
