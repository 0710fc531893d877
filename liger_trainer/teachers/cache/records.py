"""What a teacher cache holds of one token, as a record of a fixed number of bytes, and what a loss makes of it.

    topk      tail mass, label, entropy | K - 1 codes of log p_1 - log p_k | the K likeliest ids, likeliest first
    and draws  ..., mean draw           |                                  | ..., then m draws from the tail, ascending
    sampled   mean draw, label, entropy |                                  | the likeliest id, then m draws, ascending

Log-probabilities are normalised over the whole vocabulary at the cache's temperature, label and entropy at 1. All are
written as nats x >= 0 in steps that grow with x, since a likely token's error weighs more in a divergence than a rare
one's:

    code = round(log(1 + 4 x) / step),  step = log(1 + 4 limit) / (2^bits - 1)
    |error of x| <= (x + 1/4) (e^(step / 2) - 1) for x <= limit: at 8 bits, limit 32, less than (x + 1/4) / 104; at 16
    bits, limit 128, less than (x + 1/4) / 21000. What lies beyond the limit is written as the limit.

The likeliest token's own log-probability is not written: with x_k = log p_1 - log p_k and the tail's mass R it follows
from sum_k p_k = 1 - R, so the K entries and the tail always make one distribution. An entry's log-probability is off by
at most its own x_k's bound, plus the bounds of all x_j averaged over the entries, plus what R's rounding moves
log(1 - R) by. Ids take ceil(log2 V) bits each, without gaps.

Draws are stratified: one in each m-th of the cumulative distribution, so count / m is p on average, as for independent
draws, with less chance in it. From the tail, beyond the K likeliest, R count / m is p on average. Source: see
kernels/linear_sparse_divergence.py; companding: G.711's mu-law.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError
from ...kernels.linear_sparse_divergence import MAX_ENTRIES
from ...losses.sparse import TokenTargets

OFFSET = 0.25  # nats: below it steps are even, above it they grow in proportion
MAX_ID_BITS = 25  # with the 7 bits an id may start after, they fit in four bytes


@dataclass(frozen=True)
class NatsCode:
    """Numbers of nats, x >= 0, as integers of so many bits."""

    bits: int
    limit: float

    @property
    def levels(self) -> int:
        return 2**self.bits - 1

    @property
    def step(self) -> float:
        return math.log1p(self.limit / OFFSET) / self.levels

    def encode(self, x: Tensor) -> Tensor:
        """int32. Infinity is written as the limit; NaN must not come."""
        return (x.clamp(0, self.limit).div(OFFSET).log1p() / self.step).round().clamp(max=self.levels).int()

    def decode(self, code: Tensor) -> Tensor:
        """fp32"""
        return torch.expm1(code.float() * self.step) * OFFSET

    def bound(self, x: Tensor) -> Tensor:
        """The largest error of x, for x up to the limit."""
        return (x + OFFSET) * math.expm1(self.step / 2)


FINE, COARSE = NatsCode(16, 128.0), NatsCode(8, 32.0)


class Draws(NamedTuple):
    """Tokens drawn from a distribution, (N, m), and their log-probabilities in the teacher's."""

    ids: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class RecordFormat:
    """How tokens are written.

    Args:
        kind: "topk", the likeliest tokens and the mass of the rest; "sampled", tokens drawn from the teacher.
        entries: how many: K, or the number of draws.
        bits: 8 or 16, of a log-probability. Draws have none.
        vocab_size: V, of which ids are.
        tail_draws: of topk: how many tokens beyond the likeliest are drawn. Without any, their mass alone is known.
    """

    kind: Literal["topk", "sampled"]
    entries: int
    bits: int
    vocab_size: int
    tail_draws: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.entries <= self.entries + self.tail_draws <= min(self.vocab_size, MAX_ENTRIES):
            raise ConfigError(
                f"A teacher cache holds 1 to {MAX_ENTRIES} entries a token, and no more than the vocabulary's "
                f"{self.vocab_size} tokens; got {self.entries}{f' + {self.tail_draws}' if self.tail_draws else ''}."
            )
        if self.vocab_size > 2**MAX_ID_BITS:
            raise ConfigError(f"A teacher cache knows up to {2**MAX_ID_BITS} tokens, got {self.vocab_size}.")

    @classmethod
    def of(
        cls, kind: Literal["topk", "sampled"], entries: int | None, tail_draws: int | None, bits: int, vocab_size: int
    ) -> "RecordFormat":
        """With the defaults for None: 64 likeliest and 32 draws from the rest, if there are as many; 12 draws."""
        entries = entries or {"topk": 64, "sampled": 12}[kind]
        if tail_draws is None:
            rest = min(vocab_size, MAX_ENTRIES) - entries
            tail_draws = max(0, min(32, rest)) if kind == "topk" else 0
        return cls(kind, entries, bits, vocab_size, tail_draws)

    @property
    def code(self) -> NatsCode:
        return FINE if self.bits == 16 else COARSE

    @property
    def tail(self) -> str:
        """The `tail` that `linear_sparse_divergence` needs for such entries."""
        return "bucket" if self.kind == "topk" and not self.tail_draws else "none"

    @property
    def draws(self) -> int:
        return self.entries if self.kind == "sampled" else self.tail_draws

    @property
    def id_bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def _ids(self) -> int:
        return self.entries + (1 if self.kind == "sampled" else self.tail_draws)

    @property
    def _scalars_end(self) -> int:
        return 2 * (4 if self.tail_draws else 3)  # of 16 bits each, at the start of a record

    @property
    def _codes_end(self) -> int:
        codes = self.entries - 1 if self.kind == "topk" else 0
        return self._scalars_end + codes * self.bits // 8

    @property
    def bytes(self) -> int:
        """Of one token."""
        return self._codes_end + -(-self._ids * self.id_bits // 8)

    def encode_topk(
        self, ids: Tensor, log_probs: Tensor, log_rest: Tensor, label: Tensor, entropy: Tensor,
        draws: Draws | None = None,
    ) -> Tensor:  # fmt: skip
        """(N, bytes) uint8.

        Args:
            ids, log_probs: (N, K), likeliest first, at the cache's temperature.
            log_rest: (N,) log of the mass of all other tokens, -inf where there is none.
            label, entropy: (N,) the label's log-probability and the entropy, at temperature 1.
            draws: from the other tokens, if there are any in a record.
        """
        behind = self.code.encode(log_probs[:, :1] - log_probs[:, 1:])
        scalars = [-log_rest, -label, entropy]
        if draws is not None:
            ids, scalars = torch.cat([ids, draws.ids.sort(-1).values], -1), [*scalars, -draws.log_probs.mean(-1)]
        return torch.cat([self._scalars(*scalars), self._bytes(behind), self._pack(ids)], -1)

    def encode_draws(self, top_ids: Tensor, draws: Draws, label: Tensor, entropy: Tensor) -> Tensor:
        """(N, bytes) uint8, of the draws, the likeliest ids (N,), label and entropy."""
        ids = torch.cat([top_ids[:, None], draws.ids.sort(-1).values], -1)
        return torch.cat([self._scalars(-draws.log_probs.mean(-1), -label, entropy), self._pack(ids)], -1)

    def decode(self, records: Tensor) -> TokenTargets:
        """records: (..., bytes) uint8, on any device. A record of zeros has no entries or one of no meaning."""
        first, label, entropy, *of_tail = FINE.decode(_words(records[..., : self._scalars_end])).unbind(-1)
        ids = self._unpack(records[..., self._codes_end :])
        if self.kind == "sampled":
            entries, log_shares, surprise = _counted(ids[..., 1:])
            return TokenTargets(entries, log_shares, ids[..., 0], -label, entropy, surprise - first)
        codes = records[..., self._scalars_end : self._codes_end]
        behind = self.code.decode(_words(codes) if self.bits == 16 else codes)
        log_probs = torch.cat([torch.zeros_like(first)[..., None], -behind], -1)
        named = torch.log1p(-torch.exp(-first))  # of the mass of all entries
        log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True) + named[..., None]
        if not self.tail_draws:
            return TokenTargets(ids, log_probs, ids[..., 0], -label, entropy, torch.zeros_like(first))
        drawn, log_shares, surprise = _counted(ids[..., self.entries :])
        drawn = drawn.where((first < FINE.limit * (1 - 1e-6))[..., None], -1)  # beyond it nothing was drawn from
        log_shares = log_shares - first[..., None]
        unnamed = torch.exp(-first) * (first + surprise - of_tail[0])
        return TokenTargets(
            torch.cat([ids[..., : self.entries], drawn], -1), torch.cat([log_probs, log_shares], -1), ids[..., 0],
            -label, entropy, unnamed,
        )  # fmt: skip

    def _scalars(self, *nats: Tensor) -> Tensor:
        return _split_words(FINE.encode(torch.stack(nats, -1)))

    def _bytes(self, codes: Tensor) -> Tensor:
        return _split_words(codes) if self.bits == 16 else codes.to(torch.uint8)

    def _pack(self, ids: Tensor) -> Tensor:
        packed = torch.zeros(*ids.shape[:-1], self.bytes - self._codes_end, dtype=torch.uint8, device=ids.device)
        ids = ids.long()
        for entry in range(self._ids):
            byte, shift = divmod(entry * self.id_bits, 8)
            for part in range(-(-(shift + self.id_bits) // 8)):
                packed[..., byte + part] |= ((ids[..., entry] << shift) >> (8 * part) & 0xFF).to(torch.uint8)
        return packed

    def _unpack(self, packed: Tensor) -> Tensor:
        at, shift = _places(self._ids, self.id_bits, packed.shape[-1], packed.device)
        words = sum(packed[..., place].int() << 8 * part for part, place in enumerate(at))
        return (words >> shift) & (2**self.id_bits - 1)


def _counted(draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of draws (..., m), ascending: each token once, else negative; log(count / m); their own entropy (...,)."""
    draws, m = draws.contiguous(), draws.shape[-1]
    end, start = (torch.searchsorted(draws, draws, right=right) for right in (True, False))
    new = start == torch.arange(m, device=draws.device)
    log_shares = ((end - start) / m).log()
    surprise = -(log_shares.exp() * log_shares).where(new, 0).sum(-1)
    return draws.where(new, -1), log_shares.where(new, -torch.inf), surprise


@functools.lru_cache(maxsize=8)
def _places(count: int, bits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The four bytes that each id lies in, (4, count), and the bits before it, (count,).

    A byte beyond the record stands for one that the mask takes away.
    """
    start = torch.arange(count, device=device) * bits
    return (start // 8 + torch.arange(4, device=device)[:, None]).clamp(max=width - 1), (start % 8).int()


def _split_words(words: Tensor) -> Tensor:
    """(..., n) integers below 2^16 as (..., 2 n) bytes, the lower first."""
    return torch.stack([words & 0xFF, words >> 8], -1).flatten(-2).to(torch.uint8)


def _words(halves: Tensor) -> Tensor:
    return halves[..., 0::2].int() | (halves[..., 1::2].int() << 8)
