"""Rotary functions that rotate one tensor, as functions of queries and keys: what the proof of rotary.py takes.

apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1)      Gemma 3n, Gemma 4
apply_rotary_pos_emb(tensor, sin, cos)                  GPT-J, CodeGen; the heads are before the columns
"""

import functools
from collections.abc import Callable

from torch import Tensor

from .deferred_norm import DeferredNorm
from .rotary import RotaryRule, fits, parameters_of, prove_rotary, rotate

_ONE = (["cos", "sin", "unsqueeze_dim"], ["sin", "cos"])  # what such a function takes after its tensor


def is_alone(function: Callable) -> bool:
    """Whether a rotary function takes one tensor."""
    return list(parameters_of(function))[1:] in _ONE


def prove_alone(function: Callable, layouts: frozenset[str]) -> RotaryRule | str:
    """Do as `prove_rotary`, for a function of one tensor."""
    return prove_rotary(_of_both(function), layouts)


@functools.cache  # one function for all layers and models, as `replacement`
def _of_both(function: Callable) -> Callable:
    """Return a function of queries and keys that rotates each by `function`."""
    names = list(parameters_of(function))

    def with_heads(q, k, cos, sin, unsqueeze_dim=1):
        return tuple(function(x, cos, sin, unsqueeze_dim=unsqueeze_dim) for x in (q, k))

    def heads_second_last(q, k, cos, sin, unsqueeze_dim=2):
        if unsqueeze_dim == 2:
            return function(q, sin, cos), function(k, sin, cos)
        return tuple(function(x.transpose(1, 2), sin, cos).transpose(1, 2) for x in (q, k))

    return with_heads if "unsqueeze_dim" in names else heads_second_last


@functools.cache
def replacement_alone(function: Callable, rule: RotaryRule) -> Callable:
    """Return a function that is called like `function` and computed by the op."""
    default = parameters_of(function).get("unsqueeze_dim")

    def rotated(x: Tensor | DeferredNorm, cos: Tensor, sin: Tensor, heads_dim: int) -> Tensor | None:
        x = x.compute() if isinstance(x, DeferredNorm) else x
        if not fits(x, x, cos, sin, heads_dim):
            return None
        return rotate(rule, x, x.detach().narrow(heads_dim, 0, 0), cos, sin, heads_dim)[0]  # keys without heads

    def with_heads(x, cos, sin, unsqueeze_dim=1 if default is None else default.default):
        y = rotated(x, cos, sin, unsqueeze_dim)
        return function(x, cos, sin, unsqueeze_dim) if y is None else y

    def heads_second_last(tensor, sin, cos):
        y = rotated(tensor, cos, sin, 2)
        return function(tensor, sin, cos) if y is None else y

    return heads_second_last if default is None else with_heads
