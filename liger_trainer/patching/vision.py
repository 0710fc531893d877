"""Attention of towers over several images, or clips of sound, in one call for all of them.

Such a tower lays the patches of all images end to end, and its attention gets where each image, or each window of one,
ends. transformers hands these ends to flash-attn where that is installed; for any other implementation its loop asks
the device for the lengths at each layer and calls attention image by image, or window by window: 128 calls a layer for
eight images of Qwen2.5-VL. Here the tower takes the way of flash-attn to a function of ours: PyTorch's FlashAttention-2
(packing/packed_attention.py) where that can serve, else the former implementation, once for each run of equal lengths.
"""

import copy
import itertools
import types
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..common.replacements import Replacements
from ..compat.models import ATTENTION, attention_implementation
from ..compat.recognitions import (
    PATCHES,
    PLACEHOLDER_MASK,
    PLACEHOLDERS,
    TOWERS,
    check,
    compares_with,
    counts_placeholders,
    hands_over_ends,
    has_ends,
    transposes_output,
)
from ..compat.torch_internals import version_of
from . import structure
from .options import PatchOptions, PatchReport
from .packing import packed_attention
from .packing.packed_attention import NAMES as PACKED_NAMES

# transformers' modules look for "flash" in the name, and then hand over the ends.
NAMES = {"sdpa": "liger_flash_of_towers_sdpa", "eager": "liger_flash_of_towers_eager"}
TOWER = "tower attention"


def patch_tower_attention(
    model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport
) -> None:
    """Have towers compute the attention of all their images in one call, where they run sdpa or eager attention."""
    for module in _attention_modules(model) if options.towers else ():
        name = NAMES.get(attention_implementation(module.config))
        tower = [m for m in model.modules() if getattr(m, "config", None) is module.config]
        if name is not None and _may_be_replaced(module, tower):
            # a copy: of a configuration with this name transformers would build no other model
            config = copy.copy(module.config)
            setattr(config, ATTENTION, name)
            for part in tower:
                replacements.set(part, "config", config)
        if attention_implementation(module.config) in NAMES.values():
            report.swap(TOWER)


def _may_be_replaced(module: Any, tower: list[nn.Module]) -> bool:
    """Whether nothing in a tower but its attention depends on the name of the implementation."""
    known = attention_implementation(module.config) == "sdpa" or packed_attention.eager_of(module) is not None
    return known and not any(compares_with(kind, PACKED_NAMES) for kind in {type(part) for part in tower})


def _attention_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that would hand the ends of their sequences to flash-attn."""
    for module in model.modules():
        if has_ends(type(module)) and getattr(module, "config", None) is not None:
            if hands_over_ends(type(module)):
                yield module
            else:
                check(TOWERS)


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
        former, ends = packed_attention.former_attention(self.former, module), how.get("cu_seq_lens_q")
        if ends is None or attention_mask is not None:
            return former(module, query, key, value, attention_mask, **how)
        documents = packed_attention.documents_of(ends, how)
        causal = how.get("is_causal", getattr(module, "is_causal", False))
        if packed_attention.serves(former, query, key, value, how, causal):
            return packed_attention.attend(query, key, value, documents, how, causal=causal), None
        how = {**packed_attention.for_one_document(how), "is_causal": causal}
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


# Patches of images, embedded by a product of matrices.
#
# A tower cuts an image into patches by a convolution whose steps are as long as its kernel. That is a linear layer of
# each patch; cuDNN has no fast convolution for such kernels in 16 bits. What the convolution returns has its channels
# before the patches, and the module transposes it, so that every sum with the residual stream is transposed in memory,
# and each norm copies its input first. The product writes contiguous rows.


_PATCHES = "patch embedding"


def patch_patch_embedding(
    model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport
) -> None:
    """Have convolutions over patches, whose output is transposed, computed as products."""
    for module in model.modules() if options.towers else ():
        for conv in _convolutions(module):
            # its hooks go on running, such as the one by which checkpointing has embeddings require gradients
            if conv not in replacements and "forward" not in vars(conv) and structure.why_not_replaced(conv) is None:
                replacements.forward(conv, embed_patches)
                report.swap(_PATCHES)


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """Return a module's convolutions over patches, if it transposes their output and reads no layout by `view`."""
    convolutions = [child for child in module.children() if _cuts_patches(child)]
    if convolutions and not transposes_output(type(module)):
        check(PATCHES)
        return []
    return convolutions


def _cuts_patches(conv: Any) -> bool:
    if type(conv) not in (nn.Conv2d, nn.Conv3d) or conv.kernel_size != conv.stride or conv.groups != 1:
        return False
    return (conv.padding == "valid" or not any(conv.padding)) and set(conv.dilation) == {1}


def embed_patches(conv: Any, x: Tensor) -> Tensor:
    """Return conv(x), (images, channels, patches of each side), with the channels last in memory.

    Args:
        conv: its steps are as long as its kernel.
        x: (images, colours, pixels of each side). Sides that no number of patches fills go to the convolution.
    """
    sizes, kernel = x.shape[2:], conv.kernel_size
    if x.dim() != 2 + len(kernel) or any(n % k for n, k in zip(sizes, kernel, strict=True)):
        return type(conv).forward(conv, x)
    count = [n // k for n, k in zip(sizes, kernel, strict=True)]
    split = x.reshape(*x.shape[:2], *itertools.chain(*zip(count, kernel, strict=True)))
    sides = range(2, split.dim(), 2)
    patches = split.permute(0, *sides, 1, *(i + 1 for i in sides)).flatten(1 + len(count))
    return F.linear(patches, conv.weight.flatten(1), conv.bias).movedim(-1, 1)


# Placeholders of images, counted before the tower runs.
#
# A vision-language model counts the placeholders in its rows once the tower's features are there, to say so if there
# are more or fewer of them. That waits until the device has computed the whole tower, and then the device waits for
# the host, which makes masks and launches the first layers of the text. Here the ids come to the host when the
# forward starts: the count and its message are the model's own, and the device never runs out of work.


_PLACEHOLDERS = "placeholders"
_COPIES: Any = WeakIdKeyDictionary()
_IDS: ContextVar[tuple[Any, Any]] = ContextVar("ids", default=(None, None))  # and the same on the host, in a forward


def patch_placeholders(
    model: nn.Module, options: PatchOptions, replacements: Replacements, report: PatchReport
) -> None:
    """Have models count their placeholders on the host, where they wait for the device to do it."""
    for module in model.modules() if options.towers else ():
        if not counts_placeholders(type(module)):
            if hasattr(module, PLACEHOLDER_MASK):
                check(PLACEHOLDERS)
        elif module not in replacements and structure.why_not_replaced(module) is None:
            replacements.forward(module, counting_forward)
            replacements.set(module, PLACEHOLDER_MASK, types.MethodType(_placeholder_mask, module))
            report.swap(_PLACEHOLDERS)


def counting_forward(module: Any, *inputs: Any, **named: Any) -> Any:
    """Run the module's own forward, with the ids on the host while it runs."""
    forward = type(module).forward
    ids = named.get("input_ids", inputs[0] if inputs else None)
    images = any(value is not None for name, value in named.items() if name.startswith("pixel_values"))
    if not images or ids is None or not _is_far(ids) or torch.compiler.is_compiling():
        return forward(module, *inputs, **named)
    before = _IDS.set((ids, _on_host(ids)))
    try:
        return forward(module, *inputs, **named)
    finally:
        _IDS.reset(before)


def _on_host(ids: Tensor) -> Tensor:
    """Return ids on the host, those that a teacher has read before its student without waiting again."""
    if ids.is_inference():
        return ids.cpu()
    version, copy = _COPIES.get(ids, (None, ids))
    if version != version_of(ids):
        copy = ids.cpu()
        _COPIES[ids] = version_of(ids), copy
    return copy


def _is_far(ids: Tensor) -> bool:
    return ids.is_cuda


def _placeholder_mask(module: Any, input_ids: Any, inputs_embeds: Tensor, *features: Any, **named: Any) -> Any:
    ids, on_host = (None, None) if torch.compiler.is_compiling() else _IDS.get()
    method = getattr(type(module), PLACEHOLDER_MASK)
    if on_host is None or ids is not input_ids:
        return method(module, input_ids, inputs_embeds, *features, **named)
    stand_in = inputs_embeds.new_empty((), device="cpu").expand(inputs_embeds.shape)
    masks = method(module, on_host, stand_in, *features, **named)
    if isinstance(masks, Tensor):
        return _on_device(masks, inputs_embeds)
    return type(masks)(_on_device(mask, inputs_embeds) for mask in masks)


def _on_device(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Copy a mask (rows, length, 1), or one expanded from that, without waiting."""
    if mask is None:
        return None
    narrow = (mask[..., :1] if mask.stride(-1) == 0 else mask).contiguous()
    narrow = narrow.pin_memory() if like.is_cuda else narrow
    return narrow.to(like.device, non_blocking=True).expand(mask.shape)
