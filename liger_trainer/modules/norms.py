"""The public path of extras/modules/norms.py, which says what it is for."""

from ..extras.modules.norms import *  # noqa: F403
