"""Attention over documents that lie end to end, by our kernel or PyTorch's FlashAttention-2.

Causal attention without dropout, over heads of up to 128 columns, is our own kernel, which the number of documents
costs nothing (kernels/document_attention.py). The rest is FlashAttention-2 (Dao 2023, arXiv:2307.08691), the operation
below `torch.nn.attention.varlen` and `scaled_dot_product_attention`. It is called as the operation, whose backward is
PyTorch's own, since the function around it costs the host more at each layer.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.utils.weak import WeakIdKeyDictionary
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from ...kernels.document_attention import document_attention, launches
from .document_mask import Documents

FLASH: Any = torch.ops.aten._flash_attention_forward
# Keywords of an attention call about documents, which a call for one document does not get.
_OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Keywords that change the scores, which FlashAttention-2 does not know.
_OF_SCORES = ("softcap", "s_aux", "position_bias")
OWN_WIDTH = 128  # of a head; beyond it FlashAttention-2 is the faster one
_DOCUMENTS: Any = WeakIdKeyDictionary()
_FITS: dict[tuple, bool] = {}


def former_attention(name: str, module: nn.Module) -> Any:
    """Return transformers' function for "sdpa", or the eager function of an attention module."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"] if name == "sdpa" else eager_of(module)


def eager_of(module: nn.Module) -> Callable | None:
    """Return the eager attention function beside the class of an attention module."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    return None


def _is_plain(former: Any) -> bool:
    """Whether a function is sdpa, or the usual eager one, which most families of transformers copy word by word."""
    ours, usual = former.__code__, modeling_llama.eager_attention_forward.__code__
    plain = (ours.co_code, ours.co_names, ours.co_consts) == (usual.co_code, usual.co_names, usual.co_consts)
    return plain or former is ALL_ATTENTION_FUNCTIONS["sdpa"]


def for_one_document(how: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of an attention call without those about documents."""
    return {name: value for name, value in how.items() if name not in _OF_DOCUMENTS}


@torch.compiler.disable()
def documents_of(ends: Any, how: dict[str, Any]) -> Documents:
    """Return the documents that came with a batch: one object for all layers, as long as the tensor is unchanged."""
    version = None if ends.is_inference() else ends._version
    before = _DOCUMENTS.get(ends)
    if before is None or version is None or before[0] != version:
        # `ends` itself would never go
        _DOCUMENTS[ends] = before = (version, Documents(ends.detach(), how.get("max_length_q")))
    return before[1]


def serves(former: Any, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> bool:
    """Whether FlashAttention computes what `former` would.

    Args:
        former: the model's function of attention.
        query, key, value: (rows, heads, length, width); keys and values may have fewer heads.
        how: the call's keywords.
    """
    if query.device.type != "cuda" or any(how.get(name) is not None for name in _OF_SCORES):
        return False
    return _is_plain(former) and _fits((query, key, value), how.get("dropout", 0.0))


def _fits(tensors: tuple[Tensor, ...], dropout: float) -> bool:
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


def attend(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: dict[str, Any], *,
    causal: bool = True, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Return attention within documents, (rows, length, heads, width).

    Args:
        query, key, value: (rows, heads, length, width), in fp16 or bf16, or under autocast.
        documents: of the rows laid end to end.
        how: the call's keywords, of which dropout and scaling are taken.
        causal: a token sees those before it, and of these the last `window` - 1 if there is a window.
    """
    dtype = _autocast_dtype(query)
    q, k, v = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if causal and not how.get("dropout") and q.shape[-1] <= OWN_WIDTH and launches(q):
        bounds = documents.bounds(q.shape[0], q.device)
        output = document_attention(q, k, v, documents.ends, scale=how.get("scaling"), window=window, bounds=bounds)
        return output.unflatten(0, (query.shape[0], query.shape[2]))
    ends, longest = documents.ends.to(q.device), documents.longest
    left, right = (-1 if window is None else window - 1), (0 if causal else -1)
    output = FLASH(
        q, k, v, ends, ends, longest, longest, how.get("dropout", 0.0), causal and window is None, False,
        scale=how.get("scaling"), window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
    return output.unflatten(0, (query.shape[0], query.shape[2]))
