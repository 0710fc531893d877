"""The public path of extras/integrations/ms_swift.py, which says what it is for."""

from ..extras.integrations.ms_swift import *  # noqa: F403
