"""Attention of towers over several images, or clips of sound, in one call for all of them.

Such a tower lays the patches of all images end to end, and its attention gets where each image, or each window of one,
ends. transformers hands these ends to flash-attn where that is installed; for any other implementation its loop asks
the device for the lengths at each layer and calls attention image by image, or window by window: 128 calls a layer for
eight images of Qwen2.5-VL. Here the tower takes the way of flash-attn to a function of ours: PyTorch's FlashAttention-2
(flash.py) where that can serve, else the former implementation, once for each run of equal lengths.
"""

import copy
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from ..common.replacements import Replacements
from . import flash
from .options import PatchOptions, PatchReport
from .packed_attention import asks_for_implementation

# transformers' modules look for "flash" in the name, and then hand over the ends.
NAMES = {"sdpa": "liger_flash_of_towers_sdpa", "eager": "liger_flash_of_towers_eager"}
KIND = "tower attention"
_IMPLEMENTATION = "_attn_implementation_internal"


def patch_tower_attention(
    model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport
) -> None:
    """Have towers compute the attention of all their images in one call, where they run sdpa or eager attention."""
    for module in _attention_modules(model) if options.towers else ():
        name = NAMES.get(module.config._attn_implementation)
        tower = [m for m in model.modules() if getattr(m, "config", None) is module.config]
        if name is not None and _may_be_replaced(module, tower):
            # a copy: of a configuration with this name transformers would build no other model
            config = copy.copy(module.config)
            setattr(config, _IMPLEMENTATION, name)
            for part in tower:
                replacements.set(part, "config", config)
        if module.config._attn_implementation in NAMES.values():
            report.swap(KIND)


def _may_be_replaced(module: Any, tower: list[nn.Module]) -> bool:
    """Whether nothing in a tower but its attention depends on the name of the implementation."""
    known = module.config._attn_implementation == "sdpa" or flash.eager_of(module) is not None
    return known and not any(map(asks_for_implementation, {type(part) for part in tower}))


def _attention_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that would hand the ends of their sequences to flash-attn."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if code is not None and "cu_seqlens" in code.co_varnames and getattr(module, "config", None) is not None:
            asks = forward.__globals__.get("is_flash_attention_requested")
            if asks is is_flash_attention_requested and "is_flash_attention_requested" in code.co_names:
                yield module


@dataclass(frozen=True)
class TowerAttention:
    """An attention function of transformers' `AttentionInterface`, in place of `former`, "sdpa" or "eager"."""

    former: str

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (1, length, heads, width), and the weights where the former implementation has them.

        Args:
            query, key, value: (1, heads, length, width), of all images.
            attention_mask: None, unless the module attends without ends.
            how: is_causal, dropout, scaling, and `cu_seq_lens_q`, (images + 1), from 0 to the length.
        """
        former, ends = flash.former_attention(self.former, module), how.get("cu_seq_lens_q")
        if ends is None or attention_mask is not None:
            return former(module, query, key, value, attention_mask, **how)
        documents, causal = flash.documents_of(ends, how), how.get("is_causal", getattr(module, "is_causal", False))
        if flash.serves(former, query, key, value, how):
            return flash.attend(query, key, value, documents, how, causal=causal), None
        how = {**flash.for_one_document(how), "is_causal": causal}
        runs = [(length, len(list(run))) for length, run in itertools.groupby(documents.lengths) if length]
        sizes = [length * count for length, count in runs]
        parts = zip(runs, *(x.split(sizes, 2) for x in (query, key, value)), strict=True)
        outputs = [
            former(module, *(x[0].unflatten(1, (count, length)).transpose(0, 1) for x in part), None, **how)[0]
            for (length, count), *part in parts
        ]
        return torch.cat([output.flatten(0, 1) for output in outputs])[None], None


for _former, _name in NAMES.items():
    AttentionInterface.register(_name, TowerAttention(_former))
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_former])
