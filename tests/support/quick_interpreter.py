"""Triton's interpreter in less than half of its time, with the same numbers.

Each time that a kernel calls a function, the interpreter (triton 3.9) goes through all of triton.language to replace
its builtins, which the launch, or an earlier call of that launch, has done. `install` has it done once for a launch.
Around each operation on an array it makes types, shapes and constants again, and checks integers for an overflow that
it then does not report. `_quicken` has these kept, and leaves the check out; and the commonest operations, on arrays
that need no cast, it gives to numpy at once.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Nothing changes where triton is not installed, or of another build."""
    try:
        import triton
        import triton.experimental.gluon  # the first launch imports it, and fails if the interpreter is off by then
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
    if triton.__version__.startswith("3.9."):  # whose code this is the same as
        _quicken(tl, interpreter)


def _quicken(tl: Any, interpreter: Any) -> None:
    import numpy as np

    core = tl.core
    constexpr, dtype, block_type, pointer_type = core.constexpr, core.dtype, core.block_type, core.pointer_type
    semantic = type(interpreter.interpreter_semantic)
    handle_of, unwrap = interpreter.TensorHandle, core._unwrap_if_constexpr
    broadcast, check_operands = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    numpy_of = {
        x.name: interpreter._get_np_dtype(x) for x in vars(core).values() if type(x) is dtype and x.name != "void"
    }
    integers, floats = frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES), frozenset(dtype.FP_TYPES)

    def unwrap_quickly(x: Any) -> Any:
        return x.value if isinstance(x, constexpr) else unwrap(x) if isinstance(x, (list, tuple, core.tuple)) else x

    def equal(self: Any, other: Any) -> bool:
        other = unwrap_quickly(other)
        return self is other or isinstance(other, dtype) and self.name == other.name

    @functools.cache
    def of_type(*shape: int) -> tuple:
        """As a block's type has it, and the number of entries, which is checked."""
        if not shape:
            raise TypeError("0d block_type is forbidden")
        return core.tuple(shape), core.validate_block_shape(shape)

    @functools.cache
    def of_tensor(*shape: int) -> tuple:
        return core.tuple([constexpr(x) for x in shape]), constexpr(int(np.prod(shape, dtype=np.int64)))

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, list | core.tuple)
        self.element_ty, self.ints = element_ty, tuple([unwrap_quickly(x) for x in shape])
        self.shape, self.numel = of_type(*self.ints)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(*(type.ints if type.is_block() else ()))

    def spread(self: Any, x: Any, like: Any) -> Any:
        data = np.empty(like.ints, numpy_dtype(x.handle.dtype))
        data[...] = x.handle.data
        return self.make_tensor(handle_of(data, x.handle.dtype.scalar), block_type(x.type.scalar, like.shape))

    def broadcast_quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            return (lhs, rhs) if left.ints == right.ints else broadcast(self, lhs, rhs)
        if left.is_block():
            return lhs, spread(self, rhs, left)
        return (spread(self, lhs, right), rhs) if right.is_block() else (lhs, rhs)

    def numpy_dtype(x: Any) -> Any:
        x = x.element_ty if isinstance(x, block_type) else x
        return np.dtype(np.uint64) if isinstance(x, pointer_type) else numpy_of[x.name]

    def operands(self: Any, lhs: Any, rhs: Any, left=False, right=False, arithmetic=True, division=False) -> Any:
        of_one_dtype = type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and lhs.dtype.name in numpy_of
        if of_one_dtype and (lhs.dtype is core.float32 or not division):
            return self.broadcast_impl_value(lhs, rhs)
        return check_operands(self, lhs, rhs, left, right, arithmetic, division)

    def replace_builtins_of(package: Any, builder: Any, scope: Any) -> None:
        for name, function in builtins_of[package]:
            scope.set_attr(package, name, function)

    def in_interpreter(builtin: Callable) -> Callable:
        function = getattr(builtin, "__wrapped__", builtin)

        def run(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        return run

    packages = (tl, core, tl.math, core.tensor, core.tensor_descriptor_base)
    builtins_of = {
        x: [(name, in_interpreter(y)) for name, y in inspect.getmembers(x) if core.is_builtin(y)] for x in packages
    }
    core._unwrap_if_constexpr = unwrap_quickly
    dtype.__eq__ = equal
    dtype.is_int, dtype.is_floating = (lambda self: self.name in integers), (lambda self: self.name in floats)
    block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    semantic.broadcast_impl_value = broadcast_quickly
    semantic.computation_type_impl = functools.cache(semantic.computation_type_impl)
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    semantic.binary_op_type_checking_impl = operands
    interpreter._get_np_dtype, interpreter._patch_builtin = numpy_dtype, replace_builtins_of
