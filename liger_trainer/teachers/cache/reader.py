"""A teacher reads rows and writes a record for each supervised token. Logits of a whole batch are never stored."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...errors import ConfigError, LigerTrainerError
from ...losses.deferred_logits import DeferredLogits, DeferredPass
from ...losses.model_parts import Head, device_of, output_module
from ...patching.packing.document_mask import padded_on_the_right
from .records import Draws, RecordFormat, TeacherHead

_CHUNK_LOGITS = 2**27  # logits in a chunk: 512 MiB in fp32, and again as much for each step on them


class Reader(ABC):
    """Make records of rows.

    Args:
        teacher: any causal LM with an output head, on its device, in eval mode.
        autocast: the dtype of autocast; None without.
    """

    def __init__(self, teacher: nn.Module, autocast: torch.dtype | None = None):
        self.teacher, self.autocast = teacher, autocast
        self.device = device_of(teacher)

    @torch.no_grad()
    def read(self, keys: Sequence[bytes], rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return each row's records (supervised tokens, bytes), on the CPU. Takes one forward pass."""
        width = max(len(ids) for ids, _ in rows)
        ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
        targets = torch.full_like(ids, -100)
        for i, (row_ids, labels) in enumerate(rows):
            ids[i, : len(row_ids)], mask[i, : len(row_ids)] = row_ids, 1
            targets[i, : len(row_ids) - 1] = labels[1:]
        counts = (targets != -100).sum(-1).tolist()
        # Deferred logits are indexed by their hidden states, so those of other tokens are never computed.
        kept = self.logits(ids, mask)[(targets != -100).to(self.device)]
        labels = targets[targets != -100].to(self.device)
        return list(self.records(kept, labels, keys, counts).cpu().split(counts))

    @abstractmethod
    def records(self, logits: Any, labels: Tensor, keys: Sequence[bytes], counts: Sequence[int]) -> Tensor:
        """Return the records (tokens, bytes) uint8 of (deferred) logits (tokens, V) and what they should predict.

        Args:
            keys, counts: of the rows, and how many of the tokens each has.
        """

    @torch.no_grad()
    def logits(self, ids: Tensor, mask: Tensor) -> Any:
        """Return the logits of a batch that is padded on the right, deferred where the model lets them be."""
        with self.autocasting(), padded_on_the_right(), _held_back(self.teacher, self.device):
            return self.teacher(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False
            ).logits

    def autocasting(self) -> Any:
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)


class HiddenReader(Reader):
    """Make records of hidden states; `head` is what makes logits of them.

    Raises:
        ConfigError: the model's head, or what it does with its logits, cannot be written down.
    """

    def __init__(self, teacher: nn.Module, vocab_size: int, autocast: torch.dtype | None = None):
        super().__init__(teacher, autocast)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        logits, module = self.logits(ids, torch.ones_like(ids)), output_module(teacher)
        assert module is not None  # `logits` needs it too
        self.head = TeacherHead.of(module, self._deferred(logits), vocab_size, autocast)

    def records(self, logits: Any, labels: Tensor, keys: Sequence[bytes], counts: Sequence[int]) -> Tensor:
        records = self.head.format.encode(self._deferred(logits).hidden)
        if not bool(self.head.format.decode(records).isfinite().all()):
            raise LigerTrainerError(
                f"The teacher's hidden states are NaN or infinite in {self.head.format.dtype}. Nothing of this batch "
                "was written."
            )
        return records

    def _deferred(self, logits: Any) -> DeferredLogits:
        if isinstance(logits, DeferredLogits) and not logits.stored:
            return logits
        raise ConfigError(
            f"cache_kind: hidden: {type(self.teacher).__name__} does more with its logits than scale and cap them, so "
            "they cannot be computed from its head. Capture it with cache_kind: topk."
        )


class TeacherReader(Reader):
    """Make records of likely or drawn tokens.

    Args:
        teacher, autocast: as for `Reader`.
        form: the layout of a record.
        temperature: of the log-probabilities.
        seed: of the draws, which depend on it and the row's key, not on the batch.
    """

    def __init__(
        self, teacher: nn.Module, form: RecordFormat, temperature: float = 1.0, seed: int = 0,
        autocast: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(teacher, autocast)
        self.form, self.temperature, self.seed = form, temperature, seed

    def records(self, logits: Any, labels: Tensor, keys: Sequence[bytes], counts: Sequence[int]) -> Tensor:
        # A chunk's logits, log-probabilities and sums are fp32 of the whole vocabulary, and must fit at once.
        uniform, size = self._uniform(keys, counts), max(1, _CHUNK_LOGITS // self.form.vocab_size)
        chunks = (slice(at, at + size) for at in range(0, len(labels), size))
        return torch.cat([self._records(self._computed(logits, rows), labels[rows], uniform[rows]) for rows in chunks])

    def _computed(self, logits: Any, rows: slice) -> Tensor:
        """Return the fp32 logits of a slice of the tokens."""
        with self.autocasting():
            chunk = logits[rows]
            chunk = chunk.compute() if isinstance(chunk, DeferredLogits) else chunk
        return chunk[:, : self.form.vocab_size].float().to(self.device)

    def _records(self, logits: Tensor, labels: Tensor, uniform: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        label = log_p.gather(-1, labels[:, None]).squeeze(-1)
        entropy = torch.special.entr(log_p.exp()).sum(-1)
        # one check for the whole distribution: a NaN or an infinity anywhere makes the entropy NaN
        if not bool(entropy.isfinite().all()):
            raise LigerTrainerError("The teacher's logits are NaN or infinite. Nothing of this batch was written.")
        if self.temperature != 1.0:
            log_p = (logits / self.temperature).log_softmax(-1)
        if self.form.kind == "topk":
            values, ids = log_p.topk(self.form.entries, -1)
            rest = log_p.scatter(-1, ids, -torch.inf)
            draws = self._drawn(rest, rest.argmax(-1), uniform) if self.form.draws else None
            return self.form.encode_topk(ids, values, rest.logsumexp(-1), label, entropy, draws)
        top_ids = log_p.argmax(-1)
        return self.form.encode_draws(top_ids, self._drawn(log_p, top_ids, uniform), label, entropy)

    def _drawn(self, log_p: Tensor, top_ids: Tensor, uniform: Tensor) -> Draws:
        """Draw from (N, V), which need not sum to 1; `top_ids` (N,) are its likeliest. Without mass, the draws mean
        nothing."""
        cumulative = log_p.double().exp_().cumsum_(-1)  # fp64 in place: as large as two chunks
        wanted = uniform.to(self.device) * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, wanted, right=True).clamp(max=self.form.vocab_size - 1)
        # Rounding may hit a token without mass, which is perhaps among the entries already.
        ids = ids.where(log_p.gather(-1, ids) > -torch.inf, top_ids[:, None])
        return Draws(ids, log_p.gather(-1, ids))

    def _uniform(self, keys: Sequence[bytes], counts: Sequence[int]) -> Tensor:
        """Return (tokens, m) fp64, one random number in each m-th of [0, 1)."""
        draws = self.form.draws
        if not draws:
            return torch.empty(sum(counts), 0)
        chance = [
            np.random.Generator(np.random.Philox(key=[self.seed, int.from_bytes(key[:8], "little")])).random((n, draws))
            for key, n in zip(keys, counts, strict=True)
        ]
        return torch.from_numpy((np.arange(draws) + np.concatenate(chance)) / draws)


@contextlib.contextmanager
def _held_back(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context the output head, of any class, returns `DeferredLogits`: its own forward is called later.

    They are on `device`: accelerate moves what a spread model returns there, and only hidden states can be moved
    without computing logits. The head's own hook takes them to its device again.
    """
    module: Any = output_module(model)
    if module is None:
        raise ConfigError(f"{type(model).__name__} has no output head that can be found.")
    vocabulary = getattr(module, "out_features", None) or module.weight.shape[0]
    head = Head(torch.empty(vocabulary, 0, device="meta"), None)  # only its size is used
    state, replacements = DeferredPass(type(model).__name__), Replacements()
    project = module.forward
    replacements.set(module, "forward", lambda hidden: DeferredLogits(hidden.to(device), head, project, state))
    try:
        yield
    finally:
        replacements.undo()
        state.running = False
