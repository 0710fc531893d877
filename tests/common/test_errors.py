"""Errors about settings and data are those that code written for transformers and TRL catches."""

import pytest

from liger_trainer import PatchOptions
from liger_trainer.config.yaml_reader import read_settings
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


def test_no_reader_takes_our_error_for_another_one_and_wraps_it():
    with pytest.raises(ConfigError, match="^run.yaml: expected `key: value` lines, got a YAML sequence.$"):
        read_settings("- a\n- b", "run.yaml")
