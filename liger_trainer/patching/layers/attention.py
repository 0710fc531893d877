"""Rotary functions of attention, together with the norms of its queries and keys.

An attention is a module with a method that calls a global function of cosines and sines. That function is proved
(rotary.py), and the instance gets a copy of the method that calls ours (`rebound` of compat/code_objects.py). Where
every path through the method's code rotates what its norms of queries and keys return, and both are proved RMSNorms,
the norms wait for the rotation and run with it in one launch (deferred_norm.py).
"""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ...common.replacements import Replacements
from ...compat.code_objects import always_reads_after, globals_read, inner_functions, names_read, rebound
from ...compat.modules import own_children
from .. import structure
from ..options import PatchOptions, PatchReport
from .deferred_norm import can_wait, deferring_forward
from .norms import NormRule, once_for_equal_widths, prove_norm
from .rotary import is_rotary, layouts_of, prove_rotary, replacement, takes_one

_NORM_OF_QUERIES = re.compile(r"(q|query)(_?(?:layer)?_?norm)")

# A method of a class, with the rotary functions that it calls by their global names.
RotaryCalls = tuple[str, tuple[tuple[str, Any], ...]]


def patch_attention(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Swap the rotary functions of the attention in `model`, if `options.rope`."""
    if not options.rope:
        return
    layouts = layouts_of(model)
    prove = once_for_equal_widths(prove_norm)
    for module in model.modules():
        served = {
            calls[0]: _swap(module, calls, layouts, replacements, report)
            for calls in _methods_with_rotary_calls(type(module))
        }
        if not any(served.values()):
            continue
        of_both = {method: [name for name, one in names.items() if not one] for method, names in served.items()}
        norms = _norms_that_can_wait(module, of_both, prove, replacements)
        for child, rule in norms.items():
            replacements.forward(child, deferring_forward(rule))
        report.swap("QK norm + rope" if norms else "rope")


@functools.cache
def _methods_with_rotary_calls(kind: type) -> tuple[RotaryCalls, ...]:
    names = dict.fromkeys(name for base in kind.__mro__ if base not in nn.Module.__mro__ for name in vars(base))
    methods = {name: inspect.getattr_static(kind, name) for name in names}
    calls = {name: tuple(globals_read(method, is_rotary).items()) for name, method in methods.items()}
    return tuple((name, functions) for name, functions in calls.items() if functions)


def _swap(
    module: nn.Module, calls: RotaryCalls, layouts: frozenset[str], replacements: Replacements, report: PatchReport
) -> dict[str, bool]:
    """Have the instance's method call ours.

    Returns:
        for each rotary function that it no longer calls, by global name, whether it rotates one tensor.
    """
    kind, (method, functions) = type(module), calls
    if structure.is_replaced(module, method):
        report.leave(kind.__name__, f"its {method} has been replaced")
        return {}
    copy, served = getattr(kind, method), {}
    for name, before in functions:
        rule = prove_rotary(before, layouts)
        if isinstance(rule, str):
            report.leave(f"{name} of {kind.__name__}", rule)
        else:
            # of the copy that the function before has left: a method may call several
            copy = rebound(copy, name, before, replacement(before, rule))
            served[name] = takes_one(before)
    if served and method == "forward":
        replacements.forward(module, copy)
    elif served:
        replacements.set(module, method, types.MethodType(copy, module))
    return served


def _norms_that_can_wait(
    module: nn.Module,
    served: Mapping[str, list[str]],
    prove: Callable[[nn.Module], NormRule | str],
    replacements: Replacements,
) -> dict[nn.Module, NormRule]:
    """Return the norms of queries and keys with their rules; none unless the rotation of both follows on every path."""
    for method, functions in served.items():
        reading = [f for f in inner_functions(getattr(type(module), method)) if set(functions) & set(names_read(f))]
        if len(reading) != 1:  # which of several functions runs is not to be seen from the code
            continue
        for names in _norm_pairs(module):
            norms = {child: _deferrable(child, prove, replacements) for child in map(module.get_submodule, names)}
            # A path that returns the norm's output without a rotation would return what is not computed yet.
            if all(norms.values()) and all(always_reads_after(reading[0], name, functions) for name in names):
                return {child: rule for child, rule in norms.items() if rule is not None}
    return {}


def _norm_pairs(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of children that look like norms of queries and keys: q_norm and k_norm."""
    children = own_children(module)
    for name in children:
        match = _NORM_OF_QUERIES.fullmatch(name)
        other = f"{'k' if match[1] == 'q' else 'key'}{match[2]}" if match else None
        if other in children and children[name] is not None and children[other] is not None:
            yield name, other


def _deferrable(
    module: nn.Module, prove: Callable[[nn.Module], NormRule | str], replacements: Replacements
) -> NormRule | None:
    if module in replacements or structure.why_not_replaced(module) is not None:
        return None
    # A weight for each head and column is more than the op's norm has.
    if any(tensor.dim() != 1 for tensor in structure.tensors(module).values()):
        return None
    rule = prove(module)
    return None if isinstance(rule, str) or not can_wait(rule) else rule
