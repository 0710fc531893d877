"""The walkthroughs of docs/extending, followed in a copy of the repository: files, changes, commands.

A block of code with a title is a file of that name; a diff with a title is a change of that file, whose lines without
a plus must stand there once.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "extending").glob("*.md"))
COPIED = ("liger_trainer", "kernels", "recipes", "configs", "tests", "docs", "pyproject.toml")
BLOCK = re.compile(r'^```(python|diff|bash)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def change(file: Path, diff: str) -> None:
    """Put the lines of a diff with a plus into the file, in the place of those with a minus."""
    lines = diff.splitlines(keepends=True)
    before, after = ("".join(x[1:] for x in lines if x[0] in (" ", sign)) for sign in "-+")
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{file.name} has {text.count(before)} times:\n{before}"
    file.write_text(text.replace(before, after), encoding="utf-8")


def make_changes(page: Path, checkout: Path) -> list[str]:
    """What the page says to write and to change. Returns its commands."""
    commands: list[str] = []
    for language, title, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            commands += code.splitlines()
        elif language == "diff":
            change(checkout / title, code)
        elif title:
            assert not (checkout / title).exists(), f"{title} is there already: give the example another name"
            (checkout / title).write_text(code, encoding="utf-8")
    return commands


def run(checkout: Path, *command: str | Path) -> str:
    environment = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_every_walkthrough_leads_to_tests_that_pass(checkout):
    """All in one copy, and the tests in one process, which takes longer to start than they take."""
    commands = [shlex.split(command) for page in PAGES for command in make_changes(page, checkout)]
    assert {words[0] for words in commands} == {"liger-trainer", "pytest"}
    for command in {tuple(words[1:]) for words in commands if words[0] == "liger-trainer"}:
        run(checkout, "-m", "liger_trainer", *command)
    files = [file for words in commands if words[0] == "pytest" for file in words[1:]]
    run(checkout, "-m", "pytest", "-n", "0", "-q", *files)


@pytest.mark.slow
def test_the_ops_kernels_compile(checkout):
    """Together with all others: the script knows no less."""
    make_changes(ROOT / "docs" / "extending" / "op.md", checkout)
    compiled = run(checkout, checkout / "tests" / "support" / "compile_kernels.py", "float32")
    lines = [json.loads(line) for line in compiled.splitlines()]
    assert {line["kernel"] for line in lines if line["file"] == "softsign"} == {"_forward_kernel", "_backward_kernel"}
    assert not [line for line in lines if line["file"] == "softsign" and "error" in line]
