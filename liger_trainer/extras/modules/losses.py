"""Losses as modules, under the public names and signatures of Liger-Kernel (arXiv:2410.10989), on top of our ops.

An argument does what it says or is refused. docs/extras.md shows each module next to its counterpart, with the
differences. Layers are in layers.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...kernels.cross_entropy import CrossEntropy, cross_entropy
from ...kernels.jsd import jsd
from ...kernels.kl_div import kl_div
from ...kernels.linear_cross_entropy import linear_cross_entropy
from ...kernels.linear_divergence import LinearDivergence, linear_divergence
from ...kernels.tvd import tvd
from ...kernels.types import LogitTransform, transform


@dataclass
class CrossEntropyOutput:
    """The output of the cross-entropy modules where more than the loss is asked for. Fields not asked for are None.

    Only the loss has a gradient.
    """

    loss: Tensor  # scalar, or (N,) with reduction="none"
    z_loss: Tensor | None = None  # the part of the loss that is lse_square_scale * lse^2, reduced like it
    token_accuracy: Tensor | None = None  # top-1 accuracy over labelled tokens; with "none" (N,) 0 or 1
    predicted_tokens: Tensor | None = None  # (N,) int64, the likeliest token, -1 where ignored


class _CrossEntropy(nn.Module):
    """Arguments that both cross-entropies have."""

    def __init__(self, ignore_index, lse_square_scale, label_smoothing, reduction, softcap):
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {label_smoothing}.")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap must be positive or None, got {softcap}.")
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap = reduction, softcap

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"

    def _reduced(self, per_token: Tensor, keep: Tensor) -> Tensor:
        """Return (N,) values as they are, their sum, or their mean over labelled tokens, 0 if there are none."""
        if self.reduction == "none":
            return per_token
        return per_token.sum() / keep.sum().clamp(min=1) if self.reduction == "mean" else per_token.sum()

    def _accuracy(self, is_top1: Tensor, keep: Tensor) -> Tensor:
        """Return each token's accuracy for "none", otherwise the mean over labelled tokens."""
        # Liger's mean, too, where the loss is a sum
        right = is_top1.to(torch.float32)
        return right if self.reduction == "none" else right.sum() / keep.sum().clamp(min=1)


class LigerCrossEntropyLoss(_CrossEntropy):
    """Cross-entropy of given logits.

    Args:
        weight: (V,) weights of the classes. They do not weigh the z-loss. They move with the module, but are not in its
            state dict.
        ignore_index: tokens with this label take no part.
        lse_square_scale: weight of the z-loss, lse^2. Its mean is over tokens, also with class weights.
        label_smoothing: share of the target spread evenly over the vocabulary, in [0, 1).
        reduction: "mean", "sum" or "none".
        softcap: logits become softcap * tanh(logits / softcap).
        return_z_loss, return_token_accuracy, return_predicted_tokens: return a `CrossEntropyOutput` with these.
        inplace: let the gradient overwrite the logits, as Liger does. See `cross_entropy`.

    Raises:
        ValueError: an option out of range; in forward, shapes that do not fit.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        inplace: bool = False,
    ):
        super().__init__(ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
        self.register_buffer("weight", weight, persistent=False)  # not in the state dict, as in Liger
        self.return_z_loss, self.return_token_accuracy = return_z_loss, return_token_accuracy
        self.return_predicted_tokens, self.inplace = return_predicted_tokens, inplace

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """Return the loss of logits (N, V) against labels (N,)."""
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return self._cross_entropy(_input, target).loss
        keep = target != self.ignore_index
        with torch.no_grad():  # before the loss may overwrite the logits
            predicted = _input.argmax(-1).where(keep, -1) if self.return_predicted_tokens else None
            label_logit = _input.gather(1, target.where(keep, 0)[:, None]) if self.return_z_loss else None
        result = self._cross_entropy(_input, target)
        output = CrossEntropyOutput(result.loss, predicted_tokens=predicted)
        if label_logit is not None:
            lse = transform(label_logit, None, LogitTransform(softcap=self.softcap))[0].squeeze(1) - result.log_prob
            output.z_loss = self._reduced((self.lse_square_scale * lse.square()).where(keep, 0), keep)
        if self.return_token_accuracy:
            output.token_accuracy = self._accuracy(result.is_top1, keep)
        return output

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> CrossEntropy:
        return cross_entropy(
            logits, labels, weight=self.weight, reduction=self.reduction, softcap=self.softcap,
            label_smoothing=self.label_smoothing, z_loss=self.lse_square_scale, ignore_index=self.ignore_index,
            inplace=self.inplace,
        )  # fmt: skip


class LigerFusedLinearCrossEntropyLoss(_CrossEntropy):
    """Cross-entropy of a linear head, from hidden states: the logits of the whole batch are never stored.

    Args:
        ce_weight: (V,) weights of the classes, only without label_smoothing and lse_square_scale. They move with the
            module, but are not in its state dict.
        ignore_index, lse_square_scale, label_smoothing, softcap: see `LigerCrossEntropyLoss`.
        reduction: "mean", "sum", or "none", which computes the logits once more in the backward.
        return_z_loss: return a `CrossEntropyOutput` with it, only without label_smoothing. It is the loss minus its
            other part, so it has the loss's absolute error.
        accum_dtype: torch.float32 sums the head's gradient over chunks in fp32 and rounds it once. None: in its own
            dtype.
        use_token_scaling: weigh each token by its own probability, without gradient (dynamic fine-tuning).
        return_token_accuracy: return a `CrossEntropyOutput` with it.
        return_predicted_tokens: must be False.

    Raises:
        ValueError: an option out of range, or options that exclude each other; in forward, shapes that do not fit.
    """

    ce_weight: Tensor | None

    def __init__(
        self,
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
    ):
        super().__init__(ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
        _check_accum_dtype(accum_dtype)
        _check_fused(ce_weight, lse_square_scale, label_smoothing, return_z_loss, return_predicted_tokens)
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.accum_dtype, self.use_token_scaling = accum_dtype, use_token_scaling
        self.return_z_loss, self.return_token_accuracy = return_z_loss, return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """Return the loss of the head lin_weight (V, H), bias (V,) on hidden states (N, H), against labels (N,)."""
        token_weight, num_items = self._token_weight(lin_weight, target), None
        if token_weight is not None and self.reduction == "mean":  # torch divides by the sum of the labels' weights
            total = token_weight.sum()
            num_items = total.where(total != 0, 1)
        none = self.reduction == "none"
        result = linear_cross_entropy(
            _input, lin_weight, target, bias=bias, token_weight=token_weight, reduction="none" if none else "mean",
            num_items=1.0 if self.reduction == "sum" else num_items, softcap=self.softcap,
            label_smoothing=self.label_smoothing, z_loss=self.lse_square_scale, ignore_index=self.ignore_index,
            # without a reduction each row has its own upstream gradient, known only in the backward
            dft=self.use_token_scaling, recompute=none, accumulate_dtype=self.accum_dtype,
        )  # fmt: skip
        if not (self.return_z_loss or self.return_token_accuracy):
            return result.loss
        keep = target != self.ignore_index
        z_loss = self._z_loss(result, keep) if self.return_z_loss else None
        accuracy = self._accuracy(result.is_top1, keep) if self.return_token_accuracy else None
        return CrossEntropyOutput(result.loss, z_loss, accuracy)

    def _token_weight(self, lin_weight: Tensor, target: Tensor) -> Tensor | None:
        """Return the (N,) weight of each label's class, 0 where ignored."""
        if self.ce_weight is None:
            return None
        if self.ce_weight.shape != lin_weight.shape[:1]:
            raise ValueError(
                f"ce_weight must have one entry per row of the head: ce_weight is {tuple(self.ce_weight.shape)}, "
                f"lin_weight is {tuple(lin_weight.shape)}."
            )
        keep = target != self.ignore_index
        return self.ce_weight[target.where(keep, 0)].where(keep, 0)

    def _z_loss(self, result: CrossEntropy, keep: Tensor) -> Tensor:
        """Return the loss minus its cross-entropy."""
        if not self.lse_square_scale:
            return torch.zeros_like(result.loss)
        cross_entropy = -result.log_prob
        if self.use_token_scaling:
            cross_entropy = cross_entropy * result.log_prob.exp()
        # the fused op returns one loss: the z-loss is what is left of it
        return result.loss.detach() - self._reduced(cross_entropy, keep)


class LigerKLDIVLoss(nn.KLDivLoss):
    """KL(target || prediction) from the prediction's log-probabilities, as torch.nn.KLDivLoss.

    Args:
        eps: Liger's floor under the target inside its logarithm. Here 0 log 0 is 0, which needs no floor. Up to 1e-10,
            the default, both agree to fp32's rounding; larger values are refused.
        size_average, reduce: torch's deprecated names of a reduction.
        reduction: "mean" (over elements, torch's default), "batchmean" (over rows: the divergence), "sum" or "none".
        log_target: whether the target is given as log-probabilities.

    Raises:
        ValueError: eps or reduction out of range; in forward, shapes that do not fit.
    """

    def __init__(
        self,
        eps: float = 1e-10,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        log_target: bool = False,
    ):
        if not 0 <= eps <= 1e-10:
            raise ValueError(f"eps must lie in [0, 1e-10], got {eps}: here 0 log 0 is 0 without a floor. Leave it out.")
        super().__init__(size_average, reduce, reduction, log_target)
        _check_reduction(self.reduction)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the loss of log-probabilities (N, V) against probabilities (N, V), logarithms with log_target."""
        return kl_div(y_pred, y_true, reduction=self.reduction, log_target=self.log_target)


class LigerJSD(nn.Module):
    """Generalised Jensen-Shannon divergence, beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    Args:
        beta: in [0, 1]. 0 stands for the forward KL, KL(p || q), and 1 for the reverse, KL(q || p).
        ignore_index: rows with this label take no part.

    Raises:
        ValueError: beta out of range; in forward, shapes that do not fit.
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100):
        super().__init__()
        _check_beta("beta", beta)
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Return the mean over labelled rows, from log-probabilities (N, V) of student and teacher and labels (N,)."""
        return jsd(log_q, log_p, beta=self.beta, labels=shift_labels, ignore_index=self.ignore_index)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, ignore_index={self.ignore_index}"


class LigerTVDLoss(nn.Module):
    """Total variation distance, sum |p - q| / 2.

    Args:
        reduction: "batchmean" (over labelled rows), "mean" (over their elements), "sum" or "none".
        ignore_index: rows with this label take no part.

    Raises:
        ValueError: an unknown reduction; in forward, shapes that do not fit.
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100):
        super().__init__()
        _check_reduction(reduction)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Return the loss of probabilities (N, V) against probabilities (N, V), with labels (N,)."""
        return tvd(p, q, reduction=self.reduction, labels=shift_labels, ignore_index=self.ignore_index)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"


class LigerFusedLinearJSD(nn.Module):
    """Generalised JSD between a student's and a teacher's head, from hidden states: no logits are stored.

    Args:
        jsd_beta: see `LigerJSD`.
        ignore_index: rows with this label take no part, and cost nothing.
        temperature: divides both sides' logits. The loss is not multiplied by its square.
        accum_dtype: see `LigerFusedLinearCrossEntropyLoss`.

    Raises:
        ValueError: an option out of range; in forward, shapes that do not fit.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        _check_beta("jsd_beta", jsd_beta)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        _check_accum_dtype(accum_dtype)
        self.jsd_beta, self.ignore_index = jsd_beta, ignore_index
        self.temperature, self.accum_dtype = temperature, accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mean over labelled rows.

        Hidden states are (N, Hs) and (N, Ht), heads (V, Hs) and (V, Ht), labels (N,).
        """
        return linear_divergence(
            student_input, student_weight, teacher_input, teacher_weight, kind="jsd", beta=self.jsd_beta,
            labels=shift_labels, temperature=self.temperature, ignore_index=self.ignore_index,
            # fp32 logits and no T^2, as Liger computes it
            accumulate_dtype=self.accum_dtype, scale_by_temperature_squared=False, logits_dtype=torch.float32,
        ).loss  # fmt: skip

    def extra_repr(self) -> str:
        return f"jsd_beta={self.jsd_beta}, ignore_index={self.ignore_index}, temperature={self.temperature}"


class LigerFusedLinearDivergence(nn.Module):
    """Any loss of the op `linear_divergence` (its divergences, mixtures of them, with cross-entropy) as a module.

    Args:
        kind: see `linear_divergence`; one, or several with weights, {"forward_kl": 0.5, "skew_kl": 0.5}.
        options: of `linear_divergence`, except tensors: beta, temperature, ce_weight, softcap and others.

    Raises:
        ValueError, TypeError: in forward, as `linear_divergence`.
    """

    def __init__(self, kind: str | Mapping[str, float] = "forward_kl", **options: Any):
        super().__init__()
        self.kind, self.options = kind, options

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None, **tensors: Any,
    ) -> LinearDivergence:  # fmt: skip
        """Return loss and per-token values. tensors: bias, teacher_bias, num_items, rows of `linear_divergence`."""
        return linear_divergence(
            student_input, student_weight, teacher_input, teacher_weight, kind=self.kind, labels=shift_labels,
            **self.options, **tensors,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in {"kind": self.kind, **self.options}.items())


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "batchmean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'batchmean', 'sum' or 'none', got {reduction!r}.")


def _check_beta(name: str, beta: float) -> None:
    if not 0 <= beta <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {beta}.")


def _check_accum_dtype(accum_dtype: torch.dtype | None) -> None:
    if accum_dtype not in (None, torch.float32):
        raise ValueError(f"accum_dtype must be torch.float32, or None for the weight's own; got {accum_dtype}.")


def _check_fused(ce_weight, lse_square_scale, label_smoothing, return_z_loss, return_predicted_tokens) -> None:
    """Raise ValueError for options that the fused head does not have."""
    if return_predicted_tokens:
        raise ValueError(
            "return_predicted_tokens=True: the fused head does not keep the likeliest token. Take the argmax of the "
            "logits under no_grad, or use LigerCrossEntropyLoss."
        )
    if ce_weight is not None and (label_smoothing or lse_square_scale):
        raise ValueError(
            "ce_weight weighs only the label's part of a loss; with label_smoothing or lse_square_scale there are "
            "others. Leave them 0, or use LigerCrossEntropyLoss."
        )
    if return_z_loss and label_smoothing:
        raise ValueError(
            "return_z_loss=True: with label_smoothing the fused head does not know which part of its loss is the "
            "z-loss. Leave one out, or use LigerCrossEntropyLoss."
        )


# Distillation losses on given targets under Liger-Kernel's names, composed of our ops. See docs/extras.md.


CHUNK = 2**26  # logits at a time; in fp32, 256 MiB


class LigerFusedCETVDLoss(nn.Module):
    """Cross-entropy and total variation distance of each token, from the logits of student and teacher.

    Args:
        ignore_index: tokens with this label have 0 in both.
    """

    def __init__(self, ignore_index: int = -100):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return two (N,) fp32 tensors, from logits (N, V) and labels (N,). The teacher's side may have a gradient.

        Raises:
            ValueError: shapes that do not fit.
        """
        hard = cross_entropy(student_logits, target, reduction="none", ignore_index=self.ignore_index).loss
        soft = tvd(
            student_logits, teacher_logits, reduction="none", from_logits=True, labels=target,
            ignore_index=self.ignore_index,
        )  # fmt: skip
        return hard, soft


class LigerFusedLinearKLDivLoss(nn.Module):
    """KL(target || softmax(logits / temperature)) of a linear head against given probabilities, from hidden states.

    Logits are computed for a chunk of tokens at a time, and again in the backward, so that those of the whole batch are
    never stored.

    Args:
        reduction: "batchmean" (over labelled rows), "mean" (over their elements) or "sum".
        ignore_index: rows with this label take no part.
        temperature: divides the logits. The loss is not multiplied by its square.
        eps: see `LigerKLDIVLoss`.
        accum_dtype: must be None: the head's gradient is summed over chunks in its own dtype.

    Raises:
        ValueError: an option out of range; in forward, shapes that do not fit.
    """

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if reduction not in ("batchmean", "mean", "sum"):
            raise ValueError(f"reduction must be 'batchmean', 'mean' or 'sum', got {reduction!r}.")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        if not 0 <= eps <= 1e-10:
            raise ValueError(f"eps must lie in [0, 1e-10], got {eps}: here 0 log 0 is 0 without a floor. Leave it out.")
        if accum_dtype is not None:
            raise ValueError(
                f"accum_dtype must be None, got {accum_dtype}: autograd sums the chunks in the head's dtype. "
                "Keep the head in fp32 under autocast, or use LigerFusedLinearJSD, which has it."
            )
        self.reduction, self.ignore_index, self.temperature = reduction, ignore_index, temperature
        self.eps, self.accum_dtype = eps, accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None
    ) -> Tensor:
        """Return the loss of the head (V, H) on hidden states (N, H), against probabilities (N, V), labels (N,)."""
        self._check(student_input, student_weight, target, shift_labels)
        rows, vocab = target.shape
        labels = target.new_zeros(rows, dtype=torch.int64) if shift_labels is None else shift_labels
        # without labels all rows count: 0 stands in for them, and is not ignored
        ignored = self.ignore_index if shift_labels is not None else -1
        step = max(1, CHUNK // vocab)  # rows of a chunk
        parts = zip(student_input.split(step), target.split(step), labels.split(step), strict=True)
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        loss = sum(checkpoint(self._part, x, student_weight, part, some, ignored, **how) for x, part, some in parts)
        count = (labels != ignored).sum().clamp(min=1)  # without labels the loss is 0, not NaN
        return loss / {"batchmean": count, "mean": count * vocab, "sum": 1}[self.reduction]

    def _part(self, x: Tensor, weight: Tensor, target: Tensor, labels: Tensor, ignored: int) -> Tensor:
        """Return the sum over the rows of a chunk."""
        logits = F.linear(x, weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()  # in 16 bits close ones would cancel
        log_q = (wide / self.temperature).log_softmax(-1)
        return kl_div(log_q, target, reduction="sum", labels=labels, ignore_index=ignored)

    def _check(self, x: Tensor, weight: Tensor, target: Tensor, labels: Tensor | None) -> None:
        fits = x.dim() == weight.dim() == target.dim() == 2 and x.shape[1] == weight.shape[1]
        if not fits or target.shape != (x.shape[0], weight.shape[0]):
            raise ValueError(
                "student_input must be (N, H), student_weight (V, H) and target (N, V): got "
                f"{tuple(x.shape)}, {tuple(weight.shape)}, {tuple(target.shape)}."
            )
        if labels is not None and labels.shape != x.shape[:1]:
            raise ValueError(f"shift_labels must be ({x.shape[0]},), got {tuple(labels.shape)}.")

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, temperature={self.temperature}"
