"""Stacked experts: the gate between their two products is swapped, products and dispatch stay their own.

transformers' decorator `use_experts_implementation` gives the class of experts an `_apply_gate`, which the
implementations for training call between the two products.
"""

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

from ...common.replacements import Replacements
from ...compat.code_objects import without_decorator
from ...compat.four_bit_tensor import FourBitTensor
from ...compat.models import (
    GATE,
    STACKED,
    apply_gate,
    experts_implementation,
    has_swapped_features,
    is_expert_parallel,
)
from ...compat.modules import is_called, own_children, own_parameters, without_child
from ...compat.recognitions import EXPERTS, calls_gate, check
from ...kernels.gated_linear import gated_reference
from ...kernels.lora_experts import StackedProjection, lora_experts, lora_experts_reference
from ...kernels.types import Gate
from .. import structure
from ..options import PatchOptions, PatchReport
from . import linears
from .linears import gated, is_plain
from .lora import Ineligible
from .mlps import (
    CASES,
    GATED,
    INNER,
    LAYOUTS,
    OPTIONS,
    PACKED,
    Clamp,
    calls_other_children,
    clamps_of,
    note_activations,
    random_rows,
)


@dataclass(frozen=True)
class GateRule:
    """The layout of a gate's packed input, the activation, and a clamp or None. See mlps.py for the first two."""

    layout: str
    activation: str
    clamp: Clamp | None = None

    @property
    def kind(self) -> str:
        return f"{GATED[self.activation]} experts"

    def form(self, module: nn.Module) -> Gate:
        """Return the same gate as `lora_experts` takes it."""
        return Gate(self.activation, self.layout, **({} if self.clamp is None else self.clamp.numbers(module)))

    def __call__(self, module: nn.Module, packed: Tensor, plain: bool = False) -> Tensor:
        if self.clamp is not None and self.layout == "interleaved":
            return self.clamp(module, packed, None, plain, interleaved=True)
        gate, up = LAYOUTS[self.layout](packed)
        if self.clamp is not None:
            return self.clamp(module, gate, up, plain)
        return (gated_reference if plain else gated)(gate, up, self.activation)


def patch_experts(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Swap the gates of the experts that `options` ask for."""
    if not (options.swiglu or options.geglu):
        return
    prove = structure.once_for_equal_layers(prove_experts)
    for module, rule in structure.proved_layers(model, replacements, report, looks_like_experts, prove):
        if getattr(options, OPTIONS[GATED[rule.activation]]):
            note_activations(module, replacements)
            replacements.set(module, GATE, types.MethodType(_gate(rule), module))
            report.swap(rule.kind)


def _gate(rule: GateRule) -> Callable[..., Tensor]:
    def gate(module, packed):
        return apply_gate(module, packed) if calls_other_children(module) else rule(module, packed)

    return gate


def looks_like_experts(module: nn.Module) -> bool:
    """Whether it holds the weights of several experts in 3-D parameters."""
    return sum(tensor.dim() == 3 for tensor in own_parameters(module).values() if tensor is not None) >= 2


def prove_experts(module: nn.Module) -> GateRule | str | None:
    """Return the rule that holds for the gate of stacked experts, why none does, or None if these are no experts."""
    if not hasattr(type(module), GATE):
        check(EXPERTS)
        looks = all(any(word in name for name in own_parameters(module)) for word in ("gate", "down"))
        return (
            "its experts run by a loop of their own, without an `_apply_gate` that could be replaced" if looks else None
        )
    if GATE in vars(module):
        return "its `_apply_gate` has been replaced"
    rule = prove_gate(module)
    if isinstance(rule, GateRule) and not _calls_gate(module):
        check(EXPERTS)
        return (
            f"its implementation ({experts_implementation(module)}) does not call `_apply_gate`: "
            'load the model with experts_implementation="grouped_mm"'
        )
    return rule


def prove_gate(module: nn.Module) -> GateRule | str | None:
    """Return the rule that holds for the gate of an experts' class, whatever runs it; else as `prove_experts`."""
    if not hasattr(type(module), GATE):
        return None
    if not getattr(module, "has_gate", True):
        return "its experts are not gated"
    rules = [GateRule(layout, activation) for layout in PACKED for activation in GATED]
    rules += [GateRule(layout, "silu", clamp) for layout in (*PACKED, "interleaved") for clamp in clamps_of(module)]
    return structure.first_that_holds(rules, functools.partial(_check, module))


def _check(module: nn.Module, rule: GateRule) -> tuple[int, str | None]:
    """See `structure.first_that_holds`."""
    for passed, (dtype, training, autocast) in enumerate(CASES):
        with structure.on_miniatures(autocast):
            small: Any = structure.miniature(module, {}, {}, training)
            packed = random_rows(2 * INNER, dtype).requires_grad_()
            try:
                theirs = apply_gate(small, packed)
            except Exception as error:
                return passed, structure.failure(error)
            ours = rule(module, packed, plain=True)
            refused = structure.difference(ours, theirs) or structure.gradient_difference(ours, theirs, [packed])
        if refused is not None:
            return passed + 1, f"its gate is not act(gate) * up with act one of {', '.join(GATED)}, clamped or not"
    return len(CASES), None


def _calls_gate(module: nn.Module) -> bool:
    """Whether the code that runs these experts names their gate: the loop ("eager") has the gate inside."""
    original = without_decorator(type(module).forward)
    return calls_gate(ALL_EXPERTS_FUNCTIONS.get_interface(experts_implementation(module) or "eager", original))


# Stacked experts whose weights are frozen, with PEFT's LoRA on them or without, on the op `lora_experts`.
#
# PEFT wraps a parameter of the experts (`target_parameters=["experts.gate_up_proj", ...]`) by a `ParamWrapper`, one
# around the other for several, and each forward merges the adapters into a copy of all experts' weights. Here the
# outermost wrapper, or experts without one, computes by grouped products with base and adapters apart. The experts are
# read when they are called, as LoRA layers are (lora.py); in a state that the op does not serve, their own forward
# runs.
#
# transformers' registry of implementations (`ALL_EXPERTS_FUNCTIONS`) says what runs them otherwise: a rule holds for
# its loop and its grouped and batched products, and an implementation of somebody else stays as it is.


PARAMETERS = STACKED
FLAGS = {"has_gate": True, "has_post_expert_norm": False}  # of transformers' decorator, as the op needs them
COLUMNS, INNER_COLUMNS, TOKENS = 8, 16, 24  # of a miniature; 16 bytes, which torch's grouped product wants
_THEIRS = (grouped_mm_experts_forward, batched_mm_experts_forward)


@dataclass(frozen=True)
class ExpertsRule:
    """How experts are called, and their gate.

    Attributes:
        inputs: the names of the hidden states, of each token's experts and of their weights.
        gate: the rule of what is between the two products.
        transposed: the parameters are (experts, inputs, outputs), not (experts, outputs, inputs).
    """

    inputs: tuple[str, str, str]
    gate: GateRule
    transposed: bool


def patch_stacked_experts(
    model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport
) -> None:
    """Swap the forward of frozen experts, and of the adapters around them."""
    if not options.lora:
        return
    prove = structure.once_for_equal_layers(prove_stacked)
    inner: set[nn.Module] = set()  # of a wrapper that comes before
    for module in model.modules():
        chain = _chain(module)
        wrapped, weights = len(chain) > 1, [own_parameters(module).get(name) for name in PARAMETERS]
        frozen = all(weight is not None and not weight.requires_grad for weight in weights)
        if module in inner or not (wrapped or frozen):
            continue
        inner.update(chain[1:])
        replaced = GATE in vars(chain[-1]) and chain[-1] not in replacements
        rule = "its `_apply_gate` has been replaced" if replaced else prove(chain[-1])
        if rule is None and not wrapped:
            continue
        refused = rule if isinstance(rule, str) else _why_own_forward(module, rule)
        if refused is not None or rule is None or isinstance(rule, str):
            _leave(report, chain, refused)
            continue
        for wrapper in chain[1:-1]:
            replacements.mark_as_patched(wrapper)
        note_activations(chain[-1], replacements)
        replacements.forward(module, stacked_forward(rule))
        report.swap("LoRA experts" if wrapped else "frozen experts")
        report.left_alone.pop(type(chain[-1]).__name__, None)  # as a gate that nobody calls now


def _leave(report: PatchReport, chain: Sequence[Any], why: str | None) -> None:
    if len(chain) > 1:
        names = ", ".join(wrapper.parameter_name for wrapper in chain[:-1])
        report.leave(f"LoRA on {names}", f"PEFT's forward runs: {why or 'these are no stacked experts'}")
    else:
        report.leave(type(chain[-1]).__name__, f"its own forward runs: {why}")


def _why_own_forward(module: nn.Module, rule: ExpertsRule | None) -> str | None:
    """Say why the own forward has to run or to stay, as the module is now."""
    refused = structure.why_not_replaced(module)
    if refused is None and rule is not None:
        try:
            read(module, rule)
        except Ineligible as reason:
            return str(reason)
    return refused


def _chain(module: nn.Module) -> list[Any]:
    """Return a wrapper of PEFT, those inside it, and the experts; only the module if it is no wrapper."""
    chain = [module]
    while isinstance(chain[-1], ParamWrapper):
        chain.append(chain[-1].base_layer)
    return chain


def stacked_forward(rule: ExpertsRule) -> Callable[..., Tensor]:
    """Return the new forward of experts, or of the outermost wrapper of PEFT around them."""

    def forward(module, *args, **kwargs):
        given = {**dict(zip(rule.inputs, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != 3 or given.keys() != set(rule.inputs) or torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        x, index, weights = (given[name] for name in rule.inputs)
        try:
            layers = read(module, rule)
        except Ineligible:
            return type(module).forward(module, *args, **kwargs)
        if x.dim() != 2 or index.shape != weights.shape:
            return type(module).forward(module, *args, **kwargs)
        return lora_experts(x, index, weights, *layers, gate=rule.gate.form(_chain(module)[-1]))

    return forward


def read(module: nn.Module, rule: ExpertsRule) -> list[StackedProjection]:
    """Read experts and the adapters on them as they are now.

    Raises:
        Ineligible: their own forward has to run.
    """
    chain = _chain(module)
    base = chain[-1]
    if any(is_called(inner) for inner in chain[1:]):
        raise Ineligible("the experts are hooked or have another forward")
    if not _is_theirs(base):
        raise Ineligible(_foreign(base))
    if is_expert_parallel(base):
        raise Ineligible("the experts are spread over several devices")
    if calls_other_children(base):
        raise Ineligible("their activation is hooked or has another forward")
    wrappers = {wrapper.parameter_name: wrapper for wrapper in chain[:-1]}
    if wrappers.keys() - set(PARAMETERS):
        raise Ineligible(f"adapters on {', '.join(sorted(wrappers.keys() - set(PARAMETERS)))}")
    return [_layer(base, name, wrappers.get(name), rule.transposed) for name in PARAMETERS]


def _layer(base: Any, name: str, wrapper: Any, transposed: bool) -> StackedProjection:
    bias = own_parameters(base).get(f"{name}_bias")
    if bias is not None and (bias.requires_grad or type(bias) not in linears.WEIGHTS):
        raise Ineligible(f"{name}_bias is trained or sharded")
    factors = () if wrapper is None else _factors(wrapper, transposed)
    if not factors:
        return StackedProjection(_weight(base, name, transposed), bias)
    every_a, every_b = zip(*factors, strict=True)
    a, b = factors[0] if len(factors) == 1 else (torch.cat(every_a, 1), torch.cat(every_b, 2))
    return StackedProjection(_weight(base, name, transposed), bias, a, b)


def _weight(base: Any, name: str, transposed: bool) -> Tensor | Callable[[], Tensor]:
    """Return (experts, outputs, inputs), or a function that makes it of a packed or parametrised parameter."""
    weight = own_parameters(base).get(name)
    if weight is not None:
        if weight.requires_grad:
            raise Ineligible("the experts are trained too")
        if is_packed(weight):
            return functools.partial(unpacked, weight, transposed)
        if type(weight) not in linears.WEIGHTS or weight.dim() != 3:
            raise Ineligible("the experts' weights are sharded or packed")
        return weight.transpose(1, 2) if transposed else weight
    if name not in getattr(base, "parametrizations", {}):
        raise Ineligible(f"{name} is no parameter")

    def computed() -> Tensor:
        weight = getattr(base, name).detach()
        return weight.transpose(1, 2) if transposed else weight

    if any(p.requires_grad for p in base.parametrizations[name].parameters()) or getattr(base, name).requires_grad:
        raise Ineligible(f"{name} is parametrised by something that is trained")
    return computed


# Functions of the module, which `estimate` replaces for weights without data.


def is_packed(weight: Tensor) -> bool:
    return isinstance(weight, FourBitTensor)


def unpacked(weight: Any, transposed: bool) -> Tensor:
    return weight.unpacked().transpose(1, 2) if transposed else weight.unpacked()


def _factors(wrapper: Any, transposed: bool) -> list[tuple[Tensor, Tensor]]:
    """Return (experts, r, inputs) and (experts, outputs, r) of each adapter that counts now, scaled."""
    if wrapper.disable_adapters and wrapper.merged:
        raise Ineligible("the adapters are to be taken out of the weight")
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [_factor(wrapper, name, transposed) for name in wrapper.active_adapters if name in wrapper.lora_A]


def _factor(wrapper: Any, name: str, transposed: bool) -> tuple[Tensor, Tensor]:
    a, b = wrapper.lora_A[name], wrapper.lora_B[name]
    if name in wrapper.lora_variant:
        raise Ineligible(f"an adapter is {type(wrapper.lora_variant[name]).__name__}, not plain LoRA")
    if not (is_plain(a) and is_plain(b)) or b.bias is not None:
        raise Ineligible("A or B of an adapter is more than a matrix: hooked, sharded, quantised or biased")
    count = wrapper.num_experts
    rows = a.weight.reshape(count, -1, a.weight.shape[-1])  # (experts, r, inputs of A)
    columns = b.weight.reshape(b.weight.shape[0], -1, count).permute(2, 0, 1)  # (experts, outputs of B, r)
    # PEFT 0.20 takes the parameter's second dimension for A's, newer releases its third where that is the input's.
    if has_swapped_features(wrapper) == transposed:  # A is on the experts' outputs
        rows, columns = columns.transpose(1, 2), rows.transpose(1, 2)
    return rows, columns * wrapper.scaling[name]


def prove_stacked(module: nn.Module) -> ExpertsRule | str | None:
    """Return the rule that holds for stacked experts, why none does, or None if these are no such experts."""
    if "parametrizations" in own_children(module):  # torch made it another class to quantise its weights: the former
        module = without_child(module, "parametrizations", type(module).__bases__[0])
    gate = prove_gate(module)
    if gate is None or isinstance(gate, str):
        return gate
    inputs = structure.inputs_of(type(module).forward)
    if inputs is None or len(inputs) != 3:
        return f"it takes {', '.join(inputs or ['any number of inputs'])}, where experts have three inputs"
    for name, wanted in FLAGS.items():
        if getattr(module, name, wanted) != wanted:
            return f"its {name} is {not wanted}"
    names = {*PARAMETERS, *(f"{name}_bias" for name in PARAMETERS)}
    extra = sorted(set(structure.tensors(module)) - names)
    if extra:
        return f"it has more than its weights: {', '.join(extra)}"
    rule = ExpertsRule((inputs[0], inputs[1], inputs[2]), gate, getattr(module, "is_transposed", False))
    if not _is_theirs(module):
        return _foreign(module)
    return _stacked_disproof(module, rule) or rule


def _is_theirs(module: nn.Module) -> bool:
    """Whether the experts run by their own loop, or by transformers' grouped or batched products."""
    forward = type(module).forward
    original = inspect.unwrap(forward)
    function = ALL_EXPERTS_FUNCTIONS.get_interface(experts_implementation(module) or "eager", original)
    return function is original or function in _THEIRS


def _foreign(module: nn.Module) -> str:
    return f"the experts' implementation ({experts_implementation(module)}) is none of transformers' own"


def _stacked_disproof(module: nn.Module, rule: ExpertsRule) -> str | None:
    """Say how the experts' own forward differs from the rule on a miniature; None if it does not."""
    for dtype in (torch.float32, torch.bfloat16):
        with structure.on_miniatures():
            small: Any = _experts_miniature(module, rule, dtype)
            x, index, weights = _routed(len(small.gate_up_proj), dtype)
            try:
                theirs = type(small).forward(small, x, index, weights)
            except Exception as error:
                return structure.failure(error)
            ours = lora_experts_reference(x, index, weights, *read(small, rule), gate=rule.gate.form(small))
            refused = structure.difference(ours, theirs)
            refused = refused or structure.gradient_difference(ours, theirs, [x, weights])
        if refused is not None:
            return refused + f" in {dtype}"
    return None


def _experts_miniature(module: nn.Module, rule: ExpertsRule, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    count = getattr(module, "num_experts", 4)
    sizes = {"gate_up_proj": (2 * INNER_COLUMNS, COLUMNS), "down_proj": (COLUMNS, INNER_COLUMNS)}
    small = {}
    for name, (outputs, inputs) in sizes.items():
        shape = (count, inputs, outputs) if rule.transposed else (count, outputs, inputs)
        small[name] = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / inputs**0.5
        if f"{name}_bias" in own_parameters(module):
            small[f"{name}_bias"] = torch.randn(count, outputs, generator=generator, dtype=torch.float32, device="cpu")
    small = {name: nn.Parameter(values.to(dtype), requires_grad=False) for name, values in small.items()}
    return structure.miniature(module, small, {})


def _routed(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, and one or two experts for each with their weights."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.rand, generator=generator, dtype=torch.float32, device="cpu")
    x = (draw(TOKENS, COLUMNS) * 4 - 2).to(dtype).requires_grad_()
    index = draw(TOKENS, count).topk(min(2, count), -1).indices
    return x, index, draw(index.shape).to(dtype).requires_grad_()
