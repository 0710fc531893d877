"""An output head that returns deferred logits, and the two forms in which others than our loss get them.

The forward of the head is replaced for one pass of the model, in the thread that runs it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.replacements import own_attribute, replaced_in_this_thread, without_replacement
from ..compat.deepspeed import gathered, is_partitioned
from ..compat.torch_internals import (
    FakeTensor,
    checkpoint_hook,
    tensor_without_memory,
    tree_map,
    version_of,
    without_subclasses,
)
from ..errors import ConfigError
from ..kernels.linear_cross_entropy import linear_cross_entropy
from ..kernels.lora_linear import lora_linear_reference
from .deferred_logits import DeferredLogits, DeferredPass
from .model_parts import Head, gather, output_module, reader_of, sharded_head

if TYPE_CHECKING:
    from ..kernels.linear_log_probs import LogProbs

# Without gradients a model returns its deferred logits as `LazyLogits`. An evaluation loop gathers every tensor of an
# output and cannot say in advance whether its metrics need logits. So a loss-only evaluation never computes them.


# These describe a tensor without reading it. `.T`, `.data` and the like are views and reach __torch_dispatch__.
_DESCRIBES = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip


class LazyLogits(Tensor):
    """(..., V) logits with the shape, dtype and device that they will have.

    The first operation that reads them computes them, and every operation is one of the tensor that it has computed.
    """

    _deferred: DeferredLogits

    @staticmethod
    @torch.compiler.disable(reason="logits that may never be read are made outside of a graph")
    def of(deferred: DeferredLogits) -> "LazyLogits":
        """Return logits that will be computed as they would be now."""
        lazy = tensor_without_memory(LazyLogits, deferred.shape, deferred.dtype, deferred.device)
        lazy._deferred = deferred
        return lazy

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        stored = any(isinstance(x, LazyLogits) and x._deferred.stored for x in args)
        if not stored and (func in _DESCRIBES or name == "__get__"):
            with without_subclasses():  # whose result is not made a LazyLogits again
                return func(*args, **(kwargs or {}))
        dtype = None if stored else _cast_of(func, args, kwargs)
        if dtype is not None:  # mixed precision casts what a model returns, read or not
            return args[0] if args[0].dtype == dtype else LazyLogits.of(args[0]._deferred.to(dtype))
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map(_real, args), **tree_map(_real, kwargs or {}))


def _cast_of(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype that a call casts logits to, if it does nothing else: `x.float()` or `x.to(dtype)`."""
    if func is Tensor.float:
        return torch.float32
    only_casts = func is Tensor.to and len(args) == 2 and not kwargs and isinstance(args[0], LazyLogits)
    return args[1] if only_casts and isinstance(args[1], torch.dtype) and args[1].is_floating_point else None


def _real(value: Any) -> Any:
    if not isinstance(value, LazyLogits):
        return value
    value._deferred.become_real()
    return value._deferred.compute()


class Checkpoints:
    """Tells whether a checkpoint has begun since this was made.

    What runs in it runs again in the backward, perhaps in another thread, when whatever was in place is so no longer.
    """

    def __init__(self) -> None:
        self._grad, self._hook = torch.is_grad_enabled(), _hook_of_checkpoint()

    def began(self) -> bool:
        if torch.compiler.is_compiling() or not self._grad:
            return False
        return not torch.is_grad_enabled() or _hook_of_checkpoint() is not self._hook


def _hook_of_checkpoint() -> Any:
    return None if torch.compiler.is_compiling() else checkpoint_hook()  # which torch.compile cannot trace


@contextlib.contextmanager
def deferred_logits(
    model: nn.Module, *, outlive: bool = False, make: Callable[..., DeferredLogits] = DeferredLogits.of
) -> Iterator[DeferredPass]:
    """Within the context, the output head of `model` returns `DeferredLogits`.

    Yields the pass; its `why_not_deferred` says afterwards why the head could not be deferred and computed real logits.

    Args:
        outlive: the logits are used after the pass, when FSDP2 or ZeRO-3 may have freed the weights that it gathered.
            The head then keeps its own whole weights, without gradient. FSDP2's are read before the pass.
        make: makes them of the fields of `DeferredLogits` without defaults, in order.
    """
    module = output_module(model)
    state, shards, checkpoints = DeferredPass(type(model).__name__), sharded_head(module), Checkpoints()
    if shards is not None:
        with _deferred_on_ranks(shards, state):
            yield state
        return
    read = reader_of(module)
    if isinstance(read, str):
        state.why_not_deferred = read
        yield state
        return
    assert module is not None
    partitioned = any(map(is_partitioned, module.parameters()))
    own_forward: Any = without_replacement(module.forward)
    own_forward = gathered(module)(own_forward) if partitioned else own_forward  # ZeRO-3 may have freed the weights
    early = read(module) if outlive and not partitioned else None

    def forward(hidden: Tensor, **kwargs):
        head = early
        if head is None and outlive:
            head = read(module)
            head = head if isinstance(head, str) else head.detached()
        elif head is None:
            gather(module, model)
            head = read(module)
        if not isinstance(head, str) and checkpoints.began():
            head = "the model checkpoints its output head, which the backward computes again outside of this pass"
        if isinstance(head, str):
            state.why_not_deferred = head
            return own_forward(hidden, **kwargs)
        project = own_forward
        if not partitioned:  # whose weights are gathered for a call
            project = functools.partial(_product, head)
            state.watch(functools.partial(_state_of, module, head))
        if not kwargs:
            return make(hidden, head, project, state)
        with_kwargs = functools.partial(own_forward, **kwargs)
        return make(hidden, head, with_kwargs, state).compute(f"an output head called with {', '.join(kwargs)}")

    try:
        with replaced_in_this_thread(module, "forward", forward, own_forward):
            yield state
    finally:
        state.running = False


def _product(head: Head, hidden: Tensor) -> Tensor:
    """Compute what a head did when it was read: adapters may be switched, or replaced, since."""
    return lora_linear_reference(hidden, head.weight, head.bias, head.lora)  # pyright: ignore[reportArgumentType]


def _state_of(module: nn.Module, head: Head) -> Any:
    """Return what changes when somebody writes into the weights of a head, or puts others in their place."""
    tensors = [head.weight, *(() if head.bias is None else (head.bias,)), *(x for lora in head.lora for x in lora[:2])]
    merged = [tuple(getattr(m, "merged_adapters", ())) for m in module.modules()]  # PEFT writes into `.data`
    return merged, [(version_of(x), None if isinstance(x, FakeTensor) else x.data_ptr(), x.dtype) for x in tensors]


@contextlib.contextmanager
def _deferred_on_ranks(shards: Any, state: DeferredPass) -> Iterator[None]:
    """Within the context, a head whose rows lie on ranks returns `DeferredLogits` of this rank's rows."""
    module, replaced = shards.module, own_attribute(shards.module, "forward")
    project = replaced or shards.project  # tensor parallelism's gathers logits itself

    def forward(hidden: Tensor, **kwargs):
        if kwargs:
            raise ConfigError(
                f"{state.model_name} calls its output head with {', '.join(kwargs)}, which a head whose rows stay on "
                "their ranks does not take. Set vocab_parallel to never."
            )
        hidden = shards.inputs(hidden)
        head = Head(*shards.rows(), parallel=shards.parallel, gather=shards.whole)
        return DeferredLogits.of(hidden, head, project, state)

    before = without_replacement(module.forward)
    try:
        with replaced_in_this_thread(module, "forward", forward, before), shards.without_gathering():
            yield
    finally:
        state.running = False


# A trainer may compute its loss from `outputs.logits` itself, without labels in the forward. Its logits outlive the
# forward, so they remember its autocast. Besides the operations of `DeferredLogits`, such a trainer asks them for
# log-probabilities, cross-entropy and a mean, all of which the fused ops compute.


@dataclass(frozen=True, eq=False)
class ScoredLogits(DeferredLogits):
    """(..., V) logits that answer for losses on them. See the top of this file."""

    def log_probs(self, labels: Tensor, **options: Any) -> "LogProbs":
        """Return the values of labels (...), in their shape. options: of `linear_log_probs`."""
        from ..kernels.linear_log_probs import LogProbs, linear_log_probs  # which only TRL's losses on rollouts need

        with self.autocasting():
            values = linear_log_probs(**self.operands(), labels=labels.reshape(-1), **options)
        return LogProbs(*(None if x is None else x.view(labels.shape) for x in values))  # pyright: ignore[reportArgumentType]

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Return F.cross_entropy of logits (N, V). What the fused op does not compute comes from real logits."""
        other = (weight, size_average, reduce) != (None, None, None) or target.is_floating_point()
        if other or reduction not in ("mean", "sum") or self.ndim != 2 or self.stored:
            logits = self.compute("a cross-entropy with class weights, probabilities or other shapes")
            return F.cross_entropy(
                logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        num_items = None if reduction == "mean" else 1
        with self.autocasting():
            return linear_cross_entropy(
                **self.operands(), labels=target, num_items=num_items, ignore_index=ignore_index,
                label_smoothing=label_smoothing,
            ).loss  # fmt: skip

    def detach(self) -> "ScoredLogits | Tensor":
        if self.stored:
            return self.compute().detach()
        fixed = self.head.detached()
        project = self.project
        return self._with(hidden=self.hidden.detach(), head=fixed, project=lambda hidden: project(hidden).detach())

    def mean(self, *args: Any, **options: Any) -> Tensor:
        """Return the mean of all logits. Others, such as those along a dimension, come from real logits."""
        if args or options or self.stored:
            return self.compute("a mean along a dimension").mean(*args, **options)
        if self.hidden.requires_grad or self.head.weight.requires_grad:
            return self.compute("a mean with a gradient").mean()
        if not self.capped:  # linear: the mean row has the mean logits
            row = self.hidden.flatten(0, -2).float().mean(0, keepdim=True).to(self.hidden.dtype)
            return self._with(hidden=row, forward=DeferredPass("", running=False)).compute().mean()
        labels = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        means = self.log_probs(labels, ignore_index=None, mean_logits=True).mean_logit
        assert means is not None
        return means.mean()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.cross_entropy and args and isinstance(args[0], cls):
            return args[0].cross_entropy(*args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def scored_logits(model: nn.Module) -> Iterator[DeferredPass]:
    """Within the context, the output head of `model` returns `ScoredLogits`. Yields as `deferred_logits` does."""
    with deferred_logits(model, make=ScoredLogits.of) as forward:
        yield forward
