"""What tests of reports share."""

import itertools
import json
from pathlib import Path

import pytest
from finished_runs import config_text, content

from liger_trainer.extras.report.tables import read_run


@pytest.fixture
def make(tmp_path):
    """Write a run's directory; changes are to metrics.json, which None leaves out."""

    def write(name: str, scale: float = 1.0, metrics: dict | None = None, **settings) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        told = {**content(scale), **(metrics or {})}
        (folder / "metrics.json").write_text(json.dumps(told))
        (folder / "config.yaml").write_text(config_text(**settings))
        return folder

    return write


@pytest.fixture
def logged(make):
    """The record of a run that logged these entries."""
    runs = itertools.count()
    return lambda logs, **metrics: read_run(make(f"run-{next(runs)}", metrics={"log_history": logs, **metrics}))
