"""Attention over packed rows by the lengths of their documents, without a mask and without the flash-attn package.

On a GPU in 16 bits it is our kernel or PyTorch's FlashAttention-2 (`attend`). Where these cannot serve (a CPU,
fp32, heads of more than 512 columns), rows are cut at the documents, and the model's former implementation computes one
document after the other. torchtitan and axolotl chose varlen attention for packed rows before. Rows of one document
each take the same way where they have windows, sinks or capped scores; else the former implementation computes them.

Two names are registered with transformers, one for each former implementation, and a third for rows of which each rank
has a slice (packed_rows.py). A model gets one by its configuration, for as long as it is patched; `save_pretrained`
leaves it out.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...common.replacements import Replacements
from ...compat.models import ATTENTION, attention_implementation
from ...compat.recognitions import (
    INTERFACE,
    SHARING_SLICES,
    asks_for_attention,
    can_keep_whole,
    check,
    compares_with,
    is_attention,
    keep_whole,
)
from ...compat.torch_internals import FLASH_ATTENTION, version_of
from ...errors import ConfigError
from ...kernels.document_attention import WIDEST, document_attention, launches
from ..options import PatchReport
from .document_mask import DocumentMask, Documents, MaskMaker, numbers_of_documents

# Attention over documents that lie end to end, by our kernel or PyTorch's FlashAttention-2.
#
# Causal attention without dropout is our own kernel where it is the faster one or the only one: the number of documents
# costs it nothing, and it knows windows, sinks and softcaps (kernels/document_attention.py). The rest is
# FlashAttention-2 (Dao 2023, arXiv:2307.08691), the operation below `torch.nn.attention.varlen` and
# `scaled_dot_product_attention`. It is called as the operation, whose backward is PyTorch's own, since the function
# around it costs the host more at each layer.


# Keywords of an attention call about documents, which a call for one document does not get.
_OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Keywords that change the scores, which FlashAttention-2 does not know, and those that our kernel knows.
_OF_SCORES = ("softcap", "s_aux", "position_bias")
_OF_OURS = ("softcap", "s_aux")
# Who computes what, as measured: docs/results/attention-nvidia-h100-80gb-hbm3.md.
OWN_WIDTH = 128  # columns of a head up to which our kernel is faster than FlashAttention-2, which has at most 256
SDPA_WIDTH = 256  # and beyond which it is faster than sdpa without a mask
WINDOWS_A_ROW = 2  # rows of so many windows or more are read without a mask
OWN_DTYPES = (torch.float16, torch.bfloat16)  # fp32 has no tensor cores
_DOCUMENTS: Any = WeakIdKeyDictionary()
_FITS: dict[tuple, bool] = {}


def former_attention(name: str, module: nn.Module) -> Any:
    """Return transformers' function for "sdpa", or the eager function of an attention module."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"] if name == "sdpa" else eager_of(module)


def eager_of(module: nn.Module) -> Callable | None:
    """Return the eager attention function from the file of an attention module's class."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    return None


def for_one_document(how: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of an attention call without those about documents."""
    return {name: value for name, value in how.items() if name not in _OF_DOCUMENTS}


@torch.compiler.disable()
def documents_of(ends: Any, how: dict[str, Any]) -> Documents:
    """Return the documents that came with a batch: one object for all layers, as long as the tensor is unchanged."""
    version = version_of(ends)  # inference tensors count none: read each time
    before = _DOCUMENTS.get(ends)
    if before is None or version is None or before[0] != version:
        # `ends` itself would never go
        _DOCUMENTS[ends] = before = (version, Documents(ends.detach(), how.get("max_length_q")))
    return before[1]


def serves(former: Any, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any], causal: bool = True) -> bool:
    """Whether our kernel or FlashAttention computes what `former` would.

    Args:
        former: the model's function of attention.
        query, key, value: (rows, heads, length, width); keys and values may have fewer heads.
        how: the call's keywords.
        causal: a token sees those before it, not all.
    """
    sinks, softcap, bias = (how.get(name) is not None for name in ("s_aux", "softcap", "position_bias"))
    if bias or not (ours_serves(query, key, value, how, causal) or flash_serves(query, key, value, how)):
        return False
    return is_attention(former, sinks, softcap)


def ours_serves(query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any], causal: bool) -> bool:
    """Whether our kernel takes such tensors, whatever is faster."""
    fits = query.shape[3] <= WIDEST and key.shape == value.shape and query.shape[2] == key.shape[2]
    return causal and fits and not how.get("dropout") and _autocast_dtype(query) in OWN_DTYPES and launches(query)


def ours_is_faster(query: Tensor, how: dict[str, Any]) -> bool:
    """Whether our kernel takes less time than FlashAttention-2, or FlashAttention-2 does not know how."""
    return query.shape[3] <= OWN_WIDTH or any(how.get(name) is not None for name in _OF_OURS)


def needs_no_mask(query: Tensor, how: dict[str, Any], window: int | None) -> bool:
    """Whether rows of one document each are read faster without a mask than by the former implementation."""
    if any(how.get(name) is not None for name in _OF_OURS) or query.shape[3] > SDPA_WIDTH:
        return True
    return window is not None and query.shape[2] >= WINDOWS_A_ROW * window


def flash_serves(query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> bool:
    """Whether PyTorch's FlashAttention-2 takes such tensors on this GPU."""
    if query.device.type != "cuda" or any(how.get(name) is not None for name in _OF_SCORES):
        return False
    # Whether PyTorch's FlashAttention takes such tensors on this GPU: asked once for each kind of them.
    tensors, dropout = (query, key, value), how.get("dropout", 0.0)
    grad, dtype = torch.is_grad_enabled() and query.requires_grad, _autocast_dtype(query)
    kinds = tuple((x.dtype, x.shape[1], x.shape[3]) for x in tensors)
    case = (query.device, kinds, dtype, grad, dropout > 0, torch.backends.cuda.flash_sdp_enabled())
    if case not in _FITS:
        params: Any = SDPAParams  # which has no signature for type checkers
        asked = params(*(x.to(dtype) for x in tensors), None, dropout, True, query.shape[1] != key.shape[1])
        # % 8: PyTorch pads other widths in the function around the operation
        _FITS[case] = query.shape[3] % 8 == 0 and can_use_flash_attention(asked)
    return _FITS[case]


def _autocast_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that `scaled_dot_product_attention` would compute in."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def attend(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: dict[str, Any], *,
    causal: bool = True, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Return attention within documents, (rows, length, heads, width).

    Args:
        query, key, value: (rows, heads, length, width), in fp16 or bf16, or under autocast.
        documents: of the rows laid end to end.
        how: the call's keywords, of which dropout, scaling, softcap and s_aux (sinks) are taken.
        causal: a token sees those before it, and of these the last `window` - 1 if there is a window.
    """
    dtype = _autocast_dtype(query)
    q, k, v = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if ours_serves(query, key, value, how, causal):
        if ours_is_faster(query, how) or not flash_serves(query, key, value, how):
            ends = documents.ends if documents.each is None else documents.each
            bounds = documents.bounds(q.shape[0], q.device) if documents.each is None else None
            output = document_attention(
                q, k, v, ends, scale=how.get("scaling"), window=window, sinks=how.get("s_aux"),
                softcap=how.get("softcap"), bounds=bounds,
            )  # fmt: skip
            return output.unflatten(0, (query.shape[0], query.shape[2]))
    ends, longest = documents.ends.to(q.device), documents.longest
    # how many tokens before and after itself a token sees; -1: all
    left, right = (-1 if window is None else window - 1), (0 if causal else -1)
    output = FLASH_ATTENTION(
        q, k, v, ends, ends, longest, longest, how.get("dropout", 0.0), causal and window is None, False,
        scale=how.get("scaling"), window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
    return output.unflatten(0, (query.shape[0], query.shape[2]))


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
    for module in model.modules():
        if can_keep_whole(type(module)):  # by the implementation's name it would leave queries out, and not keys
            method = getattr(type(module), SHARING_SLICES)
            replacements.set(module, SHARING_SLICES, functools.partial(keep_whole, method, module))
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
        if compares_with(kind, NAMES, (SHARING_SLICES,) * can_keep_whole(kind)):
            return f"{kind.__name__} computes something else for each attention implementation"
    eager = [module for module in attention_modules(model) if attention_implementation(module.config) == "eager"]
    if not all(map(eager_of, eager)):
        return "the eager attention of the model is no function of its module"
    return None


def attention_modules(model: Any) -> Iterator[Any]:
    """Yield the modules of causal attention that ask transformers' interface for their implementation."""
    for module in model.modules():
        if getattr(module, "is_causal", False) and getattr(module, "config", None) is not None:
            if asks_for_attention(type(module)):
                yield module


def attention_configs(model: Any) -> list[Any]:
    """Return the configurations of causal attention that goes through transformers' interface."""
    return list({id(module.config): module.config for module in attention_modules(model)}.values())


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
        former = former_attention(self.former, module)
        causal, ends = how.get("is_causal", getattr(module, "is_causal", True)), how.get("cu_seq_lens_q")
        mask = attention_mask if isinstance(attention_mask, DocumentMask) else None
        # Eager attention needs a mask for every row, so it gets our object for rows of one document, too.
        if mask is not None and ends is None and self.former == "eager":
            mask.read(how.get("position_ids"))
        if mask is not None and ends is None and mask.index is None and (self.former == "eager" or mask.single):
            faster = needs_no_mask(query, how, mask.window) and not how.get("output_attentions")
            if not (faster and serves(former, query, key, value, how, causal)):
                return former(module, query, key, value, mask.tensor, **how)
        # A call that is not causal, cross-attention for example, may carry ends that are not of its keys.
        packed = mask is not None or (causal and ends is not None)
        if packed and query.shape[2] != key.shape[2]:
            raise ConfigError("Packed rows were given with keys of earlier calls. Call the model with use_cache=False.")
        if not packed and self._is_wide(former, query, key, value, attention_mask, how, causal):
            rows, length = query.shape[0], query.shape[2]
            return attend(query, key, value, Documents.of_rows(rows, length, None, query.device), how), None
        if not packed or (mask is None and attention_mask is not None):
            return former(module, query, key, value, attention_mask, **how)
        window = how.get("sliding_window") if mask is None else mask.window
        documents = mask.documents if ends is None and mask is not None else documents_of(ends, how)
        if serves(former, query, key, value, how, causal):
            return attend(query, key, value, documents, how, window=window), None
        return self._each(former, module, (query, key, value), documents, window, how), None

    def _is_wide(
        self, former: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, how: dict[str, Any], causal: bool
    ) -> bool:
        """Whether sdpa would compute causal attention of whole rows, without a mask, over heads too wide for it."""
        if mask is not None or self.former != "sdpa" or not causal or not 1 < query.shape[2] == key.shape[2]:
            return False
        return query.shape[3] > SDPA_WIDTH and serves(former, query, key, value, how)

    def _each(
        self, former: Any, module: nn.Module, rows: tuple[Tensor, ...], documents: Documents, window: int | None,
        how: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Have the former implementation compute one document after the other."""
        if how.get("position_bias") is not None:
            raise ConfigError("Packed rows go with no bias by position. Set `packing: false`.")
        how = for_one_document(how)
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
