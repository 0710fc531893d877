"""The cases of the fused losses: each is one loss at one shape, and says how its inputs are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .operands import Draw, Operands
from .reference import IGNORE_INDEX, at_least_fp32, divergence

# How far the two distributions of TRL's and Liger's generalised JSD are mixed; 0 and 1 are their KL limits.
BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}


@dataclass(frozen=True)
class Case:
    """One loss at one shape, mean over the supervised tokens.

    `kind` is "ce" or a key of `BETA`; `ignored` the share of tokens whose label is `IGNORE_INDEX`. `data` is
    "random" (hidden states and head independent: near-uniform predictions) or "structured" (hidden states are
    their target's row of the head plus noise: cross-entropy about 5 nats, logits spread like a real model's).
    """

    name: str
    kind: str
    hidden_size: int
    vocab_size: int
    teacher_hidden_size: int = 0
    tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16
    ignored: float = 0.0
    frozen_head: bool = False
    data: str = "random"
    grad_output: float = 1.0
    default: bool = True

    is_loss = True

    @property
    def is_divergence(self) -> bool:
        return self.kind != "ce"

    @property
    def width(self) -> int:
        return self.vocab_size

    @property
    def leaves(self) -> tuple[str, ...]:
        return ("hidden",) if self.frozen_head else ("hidden", "weight")

    @property
    def shared(self) -> tuple[str, ...]:
        """The tensors that have no row for each token."""
        return ("weight", "teacher_weight") if self.is_divergence else ("weight",)

    def value_names(self, outputs: int) -> tuple[str, ...]:
        return ("loss", *self.leaves)

    @property
    def ignored_tokens(self) -> int:
        return round(self.tokens * self.ignored)

    @property
    def flops(self) -> int:
        """Operations of the matrix products that supervised tokens need: logits, dX, dW, teacher's logits."""
        student_products = 2 if self.frozen_head else 3
        width = student_products * self.hidden_size + self.teacher_hidden_size
        return 2 * (self.tokens - self.ignored_tokens) * self.vocab_size * width

    def plain(self, hidden: Tensor, weight: Tensor, labels: Tensor, **teacher: Any) -> Tensor:
        """Return the loss without a fused op: whole logits in the inputs' dtype, softmax in at least fp32."""
        logits = at_least_fp32(hidden @ weight.T)
        supervised = labels != IGNORE_INDEX
        count = supervised.sum().clamp(min=1)
        if not self.is_divergence:
            return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum") / count
        log_p = at_least_fp32(teacher["teacher_hidden"] @ teacher["teacher_weight"].T).log_softmax(-1)
        return (divergence(log_p, logits.log_softmax(-1), BETA[self.kind]) * supervised).sum() / count

    def make_operands(self, device: torch.device, seed: int = 0) -> Operands:
        """Draw hidden (N, H), weight (V, H), labels (N,); of a divergence also the teacher's (N, Ht) and (V, Ht)."""
        draw = Draw.seeded(self.dtype, device, seed)
        labels = draw.labels(self.tokens, self.vocab_size)

        def head_and_hidden(width: int) -> tuple[Tensor, Tensor]:
            weight = draw.normal(self.vocab_size, width).mul_(width**-0.5)
            hidden = draw.normal(self.tokens, width)
            if self.data == "structured":
                noise = 2.0  # standard deviation of every logit; the target's mean then gives a loss of about 5
                target_logit = math.log(self.vocab_size) + noise**2 / 2 - 5.0
                hidden = hidden.mul_(noise).add_(weight[labels], alpha=target_logit)
            return weight, hidden

        weight, hidden = head_and_hidden(self.hidden_size)
        tensors = {"hidden": hidden, "weight": weight, "labels": labels}
        if self.is_divergence:
            tensors["teacher_weight"], tensors["teacher_hidden"] = head_and_hidden(self.teacher_hidden_size)
        masked = torch.randperm(self.tokens, device=device, generator=draw.generator)[: self.ignored_tokens]
        tensors["labels"] = labels.index_fill_(0, masked, IGNORE_INDEX)
        for name in self.leaves:
            tensors[name].requires_grad_()
        return Operands(tensors, [torch.tensor(self.grad_output, device=device)])


def _divergences(student: int, teacher: int, vocab: int, **options) -> list[Case]:
    shape = f"{student}from{teacher}x{vocab}" + ("-structured" if options.get("data") == "structured" else "")
    short = {"forward_kl": "fkl", "reverse_kl": "rkl", "jsd": "jsd"}
    return [Case(f"{short[kind]}-{shape}", kind, student, vocab, teacher, **options) for kind in short]


def _sweeps() -> list[Case]:
    """More tokens, then larger vocabularies. By name only."""
    pairs = (("ce", "ce", 0), ("fkl", "forward_kl", 4096))
    tokens = [
        Case(f"{short}-tokens-{k}k", kind, 2048, 128256, teacher, tokens=1024 * k, default=False)
        for short, kind, teacher in pairs
        for k in (1, 2, 4, 8, 16, 32)
    ]
    vocabularies = [
        Case(f"{short}-vocab-{k}k", kind, 2048, 1024 * k, teacher, default=False)
        for short, kind, teacher in pairs
        for k in (4, 8, 16, 32, 64, 128, 256)
    ]
    return tokens + vocabularies


CASES = (
    Case("ce-4096x128256", "ce", 4096, 128256),
    Case("ce-4096x128256-ignored60", "ce", 4096, 128256, ignored=0.6),
    Case("ce-4096x128256-frozen", "ce", 4096, 128256, frozen_head=True),
    Case("ce-2048x151936", "ce", 2048, 151936),
    Case("ce-4096x128256-structured", "ce", 4096, 128256, data="structured"),
    Case("ce-2048x151936-structured", "ce", 2048, 151936, data="structured"),
    Case("ce-1024x151936-structured", "ce", 1024, 151936, data="structured"),
    Case("ce-1152x262144-structured", "ce", 1152, 262144, data="structured"),
    Case("ce-2560x262144-structured", "ce", 2560, 262144, data="structured"),
    # 92.6 ms and 3.1 GB by Cut Cross-Entropy on an H100, says TRL pull request 6858
    Case("ce-16384x2048x248320", "ce", 2048, 248320, tokens=16384, default=False),
    Case("ce-5120x152064", "ce", 5120, 152064, default=False),
    *_divergences(4096, 4096, 128256),
    *_divergences(2048, 4096, 151936),
    *_divergences(2048, 4096, 128256),
    *_divergences(2048, 4096, 151936, data="structured", default=False),
    *_sweeps(),
)

_TINY = {"tokens": 96, "dtype": torch.float32}
SMOKE_CASES = (
    Case("ce-32x384", "ce", 32, 384, **_TINY),
    Case("ce-32x384-bf16", "ce", 32, 384, tokens=96),
    Case("ce-32x384-ignored60", "ce", 32, 384, ignored=0.6, grad_output=0.25, **_TINY),
    Case("ce-32x384-frozen", "ce", 32, 384, frozen_head=True, **_TINY),
    Case("ce-32x384-structured", "ce", 32, 384, data="structured", **_TINY),
    Case("fkl-32from48x384-ignored60", "forward_kl", 32, 384, 48, ignored=0.6, **_TINY),
    Case("rkl-32from48x384-bf16", "reverse_kl", 32, 384, 48, tokens=96),
    Case("jsd-32from48x384", "jsd", 32, 384, 48, grad_output=0.25, **_TINY),
)
