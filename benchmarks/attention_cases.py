"""Attention within documents, as an op that `benchmarks.run --suite ops` measures: its cases and its peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .op_cases import Op, OpCase
from .operands import Draw
from .suite import Provider
from .trainer_cases import draw_lengths

KIND = "document_attention"


def lengths_of(case: OpCase) -> list[int]:
    """Return the lengths of a case's documents: all of one length, or a real mix."""
    if case.document:
        return [case.document] * (case.tokens // case.document)
    ends = np.cumsum(draw_lengths(np.random.default_rng(0), case.tokens).astype(int))
    before = ends[ends < case.tokens].tolist()
    return [b - a for a, b in itertools.pairwise([0, *before, case.tokens])]


def ends_of(case: OpCase, device: torch.device | str) -> Tensor:
    """Return where documents begin and end, from 0 to the number of tokens."""
    return torch.tensor([0, *itertools.accumulate(lengths_of(case))], dtype=torch.int32, device=device)


def flops(case: OpCase, name: str) -> float:
    """Return the operations of the products between tokens that see one another: two, and five in the backward."""
    pairs = sum(length * (length + 1) // 2 for length in lengths_of(case))
    return 2 * pairs * case.heads[0] * case.width * {"forward": 2, "backward": 5, "both": 7}[name]


def inputs(case: OpCase, draw: Draw) -> dict[str, Tensor]:
    """Return q, k and v, (T, heads, D), and the ends."""
    heads = {"q": case.heads[0], "k": case.heads[1], "v": case.heads[1]}
    tensors = {name: draw.normal(case.tokens, count, case.width) for name, count in heads.items()}
    return {**tensors, "ends": ends_of(case, draw.generator.device)}


def one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """Attention of one document after the other."""
    lengths = ends.diff().tolist()
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
    outputs = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    return torch.cat(outputs, 2)[0].transpose(0, 1)


ATTENTION = Op(KIND, inputs, one_by_one, ("q", "k", "v"), reads=("out0", "q", "k", "v"), flops=flops)
CASES = (
    OpCase("document_attention-16+8", ATTENTION, 128, heads=(16, 8), host=True),
    OpCase("document_attention-32+8x64", ATTENTION, 64, heads=(32, 8)),
    OpCase("document_attention-16+8-rows", ATTENTION, 128, heads=(16, 8), document=1024),
    OpCase("document_attention-16+8-32768", ATTENTION, 128, 32768, heads=(16, 8)),
)
SMOKE_CASES = (OpCase("document_attention-40", ATTENTION, 40, 24, torch.float32, heads=(4, 2), document=6),)


def flash_attention(case: OpCase) -> Callable[..., Any]:
    """PyTorch's FlashAttention-2 (Dao 2023, arXiv:2307.08691) over documents of different lengths."""
    attend, longest = torch.ops.aten._flash_attention_forward, max(lengths_of(case))
    return lambda q, k, v, ends: attend(q, k, v, ends, ends, longest, longest, 0.0, True, False)[0]


def flex_attention(case: OpCase) -> Callable[..., Any]:
    """PyTorch's FlexAttention, compiled, with a mask of blocks that is made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ends = ends_of(case, "cuda")
    document = torch.searchsorted(ends, torch.arange(case.tokens, device="cuda", dtype=torch.int32), right=True)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (document[query] == document[key])

    mask = create_block_mask(sees, None, None, case.tokens, case.tokens, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


PROVIDERS = (
    Provider("flash", "FlashAttention-2", flash_attention, (KIND,), (KIND,)),
    Provider("flex", "FlexAttention", flex_attention, (KIND,), (KIND,)),
)
