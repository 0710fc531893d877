"""What a layer looks like, and how its own forward is compared with a rule.

A rule is a claim about code elsewhere. Before it is acted on, the layer's own forward runs on a miniature: a shallow
copy with small random weights on the CPU. A layer that computes anything else than the rule is refused, with the
reason. So a family whose code resembles a known one needs no line here, and one whose code has changed stays as it is.

The file reads in the order of a proof: look at the layer, make its miniature, run both, compare.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..common.replacements import Replacements
from ..compat.deepspeed import is_missing, shape_of
from ..compat.modules import (
    copy_without_tensors,
    is_called,
    own_buffers,
    own_children,
    own_parameters,
    replaced_forward,
)
from .options import PatchReport

Rule = TypeVar("Rule")

PROVED = "_liger_trainer_proved"  # the attribute with the activations, by name, that a module had when it was proved
_BARE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and buffers; in place of those that ZeRO-3 has partitioned, their shapes."""
    own = {**own_parameters(module), **own_buffers(module)}
    own = {name: tensor for name, tensor in own.items() if tensor is not None}
    for name, x in own.items():
        if is_missing(x):
            own[name] = nn.Parameter(torch.empty(shape_of(x), dtype=x.dtype, device="meta"), x.requires_grad)
    return own


def is_linear(module: nn.Module) -> bool:
    """Whether it is called like an nn.Linear, adapters and quantised layers included."""
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


def is_stateless(module: nn.Module) -> bool:
    return not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())


def inputs_of(function: Callable) -> list[str] | None:
    """Return the names of a method's inputs, None if it takes any number."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return [p.name for p in parameters]


def is_replaced(module: nn.Module, method: str = "forward") -> bool:
    """Whether an instance has another method than its class, accelerate's hooks around its forward aside."""
    current = replaced_forward(module) if method == "forward" else vars(module).get(method)
    return current is not None and getattr(current, "__func__", None) is not getattr(type(module), method)


def why_not_replaced(module: nn.Module) -> str | None:
    """Say why the forward of this instance cannot be replaced, whatever it computes; None if it can."""
    if is_replaced(module):
        return "its forward has been replaced"
    if any(hasattr(tensor, "full_tensor") for tensor in tensors(module).values()):
        return "its tensors are sharded (DTensor): patch before sharding"
    for name, child in module.named_children():
        if is_stateless(child) and is_called(child):
            return f"its {name} has hooks or another forward, which would not be called"
    return None


def cache_key(module: nn.Module) -> tuple:
    """Return what a layer's behaviour may depend on besides its tensors, as a key for `once_for_equal_layers`.

    Objects count by identity. Linear children count by name, others by their own settings.
    """
    own = [(k, v if isinstance(v, _PLAIN) else id(v)) for k, v in vars(module).items() if k not in _BARE | {PROVED}]
    # Sizes are left out: what holds for a miniature does not depend on them.
    children = [(k, type(v) if is_linear(v) else cache_key(v)) for k, v in module.named_children()]
    return type(module), *own, *((k, t.dim()) for k, t in tensors(module).items()), *children


def once_for_equal_layers(
    prove: Callable[[nn.Module], Rule], key: Callable[[nn.Module], Hashable] = cache_key
) -> Callable[[nn.Module], Rule]:
    """Return `prove`, run once for all layers of one class with the same settings.

    Keep the result no longer than the model: a key holds ids of its objects.
    """
    proved: dict[Hashable, Rule] = {}

    def remembered(module: nn.Module) -> Rule:
        layer = key(module)
        if layer not in proved:
            proved[layer] = prove(module)
        return proved[layer]

    return remembered


def proved_layers(
    model: nn.Module,
    replacements: Replacements,
    report: PatchReport,
    looks_alike: Callable[[nn.Module], bool],
    prove: Callable[[nn.Module], Rule | str | None],
) -> Iterator[tuple[nn.Module, Rule]]:
    """Yield the layers of a kind, each with its rule; report why others that look alike keep their own forward.

    Layers that an earlier part computes are passed over, and those that `prove` returns None for.
    """
    for module in model.modules():
        if module in replacements or not looks_alike(module):
            continue
        rule = prove(module)
        refused = rule if isinstance(rule, str) else rule and why_not_replaced(module)
        if isinstance(refused, str):
            report.leave(type(module).__name__, refused)
        elif rule is not None and not isinstance(rule, str):
            yield module, rule


def miniature(
    module: nn.Module, small: Mapping[str, Tensor], children: Mapping[str, nn.Module], training: bool = True
) -> nn.Module:
    """Return a copy that shares every plain attribute, with other tensors and children, without hooks.

    Children that are not given must have no tensors: they become miniatures themselves.
    """
    copy = copy_without_tensors(module, (PROVED,), training)
    for name, tensor in small.items():
        (own_parameters if isinstance(tensor, nn.Parameter) else own_buffers)(copy)[name] = tensor
    for name, child in own_children(module).items():
        if child is not None and name not in children:
            child = miniature(child, {}, {}, training)
        own_children(copy)[name] = children.get(name, child)
    return copy


@contextlib.contextmanager
def on_miniatures(autocast: bool = False) -> Iterator[None]:
    """Run something small on the CPU, with gradients, whatever the caller has set, and keep its random state."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        _GpuAutocast(),
    ):
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", autocast)  # some layers ask for CUDA's, whatever device they are on
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before)


class _GpuAutocast(TorchFunctionMode):
    """Under autocast on the CPU, have torch's norms compute in fp32, as they do under autocast on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        if func in (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm) and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(x) for x in args)
            named = {name: _widened(x) for name, x in named.items()}
        return func(*args, **named)


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4 else x


@functools.cache
def widens_under_autocast(kind: str, device_type: str) -> bool:
    """Whether torch's own norm of that kind takes half precision to fp32 under autocast on that device."""
    norm = F.layer_norm if kind == "LayerNorm" else F.rms_norm
    with torch.autocast(device_type, torch.bfloat16):
        return norm(torch.ones(1, 1, dtype=torch.bfloat16, device=device_type), (1,)).dtype == torch.float32


def first_that_holds(rules: Iterable, check: Callable[[Any], tuple[int, str | None]]) -> Any:
    """Return the first rule that passes all cases, else why the one that went furthest fails; None if there is none.

    Args:
        check: takes a rule; returns how many cases it passes, and what differs in the next one, or None.
    """
    furthest, reason = -1, None
    for rule in rules:
        passed, refused = check(rule)
        if refused is None:
            return rule
        if passed > furthest:
            furthest, reason = passed, refused
    return reason


def failure(error: Exception) -> str:
    """Say that a layer's own forward does not run on a miniature."""
    # 90 characters: torch's errors go on with hints that help nobody here
    return f"its forward fails on a miniature: {type(error).__name__}: {' '.join(str(error).split())[:90]}"


def difference(got: Tensor, want: Any, narrow: float = 1e-2) -> str | None:
    """Say how a layer's output differs from the rule's beyond rounding; None if it does not.

    fp32 is compared row by row to 1e-5, narrower dtypes as a whole to `narrow`.
    """
    if not isinstance(want, Tensor) or got.shape != want.shape:
        returned = tuple(want.shape) if isinstance(want, Tensor) else f"a {type(want).__name__}"
        return f"it returns {returned} where {tuple(got.shape)} was expected"
    if got.dtype != want.dtype:
        return f"it returns {want.dtype} where {got.dtype} was expected"
    wide = want.dtype == torch.float32
    # Row by row, because rows differ in size by 1e7: a wrong eps shows only in the smallest.
    rows = (-1, want.shape[-1]) if wide else (1, -1)
    norm = want.double().reshape(rows).norm(dim=1)
    error = (got.double() - want.double()).reshape(rows).norm(dim=1)
    if bool((error <= (1e-5 if wide else narrow) * norm).all()):
        return None
    return f"its values differ by up to {(error / norm.clamp_min(1e-30)).max().item():.1e} of their size"


def gradient_difference(got: Tensor, want: Tensor, inputs: Sequence[Tensor]) -> str | None:
    """Do as `difference`, for the gradients of both outputs; they are compared only in fp32."""
    if any(x.dtype != torch.float32 for x in (got, *inputs)):
        return None
    if not want.requires_grad:
        return "its output has no gradient"
    # Different weights: the gradient of a plain sum is the same for many functions.
    weights = torch.linspace(-1, 1, want.numel(), dtype=torch.float32, device="cpu").view(want.shape)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            if a is not b:
                return "its gradients differ"
        elif (a - b).norm() > 1e-4 * b.norm():
            return "its gradients differ"
    return None
