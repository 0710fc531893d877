"""Residual sums and the norms beside them in one launch: s = residual + branch, y = norm(s).

A decoder layer adds what attention returns to its residual stream, and norms the sum. Where the source of a layer's
forward says so, attention returns a `Branch`. A tensor plus a branch is a `ResidualSum`, and the norm takes it apart
(kernels/add_rms_norm.py). Any other use of the two computes them as tensors, so a layer that takes another course loses
nothing but the fusion.

The norm in front of attention reads the stream too. It hands the stream on, so that the gradients of both uses are
added by its own backward.
"""

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.replacements import Replacements, forward_of
from ..kernels.add_rms_norm import add_rms_norm
from . import structure
from .deferred_tensor import DeferredTensor, is_watched
from .forward_source import forward_source
from .mlps import RULE as RULE_OF_MLP
from .norms import RULE, NormRule
from .options import PatchOptions, PatchReport
from .residual_products import Product, product_forward

KIND = "add + RMSNorm"
STREAM = "_liger_trainer_stream"  # the attribute of a branch's module, and of the norm in front of it: their `Stream`
_ADDITIONS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)


class NormedSum(NamedTuple):
    """Names of a module's children: one whose output is added to the residual stream, the norm that takes the sum, and
    the norm that takes the stream in front of the branch, if there is one."""

    branch: str
    norm: str
    entry: str | None


class Stream:
    """The residual stream of a layer between the norm in front of a branch and the sum behind it.

    Args:
        norm: of the sum.
    """

    def __init__(self, norm: nn.Module):
        self.norm = norm
        self._entered: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor, handed_on: Tensor) -> None:
        """Note what a norm has made of the stream `x` for whoever adds to it."""
        self._entered = x, handed_on

    def leave(self) -> tuple[Tensor, Tensor] | None:
        """Return what was noted, once: nothing holds it longer than the branch runs."""
        entered, self._entered = self._entered, None
        return entered


@dataclass(eq=False)
class ResidualSum(DeferredTensor):
    """stream + branch, not computed yet."""

    stream: Tensor
    branch: Tensor
    _grad: bool = field(default_factory=torch.is_grad_enabled)
    _value: Tensor | None = None
    _is_ours: bool = False  # nobody else has the value

    def compute(self) -> Tensor:
        self._is_ours = False
        if self._value is None:
            value = self.stream + self.branch
            if torch.is_grad_enabled() is not self._grad:  # another use may need the gradients that this one has not
                return value
            self._value = value
        return self._value

    def normed(self, norm: nn.Module, rule: NormRule) -> Tensor:
        """Return the norm of the sum, which is computed with it."""
        one, other = self.stream, self.branch  # in plain torch the first one decides the strides
        wide = torch.promote_types(one.dtype, other.dtype)
        if one.dtype != wide:
            one, other = other, one
        alike = one.shape == other.shape and one.device == other.device and one.dtype == wide
        if not alike or self._value is not None or torch.is_grad_enabled() is not self._grad:
            return rule(norm, self.compute(), widens=False)
        y, self._value = _add_norm(norm, rule, one, other)
        self._is_ours = True
        return y

    def __add__(self, other: Any):
        if not isinstance(other, Product):
            return self.compute() + other
        value = self._value
        if value is None or not self._is_ours or torch.is_grad_enabled() or self._grad or not other.add_to(value):
            return self.compute() + other.compute()
        self._value = None  # whoever asks for this sum later has it computed again
        return value


@dataclass(eq=False)
class Branch(DeferredTensor):
    """A tensor that is about to be added to the residual stream."""

    value: Tensor
    entered: tuple[Tensor, Tensor] | None

    def compute(self) -> Tensor:
        return self.value

    def __add__(self, other: Any):
        if type(other) is not Tensor:
            return self.value + other
        if self.entered is not None and self.entered[0] is other:
            other = self.entered[1]
        return ResidualSum(other, self.value)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _ADDITIONS and not kwargs and len(args) == 2:
            one, other = args
            return other + one if isinstance(other, Branch) else one + other
        return super().__torch_function__(func, types, args, kwargs)


def patch_residuals(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Have RMSNorms that our op computes take the residual sum in front of them along, and MLPs add to it themselves.

    Call it last: it stands above what other parts have put in place of the modules' forwards.
    """
    if not options.rms_norm:
        return
    for module in model.modules():
        for names in normed_sums(type(module)):
            branch, norm, entry = (None if name is None else module._modules.get(name) for name in names)
            forward, rule = _own_forward(branch, replacements), _rule_of(norm)
            if branch is None or norm is None or forward is None or rule is None:
                continue
            stream = Stream(norm)
            replacements.set(branch, STREAM, stream)
            replacements.forward(branch, _branch_forward(forward))
            replacements.forward(norm, _forward_of_sum(forward_of(norm), rule))
            report.swap(KIND)
            rule = _rule_of(entry)
            if entry is not None and rule is not None:
                replacements.set(entry, STREAM, stream)
                replacements.forward(entry, _forward_of_stream(forward_of(entry), rule))
        for name in added_outputs(type(module)):
            mlp = module._modules.get(name)
            forward = _own_forward(mlp, replacements)
            if mlp is not None and forward is not None and RULE_OF_MLP in vars(mlp):
                replacements.forward(mlp, product_forward(forward))


def _rule_of(norm: nn.Module | None) -> NormRule | None:
    """Return the rule of an RMSNorm that our op computes, None for anything else."""
    rule: NormRule | None = None if norm is None or STREAM in vars(norm) else vars(norm).get(RULE)
    if rule is None or rule.form.kind != "RMSNorm" or rule.bias is not None or rule.autocast != "keep":
        return None
    return rule


def _own_forward(module: nn.Module | None, replacements: Replacements) -> Callable | None:
    """Return the forward of a module as a function, None where somebody else has replaced it."""
    if module is None or STREAM in vars(module) or (module not in replacements and structure.is_replaced(module)):
        return None
    return getattr(forward_of(module), "__func__", None)


def _branch_forward(inner: Callable) -> Callable:
    @functools.wraps(inner)
    def forward(module, *args, **kwargs):
        outputs = inner(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            return outputs
        stream: Stream = vars(module)[STREAM]
        entered = stream.leave()
        if is_watched(module) or is_watched(stream.norm):
            return outputs
        if type(outputs) is tuple and outputs:
            return (_deferred(outputs[0], entered), *outputs[1:])
        return _deferred(outputs, entered)

    return forward


def _deferred(value: Any, entered: tuple[Tensor, Tensor] | None) -> Any:
    return Branch(value, entered) if type(value) is Tensor and value.is_floating_point() else value


def _forward_of_sum(plain: Any, rule: NormRule) -> Callable:
    @functools.wraps(plain.__func__)
    def forward(module, *inputs, **named):
        if len(inputs) == 1 and isinstance(inputs[0], ResidualSum):
            return inputs[0].normed(module, rule)
        return plain.__func__(module, *inputs, **named)

    return forward


def _forward_of_stream(plain: Any, rule: NormRule) -> Callable:
    @functools.wraps(plain.__func__)
    def forward(module, *inputs, **named):
        if torch.compiler.is_compiling() or named or not all(map(_gets_gradient, inputs)) or is_watched(module):
            return plain.__func__(module, *inputs, **named)
        (x,) = inputs
        y, handed_on = _add_norm(module, rule, x, None)
        vars(module)[STREAM].enter(x, handed_on)
        return y

    return forward


def _gets_gradient(x: Any) -> bool:
    return type(x) is Tensor and x.requires_grad and torch.is_grad_enabled()


def _add_norm(norm: nn.Module, rule: NormRule, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    weight, form = None if rule.weight is None else getattr(norm, rule.weight), rule.form
    return add_rms_norm(
        x, residual, weight, rule.eps_of(norm), offset=form.offset, cast_before_weight=form.cast_before_weight
    )


@functools.cache
def normed_sums(kind: type) -> tuple[NormedSum, ...]:
    """Return where the forward of a class says `h = self.branch(...)`, `s = r + h`, `... = self.norm(s)` in a row.

    `h` may be the first of several; `r = s` may stand in between. The entry is that of `r = x`, `... = self.entry(x)`.
    """
    function = forward_source(kind)
    return () if function is None else tuple(_normed_sums(function.body))


@functools.cache
def added_outputs(kind: type) -> tuple[str, ...]:
    """Return the children whose output the forward of a class adds to something at once: `h = self.child(...)`, then
    `s = r + h`."""
    function = forward_source(kind)
    statements = [] if function is None else function.body
    calls = ((_assigned_call(one), _assigned_sum(other)) for one, other in itertools.pairwise(statements))
    return tuple(call[1] for call, added in calls if call is not None and added is not None and call[0] in added[1])


def _normed_sums(statements: list[ast.stmt]) -> Iterator[NormedSum]:
    for i, (first, second) in enumerate(zip(statements, statements[1:], strict=False)):
        branch, added = _assigned_call(first), _assigned_sum(second)
        if branch is None or added is None or branch[0] not in added[1]:
            continue
        after = [s for s in statements[i + 2 : i + 4] if not _is_alias(s, added[0])]
        norm = _assigned_call(after[0]) if after else None
        if norm is not None and norm[2] == (added[0],):
            (residual,) = added[1] - {branch[0]}
            yield NormedSum(branch[1], norm[1], _entry(statements[:i], residual))


def _entry(statements: list[ast.stmt], residual: str) -> str | None:
    """Return the child that takes what `residual` is a second name of."""
    for first, second in reversed(list(zip(statements, statements[1:], strict=False))):
        match first:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=stream)) if name == residual:
                call = _assigned_call(second)
                return call[1] if call is not None and call[2] == (stream,) else None
    return None


def _assigned_call(statement: ast.stmt) -> tuple[str, str, tuple[str, ...] | None] | None:
    """Return (h, child, names of the arguments, if these are all) of `h = self.child(...)`, and of `h, _ = ...`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name) | ast.Tuple(elts=[ast.Name(id=name), *_])],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=child), args=args, keywords=keywords),
        ):
            plain = not keywords and all(isinstance(arg, ast.Name) for arg in args)
            return name, child, tuple(arg.id for arg in args if isinstance(arg, ast.Name)) if plain else None
    return None


def _assigned_sum(statement: ast.stmt) -> tuple[str, set[str]] | None:
    """Return (s, {a, b}) of `s = a + b`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.BinOp(left=ast.Name(id=left), op=ast.Add(), right=ast.Name(id=right)),
        ) if left != right:
            return name, {left, right}
    return None


def _is_alias(statement: ast.stmt, name: str) -> bool:
    """Whether it is `other = name`."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.Name(id=value)):
            return value == name
    return False
