"""The ops in one table: how each is called with named tensors, what it must equal, and its inputs at any size.

`selfcheck` runs it as it is; the kernels' tests take it at small sizes, the script that compiles them at large ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.activation_linear import activation_linear
from ..kernels.adamw import adamw_, adamw_reference
from ..kernels.causal_conv import causal_conv, causal_conv_reference
from ..kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference
from ..kernels.cross_entropy import cross_entropy
from ..kernels.decode_attention import decode_attention, decode_attention_reference
from ..kernels.document_attention import document_attention, document_attention_reference
from ..kernels.four_bits import (
    MXFP4_BLOCK,
    NESTED_BLOCK,
    NestedScales,
    nf4_codes,
    unpack,
    unpack_nf4_,
    unpack_nf4_reference,
    unpack_reference,
)
from ..kernels.gated_linear import gated_linear
from ..kernels.gated_mlp import gated_mlp, gated_mlp_reference
from ..kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from ..kernels.geglu import geglu
from ..kernels.gradient_norm import gradient_norm, gradient_norm_reference
from ..kernels.layer_norm import layer_norm
from ..kernels.linear_cross_entropy import linear_cross_entropy
from ..kernels.linear_divergence import KINDS, linear_divergence, linear_divergence_reference
from ..kernels.linear_log_probs import linear_log_probs, linear_log_probs_reference
from ..kernels.linear_sparse_divergence import linear_sparse_divergence, linear_sparse_divergence_reference
from ..kernels.linears import linears, linears_reference
from ..kernels.lora_experts import StackedProjection, lora_experts, lora_experts_reference
from ..kernels.lora_linear import lora_linear, lora_linear_reference
from ..kernels.lora_linears import lora_linears, lora_linears_reference
from ..kernels.lora_mlp import lora_mlp, lora_mlp_reference
from ..kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from ..kernels.relu2 import relu2
from ..kernels.rms_norm import rms_norm
from ..kernels.rope import rope, rope_reference
from ..kernels.swiglu import swiglu
from ..kernels.thin_linear import thin_linear, thin_linear_reference
from ..kernels.types import Adapter, Projection

EPS, IGNORED = 1e-6, -100
SCALES = (2.0, 0.7, 1.3)  # of a layer's adapters in turn; not all powers of two

Outputs = Tensor | tuple[Tensor, ...]
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of all inputs. Few are multiples of the kernels' tiles, so that masks take part."""

    rows: int = 96
    hidden: int = 192
    inner: int = 320
    vocab: int = 1003
    rank: int = 8
    heads: int = 4
    keys: int = 2
    width: int = 64  # of a head
    positions: int = 33
    experts: int = 5


class Draw:
    """Draws the same tensors every time, in fp64 on the CPU, so that all devices see the same numbers."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:  # noqa: B008 (frozen)
        self._generator = torch.Generator().manual_seed(0)
        self.sizes = sizes

    def __call__(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64) * std + mean

    def integers(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self._generator)

    def labels(self) -> Tensor:
        labels = self.integers(self.sizes.vocab, self.sizes.rows)
        # Rows without a label, as prompts have.
        labels[::7] = IGNORED
        return labels


@dataclass(frozen=True)
class Check:
    """An op and what it must equal, on tensors by name. `leaves` names the tensors whose gradients are compared."""

    name: str
    op: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    tensors: Callable[[Draw], Tensors]
    leaves: tuple[str, ...]


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _rows(*names: str, width: str = "hidden") -> Callable[[Draw], Tensors]:
    return lambda draw: {name: draw(draw.sizes.rows, getattr(draw.sizes, width)) for name in names}


def normed(*names: str, bias: bool = False) -> Callable[[Draw], Tensors]:
    def tensors(draw: Draw) -> Tensors:
        columns = draw.sizes.hidden
        weights = {"weight": draw(columns, std=0.2, mean=1.0), **({"bias": draw(columns)} if bias else {})}
        return {**_rows(*names)(draw), **weights}

    return tensors


def _angles(sizes: Sizes) -> Tensors:
    frequencies = 10_000.0 ** -(torch.arange(0, sizes.width, 2, dtype=torch.float64) / sizes.width)
    angles = torch.outer(torch.arange(sizes.positions, dtype=torch.float64), frequencies).repeat(1, 2)[None]
    return {"cos": angles.cos(), "sin": angles.sin()}


def _heads(draw: Draw) -> Tensors:
    """(batch, heads, positions, width)."""
    s = draw.sizes
    q, k = (draw(2, heads, s.positions, s.width) for heads in (s.heads, s.keys))
    return {"q": q, "k": k, **_angles(s)}


def _heads_and_norms(draw: Draw) -> Tensors:
    """(batch, positions, heads, width), as projections leave them."""
    s = draw.sizes
    weights = {name: draw(s.width, std=0.2, mean=1.0) for name in ("q_weight", "k_weight")}
    q, k = (draw(2, s.positions, heads, s.width) for heads in (s.heads, s.keys))
    return {"q": q, "k": k, **weights, **_angles(s)}


def _documents(draw: Draw) -> Tensors:
    """(positions, heads, width) of documents that lie end to end, the third without a token."""
    s = draw.sizes
    # A document of one token, a long one, and one without any.
    ends = torch.tensor([0, 1, s.rows // 2 - 8, s.rows // 2 - 8, s.rows], dtype=torch.int32)
    q, k, v = (draw(s.rows, heads, s.width) for heads in (s.heads, s.keys, s.keys))
    return {"q": q, "k": k, "v": v, "ends": ends}


def _convolved(draw: Draw) -> Tensors:
    """(1, rows, hidden) of documents that lie end to end, of one token, of many and of none."""
    s = draw.sizes
    ends = torch.tensor([0, 1, s.rows // 2, s.rows // 2, s.rows], dtype=torch.int32).clamp(max=s.rows)
    return {"x": draw(1, s.rows, s.hidden), "weight": draw(s.hidden, 4), "ends": ends}


def _kept(draw: Draw) -> Tensors:
    """(rows, heads, width) of new tokens, and (slots, heads, positions, width) of the keys that rows have kept."""
    s = draw.sizes
    rows, lengths = torch.arange(s.positions, dtype=torch.int32), torch.arange(s.positions, dtype=torch.int32)
    q, k, v = (draw(s.positions, heads, s.width) for heads in (s.heads, s.keys, s.keys))
    keys, values = (draw(s.positions, s.keys, s.positions, s.width) for _ in range(2))
    return {"q": q, "k": k, "v": v, "keys": keys, "values": values, "slots": rows.flip(0), "lengths": lengths}


def _keeping(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return decode attention that leaves the kept keys as they were."""
    return lambda keys, values, **given: op(keys=keys.clone(), values=values.clone(), scale=0.15, **given)


def _logits(draw: Draw) -> Tensors:
    return {"logits": draw(draw.sizes.rows, draw.sizes.vocab, std=2.0), "labels": draw.labels()}


def drawn_weight(draw: Draw, rows: int, columns: int, std: float = 1.0) -> Tensor:
    return draw(rows, columns, std=std / math.sqrt(columns))


def drawn_head(draw: Draw) -> Tensors:
    s = draw.sizes
    hidden, weight = draw(s.rows, s.hidden), drawn_weight(draw, s.vocab, s.hidden, 2.0)
    return {"hidden": hidden, "weight": weight, "labels": draw.labels()}


def _pair(draw: Draw) -> Tensors:
    """A student and a teacher of another width."""
    s = draw.sizes
    teacher = {"teacher_hidden": draw(s.rows, s.inner), "teacher_weight": drawn_weight(draw, s.vocab, s.inner, 2.0)}
    return {**drawn_head(draw), **teacher}


def _top_tokens(draw: Draw) -> Tensors:
    """A student's head, and the 16 top tokens of a teacher."""
    s = draw.sizes
    log_probs, ids = draw(s.rows, s.vocab, std=2.0).log_softmax(-1).topk(16)
    return {**drawn_head(draw), "ids": ids, "log_probs": log_probs}


def _linear_ce(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _ce(hidden @ weight.t(), labels)


def _ce(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def layer(tensors: Tensors, name: str = "") -> Projection:
    """Return the layer of `<name>_weight`, `<name>_bias` if it is there, and adapters `<name>_a0`, `<name>_b0`, ..."""
    start = f"{name}_" if name else ""
    adapters: list[Adapter] = []
    while (a := tensors.get(f"{start}a{len(adapters)}")) is not None:
        adapters.append(Adapter(a, tensors[f"{start}b{len(adapters)}"], SCALES[len(adapters)]))
    return Projection(tensors[f"{start}weight"], tensors.get(f"{start}bias"), tuple(adapters))


def adapted(draw: Draw, name: str, rows: int, columns: int, ranks: tuple[int, ...] = ()) -> Tensors:
    """Draw what `layer` takes: a weight, and adapters that add about as much to the result; one if `ranks` is empty."""
    start = f"{name}_" if name else ""
    tensors = {f"{start}weight": drawn_weight(draw, rows, columns)}
    for i, rank in enumerate(ranks or (draw.sizes.rank,)):
        tensors |= {f"{start}a{i}": drawn_weight(draw, rank, columns), f"{start}b{i}": draw(rows, rank, std=0.2)}
    return tensors


def _mlp_shapes(s: Sizes) -> dict[str, tuple[int, int]]:
    return {"gate": (s.inner, s.hidden), "up": (s.inner, s.hidden), "down": (s.hidden, s.inner)}


def _mlp_tensors(draw: Draw) -> Tensors:
    return {**_rows("x")(draw), **{name: drawn_weight(draw, *s) for name, s in _mlp_shapes(draw.sizes).items()}}


def _lora_linears(draw: Draw) -> Tensors:
    s, tensors = draw.sizes, _rows("x")(draw)
    for name, rows in {"q": s.hidden, "k": s.rank, "v": s.inner}.items():
        tensors |= adapted(draw, name, rows, s.hidden)
    return tensors


def _lora_mlp(draw: Draw) -> Tensors:
    tensors = _rows("x")(draw)
    for name, shape in _mlp_shapes(draw.sizes).items():
        tensors |= adapted(draw, name, *shape)
    return tensors


def _lora_experts(draw: Draw) -> Tensors:
    s = draw.sizes
    # A token goes to two experts, which must differ; some experts get more tokens than others.
    index = torch.stack([(torch.arange(s.rows) * step + step) % s.experts for step in (1, 3)], 1)  # two different ones
    tensors = {"x": draw(s.rows, s.hidden), "index": index, "weights": draw(s.rows, 2, std=0.2, mean=0.5)}
    for name, (rows, columns) in {"up": (2 * s.inner, s.hidden), "down": (s.hidden, s.inner)}.items():
        tensors[f"{name}_weight"] = draw(s.experts, rows, columns, std=1 / math.sqrt(columns))
        tensors[f"{name}_a"] = draw(s.experts, s.rank, columns, std=1 / math.sqrt(columns))
        tensors[f"{name}_b"] = draw(s.experts, rows, s.rank, std=0.2)
    return tensors


def with_list(function: Callable[..., Any]) -> Callable[..., Any]:
    """An op on a list of weights, as a function of each by its name, and of `<name>_bias`."""

    def called(x: Tensor, **tensors: Any) -> Any:
        options = {name: tensors.pop(name) for name in [*tensors] if not isinstance(tensors[name], Tensor | None)}
        names = [name for name in tensors if not name.endswith("_bias")]
        return function(x, [tensors[n] for n in names], [tensors.get(f"{n}_bias") for n in names], **options)

    return called


def with_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(x: Tensor, **tensors: Any) -> Any:
        of = layer(tensors)
        return function(x, of.weight, of.bias, of.adapters)

    return called


def with_layers(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, **tensors: function(x, [layer(tensors, n) for n in "qkv" if f"{n}_weight" in tensors])


def with_mlp(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without `up_weight` gate is packed."""

    def called(x: Tensor, **tensors: Any) -> Any:
        options = {name: x for name, x in tensors.items() if name in ("activation", "remake")}
        gate, up, down = (layer(tensors, n) if f"{n}_weight" in tensors else None for n in ("gate", "up", "down"))
        return function(x, gate, up, down, **options)

    return called


def with_experts(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(x: Tensor, index: Tensor, weights: Tensor, **tensors: Any) -> Any:
        options = {"gate": tensors["gate"]} if "gate" in tensors else {}
        parts = ("bias", "a", "b")
        layers = (
            StackedProjection(tensors[f"{n}_weight"], *(tensors.get(f"{n}_{part}") for part in parts))
            for n in ("up", "down")
        )
        return function(x, index, weights, *layers, **options)

    return called


def _divergence(function: Callable[..., Any], kind: str) -> Callable[..., Outputs]:
    def called(**tensors: Tensor) -> Outputs:
        result = function(**tensors, kind=kind, ce_weight=0.1)
        return result.loss, result.log_prob, result.entropy

    return called


def _log_probs(function: Callable[..., Any]) -> Callable[..., Outputs]:
    return lambda **tensors: tuple(function(**tensors)[:2])


def loss_of(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    return lambda **tensors: function(**tensors, **options).loss


def _mxfp4_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of 32 numbers a block, and scales, that follow from x."""
    codes = (x.double().flatten() * 97).long().remainder(256).to(torch.uint8)
    blocks = 2 * len(codes) // MXFP4_BLOCK
    scales = 125 + torch.arange(blocks, device=x.device).remainder(5)
    return codes[: blocks * MXFP4_BLOCK // 2], scales.to(torch.uint8)


def _nested_codes(x: Tensor) -> tuple[Tensor, NestedScales]:
    """Return codes of nf4, and scales that are packed themselves, which follow from x."""
    codes, scales = nf4_codes(x)
    levels, largest = torch.linspace(-1, 1, 256, device=x.device), scales[::NESTED_BLOCK].contiguous()
    return codes, NestedScales((scales * 97).to(torch.uint8), levels, largest, scales.mean())


def _unpacked_nf4(codes: Tensor, scales: NestedScales, numel: int, dtype: torch.dtype) -> Tensor:
    unpack_nf4_(out := torch.empty(numel, dtype=dtype, device=codes.device), codes, scales)
    return out


def _in_4_bits(op: Callable[..., Tensor], codes_of: Callable[[Tensor], tuple[Tensor, Any]]) -> Callable[..., Any]:
    """Return a function that unpacks the codes of x, in its dtype."""

    def run(x: Tensor) -> Tensor:
        codes, scales = codes_of(x)
        return op(codes, scales, 2 * len(codes), x.dtype)

    return run


def _updated(update: Callable[..., None]) -> Callable[..., Outputs]:
    """Return a function that makes an optimizer's step, its third, and returns a parameter and its moments."""

    def step(param: Tensor, grad: Tensor, mean: Tensor, root: Tensor) -> Outputs:
        tensors = param.clone(), grad, mean.clone(), root.square()
        options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": EPS, "weight_decay": 0.1}
        coefficient, steps = (torch.tensor(number, device=param.device) for number in (0.5, 3.0))
        update(*([x] for x in tensors), [steps], **options, coefficient=coefficient)
        return tensors[0], tensors[2], tensors[3]

    return step


def adapters_of(*names: str) -> tuple[str, ...]:
    """Return x and the names of the layers' first adapters."""
    return ("x", *(f"{name}_{factor}0" for name in names for factor in "ab"))


HEAD_LEAVES = ("hidden", "weight")
LORA_EXPERTS_LEAVES = ("x", "weights", "up_a", "up_b", "down_a", "down_b")
CLAMPS = dict(limit=1.0, alpha=1.702, shift=1.0)
LORA_MLP_LEAVES = adapters_of("gate", "up", "down")

CHECKS: tuple[Check, ...] = (
    Check("rms_norm", partial(rms_norm, eps=EPS), plain_rms_norm, normed("x"), ("x", "weight")),
    Check(
        "layer_norm", partial(layer_norm, eps=EPS),
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        normed("x", bias=True), ("x", "weight", "bias"),
    ),
    Check(
        "gated_rms_norm", partial(gated_rms_norm, eps=EPS), partial(gated_rms_norm_reference, eps=EPS),
        normed("x", "gate"), ("x", "gate", "weight"),
    ),
    Check(
        "gated_rms_norm, gate first", partial(gated_rms_norm, eps=EPS, gate_first=True, groups=3),
        partial(gated_rms_norm_reference, eps=EPS, gate_first=True, groups=3),
        normed("x", "gate"), ("x", "gate", "weight"),
    ),
    Check("rope", rope, rope_reference, _heads, ("q", "k")),
    Check("qk_norm_rope", qk_norm_rope, qk_norm_rope_reference, _heads_and_norms, ("q", "k", "q_weight", "k_weight")),
    *(
        Check(
            f"document_attention{name}", partial(document_attention, window=window),
            partial(document_attention_reference, window=window), _documents, ("q", "k", "v"),
        )
        for name, window in {"": None, ", window": 20}.items()
    ),
    Check(
        "document_attention, sinks", partial(document_attention, softcap=5.0),
        partial(document_attention_reference, softcap=5.0),
        lambda draw: {**_documents(draw), "sinks": draw(draw.sizes.heads)}, ("q", "k", "v", "sinks"),
    ),
    *(
        Check(
            f"causal_conv{name}", partial(causal_conv, silu=silu), partial(causal_conv_reference, silu=silu),
            _convolved, ("x", "weight"),
        )
        for name, silu in {"": False, ", silu": True}.items()
    ),
    Check("swiglu", swiglu, lambda gate, up: F.silu(gate) * up, _rows("gate", "up"), ("gate", "up")),
    Check("geglu", geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, _rows("gate", "up"), ("gate", "up")),
    Check(
        "clamped_swiglu", partial(clamped_swiglu, **CLAMPS), partial(clamped_swiglu_reference, **CLAMPS),
        _rows("gate", "up"), ("gate", "up"),
    ),
    Check("relu2", relu2, lambda x: F.relu(x).square(), _rows("x"), ("x",)),
    Check(
        "gated_linear", gated_linear, lambda gate, up, weight: F.linear(F.silu(gate) * up, weight),
        lambda draw: {**_rows("gate", "up")(draw), "weight": drawn_weight(draw, draw.sizes.inner, draw.sizes.hidden)},
        ("gate", "up", "weight"),
    ),
    Check(
        "gated_mlp", with_list(gated_mlp), with_list(gated_mlp_reference), _mlp_tensors, ("x", "gate", "up", "down")
    ),
    Check(
        "activation_linear", activation_linear, lambda x, weight: F.linear(F.gelu(x), weight),
        lambda draw: {**_rows("x")(draw), "weight": drawn_weight(draw, draw.sizes.inner, draw.sizes.hidden)},
        ("x", "weight"),
    ),
    Check(
        "linears", with_list(linears), with_list(linears_reference),
        lambda draw: {**_rows("x")(draw), **{w: drawn_weight(draw, *[draw.sizes.hidden] * 2) for w in ("q", "k")}},
        ("x", "q", "k"),
    ),
    Check("cross_entropy", loss_of(cross_entropy), _ce, _logits, ("logits",)),
    Check("linear_cross_entropy", loss_of(linear_cross_entropy), _linear_ce, drawn_head, HEAD_LEAVES),
    Check(
        "linear_cross_entropy, recomputed", loss_of(linear_cross_entropy, recompute=True), _linear_ce, drawn_head,
        HEAD_LEAVES,
    ),
    Check(
        "linear_log_probs", _log_probs(linear_log_probs), _log_probs(linear_log_probs_reference), drawn_head,
        HEAD_LEAVES,
    ),
    *(
        Check(
            f"linear_divergence, {kind}", _divergence(linear_divergence, kind),
            _divergence(linear_divergence_reference, kind), _pair, HEAD_LEAVES,
        )
        for kind in KINDS
    ),
    *(
        Check(
            f"linear_sparse_divergence, {tail}", loss_of(linear_sparse_divergence, tail=tail),
            loss_of(linear_sparse_divergence_reference, tail=tail), _top_tokens, HEAD_LEAVES,
        )
        for tail in ("bucket", "none")
    ),
    *(
        Check(
            f"linear_sparse_divergence, {kind}", loss_of(linear_sparse_divergence, kind=kind),
            loss_of(linear_sparse_divergence_reference, kind=kind), _top_tokens, HEAD_LEAVES,
        )
        for kind in KINDS if kind != "forward_kl"
    ),
    Check(
        "thin_linear", with_list(thin_linear), with_list(thin_linear_reference),
        lambda draw: {**_rows("x")(draw), **{w: drawn_weight(draw, *[draw.sizes.hidden] * 2) for w in ("q", "k")}}, (),
    ),
    *(
        Check(f"four_bits, {kind}", _in_4_bits(unpack, codes), _in_4_bits(unpack_reference, codes), _rows("x"), ())
        for kind, codes in {"nf4": nf4_codes, "mxfp4": _mxfp4_codes}.items()
    ),
    Check(
        "four_bits, nested nf4", _in_4_bits(_unpacked_nf4, _nested_codes),
        _in_4_bits(unpack_nf4_reference, _nested_codes), _rows("x"), (),
    ),
    Check("decode_attention", _keeping(decode_attention), _keeping(decode_attention_reference), _kept, ()),
    Check("adamw", _updated(adamw_), _updated(adamw_reference), _rows("param", "grad", "mean", "root"), ()),
    Check(
        "gradient_norm", lambda **grads: gradient_norm([*grads.values()]),
        lambda **grads: gradient_norm_reference([*grads.values()]), _rows("first", "second"), (),
    ),
    Check("lora_linear", with_layer(lora_linear), with_layer(lora_linear_reference),
        lambda draw: {**_rows("x")(draw), **adapted(draw, "", draw.sizes.inner, draw.sizes.hidden)}, ("x", "a0", "b0"),
    ),
    Check(
        "lora_linears", with_layers(lora_linears), with_layers(lora_linears_reference), _lora_linears,
        adapters_of("q", "k", "v"),
    ),
    Check(
        "lora_experts", with_experts(lora_experts), with_experts(lora_experts_reference), _lora_experts,
        LORA_EXPERTS_LEAVES,
    ),
    Check("lora_mlp", with_mlp(lora_mlp), with_mlp(lora_mlp_reference), _lora_mlp, LORA_MLP_LEAVES),
    Check(
        "lora_mlp, remade", with_mlp(partial(lora_mlp, remake=True)), with_mlp(lora_mlp_reference), _lora_mlp,
        LORA_MLP_LEAVES,
    ),
)  # fmt: skip
