"""Attention over packed rows by the lengths of their documents, without a mask and without the flash-attn package.

On a GPU in 16 bits it is PyTorch's own FlashAttention-2 (Dao 2023, arXiv:2307.08691) over sequences of different
lengths, the operation below `torch.nn.attention.varlen` and `scaled_dot_product_attention`: with fewer key heads than
query heads, windows and dropout. It is called as the operation, whose backward is PyTorch's own, since the function
around it costs the host more at each layer. Where it cannot serve (a CPU, fp32, softcapping, sinks, wide heads), rows
are cut at the documents, and the model's former implementation computes one document after the other. torchtitan and
axolotl chose varlen attention for packed rows before.

Two names are registered with transformers, one for each former implementation. A model gets one by its configuration,
for as long as it is patched; `save_pretrained` leaves it out.
"""

import inspect
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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama import modeling_llama

from ..common.replacements import Replacements
from ..errors import ConfigError
from .document_mask import DocumentMask, Documents, MaskMaker
from .options import PatchReport

NAMES = {"sdpa": "liger_packed_sdpa", "eager": "liger_packed_eager"}
KIND = "packed attention"
_IMPLEMENTATION = "_attn_implementation_internal"
# Keywords of an attention call about documents, which a call for one document does not get.
_OF_PACKED_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Keywords that change the scores, which FlashAttention-2 does not know.
_OF_SCORES = ("softcap", "s_aux", "position_bias")


def pack_attention(model: Any, replacements: Replacements, report: PatchReport) -> None:
    """Have `model` compute attention over packed rows by lengths, where it runs sdpa or eager attention."""
    reason = obstacle_to_packing(model)
    if reason is not None:
        report.leave(KIND, reason)
        return
    for config in attention_configs(model):
        replacements.set(config, _IMPLEMENTATION, NAMES[config._attn_implementation])
    report.swap(KIND)


def obstacle_to_packing(model: Any) -> str | None:
    """Say why a model keeps its own attention, None where it need not."""
    configs = attention_configs(model)
    if not configs:
        return "the model does not call its attention through transformers' interface"
    for config in configs:
        if config._attn_implementation not in NAMES:
            return f"the model runs {config._attn_implementation}"
        if getattr(config, "output_attentions", False):
            return "the model returns its attention weights (output_attentions)"
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model is an encoder-decoder"
    for kind in {type(module) for module in model.modules()}:
        if _asks_for_implementation(kind):
            return f"{kind.__name__} computes something else for each attention implementation"
    eager = [module for module in _attention_modules(model) if module.config._attn_implementation == "eager"]
    if not all(map(_eager_of, eager)):
        return "the eager attention of the model is no function of its module"
    return None


def _attention_modules(model: Any) -> Iterator[Any]:
    """Yield the modules of causal attention that ask transformers' interface for their implementation."""
    for module in model.modules():
        if getattr(module, "is_causal", False) and getattr(module, "config", None) is not None:
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                yield module


def attention_configs(model: Any) -> list[Any]:
    """Return the configurations of causal attention that goes through transformers' interface."""
    return list({id(module.config): module.config for module in _attention_modules(model)}.values())


def _asks_for_implementation(kind: type) -> bool:
    """Whether a method in the model's own file compares the name of the implementation."""
    own = [base for base in kind.__mro__ if base.__module__.split(".")[-1].startswith("modeling_")]
    methods = [m for base in own if base is not PreTrainedModel for m in vars(base).values() if inspect.isfunction(m)]
    constants = [constant for method in methods for constant in inspect.unwrap(method).__code__.co_consts]
    return any(name == c or (isinstance(c, tuple) and name in c) for c in constants for name in NAMES)


def _eager_of(module: nn.Module) -> Callable | None:
    """Return the eager attention function beside the class of an attention module."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    return None


def _is_plain(eager: Any) -> bool:
    """Whether an eager attention function is the usual one, which most families of transformers copy word by word."""
    ours, usual = eager.__code__, modeling_llama.eager_attention_forward.__code__
    return (ours.co_code, ours.co_names, ours.co_consts) == (usual.co_code, usual.co_names, usual.co_consts)


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
        former: Any = ALL_ATTENTION_FUNCTIONS["sdpa"] if self.former == "sdpa" else _eager_of(module)
        causal, ends = how.get("is_causal", getattr(module, "is_causal", True)), how.get("cu_seq_lens_q")
        mask = attention_mask if isinstance(attention_mask, DocumentMask) else None
        if mask is not None and ends is None and self.former == "eager":
            mask.read(how.get("position_ids"))
            if mask.index is None:
                return former(module, query, key, value, mask.tensor, **how)
        packed = mask is not None or (causal and ends is not None)
        if packed and query.shape[2] != key.shape[2]:
            raise ConfigError("Packed rows were given with keys of earlier calls. Call the model with use_cache=False.")
        if not packed or (mask is None and attention_mask is not None):
            return former(module, query, key, value, attention_mask, **how)
        window = how.get("sliding_window") if mask is None else mask.window
        documents = mask.documents if ends is None and mask is not None else _given(ends, how.get("max_length_q"))
        if self._flash_serves(former, query, key, value, how):
            return _flash(query, key, value, documents, window, how), None
        return self._each(former, module, (query, key, value), documents, window, how), None

    def _flash_serves(self, former: Any, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> bool:
        if query.device.type != "cuda" or any(how.get(name) is not None for name in _OF_SCORES):
            return False
        if self.former == "eager" and not _is_plain(former):
            return False
        return _fits_flash((query, key, value), how.get("dropout", 0.0))

    def _each(
        self, former: Any, module: nn.Module, rows: tuple[Tensor, ...], documents: Documents, window: int | None,
        how: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Have the former implementation compute one document after the other."""
        if how.get("position_bias") is not None:
            raise ConfigError("Packed rows go with no bias by position. Set `packing: false`.")
        how = {name: value for name, value in how.items() if name not in _OF_PACKED_ROWS}
        lengths = [length for length in documents.lengths if length]
        in_one_row = [x.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(lengths, dim=2) for x in rows]
        outputs = [
            former(module, *parts, self._mask_of_one(parts[0], window), **how)[0]
            for parts in zip(*in_one_row, strict=True)
        ]
        return torch.cat(outputs, dim=1).unflatten(1, (rows[0].shape[0], -1)).squeeze(0)

    def _mask_of_one(self, query: Tensor, window: int | None) -> Tensor | None:
        """Return the mask of one document, None where sdpa's `is_causal` says it."""
        length = query.shape[2]
        make: Any = ALL_MASK_ATTENTION_FUNCTIONS[self.former]
        return make(
            batch_size=1, q_length=length, kv_length=length, local_size=window, dtype=query.dtype, device=query.device,
            mask_function=causal_mask_function if window is None else sliding_window_causal_mask_function(window),
        )  # fmt: skip


_GIVEN: Any = WeakIdKeyDictionary()


@torch.compiler.disable()
def _given(ends: Any, longest: int | None) -> Documents:
    """Return the documents that came with the batch: one object for all layers, as long as the tensor is unchanged."""
    version = None if ends.is_inference() else ends._version
    before = _GIVEN.get(ends)
    if before is None or version is None or before[0] != version:
        _GIVEN[ends] = before = (version, Documents(ends.detach(), longest))  # `ends` itself would never go
    return before[1]


FLASH: Any = torch.ops.aten._flash_attention_forward
_FITS: dict[tuple, bool] = {}


def _fits_flash(tensors: tuple[Tensor, ...], dropout: float) -> bool:
    """Whether PyTorch's FlashAttention takes such tensors on this GPU, asked once for each kind of them."""
    query, key, _ = tensors
    grad, dtype = torch.is_grad_enabled() and query.requires_grad, _autocast_dtype(query)
    kinds = tuple((x.dtype, x.shape[1], x.shape[3]) for x in tensors)
    case = (query.device, kinds, dtype, grad, dropout > 0, torch.backends.cuda.flash_sdp_enabled())
    if case not in _FITS:
        params: Any = SDPAParams  # which has no signature for type checkers
        asked = params(*(x.to(dtype) for x in tensors), None, dropout, True, query.shape[1] != key.shape[1])
        _FITS[case] = query.shape[3] % 8 == 0 and can_use_flash_attention(asked)
    return _FITS[case]


def _autocast_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that `scaled_dot_product_attention` would compute in."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _flash(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, window: int | None, how: dict[str, Any]
) -> Tensor:
    dtype = _autocast_dtype(query)
    q, k, v = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    ends, longest = documents.ends.to(q.device), documents.longest
    output = FLASH(
        q, k, v, ends, ends, longest, longest, how.get("dropout", 0.0), window is None, False,
        scale=how.get("scaling"), window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return output.unflatten(0, (query.shape[0], query.shape[2]))


for _former, _name in NAMES.items():
    AttentionInterface.register(_name, PackedAttention(_former))
    AttentionMaskInterface.register(_name, MaskMaker(_former))  # pyright: ignore[reportArgumentType]
