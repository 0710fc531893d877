"""Code of other libraries: what a function reads, what its closure holds, its source, and copies of it.

Everything that looks into a function is here. What is recognised in whose code, and what follows if it is not, is in
recognitions.py.

transformers' attention looks up `apply_rotary_pos_emb` among its module's globals. To give one instance another
function, its forward is copied with a new name in place of that one (`rebound`), and the module's namespace gets our
function under the new name. No existing name is changed: other models read what they always read. A copy of the
namespace would not do: the forward would miss what somebody puts into the module later, and torch.compile could not
guard it, because it looks for a function's globals in the module that they are named after.
"""

import ast
import copy
import dis
import functools
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from . import missed

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP")
_number = itertools.count()


# What a function is made of. None of these fails on what has no code of Python: a builtin, or another callable.


def names_read(function: Any) -> tuple[str, ...]:
    """Return the names of all globals and attributes that a function's code uses."""
    return getattr(getattr(function, "__code__", None), "co_names", ())


def local_names(function: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters and local variables."""
    return getattr(getattr(function, "__code__", None), "co_varnames", ())


def reads_rest(function: Any) -> bool:
    """Whether a function reads any of the keywords that its parameters do not name (**kwargs)."""
    code = code_of(function)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    starred = bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + starred]
    reads = (i for i in dis.get_instructions(code) if i.opname.startswith("LOAD_"))
    # of two variables in one instruction, a tuple
    return any(name == i.argval or (isinstance(i.argval, tuple) and name in i.argval) for i in reads)


def constants(function: Any) -> tuple[Any, ...]:
    """Return the constants in a function's code: the literals, and the code of functions inside of it."""
    return getattr(getattr(function, "__code__", None), "co_consts", ())


def outer_names(function: Any) -> tuple[str, ...]:
    """Return the names of the variables of functions around it that a function reads."""
    return getattr(getattr(function, "__code__", None), "co_freevars", ())


def closed_over(function: Any) -> dict[str, Any]:
    """Return the variables of functions around it that a function reads, with their values."""
    return dict(zip(outer_names(function), map(_contents, function.__closure__ or ()), strict=True))


def code_of(function: Any) -> types.CodeType | None:
    """Return a function's code, one object for all functions that one line of source has made; None without code."""
    return getattr(function, "__code__", None)


def is_same_code(function: Any, other: Any) -> bool:
    """Whether two functions were compiled from the same words, perhaps in two files."""
    a, b = function.__code__, other.__code__  # which compare their line numbers too
    return (a.co_code, a.co_names, a.co_consts) == (b.co_code, b.co_names, b.co_consts)


def global_of(function: Any, name: str) -> Any:
    """Return what a function reads as a global of this name, None where there is none."""
    return function.__globals__.get(name)


def name_in_source(function: Any) -> str:
    """Return the path of a function in its file, such as `Model.forward`; empty without one."""
    return getattr(function, "__qualname__", "")


def without_decorator(function: Any) -> Any:
    """Return what the outermost decorator by functools.wraps has wrapped; a function without one itself."""
    return getattr(function, "__wrapped__", function)


def argument_of_deepcopy() -> Any:
    """Return the object that copy.deepcopy was given, where it has called the caller's own caller; else None.

    `copy.deepcopy(x)` looks `x.__deepcopy__` up and calls it without x. A method that was found on an object inside of
    x, by a `__getattr__` that passes on, cannot know x in another way.
    """
    frame = sys._getframe(2)  # 0 is this function, 1 the method, 2 what calls the method
    return frame.f_locals["x"] if frame.f_code is copy.deepcopy.__code__ else None


def takes_item_of(function: Any, name: str) -> bool:
    """Whether a function indexes its local variable: `name[...]`."""
    steps = list(dis.get_instructions(function))
    for i, step in enumerate(steps):
        # The container and the index are loaded just before, by one instruction each or, from Python 3.13 on, by one.
        loads = [s for s in steps[max(0, i - 2) : i] if s.opname.startswith("LOAD_FAST")]
        names = [n for s in loads for n in (s.argval if isinstance(s.argval, tuple) else (s.argval,))]
        takes = "SUBSCR" in step.opname or step.argrepr == "[]"  # from Python 3.14 on the latter
        if takes and names[-2:-1] == [name]:
            return True
    return False


# See `missed`. Here, and not in recognitions.py, which imports transformers: layers are used without it too.
NO_SOURCE = (
    "the source of transformers' models cannot be read",  # as where only compiled files are installed
    "linear layers of one input are computed one by one",
)


@functools.cache  # each layer of a model has the same class, and reading takes a millisecond
def forward_source(kind: type) -> ast.FunctionDef | None:
    """Return the forward of a class of modules; None where there is no source, or not the source of one function."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))  # pyright: ignore[reportAttributeAccessIssue]
        (function,) = ast.parse(textwrap.dedent(source)).body
    except OSError:  # there is no file with it
        if kind.__module__.startswith("transformers.models."):
            missed(*NO_SOURCE)
        return None
    except (TypeError, SyntaxError, ValueError):
        return None
    return function if isinstance(function, ast.FunctionDef) else None


# Copies of methods that find another function under one global name, and the order in which code reads names


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
