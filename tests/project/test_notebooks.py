"""The notebooks run from top to bottom, on tiny models and rows; that of commands in tests/extras/test_tasks.py."""

from pathlib import Path

import pytest
from commands import save_models, write_rows
from tiny import WORDS

nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[notebooks]'")
preprocessors = pytest.importorskip("nbconvert.preprocessors", reason="pip install -e '.[notebooks]'")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
SMALL = 'MODEL = TEACHER = "teacher"\nDATASET, SPLIT = "rows", "train"\nLAYERS, STEPS = 1, 2'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_models(tmp_path, "teacher")
    chats = [
        [{"role": role, "content": " ".join(WORDS[i : i + 4])} for role in ("user", "assistant")] for i in range(80)
    ]
    write_rows(tmp_path / "rows" / "train.jsonl", ({"messages": chat} for chat in chats))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_kept(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert [tag for cell in code for tag in tags(cell)] == ["install", "parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != "task"], ids=lambda path: path.stem)
def test_it_runs(path, folder):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "install" not in tags(cell)]
    (parameters,) = (cell for cell in notebook.cells if "parameters" in tags(cell))
    parameters.source = SMALL
    preprocessors.ExecutePreprocessor(timeout=300).preprocess(notebook, {"metadata": {"path": str(folder)}})
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "Traceback" not in printed and "Usage:" not in printed
    assert (folder / ("sft_lora/merged" if path.stem == "sft_lora" else "distilled") / "model.safetensors").is_file()
