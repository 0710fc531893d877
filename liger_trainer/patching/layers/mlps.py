"""MLPs with a gated activation, GELU or squared ReLU: found by structure, proved on a miniature.

    down(act(gate(x)) * up(x))       gate and up are two linear layers, or one with both packed; clamped or not
    down(gelu(up(x)))                either GELU; down(relu(up(x))^2)

The linear layers are called as the modules that they are, so adapters, quantised layers, hooks and FSDP keep working;
while another child has hooks, the module's own forward runs. What `down` reads is not stored where that is a
plain nn.Linear. Stacked experts are in experts.py.
"""

import functools
import itertools
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...compat.modules import is_called, own_children
from ...errors import ConfigError
from ...kernels.activation_linear import activation_reference
from ...kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference
from ...kernels.gated_linear import gated_reference
from ...kernels.gated_mlp import gated_mlp
from ...kernels.relu2 import relu2
from ...losses.model_parts import decoder_layers
from .. import structure
from ..options import PatchOptions, PatchReport
from .linears import is_weight_and_bias, linear, project, project_ungated
from .lora import is_lora_mlp, mlp_with_lora

# The clamps that some models put on gate and up, read from the module's own numbers (gpt-oss, DeepSeek V4, GLM 5).


SHIFTS = (0.0, 1.0)


@dataclass(frozen=True)
class Clamp:
    """g * sigmoid(alpha g) * (u + shift), g = min(gate, limit), u = clamp(up, -limit, limit).

    Attributes:
        limit, alpha: names of the module's attributes; alpha None is 1.
        shift: added to up.
    """

    limit: str
    alpha: str | None
    shift: float

    def numbers(self, module: nn.Module) -> dict[str, float]:
        """Return the options of `clamped_swiglu`, as the module has them now."""
        alpha = 1.0 if self.alpha is None else getattr(module, self.alpha)
        return {"limit": getattr(module, self.limit), "alpha": alpha, "shift": self.shift}

    def __call__(
        self, module: nn.Module, gate: Tensor, up: Tensor | None, plain: bool = False, interleaved: bool = False
    ) -> Tensor:
        op = clamped_swiglu_reference if plain else clamped_swiglu
        return op(gate, up, **self.numbers(module), interleaved=interleaved)


def clamps_of(module: nn.Module) -> Iterator[Clamp]:
    """Yield the clamps that a module's numbers allow: none if no attribute of it is called a limit."""
    numbers = {name: x for name, x in vars(module).items() if isinstance(x, (int, float)) and not isinstance(x, bool)}
    alphas = [name for name in numbers if "alpha" in name]
    for limit in (name for name, x in numbers.items() if "limit" in name and x > 0):
        for shift in SHIFTS:
            yield from (Clamp(limit, alpha, shift) for alpha in (None, *alphas))


GATED = {"silu": "SwiGLU", "gelu_tanh": "GEGLU", "gelu": "GEGLU"}
UNGATED = {"relu2": "ReLU2", "gelu_tanh": "GELU MLP", "gelu": "GELU MLP"}
# The option of `PatchOptions` that asks for it.
OPTIONS = {"SwiGLU": "swiglu", "GEGLU": "geglu", "ReLU2": "relu2", "GELU MLP": "gelu"}
# How gate and up come from the first linear layers: (gate, up), where None says that gate is packed [gate | up].
LAYOUTS: Mapping[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "split": lambda gate, up: (gate, up),
    "gate first": lambda packed: (packed, None),
    "up first": lambda packed: packed.chunk(2, -1)[::-1],
}
PACKED = ("gate first", "up first")
RULE = "_liger_trainer_mlp"  # the attribute of an MLP that one op may compute: its rule
REMADE = "_liger_trainer_remade"  # the attribute of one that makes gate(x) and up(x) again: see `remake_mlps`
KEPT = (
    "memory: a {} keeps gate and up, since its layers cannot be computed as one op as they are called: they have "
    "hooks, or a 4-bit base computes in another dtype than its input's. estimate counts less memory than is taken."
)

WIDTH, INNER, ROWS = 8, 12, 24
FP32, BF16 = torch.float32, torch.bfloat16
CASES = ((FP32, True, False), (FP32, False, False), (BF16, True, False), (FP32, True, True))  # dtype, train, autocast


@dataclass(frozen=True)
class MLPRule:
    """Which children take the input, how gate and up come from them, and what follows.

    Attributes:
        first: the names of gate and up, of the layer with both, or only of up.
        layout: a key of LAYOUTS, or "ungated".
        activation: a key of GATED, or of UNGATED.
        down: the name of the last layer.
        clamp: what is between instead, or None.
    """

    first: tuple[str, ...]
    layout: str
    activation: str
    down: str
    clamp: Clamp | None = None

    @property
    def kind(self) -> str:
        return (UNGATED if self.layout == "ungated" else GATED)[self.activation]

    @property
    def is_one_op(self) -> bool:
        """Whether `lora_mlp` and `gated_mlp` take such an MLP."""
        return self.layout in ("split", "gate first") and self.clamp is None

    def linear_layers(self, module: nn.Module) -> list[Any]:
        return [getattr(module, name) for name in (*self.first, self.down)]

    def __call__(self, module: nn.Module, x: Tensor, plain: bool = False) -> Tensor:
        """Run the MLP with what `module` holds now; `plain`: by the ops' references, as the proof wants it."""
        down = getattr(module, self.down)
        if self.layout == "ungated" and self.activation != "relu2" and not plain:
            return project_ungated(down, linear(getattr(module, self.first[0]), x), self.activation)
        if self.layout == "ungated":
            up = getattr(module, self.first[0])(x)
            return down(activation_reference(up, self.activation) if plain else relu2(up))
        gate, up = LAYOUTS[self.layout](*(getattr(module, name)(x) for name in self.first))
        if self.clamp is not None:
            return down(self.clamp(module, gate, up, plain))
        if plain:
            return down(gated_reference(gate, up, self.activation))
        return project(down, gate, up, self.activation)

    def __str__(self) -> str:
        if self.layout == "ungated":
            return f"{self.down}(act({self.first[0]}(x))) with act one of {', '.join(UNGATED)}"
        gate, up = self.first if self.layout == "split" else ("gate", "up")
        return f"{self.down}(act({gate}) * {up}) with act one of {', '.join(GATED)}"


def patch_mlps(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Swap the MLPs that `options` ask for. Those that an earlier part computes are passed over."""
    if not any(getattr(options, name) for name in OPTIONS.values()):
        return
    prove = structure.once_for_equal_layers(prove_mlp)
    for module, rule in structure.proved_layers(model, replacements, report, looks_like_an_mlp, prove):
        if getattr(options, OPTIONS[rule.kind]):
            lora = options.lora and rule.is_one_op
            note_activations(module, replacements, {*rule.first, rule.down})
            replacements.forward(module, mlp_forward(rule, lora))
            if rule.is_one_op:
                replacements.set(module, RULE, rule)
            if lora and is_lora_mlp(rule.linear_layers(module)):
                report.swap("LoRA MLP")
            report.swap(rule.kind)


def mlp_forward(rule: MLPRule, lora: bool) -> Callable[..., Tensor]:
    """Return a module's new forward. `lora`: compute the layers as one op where they have adapters when called."""
    linear_layers = {*rule.first, rule.down}

    def forward(module, *inputs, **named):
        (x,) = (*inputs, *named.values())  # one input, as was proved, under whatever name
        if calls_other_children(module, linear_layers):
            return type(module).forward(module, x)
        remake, layers = vars(module).get(REMADE, False), rule.linear_layers(module)
        fused = mlp_with_lora(x, layers, rule.activation, remake) if lora else None
        if fused is not None:
            return fused
        if remake and all(map(is_weight_and_bias, layers)):
            weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
            return gated_mlp(x, weights, biases, activation=rule.activation)
        if remake and torch.is_grad_enabled():
            warnings.warn(KEPT.format(type(module).__name__), stacklevel=2)
        return rule(module, x)

    return forward


def note_activations(module: nn.Module, replacements: Replacements, linear_layers: Collection[str] = ()) -> None:
    """Note what a module, which was proved with it, calls besides its linear layers."""
    children = {name: child for name, child in own_children(module).items() if name not in linear_layers}
    functions = {
        name: value for name, value in vars(module).items()
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and "forward" not in name
    }  # fmt: skip
    replacements.set(module, structure.PROVED, {**children, **functions})


def calls_other_children(module: nn.Module, linear_layers: Collection[str] = ()) -> bool:
    """Whether a child that our forward does not call, the activation, makes a difference: it has hooks or a new
    forward, or is another one than when the module was proved."""
    for name, child in own_children(module).items():
        if name not in linear_layers and child is not None and any(is_called(m) for m in child.modules()):
            return True
    own, children = vars(module), own_children(module)
    proved = own.get(structure.PROVED, {})
    return any((children[name] if name in children else own.get(name)) is not proved[name] for name in proved)


def looks_like_an_mlp(module: nn.Module) -> bool:
    """Whether two or three of its children are linear layers."""
    return 2 <= sum(structure.is_linear(child) for child in module.children()) <= 3


def prove_mlp(module: nn.Module) -> MLPRule | str | None:
    """Return the rule that holds for a module, why none does, or None if it is nothing like our MLPs."""
    rules = list(_rules(module))
    likely = any(rule.layout != "ungated" for rule in rules)
    inputs = structure.inputs_of(type(module).forward)
    if inputs is None or len(inputs) != 1:
        if likely and inputs is not None and any("gate" in name for name in own_children(module)):
            return f"it takes {', '.join(inputs)}, where an MLP has one input"
        return None
    states = [
        name for name, x in module.named_children() if not (structure.is_linear(x) or structure.is_stateless(x))
    ] + [*structure.tensors(module)]
    if not rules or (states and not likely):
        return None
    if states:
        return f"it has more than its linear layers: {', '.join(states)}"
    rule = structure.first_that_holds(rules, functools.partial(_check, module))
    return rule if likely or isinstance(rule, MLPRule) else None


def _rules(module: nn.Module) -> Iterator[MLPRule]:
    """Yield every reading of the linear children whose sizes fit."""
    linears: dict[str, Any] = {name: child for name, child in module.named_children() if structure.is_linear(child)}
    sizes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    # Names are not trusted: which layer is gate, up or down is tried, where the sizes allow it.
    for names in itertools.permutations(sizes):
        *first, down = names
        width, inner = sizes[down]
        if len(names) == 3 and all(sizes[name] == (inner, width) for name in first):
            yield from (MLPRule(tuple(first), "split", activation, down) for activation in GATED)
            yield from (MLPRule(tuple(first), "split", "silu", down, clamp) for clamp in clamps_of(module))
        elif len(names) == 2 and sizes[first[0]] == (2 * inner, width):
            for layout in PACKED:
                yield from (MLPRule(tuple(first), layout, activation, down) for activation in GATED)
                yield from (MLPRule(tuple(first), layout, "silu", down, clamp) for clamp in clamps_of(module))
        elif len(names) == 2 and sizes[first[0]] == (inner, width):
            yield from (MLPRule(tuple(first), "ungated", activation, down) for activation in UNGATED)


def _check(module: nn.Module, rule: MLPRule) -> tuple[int, str | None]:
    """See `structure.first_that_holds`."""
    for passed, (dtype, training, autocast) in enumerate(CASES):
        with structure.on_miniatures(autocast):
            small = _miniature(module, rule, dtype, training)
            x = random_rows(WIDTH, dtype).view(2, ROWS // 2, WIDTH).requires_grad_()
            try:
                theirs = type(small).forward(small, x)
            except Exception as error:
                return passed, structure.failure(error)
            ours = rule(small, x, plain=True)
            refused = structure.difference(ours, theirs)
            refused = refused or structure.gradient_difference(ours, theirs, [x, *small.parameters()])
            # a dropout draws another mask when it is called again
            drops = refused is not None and training and not torch.equal(theirs, type(small).forward(small, x))
        if drops:
            return passed + 1, "it drops out elements in training"
        if refused is not None:
            return passed + 1, f"it is not {rule}"
    return len(CASES), None


def _miniature(module: nn.Module, rule: MLPRule, dtype: torch.dtype, training: bool) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    first = 2 * INNER if rule.layout in PACKED else INNER
    sizes = {**dict.fromkeys(rule.first, (WIDTH, first)), rule.down: (INNER, WIDTH)}
    children = {}
    for name, (columns, rows) in sizes.items():
        children[name] = nn.Linear(columns, rows, device="cpu", dtype=dtype)  # biased, whether the module's are or not
        for parameter in children[name].parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=FP32)
            parameter.data.copy_(values / columns**0.5)
    return structure.miniature(module, {}, children, training)


def random_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Draw (ROWS, width), from where activations bend to far beyond what clamps and caps let through."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, width, generator=generator, dtype=FP32, device="cpu")
    return (x * torch.logspace(-1, 3, ROWS, dtype=FP32, device="cpu")[:, None]).to(dtype)


# Gated MLPs that make gate(x) and up(x) again in the backward instead of keeping them, in some of the decoder layers.
#
# Which of them do is noted on the modules, whose forward (mlps.py) looks for it in each call.


REMADE = "gate and up made again"


def remake_mlps(model: Any, every: int, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Have MLPs make gate(x) and up(x) again in every n-th of the decoder layers that have such an MLP.

    Raises:
        ConfigError: there is none, or the decoder layers are not recognised.
    """

    def can(module: nn.Module) -> bool:
        rule = vars(module).get(RULE)
        linears = [] if rule is None else rule.linear_layers(module)
        if not linears:
            return False
        return all(map(is_weight_and_bias, linears)) or (options.lora and is_lora_mlp(linears))

    # Layers without such an MLP don't count, so that every n-th of those that can saves memory.
    layers = [mlps for layer in decoder_layers(model)[1] if (mlps := [*filter(can, layer.modules())])]
    if not layers:
        raise ConfigError(
            f"No MLP of this {type(model).__name__} can make gate and up again. It takes a patched MLP, "
            "down(act(gate(x)) * up(x)), whose layers are plain nn.Linear, or plain LoRA over frozen ones. Set "
            "memory to fast."
        )
    chosen = layers[::every]
    for mlps in chosen:
        for mlp in mlps:
            replacements.set(mlp, REMADE, True)
    report.swap(REMADE, len(chosen))
