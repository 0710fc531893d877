"""Stacked experts under Liger-Kernel's name, on torch's grouped product and our activation. See docs/extras.md."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.gated_linear import gated_linear
from ...kernels.swiglu import swiglu
from .layers import SILU, activation_of

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what configs call the number of experts


class LigerExperts(nn.Module):
    """The SwiGLU experts of Mixtral, Qwen3-MoE and DeepSeek, with the parameters of transformers' MixtralExperts.

    bf16 experts with sizes that 8 divides run as grouped products. Others run one after the other, and the number of
    tokens of each is fetched from the GPU.

    Args:
        config: a Hugging Face config, or anything with hidden_size, hidden_act ("silu" or "swish"), the number of
            experts (num_experts, num_local_experts or n_routed_experts) and their width, moe_intermediate_size or
            else intermediate_size.

    Raises:
        ValueError: the config's activation is another, or it has no number of experts.
    """

    def __init__(self, config: Any):
        super().__init__()
        activation_of(config, SILU, type(self).__name__)
        names = [name for name in _COUNTS if hasattr(config, name)]
        if not names:
            raise ValueError(f"{type(self).__name__} needs one of {', '.join(_COUNTS)} in the config; it has none.")
        self.num_experts, self.hidden_dim = getattr(config, names[0]), config.hidden_size
        narrow = hasattr(config, "moe_intermediate_size")
        self.intermediate_dim = config.moe_intermediate_size if narrow else config.intermediate_size
        self.gate_up_proj = _initial(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        self.down_proj = _initial(self.num_experts, self.hidden_dim, self.intermediate_dim)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return each token's weighted sum over its experts, in the shape and dtype of hidden_states.

        Args:
            hidden_states: (..., hidden_size).
            top_k_index: (..., K) int64 or int32, each token's experts, in [0, num_experts).
            top_k_weights: (..., K), their weights, differentiable.
        """
        x = hidden_states.reshape(-1, self.hidden_dim)
        index = top_k_index.reshape(-1, top_k_index.shape[-1])
        order = index.flatten().argsort(stable=True)  # pairs of token and expert, by expert
        counts = torch.bincount(index.flatten(), minlength=self.num_experts)
        # pair number // K is the token's number
        y = self._products(x[order // index.shape[1]], counts)
        # the inverse of `order`
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        weighted = y[back].view(*index.shape, self.hidden_dim) * top_k_weights.reshape(*index.shape, 1)
        return weighted.sum(1).to(hidden_states.dtype).view(hidden_states.shape)

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return (rows, hidden_size): each expert's output for its own rows, which lie together."""
        if self._grouped(rows):
            ends = counts.cumsum(0, dtype=torch.int32)
            packed = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
            return F.grouped_mm(swiglu(packed), self.down_proj.transpose(1, 2), offs=ends)
        return torch.cat([
            gated_linear(F.linear(part, gate_up), None, down)
            for part, gate_up, down in zip(rows.split(counts.tolist()), self.gate_up_proj, self.down_proj, strict=True)
        ])  # fmt: skip

    def _grouped(self, rows: Tensor) -> bool:
        bf16 = rows.dtype == self.gate_up_proj.dtype == self.down_proj.dtype == torch.bfloat16
        return bf16 and len(rows) > 0 and not self.hidden_dim % 8 and not self.intermediate_dim % 8  # 16 bytes

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.hidden_dim}, {self.intermediate_dim}"


def _initial(experts: int, outputs: int, inputs: int) -> nn.Parameter:
    """Return weights (experts, outputs, inputs), each drawn as nn.Linear's."""
    return nn.Parameter(torch.empty(experts, outputs, inputs).uniform_(-(inputs**-0.5), inputs**-0.5))
