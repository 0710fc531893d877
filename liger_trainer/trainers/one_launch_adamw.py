"""The optimizer of a training whose weights are whole on each GPU, or shared out by FSDP2: AdamW in one launch.

It clips gradients too: Trainer writes each gradient again, and torch's fused AdamW reads it again. Here the step gets
the coefficient of clipping, a number on the device, and multiplies by it on the way. Of weights that FSDP2 shares out,
each rank updates its shards as plain tensors: torch asks for each shard what to do with it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ..compat.modules import Places, parameter_places
from ..compat.torch_internals import (
    adamw_state,
    add_to_all,
    has_step_hooks,
    multiply_all,
    step_without_hooks,
    subtract_from_all,
)
from ..compat.trainers import clips_gradients
from ..kernels.adamw import adamw_
from ..kernels.gradient_norm import gradient_norm
from ..kernels.runtime import use_triton
from .finite_guard import innermost
from .host import TrainerHost

EPSILON = 1e-6  # torch's clip_grad_norm_ divides by norm + this
WHOLE = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)  # each rank has all weights


class OneLaunchAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` with the same state and options, updated by our kernel.

    Attributes:
        coefficient: what the next step multiplies gradients by, () fp32 on the device; None: 1. A step takes it away.
        places: where the model that it trains holds parameters, once that is known: a walk takes milliseconds.
    """

    coefficient: Tensor | None = None
    places: Places | None = None

    @functools.cached_property
    def fits(self) -> bool:
        """Whether our kernel can update all parameters, as they are at the first step: FSDP2 comes before it."""
        params = params_of(self)
        return _are_plain(_local(params)) and (_are_shards(params) or not any(isinstance(p, DTensor) for p in params))

    def clip(self, norm: Tensor, most: float) -> None:
        """Have the next step clip gradients of this norm to `most`, as torch's clip_grad_norm_ does."""
        self.coefficient = (most / (norm + EPSILON)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, closure=None):
        coefficient, self.coefficient = self.coefficient, None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if self.leaves_to_torch():
            grads = [p.grad for p in params_of(self) if p.grad is not None]
            if coefficient is not None and grads:  # none are left of a step that is left out
                multiply_all(grads, coefficient)
            return step_without_hooks(torch.optim.AdamW)(self, closure)  # hooks run around this method already
        if scale is not None:
            coefficient = 1 / scale if coefficient is None else coefficient / scale
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group, coefficient)
        return loss

    def leaves_to_torch(self) -> bool:
        """Return whether torch's own step is taken: with a scale of fp16, rare options, or others' parameters."""
        scaled = getattr(self, "grad_scale", None) is not None
        return scaled or any(map(_is_unusual, self.param_groups)) or not self.fits

    def _update(self, group: dict[str, Any], coefficient: Tensor | None) -> None:
        params, grads, means, squares, steps = map(_local, adamw_state(self, group))
        if not params:
            return
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        add_to_all(steps, 1)
        adamw_(
            params, grads, means, squares, steps, lr=float(group["lr"]), betas=group["betas"], eps=group["eps"],
            weight_decay=group["weight_decay"], coefficient=coefficient, found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            subtract_from_all(steps, found_inf)


def _is_unusual(group: dict[str, Any]) -> bool:
    """Return whether a group, of a checkpoint perhaps, has options that only torch's own step knows."""
    rare = any(group.get(name) for name in ("amsgrad", "maximize", "capturable", "differentiable"))
    return rare or not group.get("fused") or isinstance(group["lr"], Tensor)


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what this rank has of tensors: its shards, or the tensors themselves."""
    with torch.no_grad():  # so that a shard is what the DTensor holds, without a node of autograd
        return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class OneLaunchStep:
    """Has a trainer's torch AdamW, where it can, update all weights in one launch and clip their gradients there."""

    def __init__(self, trainer: TrainerHost):
        self._trainer = trainer

    def of(self, optimizer: Any) -> Any:
        """Return an optimizer of the same parameters whose step is one launch, or `optimizer` itself if it can't be.

        It can where a fused AdamW of torch has plain parameters on one GPU where Triton works, whole on each rank. What
        FSDP2 will share out is not known yet. `optim: adamw_torch` is not fused, and so stays torch's own.
        """
        if type(optimizer) is not torch.optim.AdamW or optimizer.state or any(map(_is_unusual, optimizer.param_groups)):
            return optimizer
        accelerator = self._trainer.accelerator
        is_whole = accelerator.distributed_type in WHOLE and _are_plain(params_of(optimizer))
        if not (is_whole or accelerator.is_fsdp2) or self._trainer.get_tp_size() > 1:
            return optimizer
        defaults = {name: value for name, value in optimizer.defaults.items() if name != "decoupled_weight_decay"}
        return OneLaunchAdamW(optimizer.param_groups, **defaults)

    def norm_before_step(self, model: nn.Module) -> Tensor | None:
        """Return the norm of the model's gradients, and have the optimizer's next step clip them by `max_grad_norm`.

        Return None, and have it clip nothing, where that is left to Trainer: the optimizer is another, wrapped by
        somebody or has further parameters; a scale of fp16 is in the gradients; somebody else may look at them.
        """
        trainer = self._trainer
        optimizer = innermost(trainer.optimizer)
        if not isinstance(optimizer, OneLaunchAdamW):
            return None
        optimizer.coefficient = None  # of a step that was interrupted
        if trainer.accelerator.scaler is not None or not optimizer.fits or _is_watched(trainer, optimizer):
            return None
        if optimizer.places is None:
            optimizer.places = parameter_places(model.modules())
        params = {id(p): p for of, name in optimizer.places if (p := of.get(name)) is not None}  # tied ones once
        grads = [p.grad for p in params.values() if p.grad is not None]
        if not grads or not params.keys() >= set(map(id, params_of(optimizer))):
            return None
        norm, most = gradient_norm(_local(grads)), trainer.args.max_grad_norm
        if isinstance(grads[0], DTensor):
            square = norm.square()
            dist.all_reduce(square, group=grads[0].device_mesh.get_group())
            norm = square.sqrt()
        if most > 0:
            optimizer.clip(norm, most)
        return norm


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    one_gpu = len({x.device for x in tensors}) == 1 and tensors[0].is_cuda
    return one_gpu and all(type(x) in (nn.Parameter, Tensor) and use_triton(x) for x in tensors)


def _are_shards(params: Sequence[Any]) -> bool:
    """Return whether all parameters are shared out over the same ranks, no part twice."""
    return (
        all(isinstance(p, DTensor) and p.placements[0].is_shard() for p in params)
        and len({p.device_mesh for p in params}) == 1
        and params[0].device_mesh.ndim == 1
    )


def _is_watched(trainer: TrainerHost, optimizer: OneLaunchAdamW) -> bool:
    """Return whether somebody else clips, or has a method, callback, hook or optimizer that may look at gradients."""
    outer = trainer.optimizer
    while isinstance(outer, AcceleratedOptimizer):
        outer = outer.optimizer
    callbacks = {type(callback) for callback in trainer.callback_handler.callbacks}
    looking = [
        kind
        for kind in callbacks
        if kind.on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
        or kind.on_optimizer_step is not TrainerCallback.on_optimizer_step
    ]
    clipping = [kind for kind in type(trainer).__mro__ if clips_gradients(kind)]
    return (
        outer is not optimizer
        or "clip_grad_norm_" in vars(trainer.accelerator)
        or has_step_hooks(optimizer)
        or any(not kind.__module__.startswith("liger_trainer.") for kind in looking)
        or any(not kind.__module__.startswith(("liger_trainer.", "transformers.")) for kind in clipping)
    )
