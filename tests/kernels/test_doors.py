"""What other packages may take from kernels/: modules whose names have no leading underscore."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def private_kernels(text: str) -> list[str]:
    """The private modules of kernels/ that a file imports, or names that it takes from them."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            names += [f"{start}{alias.name}" for alias in node.names]
    return [name for name in names if "kernels._" in name]


@pytest.mark.parametrize("folder", ["liger_trainer", "recipes", "benchmarks"])
def test_no_private_module_is_imported(folder):
    files = [path for path in (ROOT / folder).rglob("*.py") if "kernels" not in path.relative_to(ROOT).parts[:2]]
    found = {str(path.relative_to(ROOT)): private_kernels(path.read_text(encoding="utf-8")) for path in files}
    assert found and not {path: names for path, names in found.items() if names}


def test_a_private_import_would_be_seen():
    text = "def f():\n    from ..kernels import _linear_head, types\n    from ..kernels._triton import Launch\n"
    assert private_kernels(text) == ["kernels._linear_head", "kernels._triton.Launch"]
