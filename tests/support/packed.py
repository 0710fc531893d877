"""Packed rows as TRL's collator makes them, and a watch for tensors of the row's length squared."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_trainer.compat.sft_trainer import DataCollatorForLanguageModeling, with_lengths


def documents(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator) for length in lengths]


def packed(rows: Sequence[Tensor], device: str = "cpu") -> dict[str, Any]:
    """The batch of these documents, in one row."""
    collate = with_lengths(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))
    batch = collate([{"input_ids": row.tolist()} for row in rows])
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


class SquareTensors(TorchDispatchMode):
    """Names the operations that return a tensor with two sides of `length`."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.operations = length, set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and list(tensor.shape).count(self.length) > 1:
                self.operations.add(str(func))
        return result


def flash_by_definition(
    q, k, v, ends_q, ends_k, longest_q, longest_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
):
    """PyTorch's `_flash_attention_forward` as its documentation has it: q (tokens, heads, width); -1 is no limit."""
    assert torch.equal(ends_q, ends_k) and ends_q.dtype == torch.int32 and not debug and dropout == 0.0
    assert longest_q == longest_k >= ends_q.diff().max() and ends_q[0] == 0 and ends_q[-1] == len(q)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for start, end in zip(ends_q.tolist(), ends_q[1:].tolist(), strict=False):
        at = torch.arange(end - start)
        behind = at[:, None] - at  # how far a key is behind its query
        seen = torch.ones_like(behind, dtype=torch.bool)
        if causal or window_size_right >= 0:
            seen &= behind >= -max(window_size_right, 0)
        if window_size_left >= 0:
            seen &= behind <= window_size_left
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[start:end]))
    return torch.cat(outputs), None, None, None, None
