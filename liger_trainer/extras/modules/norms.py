"""RMSNorms of single families under Liger-Kernel's names. The general ones are in layers.py. See docs/extras.md."""

from torch import Tensor

from ...kernels.rms_norm import rms_norm
from .layers import LigerRMSNorm, casts_before_weight, check_norm


class LigerModulatedRMSNorm(LigerRMSNorm):
    """(1 + scale) * RMSNorm(x) + shift, the norm of diffusion transformers (adaptive layer norm, arXiv:2212.09748).

    The norm is one kernel, the modulation is torch's. Arguments: see `LigerRMSNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        elementwise_affine: bool = True,
    ):
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=elementwise_affine
        )

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map (..., H) to (..., H). scale, shift: see `modulated_rms_norm`."""
        return modulated_rms_norm(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerRMSNormForMuseGlimmer(LigerRMSNorm):
    """MuseGlimmerRMSNorm: product with the weight in fp32, cast once.

    Args:
        dim: H, the last dimension. It may be None without a weight.
        with_scale: whether there is a weight.
        eps, offset, casting_mode, init_fn, in_place: see `LigerRMSNorm`.

    Raises:
        ValueError: a weight without dim, or as `LigerRMSNorm`.
    """

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ):
        if dim is None and with_scale:
            raise ValueError("dim must be the size of the last dimension, got None: with_scale=True needs a weight.")
        # without a weight no size is needed
        super().__init__(dim or 0, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNorm):
    """MuseGlimmerTextCenteredRMSNorm: as Gemma's, with weights stored as w - 1. Arguments: see `LigerRMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


def modulated_rms_norm(
    x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float, casting_mode: str
) -> Tensor:
    """Return (1 + scale) * RMSNorm(x) + shift, differentiable in all four tensors.

    Args:
        x: (..., H).
        weight: (H,), or None.
        scale: M rows of H entries, in any shape; each row belongs to as many consecutive rows of x. So (H,) is for all,
            (B, H) for the sequences of (B, S, H), and x's own shape for each token.
        shift: as scale, or None.
        eps, offset, casting_mode: see `LigerRMSNorm`.

    Returns:
        (..., H), in the dtype that the norm and the modulation promote to.

    Raises:
        ValueError: shapes that do not fit, or as `LigerRMSNorm`.
    """
    check_norm(casting_mode, offset, weight is not None)
    width, rows = x.shape[-1], x.shape[:-1].numel()
    # rows of scale; each serves rows // groups rows of x that follow one another
    groups = scale.shape[:-1].numel()
    if scale.shape[-1] != width or not groups or rows % groups:
        raise ValueError(
            f"scale must have {width} columns and a number of rows that divides the {rows} rows of x: x is "
            f"{tuple(x.shape)}, scale is {tuple(scale.shape)}."
        )
    if shift is not None and shift.shape != scale.shape:
        raise ValueError(f"shift must have the shape of scale: {tuple(shift.shape)}, {tuple(scale.shape)}.")
    y = rms_norm(x, weight, eps, offset=offset, cast_before_weight=casts_before_weight(casting_mode, x))
    # one row of scale for each group of rows that follow one another
    y = y.reshape(groups, rows // groups, width) * (1 + scale.reshape(groups, 1, width))
    return (y if shift is None else y + shift.reshape(groups, 1, width)).view(x.shape)
