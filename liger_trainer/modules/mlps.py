"""The public path of extras/modules/mlps.py, which says what it is for."""

from ..extras.modules.mlps import *  # noqa: F403
