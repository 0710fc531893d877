"""What the swapped layers look like, as data, and how a model's own layer is proved to be one of them.

A rule is a claim about code elsewhere. Before it is acted on, the layer's own forward runs on a miniature: a shallow
copy with small random weights on the CPU. What computes anything else than the rule is refused, with the reason. So a
family whose code resembles a known one needs no line here, and one whose code has changed is left alone.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..common.hooks import is_called

Rule = TypeVar("Rule")

EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
FIXED_EPS = (1e-5, 1e-6, 1e-12)  # of LayerNorms that keep it in their forward (OLMo)


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

ACTIVATIONS = {"silu": "SwiGLU", "gelu_tanh": "GEGLU", "gelu": "GEGLU", "relu2": "ReLU2"}
OPTIONS = {  # the option of `PatchOptions` that asks for it
    "RMSNorm": "rms_norm",
    "LayerNorm": "layer_norm",
    "SwiGLU": "swiglu",
    "GEGLU": "geglu",
    "ReLU2": "relu2",
}
# How gate and up come from the first linear layers: (gate, up), where None says that gate is packed [gate | up].
LAYOUTS: Mapping[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "split": lambda gate, up: (gate, up),
    "gate first": lambda packed: (packed, None),
    "up first": lambda packed: packed.chunk(2, -1)[::-1],
}

_BARE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


def settings(module: nn.Module) -> tuple:
    """What a layer's behaviour may depend on beside its tensors: a key under which one proof holds for many layers.

    Objects count by identity. Linear children count by name, others by their own settings.
    """
    own = [(k, v if isinstance(v, _PLAIN) else id(v)) for k, v in vars(module).items() if k not in _BARE]
    children = [(k, type(v) if is_linear(v) else settings(v)) for k, v in module.named_children()]
    return type(module), *own, *((k, t.dim()) for k, t in tensors(module).items()), *children


def once_for_equal_layers(
    prove: Callable[[nn.Module], Rule], key: Callable[[nn.Module], Hashable] = settings
) -> Callable[[nn.Module], Rule]:
    """`prove`, run once for all layers of one class with the same settings."""
    proved: dict[Hashable, Rule] = {}

    def remembered(module: nn.Module) -> Rule:
        layer = key(module)
        if layer not in proved:
            proved[layer] = prove(module)
        return proved[layer]

    return remembered


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers."""
    found = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def is_linear(module: nn.Module) -> bool:
    """Whether it is called like an nn.Linear, adapters and quantised layers included."""
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


def is_stateless(module: nn.Module) -> bool:
    return not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())


def inputs_of(function: Callable) -> list[str] | None:
    """The names of a method's inputs, None if it takes any number."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return [p.name for p in parameters]


def is_replaced(module: nn.Module, method: str = "forward") -> bool:
    """Whether an instance has another method than its class, accelerate's hooks around its forward aside."""
    hooked = method == "forward" and "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    current = vars(module).get("_old_forward" if hooked else method)
    return current is not None and getattr(current, "__func__", None) is not getattr(type(module), method)


def obstacle(module: nn.Module) -> str | None:
    """In words, why the forward of an instance cannot be replaced."""
    if is_replaced(module):
        return "its forward has been replaced"
    if any(hasattr(tensor, "full_tensor") for tensor in tensors(module).values()):
        return "its tensors are sharded (DTensor): patch before sharding"
    for name, child in module.named_children():
        if is_stateless(child) and is_called(child):
            return f"its {name} has hooks or another forward, which would not be called"
    return None


def miniature(
    module: nn.Module, small: Mapping[str, Tensor], children: Mapping[str, nn.Module], training: bool = True
) -> nn.Module:
    """A copy that shares every plain attribute, with tensors and children of its own, without hooks.

    Children that are not given must have no tensors: they become miniatures themselves.
    """
    copy = object.__new__(type(module))
    vars(copy).update({k: v for k, v in vars(module).items() if k not in ("forward", "_old_forward", "_hf_hook")})
    vars(copy).update(vars(nn.Module()), training=training)
    copy._parameters.update(dict.fromkeys(module._parameters))
    copy._buffers.update(dict.fromkeys(module._buffers))
    for name, tensor in small.items():
        if isinstance(tensor, nn.Parameter):
            copy._parameters[name] = tensor
        else:
            copy._buffers[name] = tensor
    for name, child in module._modules.items():
        if child is not None and name not in children:
            child = miniature(child, {}, {}, training)
        copy._modules[name] = children.get(name, child)
    return copy


def first_that_holds(claims: Iterable, passed: Callable[[Any], tuple[int, str | None]]) -> Any:
    """The first claim that passes all cases, else in words why the one that went furthest does not; None of none.

    passed: of a claim, how many cases it passes and in words what differs in the next, or None.
    """
    nearest, reason = -1, None
    for claim in claims:
        cases, refused = passed(claim)
        if refused is None:
            return claim
        if cases > nearest:
            nearest, reason = cases, refused
    return reason


def failure(error: Exception) -> str:
    """In words, that a layer's own forward does not run on a miniature."""
    return f"its forward fails on a miniature: {type(error).__name__}: {' '.join(str(error).split())[:90]}"


class _GpuAutocast(TorchFunctionMode):
    """Under autocast on the CPU, torch's norms as they are under autocast on a GPU: in fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        if func in (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm) and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(x) for x in args)
            named = {name: _widened(x) for name, x in named.items()}
        return func(*args, **named)


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4 else x


@contextlib.contextmanager
def on_miniatures(autocast: bool = False) -> Iterator[None]:
    """Run something small on the CPU, with gradients, whatever the caller has set, and leave its random state alone."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        _GpuAutocast(),
    ):
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", autocast)  # what some layers ask, whatever device they are on
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before)


@functools.cache
def widens_under_autocast(kind: str, device_type: str) -> bool:
    """Whether torch's own norm of that kind takes half precision to fp32 under autocast on that device."""
    norm = F.layer_norm if kind == "LayerNorm" else F.rms_norm
    with torch.autocast(device_type, torch.bfloat16):
        return norm(torch.ones(1, 1, dtype=torch.bfloat16, device=device_type), (1,)).dtype == torch.float32


def difference(got: Tensor, want: Any, narrow: float = 1e-2) -> str | None:
    """In words, how a layer's output differs from the rule's beyond rounding; None if it does not.

    fp32 is compared row by row to 1e-5, narrower dtypes as a whole to `narrow`.
    """
    if not isinstance(want, Tensor) or got.shape != want.shape:
        found = tuple(want.shape) if isinstance(want, Tensor) else f"a {type(want).__name__}"
        return f"it returns {found} where {tuple(got.shape)} was expected"
    if got.dtype != want.dtype:
        return f"it returns {want.dtype} where {got.dtype} was expected"
    wide = want.dtype == torch.float32
    rows = (-1, want.shape[-1]) if wide else (1, -1)
    norm = want.double().reshape(rows).norm(dim=1)
    error = (got.double() - want.double()).reshape(rows).norm(dim=1)
    if bool((error <= (1e-5 if wide else narrow) * norm).all()):
        return None
    return f"its values differ by up to {(error / norm.clamp_min(1e-30)).max().item():.1e} of their size"


def gradient_difference(got: Tensor, want: Tensor, inputs: Sequence[Tensor]) -> str | None:
    """As `difference`, of the gradients of both outputs; compared in fp32 alone."""
    if any(x.dtype != torch.float32 for x in (got, *inputs)):
        return None
    if not want.requires_grad:
        return "its output has no gradient"
    weights = torch.linspace(-1, 1, want.numel(), dtype=torch.float32, device="cpu").view(want.shape)
    ours, own = (torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True) for y in (got, want))
    for mine, theirs in zip(ours, own, strict=True):
        if mine is None or theirs is None:
            if mine is not theirs:
                return "its gradients differ"
        elif (mine - theirs).norm() > 1e-4 * theirs.norm():
            return "its gradients differ"
    return None
