"""The shape of the house: tests mirror the packages, and nothing grows unnoticed."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "liger_trainer"
LINKS = {"kernels", "recipes", "configs"}
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - LINKS
FILE_LINES, FUNCTION_LINES = 460, 60


def test_folders_of_tests_mirror_the_rooms():
    other = {"kernels", "benchmarks", "project", "regressions", "engines", "support"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))} - {"__pycache__"}
    assert folders <= ROOMS | other
    assert {"losses", "trainers", "kernels"} <= folders


def test_no_file_or_function_grows_unnoticed():
    """Kernels are left out: they are as long as their formulas. So are recipes, scripts that are read downwards."""
    long = []
    for path in sorted(path for path in PACKAGE.rglob("*.py") if not LINKS & set(path.relative_to(PACKAGE).parts)):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        long += [name] * (len(text.splitlines()) > FILE_LINES)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{name}: {node.name}, {length} lines"] * (length > FUNCTION_LINES)
    assert not long
