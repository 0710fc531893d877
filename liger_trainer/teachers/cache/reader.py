"""A teacher reads rows and writes a record for each supervised token. Logits of a whole batch are never stored."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common.replacements import Replacements
from ...errors import ConfigError, LigerTrainerError
from ...losses.deferred_logits import DeferredLogits, Forward
from ...losses.model_parts import Head, device_of, output_module
from .records import Draws, RecordFormat

_CHUNK_LOGITS = 2**27  # logits in a chunk: 512 MiB in fp32, and again as much for each step on them


class TeacherReader:
    """Make records of rows.

    Args:
        teacher: any causal LM with an output head, on its device, in eval mode.
        form: the layout of a record.
        temperature: of the log-probabilities.
        seed: of the draws, which depend on it and the row's key, not on the batch.
        autocast: the dtype of autocast; None without.
    """

    def __init__(
        self, teacher: nn.Module, form: RecordFormat, temperature: float = 1.0, seed: int = 0,
        autocast: torch.dtype | None = None,
    ):  # fmt: skip
        self.teacher, self.form, self.temperature, self.seed = teacher, form, temperature, seed
        self.autocast = autocast
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
        uniform = self._uniform(keys, counts)
        logits, labels = self._logits(ids, mask, targets != -100), targets[targets != -100].to(self.device)
        size = max(1, _CHUNK_LOGITS // self.form.vocab_size)
        records = [
            self._records(logits(slice(at, at + size)), labels[at : at + size], uniform[at : at + size])
            for at in range(0, len(labels), size)
        ]
        return list(torch.cat(records).cpu().split(counts))

    def _logits(self, ids: Tensor, mask: Tensor, keep: Tensor) -> Callable[[slice], Tensor]:
        """Return a function that computes the fp32 logits of a slice of the positions to keep."""
        dtype = self.autocast
        autocast = partial(torch.autocast, self.device.type, dtype=dtype, enabled=dtype is not None)
        ids, mask, keep = ids.to(self.device), mask.to(self.device), keep.to(self.device)
        with autocast(), _held_back(self.teacher):
            logits: Any = self.teacher(input_ids=ids, attention_mask=mask, use_cache=False).logits
        kept = logits[keep]

        def compute(rows: slice) -> Tensor:
            with autocast():
                chunk: Any = kept[rows]
                chunk = chunk.compute() if isinstance(chunk, DeferredLogits) else chunk
            return chunk[:, : self.form.vocab_size].float().to(self.device)

        return compute

    def _records(self, logits: Tensor, labels: Tensor, uniform: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        label = log_p.gather(-1, labels[:, None]).squeeze(-1)
        entropy = torch.special.entr(log_p.exp()).sum(-1)
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
def _held_back(model: nn.Module) -> Iterator[None]:
    """Within the context the output head, of any class, returns `DeferredLogits`: its own forward is called later."""
    module: Any = output_module(model)
    if module is None:
        raise ConfigError(f"{type(model).__name__} has no output head that can be found.")
    vocabulary = getattr(module, "out_features", None) or module.weight.shape[0]
    head = Head(torch.empty(vocabulary, 0, device="meta"), None)  # only its size is used
    state, replacements = Forward(type(model).__name__), Replacements()
    project = module.forward
    replacements.set(module, "forward", lambda hidden: DeferredLogits(hidden, head, project, state))
    try:
        yield
    finally:
        replacements.undo()
        state.running = False
