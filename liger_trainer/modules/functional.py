"""The public path of extras/modules/functional.py, which says what it is for."""

from ..extras.modules.functional import *  # noqa: F403
