"""Llama 4's rotary embeddings under Liger-Kernel's public names, on our op. See docs/extras.md."""

import torch
from torch import Tensor

from ..kernels.rope import rope


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
    turns = turns.to(q.device)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), turns.real, turns.imag, interleaved=True, half_width=True)
    return q.transpose(1, 2), k.transpose(1, 2)
