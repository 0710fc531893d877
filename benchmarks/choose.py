"""What a command line chooses by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from fnmatch import fnmatchcase


def matching(patterns: str, names: Sequence[str], what: str, parser: argparse.ArgumentParser) -> set[str]:
    """Names that match any of the comma-separated globs; a glob that matches none is an error."""
    chosen: set[str] = set()
    for pattern in patterns.split(","):
        matches = {name for name in names if fnmatchcase(name, pattern.strip())}
        if not matches:
            choices = ", ".join(dict.fromkeys(names))
            parser.error(f"no {what} is called {pattern.strip()!r}; there are: {choices}")
        chosen |= matches
    return chosen
