"""What libraries find out again for each trainer, found out once in a process, with the same results."""

import functools
import importlib.metadata
from types import CodeType

from dill import detect


def install() -> None:
    """accelerate reads packages' metadata whenever it asks what is installed, and dill, with which datasets hashes the
    functions that it maps, disassembles each."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    nested_globals = detect.nestedglobals
    of_code = functools.cache(lambda code: nested_globals(code))

    def quick(func, recurse=True):
        return of_code(func) if recurse and isinstance(func, CodeType) else nested_globals(func, recurse)

    detect.nestedglobals = quick
