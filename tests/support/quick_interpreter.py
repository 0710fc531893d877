"""Triton's interpreter in a third of its time, with the same numbers.

Each time that a kernel calls a function, the interpreter (triton 3.9) goes through all of triton.language to replace
its builtins, which the launch, or an earlier call of that launch, has done. `install` has it done once for a launch.
Around each operation on an array it makes types, shapes and constants anew, and checks integers for an overflow that
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

    def number_of(x: Any, kind: Any) -> Any:
        """Return a number as numpy's scalar of a dtype that has it, else None."""
        x = x.value if type(x) is constexpr else x
        of_kind = type(x) is int and abs(x) < 2**31 or type(x) is float and kind is core.float32
        return scalars[kind.name](x) if of_kind and kind.name in scalars else None

    def result(data: Any, kind: Any, like: Any, of_handle: Any) -> Any:
        """Return a tensor of this kind with the shape of another."""
        handle, tensor = new(handle_of), new(core.tensor)
        handle.data, handle.dtype, handle.attr = data, of_handle, {}
        tensor.handle, tensor.dtype, tensor.shape, tensor.numel = handle, kind, like.shape, like.numel
        block = like.type
        tensor.type = block if kind is like.dtype else block_type(kind, block.shape) if block.is_block() else kind
        return tensor

    def operator(ufunc: Callable, reflected: bool, compares: bool, slow: Callable) -> Callable:
        """Operands of one dtype, whose shapes are the same or one is a scalar, are for numpy as they are."""

        def run(self: Any, other: Any, **kwargs: Any) -> Any:
            kind, block, like = self.dtype, self.type, self
            if type(other) is core.tensor:
                if other.dtype is not kind or kind.name not in scalars:
                    return slow(self, other, **kwargs)
                if not block.is_block():
                    like = other
                elif other.type.is_block() and block.ints != other.type.ints:
                    return slow(self, other, **kwargs)
                data = other.handle.data
            else:
                data = number_of(other, kind)
                if data is None:
                    return slow(self, other, **kwargs)
            out = ufunc(data, self.handle.data) if reflected else ufunc(self.handle.data, data)
            return result(out, core.int1 if compares else kind, like, kind)

        return run

    def add(slow: Callable) -> Callable:
        """Integers go to a pointer as numbers of bytes; the rest as with other operators."""
        numbers = operator(np.add, False, False, slow)

        def run(self: Any, other: Any, **kwargs: Any) -> Any:
            if type(self.dtype) is not pointer_type:
                return numbers(self, other, **kwargs)
            block = self.type.is_block()
            if type(other) is not core.tensor or other.dtype.name not in ("int32", "int64"):
                return slow(self, other, **kwargs)
            if block and other.type.is_block() and self.type.ints != other.type.ints:
                return slow(self, other, **kwargs)
            width = max(1, self.handle.get_element_ty().primitive_bitwidth // 8)
            out = self.handle.data + width * other.handle.data.astype(np.uint64)
            return result(out, self.dtype, self if block else other, self.handle.dtype)

        return run

    def where(slow: Callable) -> Callable:
        """Blocks of one shape, and numbers."""

        def run(condition: Any, x: Any, y: Any, **kwargs: Any) -> Any:
            like = x if type(x) is core.tensor else y
            if not (type(like) is type(condition) is core.tensor and like.dtype is core.float32):
                return slow(condition, x, y, **kwargs)
            if not (condition.dtype is core.int1 and condition.type.is_block() and like.type.is_block()):
                return slow(condition, x, y, **kwargs)
            sides = []
            for side in (x, y):
                if type(side) is not core.tensor:
                    sides.append(number_of(side, like.dtype))
                elif side.dtype is like.dtype and side.type.is_block() and side.type.ints == condition.type.ints:
                    sides.append(side.handle.data)
            if len(sides) < 2 or sides[0] is None or sides[1] is None:
                return slow(condition, x, y, **kwargs)
            return result(np.where(condition.handle.data, *sides), like.dtype, like, like.dtype)

        return run

    new = object.__new__
    scalars = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
    arithmetic = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    comparisons = {
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
        "ne": np.not_equal,
    }  # fmt: skip
    quick: dict[Any, Callable] = {(tl, "where"): where, (core, "where"): where}
    for name, ufunc in (arithmetic | comparisons).items():
        for reflected in (False, True):
            of_operator = functools.partial(operator, ufunc, reflected, name in comparisons)
            quick[core.tensor, f"__{'r' * reflected}{name}__"] = of_operator
    quick[core.tensor, "__add__"] = add

    def replacement(package: Any, name: str, builtin: Callable) -> Callable:
        function = in_interpreter(builtin)
        return quick[package, name](function) if (package, name) in quick else function

    packages = (tl, core, tl.math, core.tensor, core.tensor_descriptor_base)
    builtins_of = {
        x: [(name, replacement(x, name, y)) for name, y in inspect.getmembers(x) if core.is_builtin(y)]
        for x in packages
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
