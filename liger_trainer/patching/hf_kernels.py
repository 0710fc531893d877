"""Our layers through transformers' own kernel mapping: `use_kernels=True` from local code, without the Hub.

Hugging Face's `kernels` package replaces the forward of layers that a model names: `RMSNorm`, `rotary_pos_emb`.
`map_kernels(model)` hands it our layers for these, and for norms and MLPs without such a name, each proved on a
miniature as `patch` proves it. The mapping belongs to the model: nothing is fetched, and `train()` and `eval()`, which
make transformers map again, find ours. The package works in two ways that we cannot undo: a rotary function is one
object for all models of its module, and a class without a layer name gets one.

`patch(model)` needs none of this, and does more: the fused loss, norms of queries and keys with the rotation, LoRA.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.import_utils import is_kernels_available

from ..errors import ConfigError
from . import structure
from .mlps import MLPRule, looks_like_an_mlp, mlp_forward, prove_mlp
from .norms import looks_like_a_norm, norm_forward, once_for_equal_norms
from .options import PatchReport
from .patcher import patched_record
from .rotary import layouts_of, prove_rotary, replacement


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """A layer class in the form in which `kernels` takes a repository of the Hub."""

    layer_name: str
    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"liger_trainer ({self.layer_name})"


@dataclass(frozen=True)
class _Layer:
    """A layer of the model that looks like one of ours.

    Attributes:
        name: the layer's name in the mapping.
        rule: the rule that holds for it, or why none does.
        forward: makes our forward from a rule.
        kind: for the report.
    """

    name: str
    module: nn.Module
    rule: Any
    forward: Callable[[Any], Callable]
    kind: str = ""


def map_kernels(model: Any) -> PatchReport:
    """Have transformers and `kernels` run our layers in a model, where `use_kernels=True` would run the Hub's.

    Args:
        model: a transformers model on the device where it will run.

    Returns:
        A report of what was mapped, and what was left alone.

    Raises:
        ConfigError: `kernels` is missing, or transformers does not take its version; the model is patched, or
            transformers runs other kernels in it already; it has no layer to map.
    """
    _check(model)
    from transformers import KernelConfig
    from transformers.integrations import hub_kernels

    report = PatchReport(model.config.model_type)
    layers: dict[str, list[_Layer]] = {}
    for layer in _layers(model):
        layers.setdefault(layer.name, []).append(layer)
    mapping: dict[str, Any] = {}
    for name, group in layers.items():
        local = _local_layer(name, group, report)
        if local is not None:
            mapping[name] = {_device_type(model): local}
            for kind in {type(layer.module) for layer in group}:
                if not hasattr(kind, "kernel_layer_name"):
                    hub_kernels.replace_kernel_forward_from_hub(kind, name)
    if not mapping:
        raise ConfigError(f"No layer of {report.model} is found to map. Left alone: {report.reasons or 'none'}.")
    model.kernel_config = KernelConfig(mapping, inherit_mapping=False)
    hub_kernels.kernelize(model)
    return report


def _check(model: Any) -> None:
    if not is_kernels_available():
        raise ConfigError(
            "Mapping kernels needs Hugging Face's `kernels` package, in a version that this transformers takes: "
            "pip install 'transformers[kernels]'. patch(model) needs no such package."
        )
    if patched_record(model) is not None:
        raise ConfigError("This model is patched: its layers are ours already. Undo that first: patched.undo().")
    if getattr(model, "use_kernels", False):
        raise ConfigError("transformers runs other kernels in this model. Load it without use_kernels=True.")


def _layers(model: nn.Module) -> Iterator[_Layer]:
    norm, mlp = once_for_equal_norms(), structure.once_for_equal_layers(prove_mlp)
    layouts, functions = layouts_of(model), set()
    for module in model.modules():
        name = getattr(type(module), "kernel_layer_name", type(module).__name__)
        if looks_like_a_norm(module):
            rule = norm(module)
            yield _Layer(name, module, rule, norm_forward, "" if isinstance(rule, str) else rule.form.kind)
        elif looks_like_an_mlp(module) and (rule := mlp(module)) is not None:
            yield _Layer(name, module, rule, _mlp_without_lora, "" if isinstance(rule, str) else rule.kind)
        for function in getattr(module, "_kernel_funcs", {}).values():
            if type(function).kernel_layer_name == "rotary_pos_emb" and function not in functions:
                functions.add(function)
                yield _rotary(function, layouts)


def _mlp_without_lora(rule: MLPRule) -> Callable:
    return mlp_forward(rule, lora=False)


def _rotary(function: Any, layouts: frozenset[str]) -> _Layer:
    own = types.MethodType(type(function).forward, function)  # kept from before `kernels` replaces it

    def forward(rule: Any) -> Callable:
        ours = replacement(own, rule)
        return lambda module, *args, **kwargs: ours(*args, **kwargs)

    return _Layer("rotary_pos_emb", function, prove_rotary(own, layouts), forward, "rope")


def _local_layer(name: str, group: list[_Layer], report: PatchReport) -> LocalLayer | None:
    """Return one class for all layers of a name, if one rule holds for all of them."""
    for layer in group:
        refused = layer.rule if isinstance(layer.rule, str) else _obstacle(layer)
        if refused is not None:
            report.leave(name, refused)
            return None
    first = group[0]
    if len({layer.rule for layer in group}) > 1:
        report.leave(name, "the mapping has one layer for each name, and the model's layers of this name differ")
        return None
    report.swap(first.kind, len(group))
    return LocalLayer(name, _layer_class(type(first.module), first.forward(first.rule)))


def _obstacle(layer: _Layer) -> str | None:
    # transformers replaces the forward of a rotary function itself: that is no obstacle
    return None if layer.kind == "rope" else structure.obstacle(layer.module)


def _layer_class(kind: type, forward: Callable) -> type[nn.Module]:
    """Return a class with nothing but a forward of the same signature, which is what `kernels` checks for."""

    def called(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    called.__signature__ = inspect.signature(kind.forward)  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    members = {"forward": called, "has_backward": True, "can_torch_compile": True}
    return type(f"Liger{kind.__name__}", (nn.Module,), members)


def _device_type(model: Any) -> str:
    kind = model.device.type
    return "rocm" if kind == "cuda" and torch.version.hip else kind
