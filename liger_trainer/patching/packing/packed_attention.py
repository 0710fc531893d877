"""Attention over packed rows by the lengths of their documents, without a mask and without the flash-attn package.

On a GPU in 16 bits it is our kernel or PyTorch's FlashAttention-2 (documents.py). Where these cannot serve (a CPU,
fp32, softcapping, sinks, wide heads), rows are cut at the documents, and the model's former implementation computes one
document after the other. torchtitan and axolotl chose varlen attention for packed rows before.

Two names are registered with transformers, one for each former implementation, and a third for rows of which each rank
has a slice (packed_rows.py). A model gets one by its configuration, for as long as it is patched; `save_pretrained`
leaves it out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from ...common.replacements import Replacements
from ...compat.models import ATTENTION, attention_implementation
from ...compat.recognitions import INTERFACE, asks_for_attention, check, compares_with
from ...errors import ConfigError
from ..options import PatchReport
from . import documents as flash
from .documents import DocumentMask, Documents, MaskMaker, numbers_of_documents

NAMES = {"sdpa": "liger_packed_sdpa", "eager": "liger_packed_eager"}
OF_SLICES = "liger_packed_sdpa_of_slices"
KIND = "packed attention"


def pack_attention(model: Any, replacements: Replacements, report: PatchReport, sliced: bool = False) -> None:
    """Have `model` compute attention over packed rows by lengths, where it runs sdpa or eager attention.

    Args:
        sliced: of the rows, each rank has a slice. The model runs sdpa.
    """
    reason = why_not_packed(model)
    if reason is not None:
        report.leave(KIND, reason)
        return
    for config in attention_configs(model):
        replacements.set(config, ATTENTION, OF_SLICES if sliced else NAMES[attention_implementation(config)])
    report.swap(KIND)


def why_not_packed(model: Any) -> str | None:
    """Say why a model keeps its own attention, None where it need not."""
    configs = attention_configs(model)
    if not configs:
        check(INTERFACE)
        return "the model does not call its attention through transformers' interface"
    for config in configs:
        if attention_implementation(config) not in NAMES:
            return f"the model runs {attention_implementation(config)}"
        if getattr(config, "output_attentions", False):
            return "the model returns its attention weights (output_attentions)"
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model is an encoder-decoder"
    for kind in {type(module) for module in model.modules()}:
        if compares_with(kind, NAMES):
            return f"{kind.__name__} computes something else for each attention implementation"
    eager = [module for module in _attention_modules(model) if attention_implementation(module.config) == "eager"]
    if not all(map(flash.eager_of, eager)):
        return "the eager attention of the model is no function of its module"
    return None


def _attention_modules(model: Any) -> Iterator[Any]:
    """Yield the modules of causal attention that ask transformers' interface for their implementation."""
    for module in model.modules():
        if getattr(module, "is_causal", False) and getattr(module, "config", None) is not None:
            if asks_for_attention(type(module)):
                yield module


def attention_configs(model: Any) -> list[Any]:
    """Return the configurations of causal attention that goes through transformers' interface."""
    return list({id(module.config): module.config for module in _attention_modules(model)}.values())


@dataclass(frozen=True)
class PackedAttention:
    """An attention function of transformers' `AttentionInterface`, in place of `former`, "sdpa" or "eager"."""

    former: str

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (rows, length, heads, width), and the weights where the former implementation has them.

        Args:
            query, key, value: (rows, heads, length, width); keys and values may have fewer heads.
            attention_mask: a `DocumentMask`; a tensor or None, which the former implementation gets.
            how: dropout, scaling, and what the model hands over, such as `cu_seq_lens_q` and `max_length_q`, which are
                taken as the documents where they are.

        Raises:
            ConfigError: packed rows with keys of earlier calls, or with a bias by position.
        """
        former = flash.former_attention(self.former, module)
        causal, ends = how.get("is_causal", getattr(module, "is_causal", True)), how.get("cu_seq_lens_q")
        mask = attention_mask if isinstance(attention_mask, DocumentMask) else None
        # Eager attention needs a mask for every row, so it gets our object for rows of one document, too.
        if mask is not None and ends is None and self.former == "eager":
            mask.read(how.get("position_ids"))
            if mask.index is None:
                return former(module, query, key, value, mask.tensor, **how)
        # A call that is not causal, cross-attention for example, may carry ends that are not of its keys.
        packed = mask is not None or (causal and ends is not None)
        if packed and query.shape[2] != key.shape[2]:
            raise ConfigError("Packed rows were given with keys of earlier calls. Call the model with use_cache=False.")
        if not packed or (mask is None and attention_mask is not None):
            return former(module, query, key, value, attention_mask, **how)
        window = how.get("sliding_window") if mask is None else mask.window
        documents = mask.documents if ends is None and mask is not None else flash.documents_of(ends, how)
        if flash.serves(former, query, key, value, how):
            return flash.attend(query, key, value, documents, how, window=window), None
        return self._each(former, module, (query, key, value), documents, window, how), None

    def _each(
        self, former: Any, module: nn.Module, rows: tuple[Tensor, ...], documents: Documents, window: int | None,
        how: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Have the former implementation compute one document after the other."""
        if how.get("position_bias") is not None:
            raise ConfigError("Packed rows go with no bias by position. Set `packing: false`.")
        how = flash.for_one_document(how)
        # (1, heads, tokens of one document, width) each. Waits for the device.
        lengths = [length for length in documents.lengths if length]
        in_one_row = [x.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(lengths, dim=2) for x in rows]
        make_mask: Any = ALL_MASK_ATTENTION_FUNCTIONS[self.former]
        function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        outputs = []
        for length, *parts in zip(lengths, *in_one_row, strict=True):
            mask = make_mask(  # None where sdpa's `is_causal` says it
                batch_size=1, q_length=length, kv_length=length, local_size=window, mask_function=function,
                dtype=parts[0].dtype, device=parts[0].device,
            )  # fmt: skip
            outputs.append(former(module, *parts, mask, **how)[0])
        return torch.cat(outputs, dim=1).unflatten(1, (rows[0].shape[0], -1)).squeeze(0)


def attend_by_positions(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **how: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute sdpa within the documents of rows, told only by `position_ids` (rows, length).

    Around it DeepSpeed makes whole rows of slices, their positions too, and nothing else. This waits for the device.
    """
    positions = how["position_ids"]
    rows, length = positions.shape
    documents = Documents.of_rows(rows, length, numbers_of_documents(positions), positions.device)
    return PackedAttention("sdpa")(module, query, key, value, None, **{**how, "cu_seq_lens_q": documents.ends})


AttentionInterface.register(OF_SLICES, attend_by_positions)
AttentionMaskInterface.register(OF_SLICES, lambda *_, **__: None)  # pyright: ignore[reportArgumentType]
for _former, _name in NAMES.items():
    AttentionInterface.register(_name, PackedAttention(_former))
    AttentionMaskInterface.register(_name, MaskMaker(_former))  # pyright: ignore[reportArgumentType]
