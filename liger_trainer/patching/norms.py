"""RMSNorm and LayerNorm layers: found by structure, proved on a miniature, run by our ops.

A norm is a leaf whose tensors are a 1-D weight (or none) and perhaps a 1-D bias, with an eps and one input. Its form
(see structure.NORM_FORMS) is what its own forward computes, in fp32, in bf16, in bf16 with fp32 weights, and under
autocast: rounding and dtypes decide between forms that are equal in fp32.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..common.replacements import Replacements
from ..kernels.layer_norm import layer_norm, layer_norm_reference
from ..kernels.rms_norm import rms_norm, rms_norm_reference
from . import structure
from .structure import NormForm

ROWS = 32
# How far bf16 outputs may be apart. For RMSNorm between a rounding here and there and another order of rounding, about
# 1e-3; torch's own LayerNorm errs by more on a CPU, and there are no two orders to tell apart.
NARROW = {"RMSNorm": 4e-4, "LayerNorm": 4e-3}
FP32, BF16 = torch.float32, torch.bfloat16
CASES = ((FP32, FP32, False), (BF16, BF16, False), (BF16, FP32, False), (FP32, FP32, True), (BF16, FP32, True))


@dataclass(frozen=True)
class NormRule:
    """A proved claim: this form, with the module's tensors and eps under these names, and so under autocast.

    Attributes:
        eps: an attribute's name, or the number itself where the forward holds it.
        autocast: one of structure.AUTOCAST.
    """

    form: NormForm
    weight: str | None
    bias: str | None
    eps: str | float
    autocast: str = "keep"

    def __call__(self, module: nn.Module, x: Tensor, widens: bool, plain: bool = False) -> Tensor:
        """The norm of x, with what `module` holds now.

        Args:
            widens: whether torch's own norm takes half precision to fp32 under autocast on x's device.
            plain: by the ops' references, as the proof wants it.
        """
        weight = None if self.weight is None else getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        centred = self.form.kind == "LayerNorm"
        if centred and self.form.offset and weight is not None:
            weight = weight + self.form.offset
        if self.autocast == "narrow" and torch.is_autocast_enabled():
            x, weight, bias = (_narrowed(tensor, x.device.type) for tensor in (x, weight, bias))
        elif self.autocast == "widen" and widens and x.element_size() < 4 and torch.is_autocast_enabled(x.device.type):
            x = x.float()
        if centred:
            return (layer_norm_reference if plain else layer_norm)(x, weight, bias, eps)
        op = rms_norm_reference if plain else rms_norm
        return op(x, weight, eps, offset=self.form.offset, cast_before_weight=self.form.cast_before_weight)


Proofs = dict[tuple, NormRule | str]  # by class, settings and width, see `proof`


def _narrowed(x: Any, device_type: str) -> Any:
    return None if x is None else x.to(torch.get_autocast_dtype(device_type))


def patch_norms(model: nn.Module, options: Any, replacements: Replacements, report: Any) -> None:
    """Swap the norms that `options` ask for. Those that a part before this one computes are passed over."""
    if not (options.rms_norm or options.layer_norm):
        return
    proved: Proofs = {}
    for module in model.modules():
        if module in replacements or not _looks_like_a_norm(module):
            continue
        norm = structure.obstacle(module) or proof(module, proved)
        if isinstance(norm, str):
            report.leave(type(module).__name__, norm)
        elif getattr(options, structure.OPTIONS[norm.form.kind]):
            replacements.forward(module, _forward(norm))
            report.swap(norm.form.kind)


def _forward(norm: NormRule) -> Callable[..., Tensor]:
    def forward(module, *inputs, **named):
        (x,) = (*inputs, *named.values())
        if norm.autocast != "widen":
            return norm(module, x, False)
        if torch.compiler.is_compiling():  # the device is not asked while a graph is traced
            return type(module).forward(module, x)
        return norm(module, x, structure.widens_under_autocast(norm.form.kind, x.device.type))

    return forward


def _looks_like_a_norm(module: nn.Module) -> bool:
    tensors = structure.tensors(module)
    return (
        not module._modules
        and len(tensors) <= 2
        and all(tensor.dim() == 1 for tensor in tensors.values())
        and bool(_eps_of(module))
    )


def _eps_of(module: nn.Module) -> list[str | float]:
    named: list[str | float] = [name for name in structure.EPS if name in vars(module)]
    return named or (list(structure.FIXED_EPS) if "normalized_shape" in vars(module) else [])


def proof(module: nn.Module, proved: Proofs) -> NormRule | str:
    """`prove`, once for all norms of one class, settings and width: of few columns, a proof may tell less."""
    key = (*structure.settings(module), _width(module))
    if key not in proved:
        proved[key] = prove(module)
    return proved[key]


def prove(module: nn.Module) -> NormRule | str:
    """The claim that holds for a norm, or in words why none does."""
    inputs = structure.inputs_of(type(module).forward)
    if inputs is None or len(inputs) != 1:
        return f"it takes {', '.join(inputs or ['any number of inputs'])}, where a norm has one input"
    if any(not tensor.is_floating_point() for tensor in structure.tensors(module).values()):
        return "its weight is quantised"
    held = structure.first_that_holds(_claims(module), functools.partial(_cases_passed, module))
    return held or "it has more tensors than a weight and a bias"


def _claims(module: nn.Module) -> Iterator[NormRule]:
    tensors = list(structure.tensors(module))
    bias = "bias" if "bias" in tensors else None
    weights = [name for name in tensors if name != bias]
    if len(weights) > 1:
        return
    weight = weights[0] if weights else None
    for eps in _eps_of(module):
        for form in structure.NORM_FORMS:
            if (weight is None and (form.offset or form.cast_before_weight)) or (bias and form.kind == "RMSNorm"):
                continue
            for autocast in structure.AUTOCAST:
                yield NormRule(form, weight, bias, eps, autocast)


def _cases_passed(module: nn.Module, norm: NormRule) -> tuple[int, str | None]:
    """In how many cases the claim holds before one in which it does not, and in words what differs there."""
    if isinstance(norm.eps, str) and not isinstance(getattr(module, norm.eps), float):
        return 0, f"its {norm.eps} is {getattr(module, norm.eps)!r}, not a number"
    for passed, (dtype, weight_dtype, autocast) in enumerate(CASES):
        with structure.on_miniatures(autocast):
            small, x = _miniature(module, weight_dtype), _rows(module, dtype)
            try:
                own = type(small).forward(small, x)
            except Exception as error:
                if dtype == weight_dtype:
                    return passed, structure.failure(error)
                continue  # it takes no weights of another dtype
            ours = norm(small, x, widens=True, plain=True)
            refused = structure.difference(ours, own, NARROW[norm.form.kind])
            refused = refused or structure.gradient_difference(ours, own, [x, *small.parameters()])
        if refused is not None:
            return passed, refused + (" under autocast" if autocast else f" in {dtype}")
    return len(CASES), None


def _width(module: nn.Module) -> int:
    shape = getattr(module, "normalized_shape", None)
    widths = [tensor.numel() for tensor in structure.tensors(module).values()]
    return widths[0] if widths else shape[-1] if shape else 64


def _rows(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """(2, ROWS / 2, H), from so small that eps is all that counts to so large that it is nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, _width(module), generator=generator, dtype=FP32, device="cpu")
    x *= torch.logspace(-5, 2, ROWS, dtype=FP32, device="cpu")[:, None]
    return x.add_(x.std(1, correction=0, keepdim=True) / 2).view(2, ROWS // 2, -1).to(dtype).requires_grad_()


def _miniature(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    return structure.miniature(
        module,
        {
            name: nn.Parameter(
                torch.randn(_width(module), generator=generator, dtype=FP32, device="cpu").mul(0.5).add(0.5).to(dtype)
            )
            for name in structure.tensors(module)
        },
        {},
    )
