"""GEGLU:  h = gelu(gate) * up,  with the normal distribution function or its tanh approximation.

    gelu(x) = x P(Z <= x)        tanh: 0.5 x (1 + tanh u) = x sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3)

Shapes    gate, up, h: (..., I), or packed [gate | up] (..., 2I)
Method    elementwise, one kernel forward and one backward (_gated.py); only gate and up are saved
Numerics  fp32 inside, rounded once on the way out
Traffic   per element of h: forward 2 reads and 1 write, backward 3 reads and 2 writes
Source    Shazeer 2020, arXiv:2002.05202; Hendrycks & Gimpel 2016, arXiv:1606.08415
"""

from torch import Tensor

from ._gated import gated, gated_reference

ACTIVATION = {"tanh": "gelu_tanh", "none": "gelu"}


def geglu_reference(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """Return in plain torch what the op must equal. Tests and benchmarks import this."""
    return gated_reference(gate, up, ACTIVATION[approximate])


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """Compute gelu(gate) * up, differentiable once in both.

    Args:
        gate: (..., I), fp32, fp16, bf16 or fp64, any strides. With up=None, packed [gate | up] (..., 2 I); then its
            gradient is packed too. Copied only if its last stride is not 1, or if four or more dimensions don't fold
            into three.
        up: like gate.
        approximate: "tanh" (Gemma; "gelu_pytorch_tanh" in Hugging Face's configurations) or "none" (erf; "gelu").
            torch.nn.functional.gelu's own default is "none".

    Returns:
        (..., I), contiguous, in the dtype that gate and up promote to.

    Raises:
        ValueError: if gate and up differ in shape, packed has an odd number of columns, or approximate is unknown.
    """
    if approximate not in ACTIVATION:
        raise ValueError(f'approximate must be "tanh" or "none", got {approximate!r}.')
    return gated("geglu", gate, up, ACTIVATION[approximate])
