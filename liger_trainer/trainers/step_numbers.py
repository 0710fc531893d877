"""The numbers of an optimizer step by which it is judged: losses, what the teacher says, the gradient norm."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .row_search import Batch, kept_of


class StepNumbers:
    """Those of one rank, collected from micro-batch to micro-batch. They stay on the device.

    Attributes:
        batches: what tells the rows of each micro-batch.
        norm: of the gradients of all ranks, or None.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.norm: Tensor | float | None = None
        self._losses: list[Tensor] = []
        self._teacher: list[Tensor] = []

    def add_teacher(self, sums: dict[str, Tensor]) -> None:
        """Add what the teacher said about a micro-batch, by the names of metrics. Nothing without a teacher."""
        if "teacher_entropy" in sums:
            self._teacher.append(sums["teacher_entropy"].detach())
        elif "teacher_perplexity" in sums:  # of a cache, which may give a label no probability
            self._teacher.append(sums["teacher_perplexity"].detach().nan_to_num(torch.nan, 0.0, 0.0))

    def add_loss(self, loss: Tensor, inputs: dict[str, Any]) -> None:
        """Add the loss of a micro-batch."""
        self._losses.append(loss.detach())
        self.batches.append(kept_of(inputs))

    def packed(self, count: int, device: torch.device) -> Tensor:
        """Return `count` losses, `count` numbers of the teacher and the norm, (2 * count + 1,) fp32.

        Every rank packs as many, with zeros where it has none.
        """
        zero = torch.zeros((), device=device)
        norm = torch.full((), self.norm, device=device) if isinstance(self.norm, (int, float)) else self.norm
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        padded = [(values + [zero] * count)[:count] for values in (self._losses, self._teacher)]
        numbers = [*padded[0], *padded[1], zero if norm is None else norm.detach()]
        return torch.stack([number.to(device, torch.float32, non_blocking=True) for number in numbers])


@dataclass(frozen=True)
class GatheredNumbers:
    """Those of all ranks, on the host.

    Attributes:
        losses, teacher: (ranks, micro-batches).
        norm: (ranks, 1).
    """

    losses: Tensor
    teacher: Tensor
    norm: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> "GatheredNumbers":
        """Take apart what each rank has packed, (ranks, 2 * micro-batches + 1)."""
        count = (packed.shape[1] - 1) // 2
        return cls(packed[:, :count], packed[:, count:-1], packed[:, -1:])

    def not_finite(self) -> list[str]:
        """Return the names of what is not finite on some rank."""
        kinds = {"the teacher's logits": self.teacher, "loss": self.losses, "gradient norm": self.norm}
        return [name for name, numbers in kinds.items() if not bool(torch.isfinite(numbers).all())]

    def culprits(self) -> Tensor:
        """Return which micro-batches are not finite, (ranks, micro-batches) bool; all of them if it is the norm."""
        bad = ~(torch.isfinite(self.losses) & torch.isfinite(self.teacher))
        return bad if bool(bad.any()) else torch.ones_like(bad)
