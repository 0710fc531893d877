"""The command line itself: what it lists, how it passes settings on, and how each kind of end becomes an exit code."""

import re
from types import SimpleNamespace

import pytest

from liger_trainer.cli import app as cli
from liger_trainer.cli import run
from liger_trainer.config.catalogue import built_in_configs
from liger_trainer.errors import DataError, LigerTrainerError


def end_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    return int(stopped.value.code or 0)


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


def test_ls_names_and_describes_the_built_in_configurations(capsys):
    assert end_of("ls") == 0
    head, *printed = capsys.readouterr().out.splitlines()
    assert head.split() == "configuration what it does needs".split()
    assert sorted(line.split()[0] for line in printed) == list(built_in_configs())
    assert {"smollm2/sft_lora", "smollm2/distill_pruned", "qwen3/sft_full_0.6b"} <= set(built_in_configs())
    assert all(len(re.split(r"\s\s+", line.strip())) == 3 for line in printed)


def test_settings_reach_the_recipe_in_every_form(recipe):
    words = (
        "max_steps=3 --learning_rate 2e-4 --run-name=a=b --packing --lora_target_modules q_proj v_proj use_peft=true"
    )
    assert end_of("run", "smollm2/sft_full", *words.split(), "--logging_steps", "1") == 0
    config = recipe.config
    assert config.recipe == "sft"
    assert (config["max_steps"], config["learning_rate"], config["run_name"]) == (3, 2e-4, "a=b")
    assert config["packing"] is True and config["lora_target_modules"] == ["q_proj", "v_proj"]
    assert config["logging_steps"] == 1
    assert end_of("run", "smollm2/distill_lora") == 0
    assert recipe.config.recipe == "distill"


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (None, 0, ""),
        (DataError("no rows"), 4, "liger-trainer: no rows\n"),
        (LigerTrainerError("disk full"), 1, "liger-trainer: disk full\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(recipe, capsys, end, code, message):
    recipe.end = end
    assert end_of("run", "smollm2/sft_full") == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing.yaml"], "neither a file nor a built-in configuration"),
        (["run", "smollm2/sft_full", "max_steps"], "expected key=value, --key value or ~key, got 'max_steps'"),
        (["run", "smollm2/sft_full", "--max_stepz", "3"], "max_stepz: unknown key. Did you mean max_steps?"),
        (["run"], "Missing argument"),
    ],
)
def test_misuse_is_exit_code_2_without_a_stack_trace(capsys, arguments, message):
    assert end_of(*arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed


def test_a_defect_of_ours_keeps_its_stack_trace(recipe, capsys):
    recipe.end = ZeroDivisionError("ours")
    assert end_of("run", "smollm2/sft_full") == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "ZeroDivisionError: ours" in printed
