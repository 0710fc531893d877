"""Triton's interpreter in half of its time.

Each time that a kernel calls a function, the interpreter (triton 3.9) goes through all of triton.language to replace
its builtins, which the launch, or an earlier call of that launch, has done. `install` has it done once for a launch.
"""

import functools
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Nothing changes where triton is not installed, or of another build."""
    try:
        from triton import language as tl
        from triton.runtime import interpreter
        from triton.runtime.errors import InterpreterError

        replace_builtins, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
        assert callable(interpreter.InterpretedFunction.rewrite)
    except (ImportError, AttributeError):
        return
    replaced: set[frozenset[int]] = set()

    @functools.cache
    def modules_of(fn: Callable) -> frozenset[int]:
        """What `_patch_lang` looks at, where the function sees it."""
        return frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)

    def launch_anew(self, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        launch(self, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if modules_of(self.fn) not in replaced:
            replace_builtins(self.fn)
            replaced.add(modules_of(self.fn))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = launch_anew, call
