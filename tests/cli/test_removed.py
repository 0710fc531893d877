"""What was removed says what to do instead."""

import pytest
from commands import call

import liger_trainer
from liger_trainer.cli.app import REMOVED


@pytest.mark.parametrize("command", REMOVED)
def test_a_removed_command_says_what_to_do_instead(command, capsys):
    code, _, error = call(capsys, command, "anything")
    assert code == 2 and REMOVED[command] in error


@pytest.mark.parametrize("name", liger_trainer._REMOVED)
def test_a_removed_name_says_what_to_call_instead(name):
    with pytest.raises(AttributeError, match=f"{name} was removed: "):
        getattr(liger_trainer, name)
