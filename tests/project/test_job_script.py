"""docs/jobs/run.py: what uv reads in its head, and that it runs a configuration."""

import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from commands import save_models, settings, texts, write_rows

SCRIPT = Path(__file__).parents[2] / "docs" / "jobs" / "run.py"


def test_its_head_asks_for_the_package():
    block = re.match(r"# /// script\n((?:# .*\n)+)# ///\n", SCRIPT.read_text(encoding="utf-8"))
    assert block is not None
    head = tomllib.loads("".join(line[2:] for line in block[1].splitlines(keepends=True)))
    project = tomllib.loads((SCRIPT.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert head == {"requires-python": project["requires-python"], "dependencies": [project["name"]]}


def test_it_runs_a_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, "student")
    write_rows(tmp_path / "rows.jsonl", texts(20))
    (tmp_path / "run.yaml").write_text(settings(recipe="sft"))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "run.yaml", "max_steps=1"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not stopped.value.code and (tmp_path / "out" / "metrics.json").is_file()
