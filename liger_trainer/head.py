"""The output head of a causal LM, read when it is used: FSDP and PEFT replace modules and parameters after patching."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .errors import ConfigError


@dataclass(frozen=True)
class Head:
    """Weight (V, H) and bias (V,) or None of a linear output head, whole, as plain tensors."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def read(cls, module: nn.Module | None) -> "Head | str":
        """The head, or in words why `module` cannot be replaced by its weight and bias."""
        if module is None:
            return "the model has no output embeddings"
        module = _active(module)
        if type(module).forward is not nn.Linear.forward:
            return f"its output head is a {type(module).__name__}, which does more than a linear map"
        if "forward" in vars(module):
            return f"the forward of its output head ({type(module).__name__}) has been replaced"
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if weight is None or not weight.is_floating_point():
            return f"the weight of its output head ({type(module).__name__}) is not a floating-point matrix"
        if hasattr(weight, "ds_id"):
            raise ConfigError(
                "The output head is partitioned by DeepSpeed ZeRO-3, which the fused losses do not gather. "
                "Use ZeRO-2 or FSDP2."
            )
        return cls(_whole(weight), None if bias is None else _whole(bias))


def _active(module: Any) -> nn.Module:
    """What PEFT's `modules_to_save` wrapper delegates to."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return module
    adapter = next(iter(module.active_adapters), "")
    if getattr(module, "disable_adapters", False) or adapter not in copies:
        return module.original_module
    return copies[adapter]


def _whole(parameter: Tensor) -> Tensor:
    """FSDP2 shards parameters as DTensors; gathering is differentiable."""
    full_tensor = getattr(parameter, "full_tensor", None)
    return parameter if full_tensor is None else full_tensor()


def output_module(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()
