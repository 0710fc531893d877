"""The public path of the losses with a teacher in extras/modules/losses.py."""

from ..extras.modules.losses import *  # noqa: F403
