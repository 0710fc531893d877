"""Gradients under DistributedDataParallel, in which accelerate wraps the model when a training begins.

DDP adds up gradients in buckets, while the backward goes on. As it is, it copies each gradient into its bucket, divides
it by the number of ranks there, and copies it back. Here the graphs of the layers write gradients into the buckets
(kernels/weight_gradients.py), NCCL takes the average, and the gradient of a weight is a view of the bucket.
"""

import contextlib
import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from ..common.replacements import Replacements
from ..losses.model_parts import reads_images
from ..patching.layers.experts import looks_like_experts
from ..patching.patcher import base_of
from .host import TrainerHost


def spare_copies_of_gradients(trainer: TrainerHost, replacements: Replacements) -> "GradientBuckets":
    """Have DDP copy less for a training, and not look for weights without a gradient where all have one.

    Gradients that are views of the buckets spare each weight a copy back. The search is a walk over the autograd graph,
    after which the host waits for the device: a step of LoRA, which waits for the host, gains most without it
    (docs/distributed.md).

    Returns:
        The buckets, which know no place where another engine or another hook than ours adds gradients up.
    """
    handler, buckets = trainer.accelerator.ddp_handler, GradientBuckets()
    if handler is None:  # another engine
        return buckets
    replacements.set(handler, "gradient_as_bucket_view", True)
    if trainer.args.ddp_find_unused_parameters is None and _all_weights_get_gradients(trainer):
        replacements.set(handler, "find_unused_parameters", False)
    ranks = trainer.args.world_size
    # Only these ranks' average is exact: NCCL multiplies by 1 / ranks in the gradients' dtype before it adds.
    is_exact = ranks > 1 and ranks & (ranks - 1) == 0
    if is_exact and trainer.args.device.type == "cuda" and handler.comm_hook is DDPCommunicationHookType.NO:
        buckets = _joined.get(trainer.model_wrapped, buckets)
        buckets.join(trainer)
    return buckets


def _all_weights_get_gradients(trainer: TrainerHost) -> bool:
    """Return whether each step is known to give each trained weight a gradient; DDP fails where one gets none."""
    model, kind = base_of(trainer.model), cast(Any, type(trainer))
    loss = trainer.loss_options().distillation
    return (
        # a subclass may learn from something else than what the head computes
        kind.compute_loss.__module__.startswith(f"{__package__}.")
        and getattr(trainer, "compute_loss_func", None) is None
        # only losses between hidden states leave out the head, and the layers above them
        and (loss is None or any((*loss.weights.values(), loss.ce_weight, loss.uld_weight, loss.alm_weight)))
        and not reads_images(model)  # a batch may have none
        and not getattr(model.config, "layerdrop", 0)
        and not any(looks_like_experts(module) for module in model.modules())  # no token may choose one of them
    )


class GradientBuckets(TrainerCallback):
    """DDP's buckets, which NCCL averages."""

    def __init__(self) -> None:
        self._trainer: TrainerHost | None = None
        self._buckets: list[dist.GradBucket] = []  # of the last backward
        self._backwards = 0

    def join(self, trainer: TrainerHost) -> None:
        """Take part in the training that begins, until `leave`."""
        self._trainer = trainer
        trainer.add_callback(self)

    def leave(self) -> None:
        if self._trainer is not None:
            self._trainer.remove_callback(self)
        # DDP holds the hook, in C++, where no garbage collector sees that the trainer holds DDP
        self._trainer = None
        self._buckets.clear()

    def on_train_begin(self, args, state, control, **kwargs):
        model = self._trainer and self._trainer.model_wrapped
        if isinstance(model, DistributedDataParallel) and _joined.get(model) is not self:
            with contextlib.suppress(RuntimeError):  # DDP takes one hook: a callback before us has given it another
                model.register_comm_hook(model.process_group, self.average)
                _joined[model] = self
            self._buckets.clear()  # those so far were of another DDP, as where auto_find_batch_size wraps again
            self._backwards = 0

    def average(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to average a bucket over the ranks. DDP calls it for each, in their order."""
        if bucket.index() == 0:
            self._buckets.clear()
            self._backwards += 1
        self._buckets.append(bucket)
        work: Any = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def places(self) -> dict[nn.Parameter, Tensor]:
        """Return the view of a bucket that each weight's gradient becomes, once that is settled."""
        if self._backwards < 2:  # after the first, DDP fills new buckets, in the order of the gradients
            return {}
        return {
            cast(nn.Parameter, parameter): view
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }


# The same trainer's next training has the same DDP, which keeps its hook.
_joined: weakref.WeakKeyDictionary[nn.Module, GradientBuckets] = weakref.WeakKeyDictionary()
