"""Trained linear layers that read one tensor, such as queries, keys and values, or gate and up, as one op.

The module that holds them calls them one after the other, as before (`SharedInput`). While no gradient of their input
is wanted, one of them is more than its weight and bias, or all are frozen, each is computed by its class's forward.
"""

import ast
import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...compat.code_objects import forward_source
from ...compat.modules import is_called, is_hooked, own_children
from ...compat.torch_internals import version_of
from ...kernels.activation_linear import activation_linear
from ...kernels.gated_linear import gated_linear
from ...kernels.geglu import geglu
from ...kernels.linears import linears
from ...kernels.swiglu import swiglu
from ..options import PatchOptions, PatchReport

# An MLP's projections: by our ops where they are plain linear layers, else by calling them.


WEIGHTS = (nn.Parameter, Tensor)  # a sharded or packed weight has another type


def project(down: nn.Module, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Return down(act(gate) * up). Where down is a plain nn.Linear, only gate and up are stored for the backward.

    Any other layer (LoRA, quantised, hooked, sharded) is called, so it stores its own input.

    Args:
        down: the layer, which takes (..., I).
        gate: (..., I), or with up=None packed [gate | up], (..., 2 I).
        up: as gate, or None.
        activation: "silu", "gelu_tanh" or "gelu" (erf).
    """
    if is_plain(down):
        return gated_linear(gate, up, down.weight, down.bias, activation=activation)
    return down(gated(gate, up, activation))


def project_ungated(down: nn.Module, x: Tensor, activation: str) -> Tensor:
    """Return down(act(x)) as `project` does, by a GELU. Where down is a plain nn.Linear, only x is stored."""
    if is_plain(down):
        return activation_linear(x, down.weight, down.bias, activation=activation)
    return down(F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none"))


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x). Where the layer is a plain nn.Linear that trains, an x that a norm made is not stored."""
    if torch.is_grad_enabled() and is_plain(layer) and layer.weight.requires_grad and x.requires_grad:
        return linears(x, [layer.weight], [layer.bias])[0]
    return layer(x)


def gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Return act(gate) * up. Arguments: see `project`."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear layer can be replaced by its weight and bias: no adapter, quantisation, hook or sharding."""
    return has_plain_weight(linear) and not is_called(linear)


def has_plain_weight(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is a linear one with a weight that is neither packed nor sharded, whatever its forward is."""
    return type(linear) is nn.Linear and type(linear.weight) in WEIGHTS


def patch_linears(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Have plain, trained linear layers that a module calls with one tensor computed together."""
    if not options.linear:
        return
    for module in model.modules():
        for names in layers_of_one_input(type(module)):
            layers = [layer for name in names if _is_trained(layer := own_children(module).get(name))]
            if len(set(map(id, layers))) < 2 or any(layer in replacements for layer in layers):
                continue
            group = SharedInput(list(dict.fromkeys(layers)))
            for layer in group.layers:
                replacements.forward(layer, _forward)
                replacements.set(layer, GROUP, group)
            report.swap("shared input")


def is_weight_and_bias(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear layer can be replaced by its weight and bias: see `is_plain`; its forward may be ours."""
    return is_plain(layer) or _is_served(layer)


def _is_trained(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    return layer is not None and is_plain(layer) and layer.weight.requires_grad


def _is_served(layer: Any) -> TypeGuard[nn.Linear]:
    """Whether a layer has our forward, and is nothing but its weight and bias."""
    forward = vars(layer).get("forward")
    ours = isinstance(forward, types.MethodType) and forward.__func__ is _forward
    return ours and has_plain_weight(layer) and not is_hooked(layer)


def _forward(module: Any, input: Tensor) -> Tensor:  # noqa: A002  its name in nn.Linear
    group = vars(module)[GROUP]
    y = None
    if torch.is_grad_enabled() and input.requires_grad and not torch.compiler.is_compiling():
        y = group.output(module, input, functools.partial(_outputs, input))
    return type(module).forward(module, input) if y is None else y


def _outputs(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """Return the outputs of layers for x, None if one of them has to be called, or none of them is trained."""
    # Of frozen ones there is nothing to gain, and PEFT may put another weight into one for its call (target_parameters)
    if not all(map(_is_served, layers)) or not any(layer.weight.requires_grad for layer in layers):
        return None
    return linears(x, [layer.weight for layer in layers], [layer.bias for layer in layers])  # pyright: ignore


# Layers that read one tensor, computed together: an attention's projections to queries, keys and values.
#
# The attention calls them one after the other. The first call computes all of them, and the others take what is waiting
# for them. Which layers have one input is read from the source of the forward that calls them; whether they have it in
# this call is checked by the tensor's identity.


GROUP = "_liger_trainer_shared_input"  # the attribute of a layer that is computed together with others
# Statements and expressions that may not run, or more than once.
_CONDITIONAL = (
    ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.IfExp,
    ast.BoolOp, ast.comprehension, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Compare,
)  # fmt: skip


class SharedInput(threading.local):
    """Layers that are called with one tensor in each pass, in the order of their calls.

    Each thread that calls them has what waits for itself.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers  # the same list in every thread, each of which runs this
        self._x: Tensor | None = None
        self._version: int | None = None
        self._waiting: dict[int, Tensor] = {}  # by index of the layer

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedInput":
        layers: list[nn.Module] = []
        memo[id(self)] = clone = SharedInput(layers)  # before the layers, which hold their group
        layers.extend(copy.deepcopy(layer, memo) for layer in self.layers)
        return clone

    def output(self, layer: nn.Module, x: Tensor, compute: Callable[[Sequence[nn.Module]], Any]) -> Tensor | None:
        """Return a layer's output, or None if it has to be computed separately.

        Args:
            layer: which is called.
            compute: returns the outputs of layers for x, or None.
        """
        index = next((i for i, each in enumerate(self.layers) if each is layer), -1)
        if index == 0:
            self._forget()  # what an earlier pass has left
            outputs = compute(self.layers)
            if outputs is None:
                return None
            self._waiting = dict(enumerate(outputs))
            self._x, self._version = x, version_of(x)
        if self._x is not x or self._version != version_of(x):
            return None
        output = self._waiting.pop(index, None)
        if not self._waiting:
            self._forget()
        return output

    def _forget(self) -> None:
        self._x, self._waiting = None, {}


@functools.cache
def layers_of_one_input(kind: type) -> tuple[tuple[str, ...], ...]:
    """Return the names of children that a class of modules calls with one of its arguments, in the order of the calls.

    Each call is made once in every pass that gets there, and the argument is the caller's own throughout.
    """
    function = forward_source(kind)
    if function is None:
        return ()
    arguments = {a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    arguments -= {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))
    }
    every = [call for node in ast.walk(function) for call in _call_of_child(node)]
    groups: dict[str, list[str]] = {}
    nodes = (node for statement in function.body for node in _always_evaluated(statement))
    for child, argument in (call for node in nodes for call in _call_of_child(node)):
        if argument in arguments and [name for name, _ in every].count(child) == 1:
            groups.setdefault(argument, []).append(child)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _always_evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in the order of evaluation, as far as calls are concerned."""
    if not isinstance(node, _CONDITIONAL):
        for child in ast.iter_child_nodes(node):
            yield from _always_evaluated(child)
        yield node


def _call_of_child(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (child, argument) of a call self.child(argument)."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="self"), attr=child), args=[ast.Name(id=argument)], keywords=[]
        ):
            yield child, argument
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=child)):
            yield child, ""
