"""Copies of methods that find another function under one global name, and the order in which code reads names.

transformers' attention looks up `apply_rotary_pos_emb` among its module's globals. To give one instance another
function, its forward is copied with a new name in place of that one, and the module's namespace gets our function under
the new name. No existing name is changed: other models read what they always read. A copy of the namespace would not
do: the forward would miss what somebody puts into the module later, and torch.compile could not guard it, because it
looks for a function's globals in the module that they are named after.
"""

import dis
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP")
_number = itertools.count()


def inner_functions(function: Any) -> Iterator[types.FunctionType]:
    """Yield the function and all that it wraps: decorators keep what they call in their closure."""
    pending, seen = [function], set()
    while pending:
        function = pending.pop()
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        yield function
        pending.extend(_contents(cell) for cell in function.__closure__ or ())


def globals_read(function: Any, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Return, by name, the wanted ones among the globals that a function reads, or one that it wraps."""
    values: dict[str, Any] = {}
    for inner in inner_functions(function):
        for name in inner.__code__.co_names:
            value = inner.__globals__.get(name)
            if value is not None and wanted(value) and _only_global(inner.__code__, name):
                values.setdefault(name, value)
    return values


@functools.cache  # one copy for all layers, so that torch.compile sees one function
def rebound(function: types.FunctionType, name: str, before: Any, after: Callable) -> types.FunctionType:
    """Return a copy of `function` that finds `after` where it found `before` under the global `name`.

    Where a decorator wraps the function that reads the name, the decorator's function is copied too.
    """
    copied = _rebound(function, name, before, after)
    if copied is None:
        raise ValueError(f"{function.__qualname__} does not read {name}, or reads something else under that name.")
    return copied


def _rebound(function: Any, name: str, before: Any, after: Callable) -> types.FunctionType | None:
    if not isinstance(function, types.FunctionType):
        return None
    code, cells = function.__code__, function.__closure__
    if name in code.co_names and function.__globals__.get(name) is before and _only_global(code, name):
        alias = _alias(function.__globals__, name, after)
        code = code.replace(co_names=tuple(alias if n == name else n for n in code.co_names))
    else:
        copies = [_rebound(_contents(cell), name, before, after) for cell in cells or ()]
        if not any(copies):
            return None
        pairs = zip(cells or (), copies, strict=True)
        cells = tuple(cell if copied is None else types.CellType(copied) for cell, copied in pairs)
    result = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(result, function)
    result.__kwdefaults__, result.__dict__ = function.__kwdefaults__, dict(vars(function))  # without __wrapped__
    return result


def _alias(namespace: dict[str, Any], name: str, value: Any) -> str:
    """Return a name of ours under which the namespace holds `value`; it stays there, for the next model."""
    start = f"_liger_trainer_{name}_"
    for alias, held in namespace.items():
        if alias.startswith(start) and held is value:
            return alias
    alias = f"{start}{next(_number)}"
    namespace[alias] = value
    return alias


def always_reads_after(function: types.FunctionType, attribute: str, names: Collection[str]) -> bool:
    """Whether every path through the code that reads `.attribute` goes on to read one of the globals `names`."""
    instructions = list(dis.get_instructions(function.__code__))
    position = {instruction.offset: i for i, instruction in enumerate(instructions)}
    pending = [
        i + 1 for i, x in enumerate(instructions) if x.opname in ("LOAD_ATTR", "LOAD_METHOD") and x.argval == attribute
    ]
    reads_attribute, seen = bool(pending), set()
    while pending:
        i = pending.pop()
        instruction = instructions[i]
        if i in seen or (instruction.opname == "LOAD_GLOBAL" and instruction.argval in names):
            continue
        seen.add(i)
        if instruction.opname.startswith("RETURN_"):
            return False
        if instruction.opcode in _JUMPS:
            pending.append(position[instruction.argval])
        if instruction.opname not in (*_ALWAYS_JUMPS, "RAISE_VARARGS", "RERAISE"):
            pending.append(i + 1)
    return reads_attribute


def _only_global(code: types.CodeType, name: str) -> bool:
    """Whether `name` in this code is a global and nowhere an attribute: both share the table that gets renamed."""
    uses = {x.opname for x in dis.get_instructions(code) if x.argval == name and x.opname != "LOAD_CONST"}
    return uses == {"LOAD_GLOBAL"}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
