"""What is measured: each case is one loss at one shape, and says how its inputs are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

IGNORE_INDEX = -100
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

    @property
    def is_divergence(self) -> bool:
        return self.kind != "ce"

    @property
    def ignored_tokens(self) -> int:
        return round(self.tokens * self.ignored)

    @property
    def flops(self) -> int:
        """Operations of the matrix products that supervised tokens need: logits, dX, dW, teacher's logits."""
        student_products = 2 if self.frozen_head else 3
        width = student_products * self.hidden_size + self.teacher_hidden_size
        return 2 * (self.tokens - self.ignored_tokens) * self.vocab_size * width


class Inputs(NamedTuple):
    """hidden (N, H), weight (V, H), labels (N,); of a divergence also the teacher's (N, Ht) and (V, Ht)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    teacher_hidden: torch.Tensor | None
    teacher_weight: torch.Tensor | None

    @property
    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden, weight, teacher_hidden, teacher_weight of a divergence."""
        assert self.teacher_hidden is not None and self.teacher_weight is not None
        return self.hidden, self.weight, self.teacher_hidden, self.teacher_weight

    def clear_grads(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def fingerprint(self) -> tuple[int, ...]:
        """Exact sums over the bits of every tensor, to notice a provider that writes into its inputs."""
        tensors = (tensor.detach().flatten() for tensor in self if tensor is not None)
        return tuple(int(tensor.view(torch.int64).sum()) for tensor in tensors)


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Draw the inputs of `case` on `device`, the same for the same arguments; the student's require grad."""
    generator = torch.Generator(device).manual_seed(seed)
    labels = torch.randint(case.vocab_size, (case.tokens,), device=device, generator=generator)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, generator=generator)

    def head_and_hidden(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = normal(case.vocab_size, width).mul_(width**-0.5)
        hidden = normal(case.tokens, width)
        if case.data == "structured":
            noise = 2.0  # standard deviation of every logit; the target's mean then gives a loss of about 5
            target_logit = math.log(case.vocab_size) + noise**2 / 2 - 5.0
            hidden = hidden.mul_(noise).add_(weight[labels], alpha=target_logit)
        return weight, hidden

    weight, hidden = head_and_hidden(case.hidden_size)
    teacher_weight = teacher_hidden = None
    if case.is_divergence:
        teacher_weight, teacher_hidden = head_and_hidden(case.teacher_hidden_size)
    masked = torch.randperm(case.tokens, device=device, generator=generator)[: case.ignored_tokens]
    labels = labels.index_fill_(0, masked, IGNORE_INDEX)
    hidden.requires_grad_()
    weight.requires_grad_(not case.frozen_head)
    return Inputs(hidden, weight, labels, teacher_hidden, teacher_weight)


def _divergences(student: int, teacher: int, vocab: int, **options) -> list[Case]:
    shape = f"{student}from{teacher}x{vocab}" + ("-structured" if options.get("data") == "structured" else "")
    short = {"forward_kl": "fkl", "reverse_kl": "rkl", "jsd": "jsd"}
    return [Case(f"{short[kind]}-{shape}", kind, student, vocab, teacher, **options) for kind in short]


def _sweeps() -> list[Case]:
    """For the plots: more tokens, then larger vocabularies. By name only."""
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
    Case("ce-4096x128256-ignored50", "ce", 4096, 128256, ignored=0.5, default=False),
    Case("ce-4096x128256-ignored85", "ce", 4096, 128256, ignored=0.85, default=False),
    Case("ce-4096x128256-grad0.5", "ce", 4096, 128256, grad_output=0.5, default=False),
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
