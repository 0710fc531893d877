"""The public path of extras/modules/layers.py, which says what it is for."""

from ..extras.modules.layers import *  # noqa: F403
