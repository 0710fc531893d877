"""The table that a notebook shows: the terms of a distillation, and their values, at every log."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from tiny import texts
from trainings import distill, sft


@pytest.fixture
def notebook(monkeypatch):
    """transformers as it is in a notebook; the display of IPython, which need not be installed, shows nothing."""
    display = ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda html, display_id=None: SimpleNamespace(update=lambda html: None)
    package = ModuleType("IPython")
    package.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)
    from transformers.utils.notebook import NotebookProgressCallback

    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    yield
    sys.modules.pop("transformers.utils.notebook", None)


def table_of(trainer) -> list[dict]:
    """Train, and return the lines of the table as it was at the end."""
    callback = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "NotebookTable")
    kept = []
    write = callback.on_train_end
    callback.on_train_end = lambda *a, **k: (kept.append(callback.training_tracker.inner_table), write(*a, **k))[1]
    trainer.train()
    columns, *lines = kept[0]
    return [dict(zip(columns, line, strict=True)) for line in lines]


def test_terms_of_a_distillation_and_accuracy_of_fine_tuning(notebook):
    losses = [{"type": "reverse_kl", "weight": 1.0}, {"type": "ce", "weight": 0.5}]
    trainer = distill(data=texts(12), max_steps=3, losses=losses, disable_tqdm=False)
    lines = table_of(trainer)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [line["Step"] for line in lines] == [1, 2, 3]
    names = {
        "Training Loss": "loss", "reverse_kl": "loss/reverse_kl", "ce": "loss/ce", "Forward KL": "forward_kl",
        "Agreement@1": "agreement_at_1",
    }  # fmt: skip
    for line, log in zip(lines, logs, strict=True):
        assert {title: line[title] for title in names} == {title: log[name] for title, name in names.items()}
    lines = table_of(sft(data=texts(12), max_steps=2, disable_tqdm=False))
    assert len(lines) == 2 and "Token accuracy" in lines[0] and "Forward KL" not in lines[0]
