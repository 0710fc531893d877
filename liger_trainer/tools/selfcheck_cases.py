"""The cases of `selfcheck`: each op with what it must equal, a function of torch or else the op's reference."""

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
from ..kernels.add_rms_norm import add_rms_norm
from ..kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference
from ..kernels.cross_entropy import cross_entropy
from ..kernels.document_attention import document_attention, document_attention_reference
from ..kernels.gated_linear import gated_linear
from ..kernels.gated_mlp import gated_mlp, gated_mlp_reference
from ..kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from ..kernels.geglu import geglu
from ..kernels.gradient_norm import gradient_norm, gradient_norm_reference
from ..kernels.jsd import jsd, jsd_reference
from ..kernels.kl_div import kl_div
from ..kernels.layer_norm import layer_norm
from ..kernels.linear_alm import linear_alm, linear_alm_reference
from ..kernels.linear_cross_entropy import linear_cross_entropy
from ..kernels.linear_divergence import KINDS, linear_divergence, linear_divergence_reference
from ..kernels.linear_log_probs import linear_log_probs, linear_log_probs_reference
from ..kernels.linear_sparse_divergence import linear_sparse_divergence, linear_sparse_divergence_reference
from ..kernels.linear_uld import linear_uld, linear_uld_reference
from ..kernels.linears import linears
from ..kernels.lora_experts import StackedProjection, lora_experts, lora_experts_reference
from ..kernels.lora_linear import lora_linear, lora_linear_reference
from ..kernels.lora_linears import lora_linears, lora_linears_reference
from ..kernels.lora_mlp import lora_mlp, lora_mlp_reference
from ..kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from ..kernels.relu2 import relu2
from ..kernels.rms_norm import rms_norm
from ..kernels.rope import rope, rope_reference
from ..kernels.swiglu import swiglu
from ..kernels.tvd import tvd, tvd_reference
from ..kernels.types import Adapter, Projection

ROWS, HIDDEN, INNER, VOCAB, RANK = 96, 192, 320, 1003, 8  # not multiples of the tiles
HEADS, KEYS, WIDTH, EXPERTS = 4, 2, 64, 5
EPS, IGNORED = 1e-6, -100

Outputs = Tensor | tuple[Tensor, ...]


class Draw:
    """Draws the same tensors every time, in fp64 on the CPU, so that all devices see the same numbers."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64) * std + mean

    def integers(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self._generator)

    def labels(self) -> Tensor:
        labels = self.integers(VOCAB, ROWS)
        labels[::7] = IGNORED
        return labels


@dataclass(frozen=True)
class Check:
    """An op and what it must equal, on tensors by name. `leaves` names the tensors whose gradients are compared."""

    name: str
    op: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    tensors: Callable[[Draw], dict[str, Tensor]]
    leaves: tuple[str, ...]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _rows(*names: str, width: int = HIDDEN) -> Callable[[Draw], dict[str, Tensor]]:
    return lambda draw: {name: draw(ROWS, width) for name in names}


def _normed(*names: str, bias: bool = False) -> Callable[[Draw], dict[str, Tensor]]:
    def tensors(draw: Draw) -> dict[str, Tensor]:
        weights = {"weight": draw(HIDDEN, std=0.2, mean=1.0), **({"bias": draw(HIDDEN)} if bias else {})}
        return {**_rows(*names)(draw), **weights}

    return tensors


def _angles(positions: int) -> dict[str, Tensor]:
    frequencies = 10_000.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies).repeat(1, 2)[None]
    return {"cos": angles.cos(), "sin": angles.sin()}


def _heads(draw: Draw) -> dict[str, Tensor]:
    """(batch, heads, positions, width)."""
    return {"q": draw(2, HEADS, 33, WIDTH), "k": draw(2, KEYS, 33, WIDTH), **_angles(33)}


def _heads_and_norms(draw: Draw) -> dict[str, Tensor]:
    """(batch, positions, heads, width), as projections leave them."""
    weights = {name: draw(WIDTH, std=0.2, mean=1.0) for name in ("q_weight", "k_weight")}
    return {"q": draw(2, 33, HEADS, WIDTH), "k": draw(2, 33, KEYS, WIDTH), **weights, **_angles(33)}


def _documents(draw: Draw) -> dict[str, Tensor]:
    """(positions, heads, width) of documents that lie end to end, the third without a token."""
    ends = torch.tensor([0, 1, 40, 40, ROWS], dtype=torch.int32)
    return {"q": draw(ROWS, HEADS, WIDTH), "k": draw(ROWS, KEYS, WIDTH), "v": draw(ROWS, KEYS, WIDTH), "ends": ends}


def _logits(draw: Draw) -> dict[str, Tensor]:
    return {"logits": draw(ROWS, VOCAB, std=2.0), "labels": draw.labels()}


def _distributions(log_target: bool, log_input: bool = True) -> Callable[[Draw], dict[str, Tensor]]:
    def tensors(draw: Draw) -> dict[str, Tensor]:
        student, teacher = (draw(ROWS, VOCAB, std=2.0) for _ in range(2))
        return {
            "input": student.log_softmax(-1) if log_input else student.softmax(-1),
            "target": teacher.log_softmax(-1) if log_target else teacher.softmax(-1),
        }

    return tensors


def _head(draw: Draw) -> dict[str, Tensor]:
    hidden, weight = draw(ROWS, HIDDEN), draw(VOCAB, HIDDEN, std=2 / math.sqrt(HIDDEN))
    return {"hidden": hidden, "weight": weight, "labels": draw.labels()}


def _pair(draw: Draw) -> dict[str, Tensor]:
    """A student and a teacher of another width."""
    teacher = {"teacher_hidden": draw(ROWS, INNER), "teacher_weight": draw(VOCAB, INNER, std=2 / math.sqrt(INNER))}
    return {**_head(draw), **teacher}


def _other_vocabulary(draw: Draw) -> dict[str, Tensor]:
    teacher = {"teacher_hidden": draw(ROWS, INNER), "teacher_weight": draw(VOCAB - 90, INNER, std=2 / INNER**0.5)}
    return {**_head(draw), **teacher}


def _spans(draw: Draw) -> dict[str, Tensor]:
    """A student's head, spans of three rows, and how likely a teacher finds them."""
    head = _head(draw)
    rows = torch.arange(ROWS, device=head["labels"].device)
    return {**head, "spans": rows - rows % 3, "teacher_log_prob": -4 * draw(ROWS).abs()}


def _top_tokens(draw: Draw) -> dict[str, Tensor]:
    """A student's head, and the 16 top tokens of a teacher."""
    log_probs, ids = draw(ROWS, VOCAB, std=2.0).log_softmax(-1).topk(16)
    return {**_head(draw), "ids": ids, "log_probs": log_probs}


def _linear_ce(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _ce(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _lora(draw: Draw) -> dict[str, Tensor]:
    factors = {"a": draw(RANK, HIDDEN, std=1 / math.sqrt(HIDDEN)), "b": draw(INNER, RANK, std=0.2)}
    return {"x": draw(ROWS, HIDDEN), "weight": draw(INNER, HIDDEN, std=1 / math.sqrt(HIDDEN)), **factors}


def _lora_linear(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, a, b: function(x, weight, None, [Adapter(a, b, 2.0)])


def _lora_linears_tensors(draw: Draw) -> dict[str, Tensor]:
    tensors = {"x": draw(ROWS, HIDDEN)}
    for name, rows in {"q": HIDDEN, "k": RANK, "v": INNER}.items():
        tensors[f"{name}w"] = draw(rows, HIDDEN, std=1 / math.sqrt(HIDDEN))
        tensors[f"{name}a"] = draw(RANK, HIDDEN, std=1 / math.sqrt(HIDDEN))
        tensors[f"{name}b"] = draw(rows, RANK, std=0.2)
    return tensors


def _lora_linears(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    def called(x: Tensor, **factors: Tensor) -> tuple[Tensor, ...]:
        adapters = {n: (Adapter(factors[f"{n}a"], factors[f"{n}b"], 2.0),) for n in "qkv"}
        return function(x, [Projection(factors[f"{n}w"], None, adapters[n]) for n in "qkv"])

    return called


def _lora_experts_tensors(draw: Draw) -> dict[str, Tensor]:
    index = torch.stack([(torch.arange(ROWS) * step + step) % EXPERTS for step in (1, 3)], 1)  # two different ones
    tensors = {"x": draw(ROWS, HIDDEN), "index": index, "weights": draw(ROWS, 2, std=0.2, mean=0.5)}
    for name, (rows, columns) in {"u": (2 * INNER, HIDDEN), "d": (HIDDEN, INNER)}.items():
        tensors[f"{name}w"] = draw(EXPERTS, rows, columns, std=1 / math.sqrt(columns))
        tensors[f"{name}a"] = draw(EXPERTS, RANK, columns, std=1 / math.sqrt(columns))
        tensors[f"{name}b"] = draw(EXPERTS, rows, RANK, std=0.2)
    return tensors


def _lora_experts(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def called(x: Tensor, index: Tensor, weights: Tensor, **factors: Tensor) -> Tensor:
        layers = (StackedProjection(factors[f"{n}w"], None, factors[f"{n}a"], factors[f"{n}b"]) for n in "ud")
        return function(x, index, weights, *layers)

    return called


def _mlp_tensors(draw: Draw) -> dict[str, Tensor]:
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {"x": draw(ROWS, HIDDEN), **{name: draw(*s, std=1 / math.sqrt(s[1])) for name, s in shapes.items()}}


def _lora_mlp_tensors(draw: Draw) -> dict[str, Tensor]:
    tensors = {"x": draw(ROWS, HIDDEN)}
    for name, (rows, columns) in {"g": (INNER, HIDDEN), "u": (INNER, HIDDEN), "d": (HIDDEN, INNER)}.items():
        tensors[f"{name}w"] = draw(rows, columns, std=1 / math.sqrt(columns))
        tensors[f"{name}a"] = draw(RANK, columns, std=1 / math.sqrt(columns))
        tensors[f"{name}b"] = draw(rows, RANK, std=0.2)
    return tensors


def _lora_mlp(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def called(x: Tensor, **factors: Tensor) -> Tensor:
        gate, up, down = (
            Projection(factors[f"{n}w"], None, (Adapter(factors[f"{n}a"], factors[f"{n}b"], 2.0),)) for n in "gud"
        )
        return function(x, gate, up, down)

    return called


def _divergence(function: Callable[..., Any], kind: str) -> Callable[..., Outputs]:
    def called(**tensors: Tensor) -> Outputs:
        result = function(**tensors, kind=kind, ce_weight=0.1)
        return result.loss, result.log_prob, result.entropy

    return called


def _log_probs(function: Callable[..., Any]) -> Callable[..., Outputs]:
    return lambda **tensors: tuple(function(**tensors)[:2])


def _loss(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    return lambda **tensors: function(**tensors, **options).loss


def _updated(update: Callable[..., None]) -> Callable[..., Outputs]:
    """Return a function that makes an optimizer's step, its third, and returns a parameter and its moments."""

    def step(param: Tensor, grad: Tensor, mean: Tensor, root: Tensor) -> Outputs:
        tensors = param.clone(), grad, mean.clone(), root.square()
        options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": EPS, "weight_decay": 0.1}
        coefficient, steps = (torch.tensor(number, device=param.device) for number in (0.5, 3.0))
        update(*([x] for x in tensors), [steps], **options, coefficient=coefficient)
        return tensors[0], tensors[2], tensors[3]

    return step


HEAD_LEAVES = ("hidden", "weight")
LORA_EXPERTS_LEAVES = ("x", "weights", "ua", "ub", "da", "db")
CLAMPS = dict(limit=1.0, alpha=1.702, shift=1.0)
LORA_LINEARS_LEAVES = ("x", "qa", "qb", "ka", "kb", "va", "vb")
LORA_MLP_LEAVES = ("x", *(f"{name}{factor}" for name in "gud" for factor in "ab"))

CHECKS: tuple[Check, ...] = (
    Check("rms_norm", partial(rms_norm, eps=EPS), _rms, _normed("x"), ("x", "weight")),
    Check(
        "layer_norm", partial(layer_norm, eps=EPS),
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        _normed("x", bias=True), ("x", "weight", "bias"),
    ),
    Check(
        "add_rms_norm", partial(add_rms_norm, eps=EPS),
        lambda x, residual, weight: (_rms(x + residual, weight), x + residual),
        _normed("x", "residual"), ("x", "residual", "weight"),
    ),
    Check(
        "gated_rms_norm", partial(gated_rms_norm, eps=EPS), partial(gated_rms_norm_reference, eps=EPS),
        _normed("x", "gate"), ("x", "gate", "weight"),
    ),
    Check(
        "gated_rms_norm, gate first", partial(gated_rms_norm, eps=EPS, gate_first=True, groups=3),
        partial(gated_rms_norm_reference, eps=EPS, gate_first=True, groups=3),
        _normed("x", "gate"), ("x", "gate", "weight"),
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
    Check("swiglu", swiglu, lambda gate, up: F.silu(gate) * up, _rows("gate", "up"), ("gate", "up")),
    Check("geglu", geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, _rows("gate", "up"), ("gate", "up")),
    Check(
        "clamped_swiglu", partial(clamped_swiglu, **CLAMPS), partial(clamped_swiglu_reference, **CLAMPS),
        _rows("gate", "up"), ("gate", "up"),
    ),
    Check("relu2", relu2, lambda x: F.relu(x).square(), _rows("x"), ("x",)),
    Check(
        "gated_linear", gated_linear, lambda gate, up, weight: F.linear(F.silu(gate) * up, weight),
        lambda draw: {**_rows("gate", "up")(draw), "weight": draw(INNER, HIDDEN, std=1 / math.sqrt(HIDDEN))},
        ("gate", "up", "weight"),
    ),
    Check(
        "gated_mlp", lambda x, **weights: gated_mlp(x, [*weights.values()]),
        lambda x, **weights: gated_mlp_reference(x, [*weights.values()]), _mlp_tensors, ("x", "gate", "up", "down"),
    ),
    Check(
        "activation_linear", activation_linear, lambda x, weight: F.linear(F.gelu(x), weight),
        lambda draw: {**_rows("x")(draw), "weight": draw(INNER, HIDDEN, std=1 / math.sqrt(HIDDEN))}, ("x", "weight"),
    ),
    Check(
        "linears", lambda x, **weights: linears(x, [*weights.values()]),
        lambda x, **weights: tuple(F.linear(x, w) for w in weights.values()),
        lambda draw: {**_rows("x")(draw), **{w: draw(HIDDEN, HIDDEN, std=1 / math.sqrt(HIDDEN)) for w in ("q", "k")}},
        ("x", "q", "k"),
    ),
    Check("cross_entropy", _loss(cross_entropy), _ce, _logits, ("logits",)),
    Check(
        "kl_div", kl_div, lambda input, target: F.kl_div(input, target, reduction="batchmean"),
        _distributions(log_target=False), ("input",),
    ),
    Check("jsd", jsd, jsd_reference, _distributions(log_target=True), ("input",)),
    Check("tvd", tvd, tvd_reference, _distributions(log_target=False, log_input=False), ("input",)),
    Check("linear_cross_entropy", _loss(linear_cross_entropy), _linear_ce, _head, HEAD_LEAVES),
    Check(
        "linear_cross_entropy, recomputed", _loss(linear_cross_entropy, recompute=True), _linear_ce, _head, HEAD_LEAVES
    ),
    Check(
        "linear_log_probs", _log_probs(linear_log_probs), _log_probs(linear_log_probs_reference), _head, HEAD_LEAVES
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
            f"linear_sparse_divergence, {tail}", _loss(linear_sparse_divergence, tail=tail),
            _loss(linear_sparse_divergence_reference, tail=tail), _top_tokens, HEAD_LEAVES,
        )
        for tail in ("bucket", "none")
    ),
    *(
        Check(
            f"linear_sparse_divergence, {kind}", _loss(linear_sparse_divergence, kind=kind),
            _loss(linear_sparse_divergence_reference, kind=kind), _top_tokens, HEAD_LEAVES,
        )
        for kind in KINDS if kind != "forward_kl"
    ),
    Check(
        "linear_uld", _loss(linear_uld, ce_weight=0.1), _loss(linear_uld_reference, ce_weight=0.1), _other_vocabulary,
        HEAD_LEAVES,
    ),
    Check(
        "linear_alm", _loss(linear_alm, ce_weight=0.1), _loss(linear_alm_reference, ce_weight=0.1), _spans, HEAD_LEAVES
    ),
    Check("adamw", _updated(adamw_), _updated(adamw_reference), _rows("param", "grad", "mean", "root"), ()),
    Check(
        "gradient_norm", lambda **grads: gradient_norm([*grads.values()]),
        lambda **grads: gradient_norm_reference([*grads.values()]), _rows("first", "second"), (),
    ),
    Check("lora_linear", _lora_linear(lora_linear), _lora_linear(lora_linear_reference), _lora, ("x", "a", "b")),
    Check(
        "lora_linears", _lora_linears(lora_linears), _lora_linears(lora_linears_reference), _lora_linears_tensors,
        LORA_LINEARS_LEAVES,
    ),
    Check(
        "lora_experts", _lora_experts(lora_experts), _lora_experts(lora_experts_reference), _lora_experts_tensors,
        LORA_EXPERTS_LEAVES,
    ),
    Check("lora_mlp", _lora_mlp(lora_mlp), _lora_mlp(lora_mlp_reference), _lora_mlp_tensors, LORA_MLP_LEAVES),
    Check(
        "lora_mlp, remade", _lora_mlp(partial(lora_mlp, remake=True)), _lora_mlp(lora_mlp_reference),
        _lora_mlp_tensors, LORA_MLP_LEAVES,
    ),
)  # fmt: skip
