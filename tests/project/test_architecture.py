"""The shape of the code: tests mirror the packages, the documentation lists them, and nothing grows unnoticed."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "liger_trainer"
LINKS = {"kernels", "recipes", "configs"}
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - LINKS
FILE_LINES, FUNCTION_LINES = 520, 60
TRAINERS, TRAINER_LINES = {"liger_trainer/trainers/sft_trainer.py", "liger_trainer/trainers/distill_trainer.py"}, 700


def test_folders_of_tests_mirror_the_packages():
    other = {"kernels", "benchmarks", "project", "engines", "support"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))} - {"__pycache__"}
    assert folders <= PACKAGES | other
    assert {"losses", "trainers", "kernels"} <= folders


def test_the_documentation_lists_the_packages():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = page.partition("## The packages")[2].split("```")[1]
    assert set(re.findall(r"^(\w+)/", listing, flags=re.M)) == PACKAGES


def test_no_file_or_function_grows_unnoticed():
    """Kernels are left out: they are as long as their formulas. So are recipes, scripts that are read downwards.

    The two trainers tell a step from top to bottom. Comments don't count.
    """
    long = []
    for path in sorted(path for path in PACKAGE.rglob("*.py") if not LINKS & set(path.relative_to(PACKAGE).parts)):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        lines = text.splitlines()
        code = sum(not line.lstrip().startswith("#") for line in lines)
        long += [name] * (code > (TRAINER_LINES if name in TRAINERS else FILE_LINES))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = lines[node.lineno - 1 : node.end_lineno]
                length = sum(not line.lstrip().startswith("#") for line in body)
                long += [f"{name}: {node.name}, {length} lines"] * (length > FUNCTION_LINES)
    assert not long
