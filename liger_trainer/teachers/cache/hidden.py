"""A cache of hidden states: what the teacher's output head reads at each token, and the head, once.

    record of a token    H values in `dtype`, little-endian
    head.safetensors     weight (V, H) in `dtype`, bias (V,) in its own dtype where there is one

The logits are head(hidden), scaled and capped as `HiddenSettings` in store.py says. They are never stored: the fused
loss computes them chunk by chunk from these two, as it does those of a teacher in memory. V is the real vocabulary;
rows of padding are left out.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from ...errors import ConfigError
from ...losses.deferred_logits import DeferredLogits, Forward
from ...losses.model_parts import Head

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
        dtype = autocast or torch.promote_types(logits.hidden.dtype, head.weight.dtype)
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(
                f"cache_kind: hidden stores bfloat16, float16 or float32; the teacher computes in {dtype}."
            )
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
        state = Forward("The teacher cache", running=False)
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        logits = DeferredLogits(
            hidden, Head(self.weight, self.bias), partial(F.linear, weight=self.weight, bias=bias), state
        )
        if self.softcap is None:
            return replace(logits, before=self.scale)
        return replace(logits, before=self.scale / self.softcap, capped=True, after=self.softcap)


def _read(module: Any) -> Head | str:
    """Read a head; one that accelerate's hooks only move inputs for, as in a spread model, is read all the same."""
    own = getattr(module, "_old_forward", None)
    if getattr(module, "_hf_hook", None) is None or getattr(own, "__func__", None) is not nn.Linear.forward:
        return Head.read(module)
    if module.weight.is_meta:
        return "its weight is offloaded"
    return Head(module.weight, module.bias)
