"""Errors a user can cause. Each carries the exit code of the command line."""

from .secrets import redact


class LigerTrainerError(Exception):
    """Base of the errors that are reported as a message, without a stack trace. The message holds no secret."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(str(message)))


class ConfigError(LigerTrainerError, ValueError):
    """The configuration is wrong: a key, a type, a value, a file, or two parts that do not fit.

    It is a ValueError too, as transformers and TRL raise for such mistakes.
    """

    exit_code = 2


class DoesNotFitError(LigerTrainerError):
    """The run needs more memory than the device has."""

    exit_code = 3


class DataError(LigerTrainerError, ValueError):
    """The data is wrong: a column is missing, a dataset is empty, no row has a supervised token. A ValueError too."""

    exit_code = 4


class NonFiniteError(LigerTrainerError):
    """A loss, a gradient or a weight is NaN or infinite."""

    exit_code = 5


class TeacherServerError(LigerTrainerError):
    """The server of a teacher cannot be reached, does not answer in time, or fails, after several attempts."""

    exit_code = 7


class StorageError(LigerTrainerError):
    """Something cannot be written: the disk is full, read-only or over its quota."""

    exit_code = 8


class CorruptError(LigerTrainerError):
    """A checkpoint or a cache is damaged: a file is missing, cut off or not what it was when it was written."""

    exit_code = 6


class Interrupted(LigerTrainerError):
    """Training was stopped by the user or the system, after a checkpoint was saved."""

    exit_code = 130


class OutOfTimeError(Interrupted):
    """Training was stopped after `max_hours`, after a checkpoint was saved. The exit code is `timeout`'s."""

    exit_code = 124


class MaterializedLogitsWarning(UserWarning):
    """Logits of the whole batch were computed where they should have stayed deferred."""
