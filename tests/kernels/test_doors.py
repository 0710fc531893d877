"""What other rooms may take from kernels/: modules whose names have no leading underscore."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("liger_trainer", "recipes", "benchmarks")


def imported(path: Path) -> list[str]:
    """The modules that a file imports, each name after `from` among them, without leading dots."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def private_kernels(names: list[str]) -> list[str]:
    return [name for name in names if "kernels._" in name]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_private_module_is_imported(folder):
    files = [path for path in (ROOT / folder).rglob("*.py") if "kernels" not in path.relative_to(ROOT).parts[:2]]
    assert files
    private = {str(path.relative_to(ROOT)): private_kernels(imported(path)) for path in files}
    assert not {path: names for path, names in private.items() if names}


def test_a_private_import_would_be_seen(tmp_path):
    file = tmp_path / "file.py"
    file.write_text(
        "def late():\n    from ..kernels import _linear_head, types\n    from ..kernels._triton import Launch\n"
    )
    assert private_kernels(imported(file)) == ["kernels._linear_head", "kernels._triton.Launch"]
