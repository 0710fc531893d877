"""The loss of a batch without a teacher: cross-entropy, from deferred logits or from stored ones."""

from torch import Tensor
from torch.nn.functional import pad

from ..kernels.cross_entropy import cross_entropy, cross_entropy_reference
from ..kernels.linear_cross_entropy import linear_cross_entropy
from .deferred_logits import DeferredLogits
from .spec import IGNORE_INDEX, BatchTargets, Logits, LossOptions
from .teacher_answer import BatchLoss


def cross_entropy_loss(logits: Logits, targets: BatchTargets, options: LossOptions) -> BatchLoss:
    """Return the cross-entropy of logits (batch, length, V)."""
    common = {"label_smoothing": options.label_smoothing, "dft": options.dft, "ignore_index": IGNORE_INDEX}
    if isinstance(logits, DeferredLogits):
        operands = logits.operands(sharded=True)
        result = linear_cross_entropy(**operands, labels=targets.labels, **targets.for_ops(), **common)
    else:
        flat = logits.flatten(0, -2)
        common |= {"num_items": targets.num_items, "token_weight": targets.weights}
        result = cross_entropy_reference(flat, targets.labels, **common)
    return BatchLoss(*result)


def stored_logits_loss(
    logits: Tensor, labels: Tensor | None, vocab_size: int | None = None,
    num_items_in_batch: float | Tensor | None = None, ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None, **kwargs,
) -> Tensor:  # fmt: skip
    """Compute transformers' `ForCausalLMLoss` by the kernel of `cross_entropy`, without a copy of the logits in fp32.

    Args:
        logits: (batch, length, V).
        labels: (batch, length), shifted here. `shift_labels` are shifted already.
        num_items_in_batch: the divisor of the sum. Default: the number of labels that are not ignored.
        vocab_size, kwargs: what a model's forward passes on. Not used.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = shift_labels.reshape(-1).to(logits.device)
    return cross_entropy(logits.flatten(0, -2), flat, num_items=num_items_in_batch, ignore_index=ignore_index).loss
