"""Rotary embedding under Liger-Kernel's public names and signatures, and as modules, on top of our ops.

See layers.py and docs/extras.md.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.qk_norm_rope import qk_norm_rope
from ...kernels.rope import rope
from .layers import LigerRMSNorm, casts_before_weight


class LigerRope(nn.Module):
    """Rotary embedding of queries and keys, as a module. It has the options of the op `rope`, and no parameters.

    Args:
        interleaved: pairs are columns 2j and 2j + 1 (Cohere, GLM), instead of j and j + R/2.
        mrope_section: pairs that take the angle of time, height and width (Qwen2-VL).
        half_width: cos and sin hold each pair's value once (GPT-OSS).
    """

    def __init__(self, interleaved: bool = False, mrope_section: Sequence[int] | None = None, half_width: bool = False):
        super().__init__()
        self.interleaved, self.half_width = interleaved, half_width
        # a tuple: ops key their launches by it
        self.mrope_section = None if mrope_section is None else tuple(mrope_section)

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return q (B, Hq, S, D) and k (B, Hk, S, D), turned. cos, sin: (B or 1, S, R), see `rope`."""
        return rope(q, k, cos, sin, **self.options())

    def options(self) -> dict[str, Any]:
        return dict(interleaved=self.interleaved, mrope_section=self.mrope_section, half_width=self.half_width)

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.options().items())


class LigerQKNormRope(nn.Module):
    """RMSNorm of queries and keys, then their rotation, in one pass.

    This is what attention does after q_proj and k_proj in Qwen3, Gemma 3 and OLMo 2.

    Args:
        head_dim: D. With norm_over_heads, the norms' weights have num_heads * D and num_kv_heads * D entries.
        eps, offset, casting_mode, init_fn: of both norms, see `LigerRMSNorm`. Qwen3: the defaults; Gemma 3: offset=1,
            casting_mode="gemma", init_fn="zeros".
        norm_over_heads: normalise over all heads together (OLMo 2), not each head by itself.
        num_heads, num_kv_heads: heads of queries and keys, needed with norm_over_heads only.
        interleaved, mrope_section, half_width: of the rotation, see `LigerRope`.

    Raises:
        ValueError: norm_over_heads without the numbers of heads, or these without it; an unknown option.
    """

    def __init__(
        self,
        head_dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        norm_over_heads: bool = False,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        interleaved: bool = False,
        mrope_section: Sequence[int] | None = None,
        half_width: bool = False,
    ):
        super().__init__()
        has_heads = num_heads is not None and num_kv_heads is not None
        if norm_over_heads != has_heads or (num_heads is None) != (num_kv_heads is None):
            raise ValueError(
                "num_heads and num_kv_heads are needed with norm_over_heads=True, and only then: "
                f"got norm_over_heads={norm_over_heads}, num_heads={num_heads}, num_kv_heads={num_kv_heads}."
            )
        self.norm_over_heads = norm_over_heads
        self.rope = LigerRope(interleaved, mrope_section, half_width)
        self.q_norm = LigerRMSNorm(head_dim * (num_heads or 1), eps, offset, casting_mode, init_fn)
        self.k_norm = LigerRMSNorm(head_dim * (num_kv_heads or 1), eps, offset, casting_mode, init_fn)

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Map q (B, S, Hq, D), k (B, S, Hk, D) to (B, Hq, S, D), (B, Hk, S, D). cos, sin: see `LigerRope`."""
        norm, q_weight, k_weight = self.q_norm, self.q_norm.weight, self.k_norm.weight
        assert q_weight is not None and k_weight is not None
        return qk_norm_rope(
            q, k, q_weight, k_weight, cos, sin, eps=norm.variance_epsilon, offset=norm.offset,
            cast_before_weight=casts_before_weight(norm.casting_mode, q), norm_over_heads=self.norm_over_heads,
            **self.rope.options(),
        )  # fmt: skip


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions' angles, as transformers' apply_rotary_pos_emb.

    Args:
        q: (B, Hq, S, D), or (B, S, Hq, D) with unsqueeze_dim=2. Any strides.
        k: likewise, with Hk heads.
        cos: (S, R), (B or 1, S, R), or with a 1 at unsqueeze_dim; R <= D, each half the same. The columns beyond R pass
            through.
        sin: likewise.
        position_ids: must be None. cos and sin already belong to the positions.
        unsqueeze_dim: where the heads of q and k stand, 1 or 2.
        rotary_dim: how many columns turn, where cos and sin hold each angle once (GPT-OSS) or more angles than needed:
            the first rotary_dim / 2 of them are used.

    Returns:
        q and k, turned, in their own shapes and dtypes.

    Raises:
        ValueError: position_ids, another unsqueeze_dim, or shapes that do not fit.
    """
    if position_ids is not None:
        raise ValueError(
            "position_ids must be None: cos and sin hold one row per position. For a table of all positions, pass "
            "cos[position_ids] and sin[position_ids]."
        )
    # callers of Liger's function pass them with or without batch and heads
    cos, sin = (_without_heads(x, unsqueeze_dim) for x in (cos, sin))
    if rotary_dim is not None:
        if rotary_dim % 2 or not 0 < rotary_dim <= min(q.shape[-1], 2 * cos.shape[-1]):
            raise ValueError(
                f"rotary_dim must be even, at most the {q.shape[-1]} columns of q, and cos must hold half as many: "
                f"got {rotary_dim}, cos is {tuple(cos.shape)}."
            )
        # each angle once, or the first half of halves that are equal
        cos, sin = cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2]
    return _rotate(q, k, cos, sin, unsqueeze_dim, half_width=rotary_dim is not None)


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by angles of three positions, as transformers' apply_multimodal_rotary_pos_emb (Qwen2-VL).

    Args:
        q, k, unsqueeze_dim: see `liger_rotary_pos_emb`.
        cos, sin: (3, B or 1, S, D), for time, height and width.
        mrope_section: how many of the D / 2 pairs take the angle of each; 3 numbers.

    Returns:
        q and k, turned, in their own shapes and dtypes.

    Raises:
        ValueError: another unsqueeze_dim, or shapes that do not fit.
    """
    return _rotate(q, k, cos, sin, unsqueeze_dim, mrope_section=tuple(mrope_section))


def _without_heads(x: Tensor, unsqueeze_dim: int) -> Tensor:
    """Return (B or 1, S, R) cosines of such without a batch, or with the heads' dimension."""
    if x.dim() == 4 and unsqueeze_dim in (1, 2) and x.shape[unsqueeze_dim] == 1:
        return x.squeeze(unsqueeze_dim)
    return x.unsqueeze(0) if x.dim() == 2 else x


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, **options: Any):
    if unsqueeze_dim == 1:
        return rope(q, k, cos, sin, **options)
    if unsqueeze_dim != 2:
        raise ValueError(f"unsqueeze_dim must be 1 (heads before positions) or 2 (after), got {unsqueeze_dim}.")
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, **options)
    return q.transpose(1, 2), k.transpose(1, 2)


# Llama 4's rotary embeddings under Liger-Kernel's public names, on our op. See docs/extras.md.


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Turn neighbouring columns by their positions' angles, as apply_rotary_emb of Llama 4's text model.

    Args:
        xq: (B, S, Hq, D), differentiable.
        xk: (B, S, Hk, D), differentiable.
        freqs_cis: (B or 1, S, D / 2) complex, exp(i angle), perhaps scaled.

    Returns:
        xq and xk, turned, in their own shapes and dtypes.

    Raises:
        ValueError: real freqs_cis, or shapes that do not fit.
    """
    return _turned(xq, xk, freqs_cis, "freqs_cis")


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """Turn neighbouring columns by their patches' angles, as vision_apply_rotary_emb of Llama 4.

    Args:
        query, key: see `liger_llama4_text_rotary_pos_emb`.
        freqs_ci: S * D / 2 complex values in this order: (S, D / 2), (S, 1, D / 2) or (1, S, 1, D / 2).

    Returns:
        query and key, turned, in their own shapes and dtypes.

    Raises:
        ValueError: real freqs_ci, or shapes that do not fit.
    """
    # vision models give them in several shapes, all in this order
    size = query.shape[1], query.shape[-1] // 2
    if freqs_ci.numel() != size[0] * size[1] or freqs_ci.shape[-1] != size[1]:
        raise ValueError(f"freqs_ci must hold {size} values, as query {tuple(query.shape)}: {tuple(freqs_ci.shape)}.")
    return _turned(query, key, freqs_ci.reshape(1, *size), "freqs_ci")


def _turned(q: Tensor, k: Tensor, turns: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if not torch.is_complex(turns):
        raise ValueError(
            f"{name} must be complex, got {turns.dtype}. `model.to(dtype)` drops the imaginary part of such a buffer: "
            "compute it after the cast, or load the model with dtype=."
        )
    # Llama 4 keeps them where they were made
    turns = turns.to(q.device)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), turns.real, turns.imag, interleaved=True, half_width=True)
    return q.transpose(1, 2), k.transpose(1, 2)
