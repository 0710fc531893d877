"""Squared ReLU:  y = max(x, 0)^2,  dx = 2 max(x, 0) dy = 2 sqrt(y) dy.

Shapes    x, y: any
Method    elementwise (_gated.py). The forward saves y, not x: the linear layer behind saves y anyway, so x is freed. In
          fp16, whose squares vanish below x = 2.4e-4, it saves x.
Numerics  fp32 inside, rounded once on the way out; from y, the gradient errs by half a rounding of y more
Traffic   forward 1 read and 1 write of each element, backward 2 reads and 1 write
Source    So et al. 2021 (Primer), arXiv:2109.08668; Nemotron
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import check_dtypes, empty, first_order
from ._gated import backward, forward, runs_plain


def relu2_reference(x: Tensor) -> Tensor:
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    return F.relu(x).square()


class ReLU2Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = forward(x, None, "relu2", x.dtype)
        ctx.save_for_backward(x if x.dtype == torch.float16 else y)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        (saved,) = ctx.saved_tensors
        dx = empty(saved)
        backward(dy, saved, None, dx, None, "relu2" if saved.dtype == torch.float16 else "relu2_output")
        return dx


def relu2(x: Tensor) -> Tensor:
    """Compute max(x, 0)^2, differentiable once. NaN stays NaN.

    Args:
        x: any shape, fp32, fp16, bf16 or fp64, any strides. Copied only if its last stride is not 1, or if four or more
            dimensions don't fold into three.

    Returns:
        x's shape and dtype, contiguous. In fp32 and bf16 the backward reads it: do not write into it.

    Raises:
        ValueError: x is not of a float dtype.
    """
    check_dtypes(x=x)
    return relu2_reference(x) if runs_plain(x) else ReLU2Function.apply(x)
