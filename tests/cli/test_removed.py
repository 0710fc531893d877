"""What was removed says what to do instead."""

import pytest
from commands import call

import liger_trainer
from liger_trainer.cli.app import REMOVED
from liger_trainer.kernels.divergence_kinds import REMOVED as REMOVED_KINDS
from liger_trainer.kernels.divergence_kinds import divergence_weights
from liger_trainer.losses.plan import listed_terms


@pytest.mark.parametrize("command", REMOVED)
def test_a_removed_command_says_what_to_do_instead(command, capsys):
    code, _, error = call(capsys, command, "anything")
    assert code == 2 and REMOVED[command] in error


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
