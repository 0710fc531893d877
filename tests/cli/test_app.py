"""The command line itself: how it passes settings on, and how each kind of end becomes an exit code."""

from types import SimpleNamespace

import pytest
from commands import call, end_of

import liger_trainer
from liger_trainer.cli import run
from liger_trainer.errors import DataError, LigerTrainerError
from liger_trainer.kernels.divergence_kinds import REMOVED as REMOVED_KINDS
from liger_trainer.kernels.divergence_kinds import divergence_weights
from liger_trainer.losses.plan import listed_terms


@pytest.fixture
def recipe(monkeypatch):
    """Stand in for the recipes: keep the configuration they are given, or end as told."""
    seen = SimpleNamespace(config=None, end=None)

    def main(config):
        seen.config = config
        if seen.end is not None:
            raise seen.end

    importlib = SimpleNamespace(import_module=lambda name: SimpleNamespace(main=main))
    monkeypatch.setattr(run, "importlib", importlib)
    return seen


def test_settings_reach_the_recipe_in_every_form(recipe):
    words = "max_steps=3 --learning_rate 2e-4 --run-name=a=b --packing --lora_target_modules q_proj v_proj"
    assert end_of("run", "smollm2/sft_full", *words.split(), "use_peft=true", "--logging_steps", "1") == 0
    want = {"max_steps": 3, "learning_rate": 2e-4, "run_name": "a=b", "packing": True, "logging_steps": 1,
            "lora_target_modules": ["q_proj", "v_proj"]}  # fmt: skip
    assert recipe.config.recipe == "sft" and {key: recipe.config[key] for key in want} == want
    assert end_of("run", "smollm2/distill_lora") == 0
    assert recipe.config.recipe == "distill"


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (None, 0, ""),
        (DataError("no rows"), 4, "liger-trainer: no rows\n"),
        (LigerTrainerError("disk full"), 1, "liger-trainer: disk full\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("ours"), 1, "ZeroDivisionError: ours"),  # a defect of ours keeps its stack trace
    ],
)
def test_exit_codes(recipe, capsys, end, code, message):
    recipe.end = end
    found, _, err = call(capsys, "run", "smollm2/sft_full")
    assert found == code and message in err and ("Traceback" in err) == isinstance(end, ZeroDivisionError)


@pytest.mark.parametrize("name", liger_trainer._REMOVED)
def test_a_removed_name_says_what_to_call_instead(name):
    with pytest.raises(AttributeError, match=f"{name} was removed: "):
        getattr(liger_trainer, name)


@pytest.mark.parametrize("kind", REMOVED_KINDS)
@pytest.mark.parametrize(
    "read", [lambda kind: listed_terms([{"type": kind}]), lambda kind: divergence_weights(kind, 0.5)]
)
def test_a_removed_loss_says_what_to_use_instead(kind, read):
    with pytest.raises(ValueError, match=f"{kind} was removed: {REMOVED_KINDS[kind]}"):
        read(kind)


@pytest.mark.parametrize(
    ("words", "shown"),
    [*((word, f"liger-trainer {liger_trainer.__version__}\n") for word in ("--version", "-V")),
     *((f"{command}-h", "Usage:") for command in ("", "run ", "cache info "))],
)  # fmt: skip
def test_version_and_short_help(words, shown, capsys):
    code, out, _ = call(capsys, *words.split())
    assert code == 0 and shown in out
