"""Our layers through transformers' own kernel mapping: `use_kernels=True` from local code, without the Hub.

Hugging Face's `kernels` package replaces the forward of layers that a model names: `RMSNorm`, `rotary_pos_emb`.
`map_kernels(model)` gives it our layers for these, and for norms and MLPs without such a name, each proved on a
miniature as `patch` proves it. The mapping is the model's own: nothing is fetched, and `train()` and `eval()`, which
make transformers map again, find ours. Two things are the package's ways: a rotary function is one object for all
models of its module, and a class without a layer name is given one.

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
from .mlps import MLPRule, prove_mlp
from .mlps import _forward as mlp_forward
from .norms import _forward as norm_forward
from .norms import _looks_like_a_norm, prove
from .patcher import PatchReport, patched_record
from .rotary import layouts_of, prove_rotary, replacement


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """What `kernels` takes for a repository: a layer class that is here already."""

    layer_name: str
    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"liger_trainer ({self.layer_name})"


@dataclass(frozen=True)
class _Layer:
    """A layer of the model that is like one of ours."""

    name: str  # that the mapping knows it by
    module: nn.Module
    rule: Any  # what was proved, or in words why nothing is
    forward: Callable[[Any], Callable]  # ours, of a rule
    kind: str = ""  # for the report


def map_kernels(model: Any) -> PatchReport:
    """Have transformers and `kernels` run our layers in a model, as `use_kernels=True` has them run the Hub's.

    Args:
        model: a transformers model on the device where it will run.

    Returns:
        What was mapped, and what was left alone.

    Raises:
        ConfigError: `kernels` is missing, or of a version that transformers does not take; the model is patched, or
            transformers runs other kernels in it already; nothing in it is found to map.
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
        left = "; ".join(f"{name}: {why}" for name, why in report.left_alone.items())
        raise ConfigError(f"No layer of {report.model} is found to map. Left alone: {left or 'none'}.")
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
    layouts, proved, functions = layouts_of(model), {}, set()
    for module in model.modules():
        key, kind = structure.settings(module), type(module)
        name = getattr(kind, "kernel_layer_name", kind.__name__)
        if _looks_like_a_norm(module):
            rule = proved[key] = proved.get(key) or prove(module)
            yield _Layer(name, module, rule, norm_forward, "" if isinstance(rule, str) else rule.form.kind)
        elif 2 <= sum(structure.is_linear(child) for child in module.children()) <= 3:
            rule = proved[key] = proved.get(key) or prove_mlp(module)
            if rule is not None:
                yield _Layer(name, module, rule, _mlp_forward, "" if isinstance(rule, str) else rule.kind)
        for function in getattr(module, "_kernel_funcs", {}).values():
            if type(function).kernel_layer_name == "rotary_pos_emb" and function not in functions:
                functions.add(function)
                yield _rotary(function, layouts)


def _mlp_forward(rule: MLPRule) -> Callable:
    return mlp_forward(rule, lora=False)


def _rotary(function: Any, layouts: frozenset[str]) -> _Layer:
    own = types.MethodType(type(function).forward, function)  # what it was before it is replaced

    def forward(rule: Any) -> Callable:
        ours = replacement(own, rule)
        return lambda module, *args, **kwargs: ours(*args, **kwargs)

    return _Layer("rotary_pos_emb", function, prove_rotary(own, layouts), forward, "rope")


def _local_layer(name: str, group: list[_Layer], report: PatchReport) -> LocalLayer | None:
    """One class for all layers of a name, where one rule holds for all of them."""
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
    return None if layer.kind == "rope" else structure.obstacle(layer.module)  # transformers replaces that one at will


def _layer_class(kind: type, forward: Callable) -> type[nn.Module]:
    """A class with nothing but a forward of the same signature, as `kernels` wants it."""

    def called(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    called.__signature__ = inspect.signature(kind.forward)  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    members = {"forward": called, "has_backward": True, "can_torch_compile": True}
    return type(f"Liger{kind.__name__}", (nn.Module,), members)


def _device_type(model: Any) -> str:
    kind = model.device.type
    return "rocm" if kind == "cuda" and torch.version.hip else kind
