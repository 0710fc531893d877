"""A model's own rotary function, as a rule for our op: recognised by its parameters, proved by running it.

The same source code means different rotations, since `rotate_half` differs from module to module, and the layout of
cosines differs from model to model. So the code is not read: the function is called on random queries and keys, with
cosines in the layouts of the model's own rotary embedding, and every rule is tried.

The file has the rule first, then the replacement that follows it, then the proof, then the layouts of a model.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...compat.torch_internals import FakeTensor
from ...kernels.rope import rope, rope_reference
from ..structure import on_miniatures
from .deferred_norm import Deferred, DeferredNorm, norm_and_rotate

if TYPE_CHECKING:
    from ...kernels.decode_attention import Rotation

# What a rotary embedding makes of one cosine for each pair, (..., R/2): all, then all again (Llama); each next to its
# copy (Cohere); or all once (GPT-OSS).
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: torch.cat((x, x), -1),
    "pairs": lambda x: x.repeat_interleave(2, -1),
    "once": lambda x: x,
}
UNKNOWN = "it is no rotation that our op knows, for cosines as this model has them"
_B, _S, _D, _HEADS, _KEY_HEADS = 2, 5, 16, 4, 2


@dataclass(frozen=True)
class RotaryRule:
    """How a rotary function maps to the op `rope`.

    Attributes:
        interleaved: pairs are columns 2j and 2j + 1.
        half_width: there is one cosine for each pair, not two.
        first_half: only the first half of the cosines' columns is read, whatever the second holds (GLM).
        reverse: it turns by minus the angle (NanoChat).
        trailing: the last columns of a head rotate, not the first (DeepSeek V4).
        regroups: the input has pairs interleaved, the result has them as halves (DeepSeek V3).
        complex_angles: the function takes one complex tensor in place of cosines and sines (Llama 4).
        heads_dim: the dimension of the heads in q and k, for functions without `unsqueeze_dim`.
        promotes: the result has the dtype that q and the cosines promote to, not q's.
        layout: the only layout of cosines that it holds for, where those of the model are not known.
    """

    interleaved: bool = False
    half_width: bool = False
    first_half: bool = False
    reverse: bool = False
    trailing: bool = False
    regroups: bool = False
    complex_angles: bool = False
    heads_dim: int | None = None
    promotes: bool = False
    layout: str | None = None

    def options(self) -> dict[str, Any]:
        return dict(interleaved=self.interleaved, half_width=self.half_width or self.first_half)

    def read(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines for the op."""
        half = cos.shape[-1] // 2
        sin = -sin if self.reverse else sin
        return (cos[..., :half], sin[..., :half]) if self.first_half else (cos, sin)


_RULES = (
    RotaryRule(),
    RotaryRule(reverse=True),
    RotaryRule(interleaved=True),
    RotaryRule(interleaved=True, first_half=True),
    RotaryRule(half_width=True),
    RotaryRule(interleaved=True, half_width=True),
    RotaryRule(interleaved=True, half_width=True, trailing=True),
    RotaryRule(first_half=True, regroups=True),
    RotaryRule(half_width=True, regroups=True),
)
# of functions that take one complex tensor, whose signature does not say where the heads are
_COMPLEX_RULES = tuple(
    RotaryRule(i, half_width=True, complex_angles=True, heads_dim=d) for d in (1, 2) for i in (True, False)
)


@dataclass(frozen=True)
class Signature:
    """How a rotary function is called: what it takes after the angles, and where the heads are by default.

    Attributes:
        heads_dim: the default of `unsqueeze_dim`, if it has that parameter.
        of_tower: it has none, and the heads are before the columns: (tokens, heads, columns), as in vision towers.
    """

    others: tuple[str, ...]
    heads_dim: int | None
    of_tower: bool = False


def is_rotary(function: Any) -> bool:
    """Whether it looks like a function that rotates something by angles."""
    names = parameters_of(function)
    return {"cos", "sin"} <= set(names) or "freqs_cis" in names


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function; none of what is no function."""
    # With Hugging Face's `kernels` installed, transformers' functions are modules.
    function = type(function).forward if isinstance(function, nn.Module) else function
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        return {}
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    return parameters


def signature(function: Any) -> Signature | str:
    """Return the signature of a function of queries and keys, or why it is no such function."""
    parameters = parameters_of(function)
    names = list(parameters)
    heads = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in names else None
    after = list(parameters.values())[4:]
    if names[2:4] == ["cos", "sin"] and heads in (1, 2) and all(p.default is not p.empty for p in after):
        return Signature(tuple(names[4:]), heads)
    if names[2:] == ["freqs_cis"]:
        return Signature((), None)
    if names[2:] == ["cos", "sin"]:
        return Signature((), 2, of_tower=True)
    return f"it takes ({', '.join(names)}), not queries, keys, cosines, sines and unsqueeze_dim"


class Rotated(Deferred):
    """Queries or keys of one token a row, whose rotation is computed when they are used, unless attention does it.

    Attributes:
        x: (B, H, 1, D), before the rotation, and before the norm in front of it.
        rotation: of queries and keys, with their norms.
    """

    def __init__(self, x: Tensor, rotation: "Rotation", both: Callable[[], tuple[Tensor, Tensor]], at: int):
        self.x, self.rotation, self._both, self._at = x, rotation, both, at
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device

    def compute(self) -> Tensor:
        return self._both()[self._at]


ROTATES_LATER: ContextVar[bool] = ContextVar("rotates_later", default=False)  # whether q and k may be `Rotated`


def rotate(
    rule: RotaryRule, q: Any, k: Any, cos: Tensor, sin: Tensor, heads_dim: int, plain: bool = False
) -> tuple[Any, Any]:
    """Rotate q and k by our op.

    Args:
        q, k: (B, H, S, D), or (B, S, H, D) if heads_dim is 2; tensors or deferred norms.
        cos, sin: (B or 1, S, R).
        plain: compute by the op's reference, as the proof wants it.
    """
    # asked in this order, torch.compile does not see the variable, which it could not trace
    if not torch.compiler.is_compiling() and ROTATES_LATER.get():
        rotation = _rotation_of_one_token(rule, q, k, cos, sin, heads_dim)
        if rotation is not None:
            both = functools.cache(lambda: _rotated(rule, q, k, cos, sin, heads_dim, plain))
            before = [x.x if isinstance(x, DeferredNorm) else x for x in (q, k)]
            return Rotated(before[0], rotation, both, 0), Rotated(before[1], rotation, both, 1)
    return _rotated(rule, q, k, cos, sin, heads_dim, plain)


def _rotation_of_one_token(
    rule: RotaryRule, q: Any, k: Any, cos: Tensor, sin: Tensor, heads_dim: int
) -> "Rotation | None":
    """Return what the attention of one token a row needs to rotate q and k, None where it is not what that computes."""
    norms = [x.pending for x in (q, k) if isinstance(x, DeferredNorm)]
    promotes = rule.promotes and not torch.is_autocast_enabled(q.device.type)
    if (
        dataclasses.replace(rule, promotes=False, layout=None) != RotaryRule()
        or heads_dim != 1
        or q.shape[2] != 1
        or len(norms) == 1
        or (promotes and torch.promote_types(q.dtype, cos.dtype) != q.dtype)
    ):
        return None
    from ...kernels.decode_attention import QKNorm, Rotation  # which a training need not wait for

    of_both = None
    if norms:
        one, other = norms
        if q.over != (3,) or k.over != (3,) or (one.rule, one.eps) != (other.rule, other.eps):
            return None
        form = one.rule.form
        of_both = QKNorm(one.weight, other.weight, one.eps, form.offset, form.cast_before_weight)
    cos, sin = (x.expand(q.shape[0], 1, -1)[:, 0] for x in (cos, sin))
    return Rotation(cos, sin, of_both)


def _rotated(
    rule: RotaryRule, q: Any, k: Any, cos: Tensor, sin: Tensor, heads_dim: int, plain: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = rule.read(cos, sin)
    if isinstance(q, DeferredNorm) and isinstance(k, DeferredNorm) and not rule.regroups:
        together = norm_and_rotate(q, k, cos, sin, heads_dim, rule.promotes, rule.options())
        if together is not None:
            return together
    q, k = (x.compute() if isinstance(x, DeferredNorm) else x for x in (q, k))
    # Under autocast the products that follow take half precision anyway, so nothing is widened before them.
    if rule.promotes and not torch.is_autocast_enabled(q.device.type):
        q, k = (x.to(torch.promote_types(x.dtype, cos.dtype)) for x in (q, k))
    if rule.trailing:  # as many of the last columns as there are angles
        first = q.shape[-1] - cos.shape[-1] * (2 if rule.half_width else 1)
        rule = dataclasses.replace(rule, trailing=False)
        rotated = _rotated(rule, q[..., first:], k[..., first:], cos, sin, heads_dim, plain)
        q, k = (torch.cat((x[..., :first], y), -1) if first else y for x, y in zip((q, k), rotated, strict=True))
        return q, k
    if rule.regroups:
        q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    op = rope_reference if plain else rope
    if heads_dim == 1:
        return op(q, k, cos, sin, **rule.options())
    q, k = op(q.transpose(1, 2), k.transpose(1, 2), cos, sin, **rule.options())
    return q.transpose(1, 2), k.transpose(1, 2)


def fits(q: Any, k: Any, cos: Any, sin: Any, heads_dim: Any) -> bool:
    """Whether the op serves a call with these arguments. Any other goes to the model's own function."""
    if heads_dim not in (1, 2) or not all(isinstance(x, (Tensor, DeferredNorm)) for x in (q, k)):
        return False
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.requires_grad or sin.requires_grad:
        return False
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[3 - heads_dim] == k.shape[3 - heads_dim]
        and q.shape[3] == k.shape[3]
        and q.shape[3] % 2 == 0
    )


@functools.cache  # one function for all layers and models, so that torch.compile sees one
def replacement(function: Callable, rule: RotaryRule) -> Callable:
    """Return a function that is called like `function` and computed by the op."""
    if takes_one(function):
        return _replacement_of_one(function, rule)
    called = signature(function)
    assert isinstance(called, Signature)
    if called.of_tower:
        return _replacement_of_tower(function, rule)

    def apply_complex(q, k, freqs_cis):
        cos, sin = freqs_cis.real, freqs_cis.imag
        if rule.heads_dim is None or not fits(q, k, cos, sin, rule.heads_dim):
            return function(q, k, freqs_cis)
        return rotate(rule, q, k, cos, sin, rule.heads_dim)

    def apply(q, k=None, cos: Any = None, sin: Any = None, *positional, **named):
        others = {**dict(zip(called.others, positional, strict=False)), **named}
        heads_dim = others.pop("unsqueeze_dim", called.heads_dim)
        if k is None or any(x is not None for x in others.values()) or not fits(q, k, cos, sin, heads_dim):
            return function(q, k, cos, sin, *positional, **named)
        return rotate(rule, q, k, cos, sin, heads_dim)

    return apply_complex if rule.complex_angles else apply


def _replacement_of_tower(function: Callable, rule: RotaryRule) -> Callable:
    """Do as `replacement`, for a vision tower's function.

    Towers make cosines in their own code, so the first call looks at their layout, which waits for the device once.
    """
    as_proved: list[bool] = []

    def apply(q, k, cos, sin):
        batched = tuple(x[None] if q.dim() == 3 and isinstance(x, Tensor) else x for x in (q, k, cos, sin))
        if not fits(*batched, heads_dim=2) or (not as_proved and not _readable(cos)):
            return function(q, k, cos, sin)
        if not as_proved:
            assert rule.layout is not None
            as_proved.append(all(rule.layout in _layouts_of_values(x) for x in (cos, sin)))
        if not as_proved[0]:
            return function(q, k, cos, sin)
        rotated = rotate(rule, *batched, heads_dim=2)
        return (rotated[0][0], rotated[1][0]) if q.dim() == 3 else rotated

    return apply


def _readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be looked at: it is on a device, and nobody traces the call."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


@functools.cache
def prove_rotary(function: Callable, layouts: frozenset[str]) -> RotaryRule | str:
    """Return the rule of a rotary function for the layouts of cosines that its model has, or why there is none.

    Args:
        function: transformers' `apply_rotary_pos_emb` of one module, or the like.
        layouts: names in LAYOUTS. The rule must hold for all of them; for any one, if none is known.
    """
    function = _of_both(function) if takes_one(function) else function
    called = signature(function)
    if isinstance(called, str):
        return called
    if called.of_tower:
        layouts = frozenset()
    with on_miniatures():
        for rule in _RULES if called.heads_dim is not None else _COMPLEX_RULES:
            wanted = layouts if called.heads_dim is not None and layouts else None
            equal = [name for name in wanted or LAYOUTS if _equal(function, called, rule, name)]
            if set(equal) == wanted or (wanted is None and equal):
                only = equal[0] if called.of_tower else None
                return _with_dtypes(function, called, dataclasses.replace(rule, layout=only), equal[0])
    return UNKNOWN


def _inputs(layout: str, pairs: int, heads_dim: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, ...]:
    """Draw q, k, cos and sin. Any numbers will do for the last two, because a rotation is linear in them."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(_B, h, _S, _D, generator=generator) for h in (_HEADS, _KEY_HEADS))
    cos, sin = (LAYOUTS[layout](torch.randn(_B, _S, pairs, generator=generator)) for _ in range(2))
    q, k = (x.transpose(1, heads_dim).contiguous().to(dtypes[0]).requires_grad_() for x in (q, k))
    return q, k, cos.to(dtypes[1]), sin.to(dtypes[1])


def _theirs(function: Callable, called: Signature, inputs: tuple[Tensor, ...], heads_dim: int) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = inputs
    if called.heads_dim is None:
        return function(q, k, torch.complex(cos, sin))
    if called.of_tower:  # each row of the batch as it comes in a tower
        rows = [function(*row) for row in zip(q, k, cos, sin, strict=True)]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
    return function(q, k, cos, sin, unsqueeze_dim=heads_dim)


def _equal(function: Callable, called: Signature, rule: RotaryRule, layout: str) -> bool:
    """Compare values and gradients in fp32: with all columns rotating, and with half of them where the function can."""
    places = (
        (1, 2) if called.heads_dim is not None and not called.of_tower else (called.heads_dim or rule.heads_dim or 1,)
    )
    dtypes = (torch.float32, torch.float32)
    full, partial = (
        [_close(function, called, rule, _inputs(layout, pairs, dim, dtypes), dim) for dim in places]
        for pairs in (_D // 2, _D // 4)
    )
    return all(full) and False not in partial


def _close(
    function: Callable, called: Signature, rule: RotaryRule, inputs: tuple[Tensor, ...], dim: int
) -> bool | None:
    """Whether both compute the same; None where the function does not take such inputs."""
    try:
        theirs = _theirs(function, called, inputs, dim)
    except (RuntimeError, ValueError, IndexError):  # shapes that do not go together
        return None
    try:
        q, k, cos, sin = inputs
        ours = rotate(rule, q, k, cos, sin, dim, plain=True)
    except (RuntimeError, ValueError):
        return False
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(theirs, ours, strict=True)):
        return False
    pairs = zip((*theirs, *_gradients(theirs, inputs[:2])), (*ours, *_gradients(ours, inputs[:2])), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)


def _gradients(outputs: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weighted = [(x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in (*outputs, *inputs)]
    return torch.autograd.grad(torch.stack(weighted).sum(), inputs)


def _with_dtypes(function: Callable, called: Signature, rule: RotaryRule, layout: str) -> RotaryRule | str:
    """Return the rule with `promotes` as the function does it, after a comparison in bf16; or why it fails there."""
    dim = called.heads_dim or rule.heads_dim or 1
    for dtypes in ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        if called.heads_dim is None and dtypes[1] == torch.bfloat16:  # there is no complex bf16
            continue
        inputs = _inputs(layout, _D // 2, dim, dtypes)
        theirs = _theirs(function, called, inputs, dim)
        rule = dataclasses.replace(rule, promotes=rule.promotes or theirs[0].dtype != dtypes[0])
        q, k, cos, sin = inputs
        for a, b in zip(theirs, rotate(rule, q, k, cos, sin, dim, plain=True), strict=True):
            if a.dtype != b.dtype:
                return f"it returns {a.dtype} for queries in {dtypes[0]} and cosines in {dtypes[1]}, ours {b.dtype}"
            if not torch.allclose(a.float(), b.float(), rtol=2e-2, atol=4e-2):
                return f"it rounds otherwise than ours for queries in {dtypes[0]} and cosines in {dtypes[1]}"
    return rule


def layouts_of(model: nn.Module) -> frozenset[str]:
    """Return the layouts of the cosines that the model's rotary embeddings make, where they can be rebuilt on a CPU."""
    layouts: set[str] = set()
    built = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if not hasattr(module, "inv_freq") and "rotary" not in type(module).__name__.lower():
            continue
        if config is None or (type(module), id(config)) in built:
            continue
        built.add((type(module), id(config)))
        with on_miniatures(), torch.no_grad():
            layouts.update(_layouts(type(module), config))
    return frozenset(layouts)


def _layouts(rotary: Callable[..., nn.Module], config: Any) -> Iterable[str]:
    positions = torch.arange(1, _S + 1)[None]
    try:
        module = rotary(config)
        names = list(inspect.signature(module.forward).parameters)
        calls = [{"layer_type": kind} for kind in sorted(set(config.layer_types))] if "layer_type" in names else [{}]
        outputs = [module(torch.zeros(1, _S, 8), positions, **options) for options in calls]
    except Exception:  # this guesses how someone else's code is called; where it guesses wrong, no layout is known
        return
    for output in outputs:
        if isinstance(output, tuple) and len(output) == 2 and output[1].dim() == 3 and output[1].shape[-1] % 2 == 0:
            yield next(iter(_layouts_of_values(output[1])), "once")


def _layouts_of_values(angles: Tensor) -> list[str]:
    """Return which layouts cosines or sines have that hold each value twice."""
    halves = angles.shape[-1] % 2 == 0 and torch.equal(*angles.chunk(2, -1))
    pairs = angles.shape[-1] % 2 == 0 and torch.equal(angles[..., ::2], angles[..., 1::2])
    return [name for name, has in (("halves", halves), ("pairs", pairs)) if has]


# Rotary functions that rotate one tensor. The proof takes them as functions of queries and keys.
#
# apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1)      Gemma 3n, Gemma 4
# apply_rotary_pos_emb(tensor, sin, cos)                  GPT-J, CodeGen; the heads are before the columns


_ONE = (["cos", "sin", "unsqueeze_dim"], ["sin", "cos"])  # what such a function takes after its tensor


def takes_one(function: Callable) -> bool:
    """Whether a rotary function takes one tensor."""
    return list(parameters_of(function))[1:] in _ONE


def _of_both(function: Callable) -> Callable:
    """Return a function of queries and keys that rotates each by `function`."""
    names = list(parameters_of(function))

    def with_heads(q, k, cos, sin, unsqueeze_dim=1):
        return tuple(function(x, cos, sin, unsqueeze_dim=unsqueeze_dim) for x in (q, k))

    def heads_second_last(q, k, cos, sin, unsqueeze_dim=2):
        if unsqueeze_dim == 2:
            return function(q, sin, cos), function(k, sin, cos)
        return tuple(function(x.transpose(1, 2), sin, cos).transpose(1, 2) for x in (q, k))

    return with_heads if "unsqueeze_dim" in names else heads_second_last


def _replacement_of_one(function: Callable, rule: RotaryRule) -> Callable:
    default = parameters_of(function).get("unsqueeze_dim")

    def rotated(x: Tensor | DeferredNorm, cos: Tensor, sin: Tensor, heads_dim: int) -> Tensor | None:
        x = x.compute() if isinstance(x, DeferredNorm) else x
        if not fits(x, x, cos, sin, heads_dim):
            return None
        return rotate(rule, x, x.detach().narrow(heads_dim, 0, 0), cos, sin, heads_dim)[0]  # keys without heads

    def with_heads(x, cos, sin, unsqueeze_dim=1 if default is None else default.default):
        y = rotated(x, cos, sin, unsqueeze_dim)
        return function(x, cos, sin, unsqueeze_dim) if y is None else y

    def heads_second_last(tensor, sin, cos):
        y = rotated(tensor, cos, sin, 2)
        return function(tensor, sin, cos) if y is None else y

    return heads_second_last if default is None else with_heads
