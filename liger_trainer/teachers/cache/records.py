"""The record of one token in a teacher cache: a fixed number of bytes, encoded and decoded.

A record of V tokens, K entries and m draws, with b = 8 or 16 bits a log-probability. All integers are little-endian;
ids are packed without gaps, ceil(log2 V) bits each, the lowest bits first.

    topk, m = 0                                         topk, m > 0
    offset          bytes           content             offset          bytes               content
    0               2               -log R              0               2                   -log R
    2               2               -log p(label)       2               2                   -log p(label)
    4               2               entropy             4               2                   entropy
                                                        6               2                   -mean log p of the draws
    6               (K - 1) b / 8   log p_1 - log p_k   8               (K - 1) b / 8       log p_1 - log p_k
    6 + (K-1) b/8   ceil(K bits/8)  K ids,              8 + (K-1) b/8   ceil((K+m) bits/8)  K ids, likeliest first,
                                    likeliest first                                         then m draws, ascending

    sampled, K = m draws
    offset  bytes               content
    0       2                   -mean log p of the draws
    2       2                   -log p(label)
    4       2                   entropy
    6       ceil((1+m) bits/8)  the likeliest id, then m draws, ascending

R is the mass beyond the K likeliest. Log-probabilities are normalised over the whole vocabulary at the cache's
temperature; label and entropy are those at temperature 1.

Every number is nats x >= 0, written in steps that grow with x, because an error in a likely token's log-probability
moves a divergence more than one in a rare token's (G.711's mu-law):

    code = round(log(1 + 4 x) / step),  step = log(1 + 4 limit) / (2^bits - 1)
    |error of x| <= (x + 1/4) (e^(step / 2) - 1) for x <= limit
    8 bits, limit 32: less than (x + 1/4) / 104;  16 bits, limit 128: less than (x + 1/4) / 21000
    x beyond the limit is written as the limit

log p_1 is not written. It follows from sum_k p_k = 1 - R, so the K entries and the tail always make one distribution.
An entry's log-probability is off by at most the bound of its log p_1 - log p_k, plus the mean bound of all entries,
plus the effect of R's rounding on log(1 - R).

Draws are stratified: one in each m-th of the cumulative distribution. So count / m is p on average, as for independent
draws, with a smaller variance; for draws from the tail, R count / m is. Method: kernels/linear_sparse_divergence.py.
"""

import functools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from ...compat.modules import forward_below_hook
from ...errors import ConfigError
from ...kernels.linear_sparse_divergence import MAX_ENTRIES
from ...losses.deferred_logits import DeferredLogits, DeferredPass
from ...losses.model_parts import Head
from ...losses.sparse_answer import TokenTargets

OFFSET = 0.25  # nats; steps are even below it and grow in proportion above it
MAX_ID_BITS = 25  # an id may start at bit 7 of a byte, and 7 + 25 bits fit in four bytes


@dataclass(frozen=True)
class NatsCode:
    """How nats x >= 0 become integers of `bits` bits, up to `limit` nats."""

    bits: int
    limit: float

    @property
    def levels(self) -> int:
        return 2**self.bits - 1

    @property
    def step(self) -> float:
        return math.log1p(self.limit / OFFSET) / self.levels

    def encode(self, x: Tensor) -> Tensor:
        """Return int32 codes. Infinity becomes the limit; NaN is not allowed."""
        return (x.clamp(0, self.limit).div(OFFSET).log1p() / self.step).round().clamp(max=self.levels).int()

    def decode(self, code: Tensor) -> Tensor:
        """Return fp32 nats."""
        return torch.expm1(code.float() * self.step) * OFFSET

    def bound(self, x: Tensor) -> Tensor:
        """Return the largest error of x, for x up to the limit."""
        return (x + OFFSET) * math.expm1(self.step / 2)


FINE, COARSE = NatsCode(16, 128.0), NatsCode(8, 32.0)


class Draws(NamedTuple):
    """Tokens drawn from a distribution, (N, m), and their log-probabilities in the teacher's."""

    ids: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class RecordFormat:
    """The layout of a record; the module's docstring draws it.

    Args:
        kind: "topk", the likeliest tokens and the mass of the rest; "sampled", tokens drawn from the teacher.
        entries: K, or the number of draws.
        bits: 8 or 16 for each log-probability of topk.
        vocab_size: V; ids are below it.
        tail_draws: for topk, how many tokens beyond the likeliest are drawn; 0: only their mass is known.
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
        """Fill in the defaults for None: 64 likeliest and up to 32 draws from the rest; or 12 draws."""
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
        """The `tail` argument of `linear_sparse_divergence` for such entries."""
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
        return 2 * (4 if self.tail_draws else 3)  # 16 bits each

    @property
    def _codes_end(self) -> int:
        codes = self.entries - 1 if self.kind == "topk" else 0
        return self._scalars_end + codes * self.bits // 8

    @property
    def bytes(self) -> int:
        """The size of one token's record."""
        return self._codes_end + -(-self._ids * self.id_bits // 8)

    def encode_topk(
        self, ids: Tensor, log_probs: Tensor, log_rest: Tensor, label: Tensor, entropy: Tensor,
        draws: Draws | None = None,
    ) -> Tensor:  # fmt: skip
        """Return records (N, bytes) uint8.

        Args:
            ids, log_probs: (N, K), likeliest first, at the cache's temperature.
            log_rest: (N,) log of the mass of all other tokens, -inf where there is none.
            label, entropy: (N,) the label's log-probability and the entropy, at temperature 1.
            draws: from the other tokens, where records hold any.
        """
        behind = self.code.encode(log_probs[:, :1] - log_probs[:, 1:])
        scalars = [-log_rest, -label, entropy]
        if draws is not None:
            ids, scalars = torch.cat([ids, draws.ids.sort(-1).values], -1), [*scalars, -draws.log_probs.mean(-1)]
        return torch.cat([self._scalars(*scalars), self._bytes(behind), self._pack(ids)], -1)

    def encode_draws(self, top_ids: Tensor, draws: Draws, label: Tensor, entropy: Tensor) -> Tensor:
        """Return records (N, bytes) uint8 of the draws, the likeliest ids (N,), label and entropy (N,)."""
        ids = torch.cat([top_ids[:, None], draws.ids.sort(-1).values], -1)
        return torch.cat([self._scalars(-draws.log_probs.mean(-1), -label, entropy), self._pack(ids)], -1)

    def decode(self, records: Tensor) -> TokenTargets:
        """Decode records (..., bytes) uint8 on any device. A record of zeros, as padding has, means nothing."""
        first, label, entropy, *of_tail = FINE.decode(_words(records[..., : self._scalars_end])).unbind(-1)
        ids = self._unpack(records[..., self._codes_end :])
        if self.kind == "sampled":
            entries, log_shares, surprise = _counted(ids[..., 1:])
            return TokenTargets(entries, log_shares, ids[..., 0], -label, entropy, surprise - first)
        codes = records[..., self._scalars_end : self._codes_end]
        behind = self.code.decode(_words(codes) if self.bits == 16 else codes)
        log_probs = torch.cat([torch.zeros_like(first)[..., None], -behind], -1)
        log_entries_mass = torch.log1p(-torch.exp(-first))
        log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True) + log_entries_mass[..., None]
        if not self.tail_draws:
            return TokenTargets(ids, log_probs, ids[..., 0], -label, entropy, torch.zeros_like(first))
        drawn, log_shares, surprise = _counted(ids[..., self.entries :])
        # A tail at the limit has no mass to draw from; its draws mean nothing.
        drawn = drawn.where((first < FINE.limit * (1 - 1e-6))[..., None], -1)
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
    """Count ascending draws (..., m). Return each token once, else -1; log(count / m); the counts' entropy (...,)."""
    draws, m = draws.contiguous(), draws.shape[-1]
    end, start = (torch.searchsorted(draws, draws, right=right) for right in (True, False))
    new = start == torch.arange(m, device=draws.device)
    log_shares = ((end - start) / m).log()
    surprise = -(log_shares.exp() * log_shares).where(new, 0).sum(-1)
    return draws.where(new, -1), log_shares.where(new, -torch.inf), surprise


@functools.lru_cache(maxsize=8)
def _places(count: int, bits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the four bytes that each id may lie in, (4, count), and the bits before it in the first, (count,).

    Bytes beyond the record are clamped to its last: the mask of `_unpack` removes their bits.
    """
    start = torch.arange(count, device=device) * bits
    return (start // 8 + torch.arange(4, device=device)[:, None]).clamp(max=width - 1), (start % 8).int()


def _split_words(words: Tensor) -> Tensor:
    """Return (..., n) integers below 2^16 as (..., 2 n) bytes, little-endian."""
    return torch.stack([words & 0xFF, words >> 8], -1).flatten(-2).to(torch.uint8)


def _words(halves: Tensor) -> Tensor:
    return halves[..., 0::2].int() | (halves[..., 1::2].int() << 8)


# A cache of hidden states: what the teacher's output head reads at each token, and the head, once.
#
# record of a token    H values in `dtype`, little-endian
# head.safetensors     weight (V, H) in `dtype`, bias (V,) in its own dtype where there is one
#
# The logits are head(hidden), scaled and capped as `HiddenSettings` in store.py says. They are never stored: the fused
# loss computes them chunk by chunk from these two, as it does those of a teacher in memory. V is the real vocabulary;
# rows of padding are left out.


HEAD = "head.safetensors"
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class HiddenFormat:
    """The layout of a token's record: its `width` hidden values, in `dtype`."""

    width: int
    dtype: Dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        """The size of one token's record."""
        return self.width * self.torch_dtype.itemsize

    def encode(self, hidden: Tensor) -> Tensor:
        """Return records (N, bytes) uint8 of hidden states (N, H), rounded to `dtype`."""
        return hidden.to(self.torch_dtype).contiguous().view(torch.uint8)

    def decode(self, records: Tensor) -> Tensor:
        """Return hidden states (..., H) of records (..., bytes) uint8, without a copy."""
        return records.view(self.torch_dtype)


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's output head: logits = scale * (hidden @ weight.T + bias), then softcap * tanh(logits / softcap)."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, module: nn.Module, logits: DeferredLogits, vocab_size: int, autocast: torch.dtype | None) -> Self:
        """Read the head of a model, in the dtype that products with it have.

        Args:
            module: the output head.
            logits: deferred logits of a pass, from which scale and softcap are taken.
            vocab_size: how many of its rows are the real vocabulary.

        Raises:
            ConfigError: it does more than a linear map, or its products are in a dtype that no cache stores.
        """
        head = _read(module)
        if isinstance(head, str) or head.lora:
            why = "adapters are on its output head" if not isinstance(head, str) else head
            raise ConfigError(
                f"cache_kind: hidden stores the teacher's head as one matrix, and {why}. Merge adapters into the "
                "teacher, leave its head unquantized, or capture with cache_kind: topk."
            )
        # The dtype of the products, so that training from the cache rounds as the teacher did.
        dtype = autocast or torch.promote_types(logits.hidden.dtype, head.weight.dtype)
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(
                f"cache_kind: hidden stores bfloat16, float16 or float32; the teacher computes in {dtype}."
            )
        # Rows of padding are no tokens, and a student's head need not have as many.
        bias = None if head.bias is None else head.bias[:vocab_size].detach()
        return cls(head.weight[:vocab_size].detach().to(dtype), bias, logits.scale, logits.softcap)

    @property
    def format(self) -> HiddenFormat:
        name: Any = str(self.weight.dtype).removeprefix("torch.")
        return HiddenFormat(self.weight.shape[1], name)

    def pack(self) -> bytes:
        """Return the content of its file; scale and softcap are in the index."""
        tensors = {"weight": self.weight, **({} if self.bias is None else {"bias": self.bias})}
        return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})

    @classmethod
    def unpack(cls, content: bytes, scale: float, softcap: float | None) -> Self:
        tensors = load(content)
        return cls(tensors["weight"], tensors.get("bias"), scale, softcap)

    def to(self, device: torch.device) -> Self:
        return replace(self, weight=self.weight.to(device), bias=None if self.bias is None else self.bias.to(device))

    def logits(self, hidden: Tensor) -> DeferredLogits:
        """Return the deferred logits (..., V) of hidden states (..., H)."""
        state = DeferredPass("The teacher cache", running=False)
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        logits = DeferredLogits(
            hidden, Head(self.weight, self.bias), partial(F.linear, weight=self.weight, bias=bias), state
        )
        if self.softcap is None:
            return replace(logits, before=self.scale)
        return replace(logits, before=self.scale / self.softcap, capped=True, after=self.softcap)


def _read(module: Any) -> Head | str:
    """Read a head; one that accelerate's hooks only move inputs for, as in a spread model, is read all the same."""
    if getattr(forward_below_hook(module), "__func__", None) is not nn.Linear.forward:
        return Head.read(module)
    if module.weight.is_meta:
        return "its weight is offloaded"
    return Head(module.weight, module.bias)
