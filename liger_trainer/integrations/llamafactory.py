"""The public path of extras/integrations/llamafactory.py, which says what it is for."""

from ..extras.integrations.llamafactory import *  # noqa: F403
