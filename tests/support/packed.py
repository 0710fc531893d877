"""Packed rows as TRL's collator makes them, and a watch for tensors of the row's length squared."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


def documents(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator) for length in lengths]


def packed(rows: Sequence[Tensor], device: str = "cpu") -> dict[str, Any]:
    """The batch of these documents, in one row."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
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
