"""The public path of extras/modules/rope.py, which says what it is for."""

from ..extras.modules.rope import *  # noqa: F403
