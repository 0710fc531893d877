"""What one process decides for all of them."""

from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import broadcast_object_list

T = TypeVar("T")


def decided_by_first(is_first: bool, decide: Callable[[], T]) -> T:
    """Return what `decide` returns in the first process, in all of them; what it raises there, all raise.

    Else those that go on would wait for the one that does not.
    """
    result: list[object] = [None, None]
    if is_first:
        try:
            result = [decide(), None]
        except Exception as error:
            result = [None, error]
    answer, error = broadcast_object_list(result)
    if isinstance(error, Exception):
        raise error
    return answer  # type: ignore[return-value]
