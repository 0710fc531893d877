"""PEFT's plain LoRA layers on our ops.

A layer of `peft.tuners.lora` is read when it is called: base weight, active adapters and their scales, as they are
then. Where that is plain LoRA over a frozen linear layer, `lora_linear` or `lora_mlp` computes it; in every other state
its own forward runs, with the same result and PEFT's cost.

Layers that PEFT adds after `patch` keep PEFT's forward: nothing in the model announces them. Only the MLPs, whose
forward is ours, look at their children at each call and find them.
"""

import functools
import types
import warnings
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.import_utils import is_bnb_4bit_available
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...compat.modules import accelerate_hook, forward_is_moved, is_called, is_hooked, own_children
from ...kernels.four_bits import NESTED_BLOCK, NF4_BLOCK, NestedScales, unpack_nf4_
from ...kernels.lora_linear import lora_linear, lora_linear_reference
from ...kernels.lora_linears import lora_linears
from ...kernels.lora_mlp import lora_mlp
from ...kernels.types import Adapter, Projection, SharedUnpack, Workspace
from ...losses.model_parts import output_module
from .. import structure
from ..options import PatchOptions, PatchReport
from .linears import GROUP, SharedInput, is_plain, is_weight_and_bias, layers_of_one_input

WORKSPACE = "_liger_trainer_workspace"  # the attribute of a layer whose 4-bit weight is unpacked into shared memory


class Ineligible(Exception):
    """The reason why a layer's own forward has to run, as the layer is now."""


def patch_lora(model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport) -> None:
    """Swap the forward of plain LoRA layers. The output head is left to the fused loss."""
    if not options.lora:
        return
    head = output_module(model)
    layers: Any = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    bases = [m.base_layer for _, m in layers if type(m.base_layer) in bnb_4bit_types()]
    workspace = Workspace(max((base.in_features * base.out_features for base in bases), default=0))
    for name, module in layers:
        if module is head or module in replacements or isinstance(module, ParamWrapper):  # experts.py
            continue
        refused = _refused(module)
        if refused is None:
            # Whatever state it is in now: another one may follow, and our forward calls PEFT's where it has to.
            replacements.forward(module, _lora_linear_forward)
            if type(module.base_layer) in bnb_4bit_types():
                replacements.set(module, WORKSPACE, workspace)
            refused = _why_own_forward(module)
        if refused is None:
            report.swap("LoRA linear")
        else:
            report.leave(
                f"LoRA on {name.removesuffix('.base_layer').rpartition('.')[2]}", f"PEFT's forward runs: {refused}"
            )
    for module in model.modules():
        _share_inputs(module, replacements)


def _share_inputs(module: nn.Module, replacements: Replacements) -> None:
    """Have the LoRA layers that a module calls with one tensor computed by one op."""
    for names in layers_of_one_input(type(module)):
        layers = [layer for name in names if _is_ours(layer := own_children(module).get(name))]
        if len(layers) < 2 or len(set(map(id, layers))) < len(layers):
            continue
        group = SharedInput(layers)
        for layer in layers:
            replacements.set(layer, GROUP, group)


def mlp_with_lora(x: Tensor, layers: Sequence[nn.Module], activation: str, remake: bool = False) -> Tensor | None:
    """Compute down(act(gate(x)) * up(x)) by `lora_mlp`; return None where its layers have to be called.

    The op serves an MLP in which at least one layer has plain LoRA adapters, and the others are frozen linear layers.

    Args:
        x: (..., K).
        layers: the MLP's children as they are now: gate, up and down, or packed [gate | up] and down.
        activation, remake: as in `lora_mlp`.
    """
    if not any(type(layer) in _lora_types() for layer in layers):
        return None
    try:
        gate, *up, down = [_member(layer, x) for layer in layers]
    except Ineligible:
        return None
    return lora_mlp(x, gate, up[0] if up else None, down, activation=activation, remake=remake)


def is_lora_mlp(layers: Sequence[nn.Module]) -> bool:
    """Whether `mlp_with_lora` computes an MLP of these layers, in their present state."""
    try:
        # a list: all of them are read, since any of them may be ineligible
        return any([bool(_member(layer, None).adapters) for layer in layers])
    except Ineligible:
        return False


def _lora_linear_forward(module, x, *args, **kwargs):
    if args or kwargs:  # PEFT's own: adapter_names, alora_offsets
        return type(module).forward(module, x, *args, **kwargs)
    group = vars(module).get(GROUP)
    # A graph of torch.compile cannot hold what waits between two calls.
    if group is not None and not torch.compiler.is_compiling():
        y = group.output(module, x, functools.partial(_outputs, x))
        if y is not None:
            return y
    try:
        p = read(module, x)
    except Ineligible:
        return type(module).forward(module, x)
    return lora_linear(x, p.weight, p.bias, p.adapters, unpack=p.unpack)


def _outputs(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """Return the outputs of LoRA layers for x, None if one of them has to be called."""
    try:
        projections = [_member(layer, x) for layer in layers]
    except Ineligible:
        return None
    return lora_linears(x, projections)


def _is_ours(layer: nn.Module | None) -> TypeGuard[nn.Module]:
    forward = None if layer is None else vars(layer).get("forward")
    return isinstance(forward, types.MethodType) and forward.__func__ is _lora_linear_forward


def read(module: Any, x: Tensor | None) -> Projection:
    """Read a LoRA layer as it is now.

    Args:
        x: the layer's input, or None to learn what the layer will be in training.

    Raises:
        Ineligible: PEFT's forward has to run.
    """
    if module.disable_adapters:
        raise Ineligible("adapters are disabled")
    if module.merged_adapters:
        raise Ineligible("adapters are merged into the weight")
    if not module.cast_input_dtype_enabled:
        raise Ineligible("inputs are not cast to the adapters' dtype")
    base = module.base_layer
    weight, unpack = _base_weight(base, x, vars(module).get(WORKSPACE))
    bias = base.bias
    # The op has no product for dW.
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise Ineligible("the base layer is trained too")
    adapters = tuple(_adapter(module, name) for name in module.active_adapters if name in module.lora_A)
    return Projection(weight, bias, adapters, unpack)


def _adapter(module: Any, name: str) -> Adapter:
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if name in module.lora_variant:
        raise Ineligible(f"an adapter is {type(module.lora_variant[name]).__name__}, not plain LoRA")
    if not (is_plain(a) and is_plain(b)):
        raise Ineligible("A or B of an adapter is more than a matrix: hooked, sharded or quantised")
    if is_called(dropout):
        raise Ineligible("the dropout of an adapter is hooked or has another forward")
    if b.bias is not None:
        raise Ineligible("an adapter has a bias (lora_bias)")
    return Adapter(a.weight, b.weight, module.scaling[name], _rate(dropout))


def _rate(dropout: nn.Module) -> float:
    """Return the probability with which a dropout of PEFT drops, as it is now."""
    if type(dropout) is nn.Identity:
        return 0.0
    if type(dropout) is not nn.Dropout or dropout.inplace:
        raise Ineligible(f"an adapter drops out by {dropout}")
    if dropout.p >= 1:
        raise Ineligible(f"lora_dropout is {dropout.p}, with which nothing is left")
    return dropout.p if dropout.training else 0.0  # its own mode: a part of a model may be in eval mode


def _base_weight(base: Any, x: Tensor | None, workspace: Workspace | None) -> tuple[Tensor, Any]:
    """Return a base layer's weight and the function that unpacks it, None for a plain weight."""
    if type(base) is nn.Linear:
        if not (is_weight_and_bias(base) or _only_aligns_devices(base)):
            raise Ineligible("the base layer is hooked, sharded, or has another forward")
        return base.weight, None
    if type(base) not in bnb_4bit_types():
        raise Ineligible(f"the base layer is a {type(base).__name__}")
    state = getattr(base.weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        raise Ineligible("the 4-bit weight is not on the GPU yet")
    if not _computes_in(base.compute_dtype, x):
        raise Ineligible(f"the 4-bit layer computes in {base.compute_dtype}, another dtype than its input's")
    if is_called(base):
        raise Ineligible("the base layer is hooked or has another forward")
    unpack = functools.partial(dequantized, state)
    if workspace is not None and is_nf4(state):
        unpack = SharedUnpack(unpack, functools.partial(unpack_into, state), state.shape, state.dtype, workspace)
    return base.weight, unpack


def _computes_in(dtype: torch.dtype | None, x: Tensor | None) -> bool:
    """Whether a 4-bit layer and its adapters agree on x's own dtype, autocast or not."""
    if x is None:
        return True
    autocast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) != x.dtype
    return dtype in (None, x.dtype) and not autocast


def dequantized(state: Any, weight: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(weight.data, state)


def is_nf4(state: Any) -> bool:
    """Whether a 4-bit weight has the blocks that transformers has bitsandbytes make: those that our kernel unpacks."""
    outer = state.state2
    scales = torch.float32 if outer is None else torch.uint8
    return (
        (state.quant_type, state.blocksize, state.absmax.dtype) == ("nf4", NF4_BLOCK, scales)
        and state.shape.numel() % NF4_BLOCK == 0
        and (outer is None or (outer.blocksize, outer.absmax.dtype) == (NESTED_BLOCK, torch.float32))
    )


def unpack_into(state: Any, weight: Tensor, out: Tensor) -> None:
    scales = state.absmax
    if state.state2 is not None:
        scales = NestedScales(scales, state.state2.code, state.state2.absmax, state.offset)
    unpack_nf4_(out, weight.data, scales)


def _only_aligns_devices(linear: Any) -> bool:
    """Whether accelerate has replaced its forward only to move inputs: hooks on larger modules have moved them."""
    return (
        forward_is_moved(linear)
        and getattr(accelerate_hook(linear), "offload", True) is False
        and type(linear.weight) in (nn.Parameter, Tensor)
        and not is_hooked(linear)
    )


def _member(layer: Any, x: Tensor | None) -> Projection:
    """Read a child of an MLP. It is not called, so its call must have no hooks."""
    if is_weight_and_bias(layer):
        if layer.weight.requires_grad or (layer.bias is not None and layer.bias.requires_grad):
            raise Ineligible("a layer without adapters is trained")
        return Projection(layer.weight, layer.bias)
    if type(layer) not in _lora_types():
        raise Ineligible(f"it has a {type(layer).__name__}")
    if ("forward" in vars(layer) and not _is_ours(layer)) or is_hooked(layer):
        raise Ineligible("a LoRA layer is hooked or has another forward")
    return read(layer, x)


def _refused(module: nn.Module) -> str | None:
    """Say why the forward of a LoRA layer cannot be replaced, in any state of it."""
    if type(module) not in _lora_types():
        return f"lora.{type(module).__name__} is another kind of layer"
    return (_disproof() if type(module) is LoraLinear else None) or structure.why_not_replaced(module)


def _why_own_forward(module: nn.Module) -> str | None:
    """Say why PEFT's forward will run in training, as the layer is now."""
    try:
        read(module, None)
    except Ineligible as reason:
        return str(reason)
    return None


# Two more functions: dynamo traces no functools.cache, and a constant result needs no tracing.
@torch.compiler.assume_constant_result
def bnb_4bit_types() -> tuple[type, ...]:
    return _installed_types()[0]


@torch.compiler.assume_constant_result
def _lora_types() -> tuple[type, ...]:
    return _installed_types()[1]


@functools.cache
def _installed_types() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Return bitsandbytes' 4-bit layers, and PEFT's LoRA layers over plain and 4-bit ones."""
    if not is_bnb_4bit_available():
        return (), (LoraLinear,)
    from bitsandbytes.nn import Linear4bit, LinearFP4, LinearNF4  # pyright: ignore[reportMissingImports]
    from peft.tuners.lora.bnb import Linear4bit as Lora4bit  # pyright: ignore[reportAttributeAccessIssue]

    return (Linear4bit, LinearFP4, LinearNF4), (LoraLinear, Lora4bit)


@functools.cache
def _disproof() -> str | None:
    """Say how PEFT's forward differs from plain LoRA on a miniature with two adapters; None if it does not."""
    fp32, bf16 = torch.float32, torch.bfloat16
    for dtype, adapter_dtype, autocast in (
        (fp32, fp32, False), (bf16, fp32, False), (bf16, bf16, False), (bf16, fp32, True),
    ):  # fmt: skip
        with structure.on_miniatures(autocast):
            layer = _miniature(dtype, adapter_dtype)
            x = torch.randn(2, 5, layer.in_features, dtype=dtype, requires_grad=True)
            try:
                theirs, p = type(layer).forward(layer, x), read(layer, x)
            except Exception as error:
                return f"its forward fails on a miniature: {type(error).__name__}: {error}"
            plain = lora_linear_reference(x, p.weight, p.bias, p.adapters)
            leaves = [x, *(tensor for adapter in p.adapters for tensor in adapter[:2])]
            refused = structure.difference(plain, theirs) or structure.gradient_difference(plain, theirs, leaves)
        if refused is not None:
            return refused + f" in {dtype}"
    return None


def _miniature(dtype: torch.dtype, adapter_dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"linear": nn.Linear(24, 16)})
    with warnings.catch_warnings():  # a second adapter is announced
        warnings.simplefilter("ignore")
        for name, r in (("one", 3), ("two", 4)):
            config = LoraConfig(r=r, lora_alpha=5, target_modules=["linear"], init_lora_weights=False)
            inject_adapter_in_model(config, model, adapter_name=name)
    layer = model["linear"].to(adapter_dtype)
    layer.set_adapter(["one", "two"])
    layer.base_layer.to(dtype)
    return layer
