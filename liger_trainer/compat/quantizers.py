"""transformers' quantizers (5.6 to 5.24), while a model is loaded: its stacked experts become, or stay, 4 bits."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.integrations import bitsandbytes, mxfp4
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from .four_bit_tensor import FourBitTensor
from .models import GATE, STACKED

PACKED_BYTES = 17 / 32  # of a number in MXFP4: transformers reserves a model's memory before it reads the files


def _is_stacked(model: Any, name: str) -> bool:
    module, own = get_module_from_name(model, name)
    return own in STACKED and hasattr(type(module), GATE)


def _frozen(weight: FourBitTensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


class _Bnb4bitQuantize(bitsandbytes.Bnb4bitQuantize):
    """bitsandbytes' linear layers, and experts in our nf4, layer by layer as the files are read."""

    def convert(
        self, input_dict: Any, full_layer_name: str | None = None, model: Any = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        experts = {name: value for name, value in input_dict.items() if _is_stacked(model, name)}
        others = {name: value for name, value in input_dict.items() if name not in experts}
        packed: dict[str, Tensor] = {
            name: _frozen(FourBitTensor.nf4(value[0] if isinstance(value, list) else value))
            for name, value in experts.items()
        }
        return packed | (super().convert(others, full_layer_name, model, **kwargs) if others else {})


class _KeepMxfp4(mxfp4.Mxfp4Dequantize):
    """In the place of what makes gpt-oss' packed experts bf16."""

    def convert(
        self, input_dict: Any, model: Any = None, full_layer_name: str | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        assert full_layer_name is not None
        found = {name.rpartition("_")[2]: value for name, value in input_dict.items()}
        blocks, scales = (
            value[0] if isinstance(value, list) else value for value in (found["blocks"], found["scales"])
        )
        module, own = get_module_from_name(model, full_layer_name)
        return {full_layer_name: _frozen(FourBitTensor.mxfp4(blocks, scales, getattr(module, own).dtype))}


@contextlib.contextmanager
def experts_in_4_bits() -> Iterator[None]:
    """Within, experts of a model that is loaded with `load_in_4bit` are quantised too, and MXFP4's stay packed.

    The latter are loaded with `Mxfp4Config(dequantize=True)`, which leaves the modules transformers' own.
    """
    needs, size_of = Bnb4BitHfQuantizer.param_needs_quantization, Mxfp4HfQuantizer.param_element_size

    def with_experts(self: Any, model: Any, param_name: str, **kwargs: Any) -> bool:
        if needs(self, model, param_name, **kwargs):
            return True
        return _is_stacked(model, param_name) and should_convert_module(param_name, self.modules_to_not_convert)

    def packed_size(self: Any, model: Any, param_name: str, param: Tensor) -> float:
        return PACKED_BYTES if _is_stacked(model, param_name) else size_of(self, model, param_name, param)

    replaced = (
        (Bnb4BitHfQuantizer, "param_needs_quantization", with_experts),
        (Mxfp4HfQuantizer, "param_element_size", packed_size),
        (bitsandbytes, "Bnb4bitQuantize", _Bnb4bitQuantize),
        (mxfp4, "Mxfp4Dequantize", _KeepMxfp4),
    )
    before = [getattr(owner, name) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


def packed_experts(model: nn.Module) -> list[FourBitTensor]:
    """Return the weights of experts that are in 4 bits."""
    return [weight for weight in model.parameters() if isinstance(weight, FourBitTensor)]
