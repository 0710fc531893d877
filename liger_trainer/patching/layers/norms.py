"""RMSNorm and LayerNorm layers: found by structure, proved on a miniature, run by our ops.

A norm is a leaf whose tensors are a 1-D weight (or none) and perhaps a 1-D bias, with an eps and one input. Its form is
what its own forward computes, in fp32, in bf16, in bf16 with fp32 weights, and under autocast: rounding and dtypes
decide between forms that are equal in fp32.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...compat.modules import own_buffers, own_children
from ...kernels.gated_rms_norm import ACTIVATIONS, gated_rms_norm, gated_rms_norm_reference
from ...kernels.layer_norm import layer_norm, layer_norm_reference
from ...kernels.rms_norm import rms_norm, rms_norm_reference
from .. import structure
from ..options import PatchOptions, PatchReport


@dataclass(frozen=True)
class NormForm:
    """normalised(x) * (offset + weight) + bias.

    Attributes:
        kind: "RMSNorm", or "LayerNorm", which also subtracts the mean.
        offset: added to the weight.
        cast_before_weight: whether the normalised x is rounded to x's dtype before it meets the weight.
    """

    kind: str
    offset: float = 0.0
    cast_before_weight: bool = False


NORM_FORMS = (
    NormForm("RMSNorm", cast_before_weight=True),  # Llama, Mistral, Qwen
    NormForm("RMSNorm"),  # OLMo 2, gpt-oss, Gemma 4
    NormForm("RMSNorm", offset=1.0),  # Gemma, Qwen3-Next
    NormForm("LayerNorm"),  # GPT-2, Cohere
    NormForm("LayerNorm", offset=1.0),  # Nemotron
)
# What autocast does to a norm. "keep": nothing. "widen": half precision becomes fp32, as F.layer_norm on a GPU does.
# "narrow": everything is cast to autocast's dtype where autocast for CUDA is on (Nemotron).
AUTOCAST = ("keep", "widen", "narrow")
EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
FIXED_EPS = (1e-5, 1e-6, 1e-12)  # of LayerNorms that keep it in their forward (OLMo)
OPTIONS = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm"}  # the option of `PatchOptions` that asks for it

ROWS = 32
# How far bf16 outputs may be apart. For RMSNorm the bound lies between one rounding more or less and another order of
# rounding, which is about 1e-3. torch's own LayerNorm errs by more on a CPU, and there are no two orders to tell apart.
NARROW = {"RMSNorm": 4e-4, "LayerNorm": 4e-3}
FP32, BF16 = torch.float32, torch.bfloat16
# dtype of x, of the weight, autocast
CASES = ((FP32, FP32, False), (BF16, BF16, False), (BF16, FP32, False), (FP32, FP32, True), (BF16, FP32, True))


@dataclass(frozen=True)
class NormRule:
    """This form, with the module's tensors and eps under these names, and this behaviour under autocast.

    Attributes:
        eps: an attribute's name, or the number itself where the forward holds it.
        autocast: one of AUTOCAST.
    """

    form: NormForm
    weight: str | None
    bias: str | None
    eps: str | float
    autocast: str = "keep"

    def __call__(self, module: nn.Module, x: Tensor, widens: bool, plain: bool = False) -> Tensor:
        """Normalise x, with what `module` holds now.

        Args:
            widens: whether torch's own norm takes half precision to fp32 under autocast on x's device.
            plain: compute by the ops' references, as the proof wants it.
        """
        weight = None if self.weight is None else getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        eps = self.eps_of(module)
        centred = self.form.kind == "LayerNorm"
        if centred and self.form.offset and weight is not None:
            weight = weight + self.form.offset
        if self.autocast == "narrow" and torch.is_autocast_enabled():
            narrow = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(narrow), *(None if p is None else p.to(narrow) for p in (weight, bias))
        elif self.autocast == "widen" and widens and x.element_size() < 4 and torch.is_autocast_enabled(x.device.type):
            x = x.float()
        if centred:
            return (layer_norm_reference if plain else layer_norm)(x, weight, bias, eps)
        op = rms_norm_reference if plain else rms_norm
        return op(x, weight, eps, offset=self.form.offset, cast_before_weight=self.form.cast_before_weight)

    def eps_of(self, module: nn.Module) -> float:
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps


def patch_norms(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Swap the norms that `options` ask for. Those that an earlier part computes are passed over."""
    if not (options.rms_norm or options.layer_norm):
        return
    prove = once_for_equal_widths(prove_norm)
    for module, rule in structure.proved_layers(model, replacements, report, looks_like_a_norm, prove):
        if getattr(options, OPTIONS[rule.form.kind]):
            replacements.forward(module, norm_forward(rule))
            report.swap(rule.form.kind)


def norm_forward(rule: NormRule) -> Callable[..., Tensor]:
    def forward(module, *inputs, **named):
        (x,) = (*inputs, *named.values())
        if rule.autocast != "widen":
            return rule(module, x, False)
        if torch.compiler.is_compiling():  # asking the device runs a norm on it, which a graph would record
            return type(module).forward(module, x)
        return rule(module, x, structure.widens_under_autocast(rule.form.kind, x.device.type))

    return forward


def looks_like_a_norm(module: nn.Module) -> bool:
    tensors = structure.tensors(module)
    return (
        not own_children(module)
        and len(tensors) <= 2
        and all(tensor.dim() == 1 for tensor in tensors.values())
        and bool(_places_of_eps(module))
    )


def _places_of_eps(module: nn.Module) -> list[str | float]:
    named: list[str | float] = [name for name in EPS if name in vars(module)]
    return named or (list(FIXED_EPS) if "normalized_shape" in vars(module) else [])


def once_for_equal_widths(prove: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Return `prove`, run once for norms of one class, settings and width: few columns may prove less."""
    return structure.once_for_equal_layers(prove, lambda module: (structure.cache_key(module), width(module)))


def prove_norm(module: nn.Module) -> NormRule | str:
    """Return the rule that holds for a norm, or why none does."""
    inputs = structure.inputs_of(type(module).forward)
    if inputs is None or len(inputs) != 1:
        return f"it takes {', '.join(inputs or ['any number of inputs'])}, where a norm has one input"
    if any(not tensor.is_floating_point() for tensor in structure.tensors(module).values()):
        return "its weight is quantised"
    rule = structure.first_that_holds(_rules(module), functools.partial(_check, module))
    return rule or "it has more tensors than a weight and a bias"


def _rules(module: nn.Module) -> Iterator[NormRule]:
    tensors = list(structure.tensors(module))
    bias = "bias" if "bias" in tensors else None
    weights = [name for name in tensors if name != bias]
    if len(weights) > 1:
        return
    weight = weights[0] if weights else None
    for eps in _places_of_eps(module):
        for form in NORM_FORMS:
            if (weight is None and (form.offset or form.cast_before_weight)) or (bias and form.kind == "RMSNorm"):
                continue
            for autocast in AUTOCAST:
                yield NormRule(form, weight, bias, eps, autocast)
        if weight in own_buffers(module):  # it may be there for the kernels of others, as in FalconMamba
            yield NormRule(NormForm("RMSNorm"), None, bias, eps)


def _check(module: nn.Module, rule: NormRule) -> tuple[int, str | None]:
    """See `structure.first_that_holds`."""
    if isinstance(rule.eps, str) and not isinstance(getattr(module, rule.eps), float):
        return 0, f"its {rule.eps} is {getattr(module, rule.eps)!r}, not a number"
    for passed, (dtype, weight_dtype, autocast) in enumerate(CASES):
        with structure.on_miniatures(autocast):
            small, x = norm_miniature(module, weight_dtype), _input(module, dtype)
            try:
                theirs = type(small).forward(small, x)
            except Exception as error:
                if dtype == weight_dtype:
                    return passed, f"it does not take rows of {width(module)} columns: {structure.failure(error)}"
                continue  # it takes no weights of another dtype
            ours = rule(small, x, widens=True, plain=True)
            refused = structure.difference(ours, theirs, NARROW[rule.form.kind])
            refused = refused or structure.gradient_difference(ours, theirs, [x, *small.parameters()])
        if refused is not None:
            refused += " under autocast" if autocast else f" in {dtype}"
            return passed, refused if not passed or autocast else f"it rounds otherwise than ours: {refused}"
    return len(CASES), None


def width(module: nn.Module) -> int:
    """Return the columns of a norm; 64 where it does not say."""
    shape = getattr(module, "normalized_shape", None)
    widths = [tensor.numel() for tensor in structure.tensors(module).values()]
    return widths[0] if widths else shape[-1] if shape else 64


def norm_miniature(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a norm with random weights."""
    generator = torch.Generator().manual_seed(1)

    def weight() -> nn.Parameter:
        values = torch.randn(width(module), generator=generator, dtype=FP32, device="cpu")
        return nn.Parameter((values * 0.5 + 0.5).to(dtype))

    return structure.miniature(module, {name: weight() for name in structure.tensors(module)}, {})


def _input(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Draw x (2, ROWS / 2, H)."""
    x = _rows(module, torch.Generator().manual_seed(0)).mul_(_SIZES)
    # The rows get a mean, by which RMSNorm and LayerNorm differ.
    return _as_batch(x.add_(x.std(1, correction=0, keepdim=True) / 2), dtype)


# From rows so small that only eps counts to rows so large that it does not.
_SIZES = torch.logspace(-5, 2, ROWS, dtype=FP32, device="cpu")[:, None]


def _rows(module: nn.Module, generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, width(module), generator=generator, dtype=FP32, device="cpu")


def _as_batch(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(2, ROWS // 2, -1).to(dtype).requires_grad_()


# RMSNorm layers with a gate (Qwen3-Next, Kimi Linear, Mamba-2 hybrids): found by structure, proved on a miniature.
#
# norm first   rms_norm(x) * weight * act(gate)
# gate first   rms_norm(x * act(gate)) * weight
#
# Such a norm is a leaf with a 1-D weight, an eps, and two inputs, of which the second may be left out; then its own
# forward runs. How many columns are normalised together is read from a number of the layer's, if it has one.


GATED_KIND = "gated RMSNorm"
GROUP_SIZES = ("group_size",)  # attributes that say how many columns are normalised together
GROUP_COUNTS = ("n_groups", "num_groups", "ngroups")  # how many groups there are
GATED_NARROW = 4e-3  # of bf16 outputs: the layers round the normalised row and its product with the weight, too


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
    for module, rule in structure.proved_layers(model, replacements, report, looks_like_a_gated_norm, prove):
        replacements.forward(module, gated_norm_forward(rule))
        report.swap(GATED_KIND)
    for module in filter(looks_like_a_gated_norm, model.modules()):
        replacements.mark_as_patched(
            module
        )  # also those that stay, of which `patch_norms` would say that they have two inputs


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
    if own_children(module) or len(tensors) != 1 or not any(name in vars(module) for name in EPS):
        return False
    inputs = list(inspect.signature(type(module).forward).parameters)[1:]
    return len(inputs) == 2 and "gate" in inputs[1] and all(tensor.dim() == 1 for tensor in tensors.values())


def prove_gated_norm(module: nn.Module) -> GatedNormRule | str:
    """Return the rule that holds for a gated norm, or why none does."""
    if any(not tensor.is_floating_point() for tensor in structure.tensors(module).values()):
        return "its weight is quantised"
    return structure.first_that_holds(_gated_rules(module), functools.partial(_check_gated, module))


def _gated_rules(module: nn.Module) -> Iterator[GatedNormRule]:
    (weight,) = structure.tensors(module)
    numbers = {name for name, x in vars(module).items() if isinstance(x, int) and not isinstance(x, bool) and x > 0}
    of_groups: list[tuple[str | None, str | None]] = [(name, None) for name in GROUP_SIZES if name in numbers]
    of_groups += [(None, name) for name in GROUP_COUNTS if name in numbers]
    for eps in (name for name in EPS if name in vars(module)):
        for activation in ACTIVATIONS:
            for gate_first in (False, True):
                for size, count in (*of_groups, (None, None)):
                    yield GatedNormRule(activation, gate_first, weight, eps, size, count)


def _check_gated(module: nn.Module, rule: GatedNormRule) -> tuple[int, str | None]:
    """See `structure.first_that_holds`."""
    groups = rule.groups(module, width(module))
    if groups < 1 or width(module) % groups:
        return 0, f"its {width(module)} columns are no {groups} groups"
    for passed, (dtype, weight_dtype, autocast) in enumerate(CASES):
        with structure.on_miniatures(autocast):
            small, generator = norm_miniature(module, weight_dtype), torch.Generator().manual_seed(0)
            x, gate = _rows(module, generator).mul_(_SIZES), _rows(module, generator) * 2
            x, gate = _as_batch(x, dtype), _as_batch(gate, dtype)
            try:
                theirs = type(small).forward(small, x, gate)
            except Exception as error:
                return passed, structure.failure(error)
            ours = rule(small, x, gate, plain=True)
            if ours.dtype == theirs.dtype:  # a result that is wider than x has been rounded like x
                refused = structure.difference(ours.to(dtype), theirs.to(dtype), GATED_NARROW)
            else:
                refused = f"it returns {theirs.dtype} where {ours.dtype} was expected"
            refused = refused or structure.gradient_difference(ours, theirs, [x, gate, *small.parameters()])
        if refused is not None:
            return passed, f"it is neither norm(x) * act(gate) nor norm(x * act(gate)): {refused}"
    return len(CASES), None
