"""GEGLU:  h = gelu(gate) * up,  with the normal distribution function or its tanh approximation.

    gelu(x) = x P(Z <= x)        tanh: 0.5 x (1 + tanh u) = x sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3)

Shapes    gate, up, h: (..., I), or packed [gate | up] (..., 2I)
Method    elementwise, forward and backward one kernel each (_gated.py); gate and up are saved, nothing else
Numerics  fp32 inside, rounded once on the way out
Traffic   forward 2 reads and 1 write an element of h, backward 3 reads and 2 writes
Source    Shazeer 2020, arXiv:2002.05202; Hendrycks & Gimpel 2016, arXiv:1606.08415
"""

from torch import Tensor

from ._gated import gated, gated_reference

ACTIVATION = {"tanh": "gelu_tanh", "none": "gelu"}


def geglu_reference(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """What the op must equal, in plain torch. Tests and benchmarks import this one."""
    return gated_reference(gate, up, ACTIVATION[approximate])


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """gelu(gate) * up, differentiable once in both.

    Args:
        gate: (..., I), fp32, fp16, bf16 or fp64, any strides; with up=None packed [gate | up], (..., 2 I), whose
            gradient is packed too. Copied only where its last stride is not 1, or where four or more dimensions do not
            fold into three.
        up: as gate.
        approximate: "tanh" (Gemma; "gelu_pytorch_tanh" in Hugging Face's configurations) or "none" (erf; "gelu").
            torch.nn.functional.gelu's own default is "none".

    Returns:
        (..., I), contiguous, in the dtype that gate and up promote to.

    Raises:
        ValueError: gate and up differ in shape, packed has an odd number of columns, or approximate is unknown.
    """
    if approximate not in ACTIVATION:
        raise ValueError(f'approximate must be "tanh" or "none", got {approximate!r}.')
    return gated("geglu", gate, up, ACTIVATION[approximate])
