"""Stand-ins for layers and optimizers whose kernels run on a GPU only. They have their memory and compute nothing.

Sizes of attention: PyTorch's FlashAttention-2 (Dao 2023, arXiv:2307.08691); of a gated delta rule: fla-core 0.6
(Yang et al. 2024, arXiv:2412.06464); of 4-bit and 8-bit weights and moments: bitsandbytes (Dettmers et al. 2022,
arXiv:2110.02861; 2023, arXiv:2305.14314).
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv

from ...common.replacements import Replacements
from ...compat.models import GATE, STACKED
from ...compat.modules import own_parameters
from ...compat.recognitions import is_attention
from ...compat.torch_internals import FakeTensor, grouped_products
from ...kernels.runtime import without_data
from ...patching.layers import experts as patch_experts
from ...patching.layers import linears
from ...patching.layers import lora as patch_lora
from ...patching.packing import token_mixers
from ...patching.packing.packed_attention import attention_modules, eager_of, why_not_packed
from ...patching.packing.token_mixers import CHUNK
from ...patching.structure import on_miniatures
from .. import delta_rule_gradients
from ..delta_rule_gradients import chunk_gradients


@contextlib.contextmanager
def on_a_gpu(count: int, num_items: float) -> Iterator[None]:
    """Let our ops on CPU tensors without data allocate what they would on a GPU.

    Args:
        count: labelled rows of a batch, which the ops would count.
        num_items: divisor of the loss.
    """
    replaced = Replacements()
    # dropout on the CPU keeps its mask in the dtype of the input
    replaced.set(F, "dropout", _dropout)
    # The patches take only plain parameters for weights; here those are fake ones.
    replaced.set(linears, "WEIGHTS", (*linears.WEIGHTS, FakeTensor))
    for place, name in grouped_products():
        replaced.set(place, name, grouped_mm)
    try:
        with without_data(count, num_items):
            yield
    finally:
        replaced.undo()


@contextlib.contextmanager
def as_bitsandbytes() -> Iterator[None]:
    """Let patching and the LoRA ops take `QuantizedLinear` for the layers of bitsandbytes, and `pack_experts`' too."""
    replaced = Replacements()
    replaced.set(patch_lora, "bnb_4bit_types", lambda: (QuantizedLinear,))
    replaced.set(patch_experts, "is_packed", lambda weight: hasattr(weight, "packed_bytes"))
    replaced.set(patch_experts, "unpacked", _unpacked_experts)
    replaced.set(patch_lora, "dequantized", lambda state, weight: weight.new_empty(state.shape, dtype=state.dtype))
    replaced.set(patch_lora, "is_nf4", lambda state: True)
    replaced.set(patch_lora, "unpack_into", lambda state, weight, out: None)
    try:
        yield
    finally:
        replaced.undo()


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


class _Attention(torch.autograd.Function):
    """q: (batch, heads, length, width); k, v: as many heads or fewer. Keeps these, mask, output and a log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        ctx.bias = bias
        batch, heads, length, _ = q.shape
        same = v.shape[-1] == q.shape[-1]  # then the output has the strides of q
        out = torch.empty_like(q) if same else q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *_ = ctx.saved_tensors
        summed = q.new_empty(q.shape, dtype=torch.float32)  # dq is accumulated in fp32
        spread = [x.new_empty(*q.shape[:-1], x.shape[-1]) for x in (k, v) if k.shape[1] != q.shape[1]]
        result = tuple(torch.empty_like(x) for x in (q, k, v))
        del summed, spread
        return *result, None


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers with the memory of `scaled_dot_product_attention` on a GPU."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if attention_mask is not None:  # these kernels take as many key heads as query heads, and the mask in their dtype
        groups = query.shape[1] // key.shape[1]
        key, value = (repeat_kv(x, groups) if groups > 1 else x for x in (key, value))
        attention_mask = attention_mask.to(query.dtype)
    return _Attention.apply(query, key, value, attention_mask).transpose(1, 2).contiguous(), None  # pyright: ignore


def kernel_serves(model: Any) -> bool:
    """Whether our kernel computes what the eager attention of a model does, which it takes for packed rows."""
    with on_miniatures():
        return why_not_packed(model) is None and all(
            is_attention(eager_of(m), hasattr(m, "sinks"), getattr(m, "attn_logit_softcapping", None) is not None)
            for m in attention_modules(model)
        )


class _GroupedProduct(torch.autograd.Function):
    """x: (tokens, K) with weight (experts, K, N): the product of a mixture of experts, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(x) if need else None for x, need in needed)


class _DeltaRule(torch.autograd.Function):
    """fla-core's gated delta rule, chunk by chunk, with norms of q and k: (rows, length, heads, width).

    v, g, beta have as many heads or more. A chunk's state is (heads, width of keys, width of values). The step of the
    backward that fla-core refuses on Hopper is ours everywhere: it takes more than fla-core's own.

    Args:
        documents: the most that packed rows may have; None: rows are not packed.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: int | None) -> Tensor:
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        normed = [torch.empty_like(x) for x in (q, k)]
        norms = [x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (q, k)]
        solved = k.new_empty(*beta.shape, CHUNK)
        ctx.save_for_backward(*normed, *norms, v, torch.empty_like(g, dtype=torch.float32), beta, solved)
        ctx.documents = documents
        _states_of_chunks(k, v, documents)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, _, _, v, g, beta, _ = ctx.saved_tensors
        states, made, u, w = _states_of_chunks(k, v, ctx.documents)
        of_states, dv = torch.empty_like(states), torch.empty_like(v)
        packed: dict[str, Any] = {}
        if ctx.documents is not None:
            packed["cu_seqlens"] = k.new_empty(ctx.documents + 2, dtype=torch.int32)
            packed["chunk_indices"] = k.new_empty(states.shape[1], 2, dtype=torch.int32)
        dq, dk, dw, dg = chunk_gradients(q, k, made, grads[0], states, of_states, w, g, dv, 1.0, **packed)
        _, of_v, of_beta, _ = (torch.empty_like(x) for x in (w, v, beta, g))  # what comes through u and w
        del u, dw
        return dq, dk, of_v, dg, of_beta, None


def _states_of_chunks(k: Tensor, v: Tensor, documents: int | None) -> tuple[Tensor, ...]:
    """Return what has the size of the states of all chunks, of v twice, and of k with the heads of v."""
    rows, length, heads, width = v.shape
    chunks = (rows, math.ceil(length / CHUNK)) if documents is None else (1, rows * length // CHUNK + documents)
    states = k.new_empty(*chunks, heads, k.shape[-1], width)
    return states, torch.empty_like(v), torch.empty_like(v), k.new_empty(rows, length, heads, k.shape[-1])


@contextlib.contextmanager
def as_fla_core(documents: int | None) -> Iterator[None]:
    """Let patching take a stand-in for fla-core's gated delta rule, installed or not.

    Args:
        documents: as of `_DeltaRule`.
    """

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **how: Any) -> tuple[Tensor, None]:
        return _DeltaRule.apply(query, key, value, g, beta, documents), None  # pyright: ignore

    def product(a: Tensor, b: Tensor) -> Tensor:  # which sums up in fp32 without wider factors
        return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)

    replaced = Replacements()
    replaced.set(token_mixers, "why_no_rule", lambda function: None)
    replaced.set(token_mixers, "delta_rule", lambda function, by_fla: rule)
    replaced.set(delta_rule_gradients, "product", product)
    try:
        yield
    finally:
        replaced.undo()


def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor | None = None, **kwargs: Any) -> Tensor:
    return _GroupedProduct.apply(input, weight)  # pyright: ignore


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None,
    local_size: int | None = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Return the mask for `scaled_dot_product_attention`: none for plain causality, else (batch, 1, queries, keys)."""
    windowed = local_size is not None and kv_length > local_size
    if attention_mask is None and not windowed:
        return None
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)


class _Packed(NamedTuple):
    """Shape and dtype of a packed weight after unpacking."""

    shape: torch.Size
    dtype: torch.dtype


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weight is unpacked for each product, forward and backward."""

    def __init__(self, linear: nn.Linear, bits: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        numbers = linear.weight.numel()
        # 4 bits, double quantisation: a byte for 64 numbers and 4 bytes for 256 such bytes; 8 bits: 4 bytes a row
        scales = math.ceil(numbers / 64) + 4 * math.ceil(numbers / 2**14) if bits == 4 else 4 * linear.out_features
        size = numbers * bits // 8 + scales
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = _Packed(linear.weight.shape, linear.weight.dtype)  # pyright: ignore
        self.bias = linear.bias
        self.compute_dtype = linear.weight.dtype

    def forward(self, input: Tensor) -> Tensor:
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
        out = _Unpacked.apply(input.to(dtype), self.weight, self.out_features)
        return out if self.bias is None else out + self.bias.to(dtype)  # pyright: ignore


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out_features: int) -> Tensor:
        # Not the unpacked one: it is made again in the backward.
        ctx.save_for_backward(weight)
        ctx.shape = out_features, x.shape[-1]
        return F.linear(x, x.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] @ grads[0].new_empty(ctx.shape), None, None


def quantize(model: nn.Module, bits: int) -> None:
    """Replace linear layers as transformers does for bitsandbytes: all but the output head."""
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, QuantizedLinear(child, bits))


NF4_BYTES, MXFP4_BYTES = 0.5 + 4 / 64, 0.5 + 1 / 32  # of a number and its share of its block's scale


def expert_bytes(config: Any, bits: int | None) -> float | None:
    """Return the bytes of a number of stacked experts in a model that is loaded in so many bits; None: not packed."""
    stored = getattr(config, "quantization_config", None) or {}
    return NF4_BYTES if bits == 4 else MXFP4_BYTES if stored.get("quant_method") == "mxfp4" else None


def pack_experts(model: nn.Module, bytes_of_a_number: float) -> None:
    """Replace the weights of stacked experts by such as take fewer bytes: `packed_bytes` of each."""
    for module in model.modules():
        for name in STACKED if hasattr(type(module), GATE) else ():
            weight = own_parameters(module).get(name)
            if weight is not None:
                packed = packed_weight(weight.shape, weight.dtype, int(weight.numel() * bytes_of_a_number))
                setattr(module, name, packed)


def packed_weight(shape: torch.Size, dtype: torch.dtype, size: int) -> nn.Parameter:
    """Return a frozen parameter of a shape and a dtype whose memory is only `size` bytes, at least one row's."""
    memory = torch.empty(max(size // dtype.itemsize, shape[-1]), dtype=dtype)
    weight = nn.Parameter(memory.as_strided(shape, (0,) * (len(shape) - 1) + (1,)), requires_grad=False)
    weight.packed_bytes = size  # pyright: ignore[reportAttributeAccessIssue]
    return weight


def _unpacked_experts(weight: Tensor, transposed: bool) -> Tensor:
    shape = weight.mT.shape if transposed else weight.shape
    return torch.empty(shape, dtype=weight.dtype)


class MomentsOptimizer(torch.optim.Optimizer):
    """An optimizer of bitsandbytes, or our AdamW of 8 bits, with `moments` of `bits` for each number.

    Moments of 8 bits have 4 bytes for each block of 256; groups with `in_32_bits` have none of them. Paged moments lie
    in host memory.
    """

    SMALLEST = 4096  # numbers; smaller tensors keep moments of 32 bits

    def __init__(self, params: Any, moments: int, bits: int, paged: bool):
        self.moments, self.bits, self.paged = moments, bits, paged
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state or not self.state[p]:
                    self.state[p] = self._state(p, group["in_32_bits"])

    def _state(self, p: Tensor, wide: bool) -> dict[str, Tensor]:
        # It lies in host memory.
        if self.paged:
            return {}
        packed = self.bits == 8 and not wide and p.numel() >= self.SMALLEST
        each = p.numel() + 4 * math.ceil(p.numel() / 256) if packed else 4 * p.numel()
        return {f"moment{i}": torch.empty(each, dtype=torch.uint8) for i in range(self.moments)}
