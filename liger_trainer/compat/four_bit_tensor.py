"""A frozen weight in 4 bits as a subclass of torch's tensors: models and PEFT take it for an ordinary weight."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..kernels.four_bits import MXFP4_BLOCK, NF4_BLOCK, nf4_codes, unpack


class FourBitTensor(Tensor):
    """A frozen weight of any shape in 4 bits, which looks as it does unpacked; torch's operations unpack it.

    Attributes:
        codes, scales: what `unpack` takes.
        is_transposed: the packed numbers are in the order of the weight with its last two dimensions swapped.
    """

    codes: Tensor
    scales: Tensor
    is_transposed: bool

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, shape: Any, dtype: torch.dtype, is_transposed: bool = False
    ) -> "FourBitTensor":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)  # pyright: ignore

    def __init__(
        self, codes: Tensor, scales: Tensor, shape: Any, dtype: torch.dtype, is_transposed: bool = False
    ) -> None:
        self.codes, self.scales, self.is_transposed = codes, scales, is_transposed

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        kind = "mxfp4" if self.scales.dtype == torch.uint8 else "nf4"
        return f"FourBitTensor({kind}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def nf4(cls, weight: Tensor) -> "FourBitTensor":
        """Quantise a weight, its first dimension's entries one after the other, so that little memory is taken."""
        # Blocks must not reach from one entry into the next.
        if weight.dim() < 2 or weight[0].numel() % NF4_BLOCK:
            return cls(*nf4_codes(weight), weight.shape, weight.dtype)
        codes = torch.empty(weight.numel() // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(weight.numel() // NF4_BLOCK, dtype=torch.float32, device=weight.device)
        for entry, into, largest in zip(weight, codes.chunk(len(weight)), scales.chunk(len(weight)), strict=True):
            for whole, part in zip((into, largest), nf4_codes(entry), strict=True):
                whole.copy_(part)
        return cls(codes, scales, weight.shape, weight.dtype)

    @classmethod
    def mxfp4(cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> "FourBitTensor":
        """Keep MXFP4's experts: blocks (E, O, K/32, 16), scales (E, O, K/32), both uint8; the weight is (E, K, O)."""
        experts, outputs, count, half = blocks.shape
        if scales.shape != blocks.shape[:-1] or half != MXFP4_BLOCK // 2:
            raise ValueError(
                "MXFP4 experts are blocks (E, O, K/32, 16) and scales (E, O, K/32): got "
                f"{tuple(blocks.shape)} and {tuple(scales.shape)}."
            )
        shape = (experts, count * MXFP4_BLOCK, outputs)
        return cls(blocks.contiguous().flatten(), scales.contiguous().flatten(), shape, dtype, True)

    def unpacked(self) -> Tensor:
        """Return the weight, computed again."""
        *first, rows, columns = self.shape if self.dim() > 1 else (1, *self.shape)
        swapped = (*first, columns, rows) if self.is_transposed else self.shape
        out = unpack(self.codes, self.scales, math.prod(self.shape), self.dtype).view(swapped)
        return out.transpose(-1, -2) if self.is_transposed else out

    def _with(self, change: Any, dtype: torch.dtype | None = None) -> "FourBitTensor":
        return FourBitTensor(
            change(self.codes), change(self.scales), self.shape, dtype or self.dtype, self.is_transposed
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, FourBitTensor):
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return first._with(lambda x: x)
            if func is torch.ops.aten.clone.default:
                return first._with(Tensor.clone)
            if func is torch.ops.aten._to_copy.default:
                where = {"device": kwargs.get("device"), "non_blocking": kwargs.get("non_blocking", False)}
                return first._with(lambda x: x.to(**where, copy=True), kwargs.get("dtype"))
            if func is torch.ops.aten.copy_.default and isinstance(args[1], FourBitTensor):
                first.codes.copy_(args[1].codes)
                first.scales.copy_(args[1].scales)
                return first
            if func.overloadpacket.__name__.endswith("_"):  # torch's names of what changes its first argument
                raise RuntimeError(
                    f"{func} would change a weight in 4 bits, which stays as it is. To merge adapters into it, load "
                    "the model in its own precision: liger-trainer merge does."
                )
        # contiguous, as its strides say that it is
        args, kwargs = tree_map(
            lambda x: x.unpacked().contiguous() if isinstance(x, FourBitTensor) else x, (args, kwargs)
        )
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.dtype, self.is_transposed)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, shape: Any, strides: Any) -> "FourBitTensor":
        return FourBitTensor(inner["codes"], inner["scales"], shape, *context)
