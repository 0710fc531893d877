"""Frozen linear layers with LoRA adapters that read one x, such as queries, keys and values:

    y_i = x W_i^T + b_i + sum_j s_j (x A_j^T) B_j^T

Shapes    x: (..., K)  weight: (O_i, K)  bias: (O_i,)  A: (r, K)  B: (O_i, r)  y_i: (..., O_i)
Method    Each is the layer of lora_linear.py. One product with the A of all of them reads x once; in the backward dx is
          one tensor, to which each product adds its part, and one product makes all dA.
Numerics  see _low_rank.py
Traffic   as lora_linear, with one read of x for all adapters, and no sum of the layers' dx
Source    Hu et al. 2021, arXiv:2106.09685
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._autograd import check_dtypes
from ._low_rank import Projection, check_projection, leaves_of
from .lora_linear import LoraLinearFunction, lora_linear_reference


def lora_linears_reference(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Return in plain torch what the op must equal."""
    return tuple(lora_linear_reference(x, p.weight, p.bias, p.adapters, unpack=p.unpack) for p in projections)


def lora_linears(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """Compute `lora_linear` of one x for several layers. Differentiable once, in x and adapters.

    Args:
        x: (..., K), any floating dtype and strides.
        projections: at least one; (O_i, K) each, with or without adapters. Ranks, dtypes and dropouts may differ. The
            adapters' masks are independent of each other.

    Returns:
        (..., O_i) for each, in x's dtype, or autocast's.

    Raises:
        ValueError: if there are none, shapes don't fit, a weight or bias requires a gradient, or a dropout isn't from 0
            to below 1.
    """
    check_dtypes(x=x)
    if not projections:
        raise ValueError("lora_linears needs at least one projection.")
    for i, projection in enumerate(projections):
        check_projection("lora_linears", f"weight {i}", projection, x.shape[-1])
    if torch.compiler.is_compiling():
        return lora_linears_reference(x, projections)
    return LoraLinearFunction.apply(x, tuple(projections), *leaves_of(projections))
