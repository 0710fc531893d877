"""Distillation losses on given targets under Liger-Kernel's names, composed of our ops. See docs/extras.md."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernels.cross_entropy import cross_entropy
from ..kernels.kl_div import kl_div
from ..kernels.tvd import tvd

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
        ignored = self.ignore_index if shift_labels is not None else -1
        step = max(1, CHUNK // vocab)
        loss = sum(
            checkpoint(
                self._part, x, student_weight, part, part_labels, ignored, use_reentrant=False, preserve_rng_state=False
            )
            for x, part, part_labels in zip(
                student_input.split(step), target.split(step), labels.split(step), strict=True
            )
        )
        count = (labels != ignored).sum().clamp(min=1)
        return loss / {"batchmean": count, "mean": count * vocab, "sum": 1}[self.reduction]

    def _part(self, x: Tensor, weight: Tensor, target: Tensor, labels: Tensor, ignored: int) -> Tensor:
        """Return the sum over the rows of a chunk."""
        logits = F.linear(x, weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
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
