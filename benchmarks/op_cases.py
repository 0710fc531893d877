"""The cases of the ops on plain tensors. Each op is data: its inputs, its plain torch, its traffic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .operands import Draw, Operands, outputs_of
from .reference import at_least_fp32, divergence
from .trainer_cases import draw_lengths

EPS = 1e-6
HEAD_DIM = 128
SEQUENCE = 2048  # tokens of one sequence; more tokens are more sequences
BLOCK = 1024  # queries whose scores plain attention with windows or sinks has at a time


@dataclass(frozen=True)
class Op:
    """One operation on named tensors.

    Attributes:
        plain: the op in plain torch, as model code has it: in high precision it is the truth, in the case's dtype the
            eager provider.
        leaves: the tensors that get a gradient.
        reads: what a backward must read besides the gradients of the outputs; None for all inputs. out0, out1, ... are
            outputs.
        writes: the tensors whose gradients a backward must write; None for all leaves.
        is_loss: the output is a scalar, the mean over rows of something a row.
        flops: of the matrix products in a pass.
    """

    name: str
    make: Callable[[OpCase, Draw], dict[str, Tensor]]
    plain: Callable[..., Tensor | tuple[Tensor, ...]]
    leaves: tuple[str, ...]
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None
    is_loss: bool = False
    flops: Callable[[OpCase, str], float] | None = None


@dataclass(frozen=True)
class OpCase:
    """One op at one shape: `tokens` rows of `width` (hidden size, intermediate size or vocabulary)."""

    name: str
    op: Op
    width: int = 0
    tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (32, 8)  # of the queries, of the keys
    transposed: bool = False  # heads outermost, as a view: what a projection leaves behind
    hidden_size: int = 0
    document: int = 0  # tokens of each document; 0: of a real mix
    window: int | None = None  # how many tokens attention sees
    sinks: bool = False  # whether each head has one, as gpt-oss'
    grad_output: float = 1.0  # of a loss
    host: bool = False  # also the wall time of a short sequence
    default: bool = True

    @property
    def kind(self) -> str:
        return self.op.name

    @property
    def is_loss(self) -> bool:
        return self.op.is_loss

    @property
    def leaves(self) -> tuple[str, ...]:
        return self.op.leaves + ("sinks",) * self.sinks

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the op besides its tensors."""
        return {} if self.window is None else {"window": self.window}

    @property
    def plain(self) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        return partial(self.op.plain, **self.options)

    shared = ()  # a loss has a row of every tensor for each token

    def value_names(self, outputs: int) -> tuple[str, ...]:
        return (*(f"out{i}" for i in range(outputs)), *(f"d_{name}" for name in self.leaves))

    def flops(self, name: str) -> float:
        """Return the operations of the matrix products in a pass, 0 for an op without any."""
        return self.op.flops(self, name) if self.op.flops else 0

    def make_operands(self, device: torch.device, seed: int = 0) -> Operands:
        """Draw the inputs, whose leaves require grad, and the gradients of the outputs."""
        draw = Draw.seeded(self.dtype, device, seed)
        tensors = self.op.make(self, draw)
        if self.is_loss:
            upstream = [torch.tensor(self.grad_output, device=device)]
        else:
            with torch.no_grad():
                shapes = outputs_of(self.plain(**tensors))
            upstream = [torch.empty_like(x).normal_(generator=draw.generator) for x in shapes]
        for name in self.leaves:
            tensors[name].requires_grad_()
        return Operands(tensors, upstream)


def bytes_moved(case: OpCase, operands: Operands) -> dict[str, int]:
    """Return what each pass must read and write, whoever computes the op.

    Both passes of a loss together need less than their sum: it can make its gradient while it reads its inputs.
    """
    op, inputs = case.op, tuple(operands.tensors)
    sizes = {name: x.nbytes for name, x in operands.tensors.items()}
    outputs = {f"out{i}": x.nbytes for i, x in enumerate(operands.upstream)}  # a gradient has its output's size
    scalars = sum(outputs.values()) if op.is_loss else 0
    forward = sum(sizes.values()) + sum(outputs.values()) - scalars
    reads, writes = inputs if op.reads is None else op.reads, case.leaves if op.writes is None else op.writes
    sizes |= outputs
    backward = sum(outputs.values()) - scalars + sum(sizes[name] for name in (*reads, *writes))
    gradients = sum(sizes[name] for name in case.leaves)
    return {"forward": forward, "backward": backward, "both": forward + (gradients if op.is_loss else backward)}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's and Qwen3's: the normalised x is rounded before the weight."""
    wide = at_least_fp32(x)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return rms_norm(summed, weight), summed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]  # the same for every head

    def turn(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    return turn(q), turn(k)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Qwen3's: q and k come as (B, S, heads, D) and leave as (B, heads, S, D)."""
    return rope(rms_norm(q, q_weight).transpose(1, 2), rms_norm(k, k_weight).transpose(1, 2), cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(swiglu(gate, up), weight)


def _linear_flops(case: OpCase, name: str) -> float:
    once = 2 * case.tokens * case.width * case.hidden_size
    return once * {"forward": 1, "backward": 2, "both": 3}[name]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(at_least_fp32(logits), labels)


def kl_div(input: Tensor, target: Tensor) -> Tensor:
    """target holds probabilities."""
    return F.kl_div(input, target, reduction="batchmean")


def jsd(input: Tensor, target: Tensor) -> Tensor:
    """Both hold log-probabilities."""
    return divergence(target, input, beta=0.5).mean()


def tvd(input: Tensor, target: Tensor) -> Tensor:
    """Both hold probabilities."""
    return 0.5 * (input - target).abs().sum(-1).mean()


def _rows(case: OpCase, draw: Draw, *names: str) -> dict[str, Tensor]:
    return {name: draw.normal(1, case.tokens, case.width) for name in names}


def _weights(width: int, draw: Draw, *names: str) -> dict[str, Tensor]:
    return {name: draw.normal(width, mean=float("bias" not in name), std=0.1) for name in names}


def _norm(*rows: str, weights: tuple[str, ...] = ("weight",)) -> Callable:
    return lambda case, draw: {**_rows(case, draw, *rows), **_weights(case.width, draw, *weights)}


def _positions(case: OpCase, draw: Draw, length: int) -> dict[str, Tensor]:
    """cos and sin (1, S, D) as transformers' rotary embeddings return them."""
    device = draw.generator.device
    frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angle = torch.outer(torch.arange(length, device=device), frequency).repeat(1, 2)[None]
    return {"cos": angle.cos().to(case.dtype), "sin": angle.sin().to(case.dtype)}


def _heads(case: OpCase, draw: Draw) -> dict[str, Tensor]:
    """q and k as (B, S, heads, D)."""
    length = min(case.tokens, SEQUENCE)
    shape = (case.tokens // length, length)
    return {name: draw.normal(*shape, heads, HEAD_DIM) for name, heads in zip("qk", case.heads, strict=True)}


def _rope_inputs(case: OpCase, draw: Draw) -> dict[str, Tensor]:
    views = {name: x.transpose(1, 2) for name, x in _heads(case, draw).items()}
    tensors = views if case.transposed else {name: x.contiguous() for name, x in views.items()}
    return {**tensors, **_positions(case, draw, tensors["q"].shape[2])}


def _qk_norm_rope_inputs(case: OpCase, draw: Draw) -> dict[str, Tensor]:
    tensors = _heads(case, draw) | _weights(HEAD_DIM, draw, "q_weight", "k_weight")
    return {**tensors, **_positions(case, draw, tensors["q"].shape[1])}


def _gated_linear_inputs(case: OpCase, draw: Draw) -> dict[str, Tensor]:
    weight = draw.normal(case.hidden_size, case.width, std=case.width**-0.5)
    return {**_rows(case, draw, "gate", "up"), "weight": weight}


def _logits_and_labels(case: OpCase, draw: Draw) -> dict[str, Tensor]:
    """Logits like a trained model's: a standard deviation of 2, and a loss of about 5 nats."""
    labels = draw.labels(case.tokens, case.width)
    logits = draw.normal(case.tokens, case.width, std=2.0)
    logits[torch.arange(case.tokens, device=labels.device), labels] += math.log(case.width) + 2.0 - 5.0
    return {"logits": logits, "labels": labels}


def _distributions(log_input: bool, log_target: bool) -> Callable:
    """Two rows of distributions, a student's and a teacher's."""

    def make(case: OpCase, draw: Draw) -> dict[str, Tensor]:
        raw = {name: draw.normal(case.tokens, case.width, std=2.0) for name in ("input", "target")}
        logs = {"input": log_input, "target": log_target}
        return {name: x.log_softmax(-1) if logs[name] else x.softmax(-1) for name, x in raw.items()}

    return make


def lengths_of(case: OpCase) -> list[int]:
    """Return the lengths of a case's documents: all of one length, or a real mix."""
    if case.document:
        return [case.document] * (case.tokens // case.document)
    ends = np.cumsum(draw_lengths(np.random.default_rng(0), case.tokens).astype(int))
    before = ends[ends < case.tokens].tolist()
    return [b - a for a, b in itertools.pairwise([0, *before, case.tokens])]


def ends_of(case: OpCase, device: torch.device | str) -> Tensor:
    """Return where documents begin and end, from 0 to the number of tokens."""
    return torch.tensor([0, *itertools.accumulate(lengths_of(case))], dtype=torch.int32, device=device)


def _attention_flops(case: OpCase, name: str) -> float:
    """Return the operations of the products between tokens that see one another: two, and five in the backward."""
    lengths, window = lengths_of(case), case.window or case.tokens
    pairs = sum(min(x, window) * (min(x, window) + 1) // 2 + max(0, x - window) * window for x in lengths)
    return 2 * pairs * case.heads[0] * case.width * {"forward": 2, "backward": 5, "both": 7}[name]


def _attention_inputs(case: OpCase, draw: Draw) -> dict[str, Tensor]:
    """Return q, k and v, (T, heads, D), the sinks, where there are any, and the ends."""
    heads = {"q": case.heads[0], "k": case.heads[1], "v": case.heads[1]}
    tensors = {name: draw.normal(case.tokens, count, case.width) for name, count in heads.items()}
    sinks = {"sinks": draw.normal(case.heads[0])} if case.sinks else {}
    return {**tensors, **sinks, "ends": ends_of(case, draw.generator.device)}


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, sinks: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Attention of one document after the other; with windows or sinks by blocks, whose scores are made again."""
    lengths, plain = ends.diff().tolist(), sinks is None and window is None
    parts = list(zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True))
    if plain:
        outputs = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    else:
        outputs = [
            checkpoint(_block, *part, sinks, start, window, use_reentrant=False)
            for part in parts
            for start in range(0, part[0].shape[2], BLOCK)
        ]
    return torch.cat(cast("list[Tensor]", outputs), 2)[0].transpose(0, 1)


def _block(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, start: int, window: int | None) -> Tensor:
    """The output of BLOCK queries of a document, from `start` on: (1, Hq, BLOCK, D)."""
    end = min(start + BLOCK, q.shape[2])
    first = max(0, start - window + 1) if window else 0
    rows = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
    seen = (rows >= 0) & (rows < (window or end))
    grouped = q[0, :, start:end].unflatten(0, (k.shape[1], -1))  # (Hk, Hq / Hk, rows, D)
    scores = grouped @ k[0, :, None, first:end].mT * q.shape[3] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.to(q.dtype).view(k.shape[1], -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], 3)
    shares = scores.softmax(3)[..., : end - first]
    return (shares @ v[0, :, None, first:end]).flatten(0, 1)[None]


RMS_NORM = Op("rms_norm", _norm("x"), rms_norm, ("x", "weight"))
ADD_RMS_NORM = Op(
    "add_rms_norm", _norm("x", "residual"), add_rms_norm, ("x", "residual", "weight"), reads=("out1", "weight"),
    writes=("x", "weight"),  # the residual's gradient is x's
)  # fmt: skip
LAYER_NORM = Op(
    "layer_norm", _norm("x", weights=("weight", "bias")), layer_norm, ("x", "weight", "bias"), ("x", "weight")
)
ROPE = Op("rope", _rope_inputs, rope, ("q", "k"), reads=("cos", "sin"))
QK_NORM_ROPE = Op("qk_norm_rope", _qk_norm_rope_inputs, qk_norm_rope, ("q", "k", "q_weight", "k_weight"))
SWIGLU = Op("swiglu", _norm("gate", "up", weights=()), swiglu, ("gate", "up"))
GEGLU = Op("geglu", _norm("gate", "up", weights=()), geglu, ("gate", "up"))
RELU2 = Op("relu2", _norm("x", weights=()), relu2, ("x",))
GATED_LINEAR = Op("gated_linear", _gated_linear_inputs, gated_linear, ("gate", "up", "weight"), flops=_linear_flops)
CROSS_ENTROPY = Op("cross_entropy", _logits_and_labels, cross_entropy, ("logits",), ("logits",), is_loss=True)
KL_DIV = Op("kl_div", _distributions(True, False), kl_div, ("input",), ("target",), is_loss=True)
JSD = Op("jsd", _distributions(True, True), jsd, ("input",), is_loss=True)
TVD = Op("tvd", _distributions(False, False), tvd, ("input",), is_loss=True)
ATTENTION = Op(
    "document_attention", _attention_inputs, one_by_one, ("q", "k", "v"), reads=("out0", "q", "k", "v"),
    flops=_attention_flops,
)  # fmt: skip
OPS = (
    RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ROPE, QK_NORM_ROPE, SWIGLU, GEGLU, RELU2, GATED_LINEAR, CROSS_ENTROPY, KL_DIV,
    JSD, TVD, ATTENTION,
)  # fmt: skip

# Attention of today's models: heads of the queries and keys, columns, and the window, of one document.
_OF_MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt-oss", {"width": 64, "heads": (64, 8), "window": 128, "sinks": True}),
    ("gpt-oss-full", {"width": 64, "heads": (64, 8), "sinks": True}),
    ("16+8-whole", {"width": 128, "heads": (16, 8)}),
    ("gemma3-1b", {"width": 256, "heads": (4, 1), "window": 512}),
    ("8+4x256-window", {"width": 256, "heads": (8, 4), "window": 1024}),
    ("gemma3-1b-full", {"width": 256, "heads": (4, 1)}),
    ("gemma4-e2b-full", {"width": 512, "heads": (8, 1)}),
)
_FP32 = {"tokens": 4096, "dtype": torch.float32}
CASES = (
    OpCase("rms_norm-4096", RMS_NORM, 4096, host=True),
    OpCase("rms_norm-2048", RMS_NORM, 2048),
    OpCase("rms_norm-1024", RMS_NORM, 1024),
    OpCase("swiglu-14336", SWIGLU, 14336, host=True),
    OpCase("swiglu-3072", SWIGLU, 3072),
    OpCase("cross_entropy-128256", CROSS_ENTROPY, 128256, host=True),
    OpCase("rope-32+8", ROPE, host=True),
    OpCase("rope-32+8-transposed", ROPE, transposed=True),
    OpCase("qk_norm_rope-32+8", QK_NORM_ROPE, host=True),
    OpCase("qk_norm_rope-16+8", QK_NORM_ROPE, heads=(16, 8)),
    *(OpCase(f"jsd-{v}", JSD, v, **_FP32, host=v == 32768) for v in (4096, 8192, 32768, 128256, 262144)),
    *(OpCase(f"kl_div-{v}", KL_DIV, v, **_FP32, host=v == 32768) for v in (4096, 32768, 128256)),
    OpCase("add_rms_norm-4096", ADD_RMS_NORM, 4096, host=True),
    OpCase("add_rms_norm-1024", ADD_RMS_NORM, 1024),
    OpCase("layer_norm-4096", LAYER_NORM, 4096, host=True),
    OpCase("layer_norm-1024", LAYER_NORM, 1024),
    OpCase("geglu-14336", GEGLU, 14336, host=True),
    OpCase("geglu-3072", GEGLU, 3072),
    OpCase("relu2-14336", RELU2, 14336, host=True),
    OpCase("gated_linear-14336", GATED_LINEAR, 14336, hidden_size=4096, host=True),
    OpCase("gated_linear-3072", GATED_LINEAR, 3072, hidden_size=1024),
    OpCase("tvd-128256", TVD, 128256, **_FP32, host=True),
    OpCase("document_attention-16+8", ATTENTION, 128, heads=(16, 8), host=True),
    OpCase("document_attention-32+8x64", ATTENTION, 64, heads=(32, 8)),
    OpCase("document_attention-16+8-rows", ATTENTION, 128, heads=(16, 8), document=1024),
    OpCase("document_attention-16+8-32768", ATTENTION, 128, 32768, heads=(16, 8)),
    *(
        OpCase(f"document_attention-{name}-{n}", ATTENTION, tokens=n, document=n, default=False, **sizes)
        for name, sizes in _OF_MODELS
        for n in (2048, 8192, 32768)
    ),
)

_TINY = {"tokens": 24, "dtype": torch.float32}
SMOKE_CASES = (
    *(
        OpCase(f"{op.name}-40", op, 40, **_TINY, hidden_size=16, heads=(4, 2), document=6, host=op is RMS_NORM)
        for op in OPS
    ),
    OpCase("rms_norm-40-bf16", RMS_NORM, 40, tokens=24),
    OpCase("rope-transposed", ROPE, **_TINY, heads=(4, 2), transposed=True),
    OpCase("document_attention-40-sinks", ATTENTION, 40, **_TINY, heads=(4, 2), document=12, window=5, sinks=True),
    OpCase("cross_entropy-40-grad0.5", CROSS_ENTROPY, 40, **_TINY, grad_output=0.5),
)
