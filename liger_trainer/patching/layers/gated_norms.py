"""RMSNorm layers with a gate (Qwen3-Next, Kimi Linear, Mamba-2 hybrids): found by structure, proved on a miniature.

    norm first   rms_norm(x) * weight * act(gate)
    gate first   rms_norm(x * act(gate)) * weight

Such a norm is a leaf with a 1-D weight, an eps, and two inputs, of which the second may be left out; then its own
forward runs. How many columns are normalised together is read from a number of the layer's, if it has one.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...kernels.gated_rms_norm import ACTIVATIONS, gated_rms_norm, gated_rms_norm_reference
from .. import structure
from ..options import PatchOptions, PatchReport
from .norms import CASES, EPS, ROWS, norm_miniature, once_for_equal_widths, width

KIND = "gated RMSNorm"
SIZES = ("group_size",)  # attributes that say how many columns are normalised together
COUNTS = ("n_groups", "num_groups", "ngroups")  # how many groups there are
NARROW = 4e-3  # of bf16 outputs: the layers round the normalised row and its product with the weight, too
FP32 = torch.float32


@dataclass(frozen=True)
class GatedNormRule:
    """This form, with the module's weight, eps and groups under these names.

    Attributes:
        size, count: names of the columns of a group or of the number of groups; both None for one group.
    """

    activation: str
    gate_first: bool
    weight: str
    eps: str
    size: str | None = None
    count: str | None = None

    def __call__(self, module: nn.Module, x: Tensor, gate: Tensor, plain: bool = False) -> Tensor:
        """Run the norm with what `module` holds now; `plain`: by the op's reference, as the proof wants it."""
        op = gated_rms_norm_reference if plain else gated_rms_norm
        weight, eps = getattr(module, self.weight), getattr(module, self.eps)
        groups = self.groups(module, x.shape[-1])
        return op(x, gate, weight, eps, activation=self.activation, gate_first=self.gate_first, groups=groups)

    def groups(self, module: nn.Module, columns: int) -> int:
        if self.count is not None:
            return getattr(module, self.count)
        return 1 if self.size is None else columns // getattr(module, self.size)


def patch_gated_norms(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Swap the gated norms, if `options` ask for RMSNorm."""
    if not options.rms_norm:
        return
    prove = once_for_equal_widths(prove_gated_norm)
    for module, rule in structure.candidates(model, replacements, looks_like_a_gated_norm, prove):
        if isinstance(rule, str):
            report.leave(type(module).__name__, rule)
            replacements.claim(module)  # norms.py would say that it has two inputs
        else:
            replacements.forward(module, gated_norm_forward(rule))
            report.swap(KIND)


def gated_norm_forward(rule: GatedNormRule) -> Callable[..., Tensor]:
    def forward(module, *inputs, **named):
        given = (*inputs, *named.values())
        if len(given) != 2 or given[1] is None or given[0].shape != given[1].shape:
            return type(module).forward(module, *inputs, **named)
        return rule(module, *given)

    return forward


def looks_like_a_gated_norm(module: nn.Module) -> bool:
    """Whether it is a leaf with a 1-D weight and an eps, whose second input is called a gate."""
    tensors = structure.tensors(module)
    if module._modules or len(tensors) != 1 or not any(name in vars(module) for name in EPS):
        return False
    inputs = list(inspect.signature(type(module).forward).parameters)[1:]
    return len(inputs) == 2 and "gate" in inputs[1] and all(tensor.dim() == 1 for tensor in tensors.values())


def prove_gated_norm(module: nn.Module) -> GatedNormRule | str:
    """Return the rule that holds for a gated norm, or why none does."""
    if any(not tensor.is_floating_point() for tensor in structure.tensors(module).values()):
        return "its weight is quantised"
    return structure.first_that_holds(_rules(module), functools.partial(_check, module))


def _rules(module: nn.Module) -> Iterator[GatedNormRule]:
    (weight,) = structure.tensors(module)
    numbers = {name for name, x in vars(module).items() if isinstance(x, int) and not isinstance(x, bool) and x > 0}
    of_groups: list[tuple[str | None, str | None]] = [(name, None) for name in SIZES if name in numbers]
    of_groups += [(None, name) for name in COUNTS if name in numbers]
    for eps in (name for name in EPS if name in vars(module)):
        for activation in ACTIVATIONS:
            for gate_first in (False, True):
                for size, count in (*of_groups, (None, None)):
                    yield GatedNormRule(activation, gate_first, weight, eps, size, count)


def _check(module: nn.Module, rule: GatedNormRule) -> tuple[int, str | None]:
    """See `structure.first_that_holds`."""
    groups = rule.groups(module, width(module))
    if groups < 1 or width(module) % groups:
        return 0, f"its {width(module)} columns are no {groups} groups"
    for passed, (dtype, weight_dtype, autocast) in enumerate(CASES):
        with structure.on_miniatures(autocast):
            small, (x, gate) = norm_miniature(module, weight_dtype), _inputs(module, dtype)
            try:
                theirs = type(small).forward(small, x, gate)
            except Exception as error:
                return passed, structure.failure(error)
            ours = rule(small, x, gate, plain=True)
            if ours.dtype == theirs.dtype:  # a result that is wider than x has been rounded like x
                refused = structure.difference(ours.to(dtype), theirs.to(dtype), NARROW)
            else:
                refused = f"it returns {theirs.dtype} where {ours.dtype} was expected"
            refused = refused or structure.gradient_difference(ours, theirs, [x, gate, *small.parameters()])
        if refused is not None:
            return passed, f"it is neither norm(x) * act(gate) nor norm(x * act(gate)): {refused}"
    return len(CASES), None


def _inputs(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw x and the gate (2, ROWS / 2, H): x from rows so small that only eps counts to rows so large that not."""
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(ROWS, width(module), generator=generator, dtype=FP32, device="cpu") for _ in range(2))
    x *= torch.logspace(-5, 2, ROWS, dtype=FP32, device="cpu")[:, None]
    x, gate = (y.view(2, ROWS // 2, -1).to(dtype).requires_grad_() for y in (x, gate * 2))
    return x, gate
