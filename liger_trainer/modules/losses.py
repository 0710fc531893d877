"""The public path of extras/modules/losses.py, which says what it is for."""

from ..extras.modules.losses import *  # noqa: F403
