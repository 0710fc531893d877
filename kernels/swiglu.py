"""SwiGLU:  h = silu(gate) * up,  silu(x) = x / (1 + exp(-x)).

Shapes    gate, up, h: (..., I), or packed [gate | up] (..., 2I)
Method    elementwise, one kernel forward and one backward (_gated.py); only gate and up are saved
Numerics  fp32 inside, rounded once on the way out
Traffic   per element of h: forward 2 reads and 1 write, backward 3 reads and 2 writes
Source    Shazeer 2020, arXiv:2002.05202
"""

from torch import Tensor

from ._gated import gated, gated_reference


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    return gated_reference(gate, up, "silu")


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up, differentiable once in both.

    Args:
        gate: (..., I), fp32, fp16, bf16 or fp64, any strides. With up=None, packed [gate | up] (..., 2 I); then its
            gradient is packed too. Copied only if its last stride is not 1, or if four or more dimensions don't fold
            into three.
        up: like gate.

    Returns:
        (..., I), contiguous, in the dtype that gate and up promote to.

    Raises:
        ValueError: if gate and up differ in shape, or packed has an odd number of columns.
    """
    return gated("swiglu", gate, up, "silu")
