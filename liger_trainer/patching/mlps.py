"""MLPs with a gated activation or squared ReLU, and stacked experts: found by structure, proved on a miniature.

    down(act(gate(x)) * up(x))       gate and up two linear layers, or one with both packed
    down(relu(up(x))^2)

The linear layers are called as the modules that they are, so adapters, quantised layers, hooks and FSDP keep working;
while another child has hooks, the module's own forward runs. act(gate) * up is not stored where `down` is a plain
nn.Linear. Stacked experts keep their own products and dispatch: of them, the gate alone is swapped.
"""

import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..common.hooks import is_called
from ..common.replacements import Replacements
from ..kernels.gated_linear import gated_reference
from ..kernels.relu2 import relu2, relu2_reference
from ..modules.gated_mlp import gated, project
from . import structure
from .lora import is_lora_mlp, mlp_with_lora

WIDTH, INNER, ROWS = 8, 12, 24
FP32, BF16 = torch.float32, torch.bfloat16
CASES = ((FP32, True, False), (FP32, False, False), (BF16, True, False), (FP32, True, True))  # dtype, train, autocast
GATED = ("silu", "gelu_tanh", "gelu")


@dataclass(frozen=True)
class MLP:
    """A proved claim: which children take the input, how gate and up come from them, and what follows.

    Attributes:
        first: the names of gate and up, of the layer with both, or of up alone.
        layout: a key of structure.LAYOUTS, or "ungated".
        activation: a key of structure.ACTIVATIONS.
        down: the name of the last layer.
    """

    first: tuple[str, ...]
    layout: str
    activation: str
    down: str

    @property
    def kind(self) -> str:
        return structure.ACTIVATIONS[self.activation]

    def linear_layers(self, module: nn.Module) -> list[nn.Module]:
        return [getattr(module, name) for name in (*self.first, self.down)]

    def __call__(self, module: nn.Module, x: Tensor, plain: bool = False) -> Tensor:
        """The MLP of x, with what `module` holds now. plain: by the ops' references, as the proof wants it."""
        projections = [getattr(module, name)(x) for name in self.first]
        down = getattr(module, self.down)
        if self.layout == "ungated":
            return down((relu2_reference if plain else relu2)(*projections))
        gate, up = structure.LAYOUTS[self.layout](*projections)
        if plain:
            return down(gated_reference(gate, up, self.activation))
        return project(down, gate, up, self.activation)


@dataclass(frozen=True)
class Gate:
    """A proved claim about the gate of stacked experts: the layout of its packed input, and the activation."""

    layout: str
    activation: str

    @property
    def kind(self) -> str:
        return f"{structure.ACTIVATIONS[self.activation]} experts"

    def __call__(self, packed: Tensor, plain: bool = False) -> Tensor:
        gate, up = structure.LAYOUTS[self.layout](packed)
        return (gated_reference if plain else gated)(gate, up, self.activation)


def patch_mlps(model: nn.Module, options: Any, replacements: Replacements, report: Any) -> None:
    """Swap the MLPs and experts that `options` ask for. Those that a part before this one swapped are passed over."""
    if not (options.swiglu or options.geglu or options.relu2):
        return
    proved: dict[tuple, MLP | Gate | str | None] = {}
    for module in model.modules():
        if module in replacements:
            continue
        if _looks_like_experts(module):
            prove = prove_experts
        elif 2 <= sum(structure.is_linear(child) for child in module.children()) <= 3:
            prove = prove_mlp
        else:
            continue
        key = structure.settings(module)
        if key not in proved:
            proved[key] = prove(module)
        rule = proved[key]
        if rule is not None:
            _swap(module, rule, options, replacements, report)


def _swap(module: nn.Module, rule: MLP | Gate | str, options: Any, replacements: Replacements, report: Any) -> None:
    refused = rule if isinstance(rule, str) else structure.obstacle(module)
    if refused is not None:
        report.leave(type(module).__name__, refused)
    elif not isinstance(rule, str) and getattr(options, structure.OPTIONS[structure.ACTIVATIONS[rule.activation]]):
        if isinstance(rule, MLP):
            lora = options.lora and rule.layout in ("split", "gate first")
            replacements.forward(module, _forward(rule, lora))
            if lora and is_lora_mlp(rule.linear_layers(module)):
                report.swap("LoRA MLP")
        else:
            replacements.set(module, "_apply_gate", types.MethodType(_apply_gate(rule), module))
        report.swap(rule.kind)


def _forward(mlp: MLP, lora: bool) -> Callable[..., Tensor]:
    """lora: whether layers that have adapters by the time of a call are computed as one."""

    linear_layers = {*mlp.first, mlp.down}

    def forward(module, *inputs, **named):
        (x,) = (*inputs, *named.values())
        if _calls_beside(module, linear_layers):
            return type(module).forward(module, x)
        fused = mlp_with_lora(x, mlp.linear_layers(module), mlp.activation) if lora else None
        return mlp(module, x) if fused is None else fused

    return forward


def _apply_gate(gate: Gate) -> Callable[..., Tensor]:
    def apply_gate(module, packed):
        return type(module)._apply_gate(module, packed) if _calls_beside(module) else gate(packed)

    return apply_gate


def _calls_beside(module: nn.Module, linear_layers: Collection[str] = ()) -> bool:
    """Whether somebody counts on the call of a child that our forward does not call: the activation, say."""
    for name, child in module._modules.items():
        if name not in linear_layers and child is not None and any(is_called(m) for m in child.modules()):
            return True
    return False


def prove_mlp(module: nn.Module) -> MLP | str | None:
    """The claim that holds for a module, in words why none does, or None if it is no MLP of ours at all."""
    claims = list(_claims(module))
    likely = any(claim.layout != "ungated" for claim in claims)
    inputs = structure.inputs_of(type(module).forward)
    if inputs is None or len(inputs) != 1:
        if likely and inputs is not None and any("gate" in name for name in module._modules):
            return f"it takes {', '.join(inputs)}, where an MLP has one input"
        return None
    states = [name for name, child in module.named_children() if not _linear_or_stateless(child)]
    states += structure.tensors(module)
    if not claims or (states and not likely):
        return None
    if states:
        return f"it has more than its linear layers: {', '.join(states)}"
    held = structure.first_that_holds(claims, functools.partial(_cases_passed, module))
    return held if likely or isinstance(held, MLP) else None


def _linear_or_stateless(module: nn.Module) -> bool:
    return structure.is_linear(module) or structure.is_stateless(module)


def _claims(module: nn.Module) -> Iterator[MLP]:
    """Every reading of the linear children whose sizes fit."""
    linears: dict[str, Any] = {name: child for name, child in module.named_children() if structure.is_linear(child)}
    sizes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    for names in itertools.permutations(sizes):
        *first, down = names
        width, inner = sizes[down]
        if len(names) == 3 and all(sizes[name] == (inner, width) for name in first):
            yield from (MLP(tuple(first), "split", activation, down) for activation in GATED)
        elif len(names) == 2 and sizes[first[0]] == (2 * inner, width):
            for layout in ("gate first", "up first"):
                yield from (MLP(tuple(first), layout, activation, down) for activation in GATED)
        elif len(names) == 2 and sizes[first[0]] == (inner, width):
            yield MLP(tuple(first), "ungated", "relu2", down)


def _cases_passed(module: nn.Module, mlp: MLP) -> tuple[int, str | None]:
    """In how many cases the claim holds before one in which it does not, and in words what differs there."""
    for passed, (dtype, training, autocast) in enumerate(CASES):
        with structure.on_miniatures(autocast):
            small = _miniature(module, mlp, dtype, training)
            x = _rows(WIDTH, dtype).view(2, ROWS // 2, WIDTH).requires_grad_()
            try:
                own = type(small).forward(small, x)
            except Exception as error:
                return passed, structure.failure(error)
            ours = mlp(small, x, plain=True)
            refused = structure.difference(ours, own)
            refused = refused or structure.gradient_difference(ours, own, [x, *small.parameters()])
        if refused is not None:
            return passed + 1, f"it is not {_formula(mlp)}"
    return len(CASES), None


def _formula(mlp: MLP) -> str:
    if mlp.layout == "ungated":
        return f"{mlp.down}(relu({mlp.first[0]}(x))^2)"
    gate, up = mlp.first if mlp.layout == "split" else ("gate", "up")
    return f"{mlp.down}(act({gate}) * {up}) with act one of {', '.join(GATED)}"


def _miniature(module: nn.Module, mlp: MLP, dtype: torch.dtype, training: bool) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    first = 2 * INNER if mlp.layout in ("gate first", "up first") else INNER
    sizes = {**dict.fromkeys(mlp.first, (WIDTH, first)), mlp.down: (INNER, WIDTH)}
    children = {}
    for name, (columns, rows) in sizes.items():
        children[name] = nn.Linear(columns, rows, device="cpu", dtype=dtype)  # biased, whether the module's are or not
        for parameter in children[name].parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=FP32)
            parameter.data.copy_(values / columns**0.5)
    return structure.miniature(module, {}, children, training)


def _rows(width: int, dtype: torch.dtype) -> Tensor:
    """(ROWS, width), from where activations bend to far beyond what clamps and caps let through."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, width, generator=generator, dtype=FP32, device="cpu")
    return (x * torch.logspace(-1, 3, ROWS, dtype=FP32, device="cpu")[:, None]).to(dtype)


def _looks_like_experts(module: nn.Module) -> bool:
    """Whether it holds the weights of several experts in 3-D parameters."""
    return sum(tensor.dim() == 3 for tensor in module._parameters.values() if tensor is not None) >= 2


def prove_experts(module: nn.Module) -> Gate | str | None:
    """The claim that holds for stacked experts, in words why none does, or None if they are no experts.

    Transformers' decorator `use_experts_implementation` gives the class an `_apply_gate`, which the implementations
    for training call between the two products.
    """
    if not hasattr(type(module), "_apply_gate"):
        looks = all(any(word in name for name in module._parameters) for word in ("gate", "down"))
        return "its experts have no `_apply_gate` to replace" if looks else None
    if "_apply_gate" in vars(module):
        return "its `_apply_gate` has been replaced"
    if not getattr(module, "has_gate", True):
        return "its experts are not gated"
    claims = [Gate(layout, activation) for layout in ("gate first", "up first") for activation in GATED]
    proved = structure.first_that_holds(claims, functools.partial(_gate_passes, module))
    if isinstance(proved, Gate) and not _calls_apply_gate(module):
        return (
            f"its implementation ({_implementation(module)}) does not call `_apply_gate`: "
            'load the model with experts_implementation="grouped_mm"'
        )
    return proved


def _gate_passes(module: nn.Module, gate: Gate) -> tuple[int, str | None]:
    for passed, (dtype, training, autocast) in enumerate(CASES):
        with structure.on_miniatures(autocast):
            small: Any = structure.miniature(module, {}, {}, training)
            packed = _rows(2 * INNER, dtype).requires_grad_()
            try:
                own = type(small)._apply_gate(small, packed)
            except Exception as error:
                return passed, structure.failure(error)
            ours = gate(packed, plain=True)
            refused = structure.difference(ours, own) or structure.gradient_difference(ours, own, [packed])
        if refused is not None:
            return passed + 1, f"its gate is not act(gate) * up with act one of {', '.join(GATED)}"
    return len(CASES), None


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _calls_apply_gate(module: nn.Module) -> bool:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    forward = type(module).forward
    original = getattr(forward, "__wrapped__", forward)
    function = ALL_EXPERTS_FUNCTIONS.get_interface(_implementation(module) or "eager", original)
    return "_apply_gate" in getattr(getattr(function, "__code__", None), "co_names", ())
