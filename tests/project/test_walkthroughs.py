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

import processes
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


def test_every_walkthrough_leads_to_tests_that_pass(checkout):
    """All in one copy, and by one process, which takes longer to start than they take."""
    commands = [command for page in PAGES for command in make_changes(page, checkout)]
    assert {command.partition(" ")[0] for command in commands} == {"liger-trainer", "pytest"}
    processes.run_on(1, __file__, checkout, *dict.fromkeys(commands))


def _is_of_repository(path: str) -> bool:
    """Whether a file is the repository's, and not of an environment that lies in its folder."""
    return path.startswith(str(ROOT)) and "site-packages" not in path


def follow(checkout: Path, commands: list[str]) -> int:
    """Run commands in a copy of the repository, in this process. Returns the status of the tests."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TRITON_INTERPRET"):
        os.environ.pop(name, None)
    os.chdir(checkout)
    for name, module in list(sys.modules.items()):  # from here on the copy's
        ours = name.partition(".")[0] == "liger_trainer" or _is_of_repository(str(getattr(module, "__file__", "")))
        if ours and name != "__main__":
            del sys.modules[name]
    sys.path[:] = [str(checkout), *(path for path in sys.path if not _is_of_repository(path))]
    from liger_trainer.cli import app

    assert Path(app.__file__).is_relative_to(checkout)
    files = []
    for program, *words in map(shlex.split, commands):
        if program == "pytest":
            files += words
            continue
        try:
            app.main(words)
        except SystemExit as stopped:
            assert not stopped.code, words
    return pytest.main(["-n", "0", "-q", *files])


@pytest.mark.slow
def test_the_ops_kernels_compile(checkout):
    """Together with all others: the script knows no less."""
    make_changes(ROOT / "docs" / "extending" / "op.md", checkout)
    environment = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(checkout)}
    script = [sys.executable, checkout / "tests" / "support" / "compile_kernels.py", "float32"]
    done = subprocess.run(script, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in lines if line["file"] == "softsign"} == {"_forward_kernel", "_backward_kernel"}
    assert not [line for line in lines if line["file"] == "softsign" and "error" in line]


if __name__ == "__main__":
    sys.exit(follow(Path(sys.argv[1]), sys.argv[2:]))
