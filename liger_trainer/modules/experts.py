"""The public path of extras/modules/experts.py, which says what it is for."""

from ..extras.modules.experts import *  # noqa: F403
