"""Errors about settings and data are those that code written for transformers and TRL catches."""

import pytest

from liger_trainer import PatchOptions
from liger_trainer.errors import ConfigError, CorruptError, DataError


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_they_are_value_errors_and_keep_message_and_exit_code(kind):
    with pytest.raises(ValueError, match="^lr: too large$") as raised:
        raise kind("lr: too large")
    assert raised.value.exit_code == kind.exit_code != 1


def test_a_mistake_in_an_argument_can_be_caught_as_elsewhere():
    with pytest.raises(ValueError, match="Unknown patch options: rop"):
        PatchOptions.of({"rop": True})
    assert not issubclass(CorruptError, ValueError)  # not a mistake in an argument
