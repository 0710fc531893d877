"""Errors a user can cause. Each carries the exit code of the command line."""


class LigerTrainerError(Exception):
    """Base of the errors that are reported as a message, without a stack trace."""

    exit_code = 1


class ConfigError(LigerTrainerError):
    """The configuration is wrong: a key, a type, a value, a file, or two parts that do not fit."""

    exit_code = 2


class DataError(LigerTrainerError):
    """The data is wrong: a column is missing, a dataset is empty, no row has a supervised token."""

    exit_code = 4
