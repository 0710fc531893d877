"""The public path of extras/integrations/axolotl.py, which says what it is for."""

from ..extras.integrations.axolotl import *  # noqa: F403
