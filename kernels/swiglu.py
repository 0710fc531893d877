"""SwiGLU:  h = silu(gate) * up,  silu(x) = x / (1 + exp(-x)).

Shapes    gate, up, h: (..., I), or packed [gate | up] (..., 2I)
Method    elementwise, forward and backward one kernel each (_gated.py); gate and up are saved, nothing else
Numerics  fp32 inside, rounded once on the way out
Traffic   forward 2 reads and 1 write an element of h, backward 3 reads and 2 writes
Source    Shazeer 2020, arXiv:2002.05202
"""

from torch import Tensor

from ._gated import gated, gated_reference


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """What the op must equal, in plain torch. Tests and benchmarks import this one."""
    return gated_reference(gate, up, "silu")


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up, differentiable once in both.

    Args:
        gate: (..., I), fp32, fp16, bf16 or fp64, any strides; with up=None packed [gate | up], (..., 2 I), whose
            gradient is packed too. Copied only where its last stride is not 1, or where four or more dimensions do not
            fold into three.
        up: as gate.

    Returns:
        (..., I), contiguous, in the dtype that gate and up promote to.

    Raises:
        ValueError: gate and up differ in shape, or packed has an odd number of columns.
    """
    return gated("swiglu", gate, up, "silu")
