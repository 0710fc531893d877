"""Functions under the names and signatures of Liger-Kernel's `functional`, on top of our ops and modules.

Each means what the module of its name does, whose docstring says shapes, dtypes and errors; docs/extras.md says which
of Liger-Kernel's functions are not here, and what differs. in_place and chunk_mem_const steer how Liger's kernels run:
our values do not depend on them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.add_rms_norm import add_rms_norm
from ...kernels.geglu import geglu
from ...kernels.layer_norm import layer_norm
from ...kernels.relu2 import relu2
from ...kernels.rms_norm import rms_norm
from ...kernels.swiglu import swiglu
from .layers import casts_before_weight, check_norm
from .losses import (
    CrossEntropyOutput,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearKLDivLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)
from .norms import modulated_rms_norm
from .rope import liger_multimodal_rotary_pos_emb, liger_rotary_pos_emb


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Return `LigerCrossEntropyLoss` of logits (N, V) and labels (N,). size_average and reduce must be left out."""
    _check_left_out(size_average=size_average, reduce=reduce)
    loss = LigerCrossEntropyLoss(
        weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return loss(input, target)


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """Return `LigerFusedLinearCrossEntropyLoss` of hidden states (N, H), a head (V, H) and labels (N,)."""
    loss = LigerFusedLinearCrossEntropyLoss(
        ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
        use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    # the module takes the head first, the function the hidden states
    return loss(weight, input, target, bias)


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `LigerFusedLinearJSD` of the hidden states and heads of student and teacher."""
    # a module for each call: it holds options and no tensors
    loss = LigerFusedLinearJSD(jsd_beta, ignore_index, temperature, accum_dtype)
    return loss(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


def liger_fused_linear_kl_div(
    student_input: Tensor,
    student_weight: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `LigerFusedLinearKLDivLoss` of hidden states (N, H), a head (V, H) and probabilities (N, V)."""
    loss = LigerFusedLinearKLDivLoss(reduction, ignore_index, temperature, eps, accum_dtype)
    return loss(student_input, student_weight, target, shift_labels)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Return `LigerJSD` of log-probabilities (N, V), the student's first."""
    return LigerJSD(beta, ignore_index)(input, target, shift_labels)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """Return `LigerKLDIVLoss` of log-probabilities and a target (N, V). size_average and reduce must be left out."""
    # torch's own defaults of both here are True, and mean nothing
    _check_left_out(size_average=None if size_average else size_average, reduce=None if reduce else reduce)
    return LigerKLDIVLoss(eps, reduction=reduction, log_target=log_target)(input, target)


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """Return `LigerTVDLoss` of probabilities (N, V), with another default reduction, as in Liger-Kernel."""
    # the module's own default is batchmean
    return LigerTVDLoss(reduction, ignore_index)(input, target, shift_labels)


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """Return the LayerNorm of X (..., H), with weight and bias (H,)."""
    return layer_norm(X, W, B, eps)


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """Return the RMSNorm of X (..., H), with weight (H,). See `LigerRMSNorm`."""
    check_norm(casting_mode, offset, W is not None)
    return rms_norm(X, W, eps, offset=offset, cast_before_weight=casts_before_weight(casting_mode, X))


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of X + R (..., H), and X + R. See `LigerFusedAddRMSNorm`."""
    check_norm(casting_mode, offset, W is not None)
    return add_rms_norm(X, R, W, eps, offset=offset, cast_before_weight=casts_before_weight(casting_mode, X))


def liger_modulated_rms_norm(
    X: Tensor,
    W: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    """Return (1 + scale) * RMSNorm(X) + shift. See `LigerModulatedRMSNorm`."""
    return modulated_rms_norm(X, W, scale, shift, eps, offset, casting_mode)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """Return gelu(a) * b, with the tanh form of GELU."""
    # Liger has this form only
    return geglu(a, b, approximate="tanh")


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b."""
    return swiglu(a, b)


def liger_relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)^2."""
    return relu2(x)


def liger_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `liger_rotary_pos_emb` of the same arguments."""
    return liger_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Return `liger_multimodal_rotary_pos_emb` of the same arguments."""
    return liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim)


def _check_left_out(**options: bool | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}={value}: torch's old name of a reduction does nothing in Liger-Kernel. "
                             "Leave it out and pass reduction='mean', 'sum' or 'none'.")  # fmt: skip
