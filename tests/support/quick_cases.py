"""Cases of which the default suite runs some; `-m slow` runs the others."""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import pytest


def slow_but(cases: Iterable[str], *quick: str) -> list[Any]:
    """Return names of cases as parameters, all but `quick` marked slow."""
    names = list(cases)
    assert set(quick) <= set(names), set(quick) - set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def quick_but(cases: Iterable[str], *slow: str) -> list[Any]:
    """Return names of cases as parameters, only `slow` marked so: a case that is new is quick, and has to pass."""
    names = list(cases)
    assert set(slow) <= set(names), set(slow) - set(names)
    return slow_but(names, *(name for name in names if name not in slow))


def by_turns(first: Iterable, second: Iterable) -> list[Any]:
    """Return the product of two lists as parameters, all slow but each of `first` with one of `second`, by turns."""
    seconds = list(second)
    turns = cycle(seconds)
    cases = []
    for one in first:
        quick = next(turns)
        cases += [pytest.param(one, other, marks=[] if other is quick else pytest.mark.slow) for other in seconds]
    return cases
