"""Stacked experts: the gate between their two products is swapped, products and dispatch stay their own.

transformers' decorator `use_experts_implementation` gives the class of experts an `_apply_gate`, which the
implementations for training call between the two products.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...common.replacements import Replacements
from ...kernels.gated_linear import gated_reference
from ...kernels.types import Gate
from .. import structure
from ..options import PatchOptions, PatchReport
from .mlps import (  # fmt: skip
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
from .projections import gated


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
    for module, rule in structure.candidates(model, replacements, looks_like_experts, prove):
        if isinstance(rule, str):
            report.leave(type(module).__name__, rule)
        elif getattr(options, OPTIONS[GATED[rule.activation]]):
            note_activations(module, replacements)
            replacements.set(module, "_apply_gate", types.MethodType(_apply_gate(rule), module))
            report.swap(rule.kind)


def _apply_gate(rule: GateRule) -> Callable[..., Tensor]:
    def apply_gate(module, packed):
        return type(module)._apply_gate(module, packed) if calls_other_children(module) else rule(module, packed)

    return apply_gate


def looks_like_experts(module: nn.Module) -> bool:
    """Whether it holds the weights of several experts in 3-D parameters."""
    return sum(tensor.dim() == 3 for tensor in module._parameters.values() if tensor is not None) >= 2


def prove_experts(module: nn.Module) -> GateRule | str | None:
    """Return the rule that holds for the gate of stacked experts, why none does, or None if these are no experts."""
    if not hasattr(type(module), "_apply_gate"):
        looks = all(any(word in name for name in module._parameters) for word in ("gate", "down"))
        return (
            "its experts run by a loop of their own, without an `_apply_gate` that could be replaced" if looks else None
        )
    if "_apply_gate" in vars(module):
        return "its `_apply_gate` has been replaced"
    rule = prove_gate(module)
    if isinstance(rule, GateRule) and not _calls_apply_gate(module):
        return (
            f"its implementation ({_implementation(module)}) does not call `_apply_gate`: "
            'load the model with experts_implementation="grouped_mm"'
        )
    return rule


def prove_gate(module: nn.Module) -> GateRule | str | None:
    """Return the rule that holds for the gate of an experts' class, whatever runs it; else as `prove_experts`."""
    if not hasattr(type(module), "_apply_gate"):
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
                theirs = type(small)._apply_gate(small, packed)
            except Exception as error:
                return passed, structure.failure(error)
            ours = rule(module, packed, plain=True)
            refused = structure.difference(ours, theirs) or structure.gradient_difference(ours, theirs, [packed])
        if refused is not None:
            return passed + 1, f"its gate is not act(gate) * up with act one of {', '.join(GATED)}, clamped or not"
    return len(CASES), None


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _calls_apply_gate(module: nn.Module) -> bool:
    """Whether the code that runs these experts names `_apply_gate`: the loop ("eager") has the gate inside."""
    forward = type(module).forward
    original = getattr(forward, "__wrapped__", forward)
    function = ALL_EXPERTS_FUNCTIONS.get_interface(_implementation(module) or "eager", original)
    return "_apply_gate" in getattr(getattr(function, "__code__", None), "co_names", ())
