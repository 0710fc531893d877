"""Rotary functions of attention, together with the norms of its queries and keys.

An attention is a module with a method that calls a global function of cosines and sines. That function is proved
(rotary.py), and the instance gets a copy of the method that calls ours (rebound.py). Where its code, whichever way it
goes, turns what its norms of queries and keys return, and both are proved RMSNorms, these wait for the rotation and run
with it in one launch (deferred_norm.py).
"""

import functools
import inspect
import re
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..common.replacements import Replacements
from . import structure
from .deferred_norm import can_wait, deferring
from .norms import NormRule, Proofs, proof
from .rebind_globals import always_reads_after, globals_read, inner_functions, rebound
from .rotary import is_rotary, layouts_of, prove_rotary, replacement

_NORM_OF_QUERIES = re.compile(r"(q|query)(_?(?:layer)?_?norm)")


def patch_attention(model: nn.Module, options: Any, replacements: Replacements, report: Any) -> None:
    """Swap the rotary functions of the attention in `model`, if `options.rope`."""
    if not options.rope:
        return
    layouts = layouts_of(model)
    proved: Proofs = {}  # of norms of queries and keys
    for module in model.modules():
        calls = {name: _swapped(module, name, found, layouts, replacements, report) for name, found in _turns(module)}
        if not any(calls.values()):
            continue
        norms = _norms_that_can_wait(module, calls, proved, replacements)
        for child, norm in norms.items():
            replacements.forward(child, deferring(norm))
        report.swap("QK norm + rope" if norms else "rope")


def _turns(module: nn.Module) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    return _methods_that_turn(type(module))


@functools.cache
def _methods_that_turn(kind: type) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """Methods of a class that call rotary functions, each with these by their global names."""
    names = dict.fromkeys(name for base in kind.__mro__ if base not in nn.Module.__mro__ for name in vars(base))
    methods = {name: inspect.getattr_static(kind, name) for name in names}
    found = []
    for name, method in methods.items():
        calls = tuple(globals_read(method, is_rotary).items())
        if calls:
            found.append((name, calls))
    return tuple(found)


def _swapped(
    module: nn.Module,
    method: str,
    calls: tuple[tuple[str, Any], ...],
    layouts: frozenset[str],
    replacements: Replacements,
    report: Any,
) -> list[str]:
    """Global names of the rotary functions for which the instance's method now calls ours."""
    kind = type(module)
    function, served = getattr(kind, method), []
    if structure.is_replaced(module, method):
        report.leave(kind.__name__, f"its {method} has been replaced")
        return []
    for name, before in calls:
        rule = prove_rotary(before, layouts)
        if isinstance(rule, str):
            report.leave(f"{name} of {kind.__name__}", rule)
        else:
            function = rebound(function, name, before, replacement(before, rule))
            served.append(name)
    if served and method == "forward":
        replacements.forward(module, function)
    elif served:
        replacements.set(module, method, types.MethodType(function, module))
    return served


def _norms_that_can_wait(
    module: nn.Module, calls: Mapping[str, list[str]], proved: Proofs, replacements: Replacements
) -> dict[nn.Module, NormRule]:
    """The norms of queries and keys, proved; empty unless the rotation of both follows for certain."""
    for method, served in calls.items():
        inner = [f for f in inner_functions(getattr(type(module), method)) if set(served) & set(f.__code__.co_names)]
        for name, child in module.named_children():
            match = _NORM_OF_QUERIES.fullmatch(name)
            other = getattr(module, f"{'k' if match[1] == 'q' else 'key'}{match[2]}", None) if match else None
            if not isinstance(other, nn.Module) or not match or len(inner) != 1:
                continue
            names = (name, f"{'k' if match[1] == 'q' else 'key'}{match[2]}")
            norms = {x: _norm(x, proved, replacements) for x in (child, other)}
            if all(norms.values()) and all(always_reads_after(inner[0], x, served) for x in names):
                return {x: norm for x, norm in norms.items() if norm is not None}
    return {}


def _norm(module: nn.Module, proved: Proofs, replacements: Replacements) -> NormRule | None:
    if module in replacements or structure.obstacle(module) is not None:
        return None
    if any(tensor.dim() != 1 for tensor in structure.tensors(module).values()):
        return None
    norm = proof(module, proved)
    return None if isinstance(norm, str) or not can_wait(norm) else norm
