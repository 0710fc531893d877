"""The source of a module's own forward, for what only a reading of it can tell."""

import ast
import functools
import inspect
import textwrap


@functools.cache
def forward_source(kind: type) -> ast.FunctionDef | None:
    """Return the forward of a class of modules; None where there is no source, or not that of one function."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))  # pyright: ignore[reportAttributeAccessIssue]
        (function,) = ast.parse(textwrap.dedent(source)).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return function if isinstance(function, ast.FunctionDef) else None
