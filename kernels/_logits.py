"""Pieces that the row kernels of both fused losses share: how a raw logit becomes a logit of the model's distribution.

z = scale * (raw + bias)        scale: Granite, Cohere
x = softcap * tanh(z / softcap) Gemma 2
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._autograd import stats_dtype
from ._triton import tl, triton

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)  # the hardware computes powers of two: kernels multiply logits by it once
LOWEST = -1e30  # replaces -inf, the logit of a token that is ruled out: the difference of two such is a number


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its head's output before the softmax."""

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self):
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive or None, got {self.softcap}.")


def check_scalars(temperature: float, label_smoothing: float = 0.0) -> None:
    """Raise ValueError for a temperature or label_smoothing that no loss accepts."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must lie in [0, 1), got {label_smoothing}.")


def transform(raw: Tensor, bias: Tensor | None, how: LogitTransform) -> tuple[Tensor, Tensor | float]:
    """Return (logits in fp32 or fp64, d logits / d raw) from raw (n, V) and bias (V,)."""
    z = raw.to(stats_dtype(raw.dtype))
    if bias is not None:
        z = z + bias
    if how.scale != 1.0:
        z = z * how.scale
    if how.softcap is None:
        return z, how.scale
    tanh = torch.tanh(z / how.softcap)
    return how.softcap * tanh, (1 - tanh.square()) * how.scale


def entropy_of(log_probs: Tensor) -> Tensor:
    """Return the entropy (n,) in nats of log-probabilities (n, V). A token of probability 0 adds nothing."""
    return -torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=LOWEST))


@triton.jit
def transformed(z, scale, softcap, HAS_SOFTCAP: tl.constexpr, BASE_TWO: tl.constexpr):
    """Return (the logit, d logit / d raw) from raw + bias; with BASE_TWO the logit is multiplied by log2(e)."""
    unit: tl.constexpr = LOG2E if BASE_TWO else 1.0
    if HAS_SOFTCAP:
        # tanh(y) = 2 sigmoid(2 y) - 1: one exponential and no branch
        tanh = 2.0 * tl.sigmoid(2.0 * (z * scale) / softcap) - 1.0
        x = tanh * (softcap * unit)
        slope = (1.0 - tanh * tanh) * scale
    else:
        x = z * (scale * unit)
        slope = tl.zeros_like(z) + scale
    return x, slope


@triton.jit
def load_logits(
    raw_ptr, bias_ptr, cols, mask, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Return (logits, d logits / d raw) of one block. Masked lanes are so low that they weigh nothing, yet finite."""
    z = tl.load(raw_ptr + cols, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x, slope = transformed(z, scale, softcap, HAS_SOFTCAP, False)
    return tl.where(mask, x, -1e30), slope


@triton.jit
def load_label_logit(
    raw_ptr, bias_ptr, label, V, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BASE_TWO: tl.constexpr,
):  # fmt: skip
    """Return the label's logit. It is NaN for a label outside [0, V), so that a wrong label shows."""
    inside = (label >= 0) & (label < V)
    z = tl.load(raw_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + label, mask=inside, other=0.0).to(tl.float32)
    x, _ = transformed(z, scale, softcap, HAS_SOFTCAP, BASE_TWO)
    return x
