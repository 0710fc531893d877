"""Who computes the ops: a provider turns an op into a function of its tensors, importing the peer then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from .op_cases import ATTENTION, EPS, OPS, OpCase, ends_of, lengths_of
from .suite import Provider

Function = Callable[..., Any]
DEVICE = "cuda"  # of the masks of blocks, which a provider makes before it sees tensors


def kernel(name: str) -> Function:
    """Our op of that name, from the file of that name."""
    return getattr(import_module(f"liger_trainer.kernels.{name}"), name)


def liger(name: str) -> Function:
    return getattr(import_module("liger_kernel.transformers.functional"), f"liger_{name}")


def our_norm(name: str) -> Function:
    return partial(kernel(name), eps=EPS, cast_before_weight=True)


def our_cross_entropy() -> Function:
    op = kernel("cross_entropy")
    return lambda logits, labels: op(logits, labels).loss


def our_cross_entropy_in_place() -> Function:
    """A view, since autograd keeps leaves and the op refuses them: in a model the logits are a layer's output."""
    op = kernel("cross_entropy")
    return lambda logits, labels: op(logits.view_as(logits), labels, inplace=True).loss


def norm_then_rope(norm: Function, rope: Function) -> Function:
    def unfused(q, k, q_weight, k_weight, cos, sin):
        return rope(norm(q, q_weight).transpose(1, 2), norm(k, k_weight).transpose(1, 2), cos, sin)

    return unfused


def liger_gated_linear() -> Function:
    """As LigerSwiGLUMLP does."""
    swiglu = liger("swiglu")
    return lambda gate, up, weight: F.linear(swiglu(gate, up), weight)


def liger_norm() -> Function:
    norm = liger("rms_norm")
    return lambda x, weight: norm(x, weight, EPS)


def liger_by_position(name: str, *rest: Any) -> Callable[[], Function]:
    """Liger gives the parameters other names than our cases."""

    def build() -> Function:
        op = liger(name)
        return lambda **tensors: op(*tensors.values(), *rest)

    return build


OURS: Mapping[str, Callable[[], Function]] = {
    "rms_norm": partial(our_norm, "rms_norm"),
    "add_rms_norm": partial(our_norm, "add_rms_norm"),
    "layer_norm": lambda: partial(kernel("layer_norm"), eps=EPS),
    "rope": partial(kernel, "rope"),
    "qk_norm_rope": partial(our_norm, "qk_norm_rope"),
    "swiglu": partial(kernel, "swiglu"),
    "geglu": partial(kernel, "geglu"),
    "relu2": partial(kernel, "relu2"),
    "gated_linear": partial(kernel, "gated_linear"),
    "document_attention": partial(kernel, "document_attention"),
    "cross_entropy": our_cross_entropy,
    "kl_div": lambda: partial(kernel("kl_div"), reduction="batchmean"),
    "jsd": lambda: partial(kernel("jsd"), reduction="batchmean"),
    "tvd": lambda: partial(kernel("tvd"), reduction="batchmean"),
}
LIGER: Mapping[str, Callable[[], Function]] = {
    "rms_norm": liger_norm,
    "add_rms_norm": liger_by_position("fused_add_rms_norm", EPS),
    "layer_norm": liger_by_position("layer_norm", EPS),
    "rope": partial(liger, "rope"),
    "qk_norm_rope": lambda: norm_then_rope(liger_norm(), liger("rope")),
    "swiglu": liger_by_position("swiglu"),
    "geglu": liger_by_position("geglu"),
    "relu2": partial(liger, "relu_squared"),
    "gated_linear": liger_gated_linear,
    "cross_entropy": liger_by_position("cross_entropy"),
    "kl_div": lambda: partial(liger("kl_div"), reduction="batchmean"),
    "jsd": partial(liger, "jsd"),
    "tvd": lambda: partial(liger("tvd"), reduction="batchmean"),
}
IN_PLACE = {"cross_entropy": our_cross_entropy_in_place}
UNFUSED = {"qk_norm_rope": lambda: norm_then_rope(our_norm("rms_norm"), kernel("rope"))}


def flash_attention(case: OpCase) -> Function:
    """PyTorch's FlashAttention-2 (Dao 2023, arXiv:2307.08691) over documents of different lengths, or windows."""
    if case.sinks:
        raise NotImplementedError("it knows no sinks")
    attend, longest, window = torch.ops.aten._flash_attention_forward, max(lengths_of(case)), case.window
    sides = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    return lambda q, k, v, ends, window=None: attend(
        q, k, v, ends, ends, longest, longest, 0.0, window is None, False, **sides
    )[0]


def sdpa(case: OpCase) -> Function:
    """As transformers calls it for a row of one document: by is_causal, or repeated keys and a mask where there is a
    window."""
    if case.sinks or len(lengths_of(case)) > 1:
        raise NotImplementedError("it knows no sinks, and one document")
    length, group = case.tokens, case.heads[0] // case.heads[1]
    mask = None
    if case.window:
        distance = torch.arange(length, device=DEVICE)[:, None] - torch.arange(length, device=DEVICE)
        mask = ((distance >= 0) & (distance < case.window))[None, None]
    repeated = mask is not None or case.width > 256  # which its fast kernels want

    def attend(q: Any, k: Any, v: Any, ends: Any, window: Any = None) -> Any:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if repeated:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        how: dict[str, Any] = {"is_causal": mask is None, "enable_gqa": not repeated}
        return F.scaled_dot_product_attention(q, k, v, mask, **how)[0].transpose(0, 1)

    return attend


def flex_attention(case: OpCase) -> Function:
    """PyTorch's FlexAttention, compiled, with a mask of blocks that is made beforehand; sinks by its log-partition."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ends, nearest = ends_of(case, DEVICE), case.window or case.tokens
    document = torch.searchsorted(ends, torch.arange(case.tokens, device=DEVICE, dtype=torch.int32), right=True)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key < nearest) & (document[query] == document[key])

    mask = create_block_mask(sees, None, None, case.tokens, case.tokens, device=DEVICE)

    def attend(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        found = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=sinks is not None)
        if sinks is None:
            return found[0].transpose(0, 1)
        output, lse = found
        return (output * torch.sigmoid(lse - sinks[None, :, None])[..., None].to(q.dtype))[0].transpose(0, 1)

    compiled: Any = torch.compile(attend, dynamic=False)
    return lambda q, k, v, ends, sinks=None, window=None: compiled(q, k, v, sinks)


def eager(case: OpCase) -> Function:
    return case.plain


def compiled(case: OpCase) -> Function:
    return torch.compile(case.plain, dynamic=False)


def _provider(name: str, title: str, builders: Mapping[str, Callable[[], Function]], ours: bool = False) -> Provider:
    kinds = tuple(builders)
    return Provider(name, title, lambda case: partial(builders[case.kind](), **case.options), kinds, kinds, ours=ours)


ALL = tuple(op.name for op in OPS)
COMPILED = ("rms_norm", "swiglu")  # seconds each; the rest if --providers asks
PROVIDERS = (
    _provider("ours", "ours", OURS, ours=True),
    _provider("ours_inplace", "ours, in place", IN_PLACE, ours=True),
    _provider("ours_unfused", "ours, norm then rope", UNFUSED, ours=True),
    Provider("eager", "torch eager", eager, ALL, ALL),
    Provider("compile", "torch.compile", compiled, ALL, COMPILED),
    _provider("liger", "Liger", LIGER),
    Provider("sdpa", "sdpa", sdpa, (ATTENTION.name,), ()),
    Provider("flash", "FlashAttention-2", flash_attention, (ATTENTION.name,), (ATTENTION.name,)),
    Provider("flex", "FlexAttention", flex_attention, (ATTENTION.name,), (ATTENTION.name,)),
)
