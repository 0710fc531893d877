"""Cases of which the default suite runs some; `-m slow` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[str], *quick: str) -> list[Any]:
    """Return names of cases as parameters, all but `quick` marked slow."""
    names = list(cases)
    assert set(quick) <= set(names), set(quick) - set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
