"""An output head that returns deferred logits, and what they are computed from later.

The forward of the head is replaced for one pass of the model, in the thread that runs it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..common.replacements import own_attribute, replaced_in_this_thread, without_replacement
from ..compat.deepspeed import gathered, is_partitioned
from ..errors import ConfigError
from ..kernels.lora_linear import lora_linear_reference
from .deferred_logits import DeferredLogits, Forward, version_of
from .model_parts import Head, gather, output_module, reader_of, sharded_head


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
    """Return the hook by which the innermost checkpoint takes what autograd saves, if it is a non-reentrant one."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks[0] if hooks and hooks[0].__qualname__.startswith("_checkpoint_hook.") else None


@contextlib.contextmanager
def deferred_logits(
    model: nn.Module, *, outlive: bool = False, make: Callable[..., DeferredLogits] = DeferredLogits.of
) -> Iterator[Forward]:
    """Within the context, the output head of `model` returns `DeferredLogits`.

    Yields the pass; its `obstacle` says afterwards why the head could not be deferred and computed real logits.

    Args:
        outlive: the logits are used after the pass, when FSDP2 or ZeRO-3 may have freed the weights that it gathered.
            The head then keeps whole weights of its own, without gradient. FSDP2's are read before the pass.
        make: makes them of the fields of `DeferredLogits` without defaults, in order.
    """
    module = output_module(model)
    state, shards, checkpoints = Forward(type(model).__name__), sharded_head(module), Checkpoints()
    if shards is not None:
        with _deferred_on_ranks(shards, state):
            yield state
        return
    read = reader_of(module)
    if isinstance(read, str):
        state.obstacle = read
        yield state
        return
    assert module is not None
    partitioned = any(map(is_partitioned, module.parameters()))
    own_forward: Any = without_replacement(module.forward)
    own_forward = functools.partial(_project_gathered, module, own_forward) if partitioned else own_forward
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
            state.obstacle = head
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


def _project_gathered(module: nn.Module, project: Callable[..., Tensor], hidden: Tensor, **kwargs: Any) -> Tensor:
    """Run a head's forward on weights that ZeRO-3 may have freed."""
    with gathered(module):
        return project(hidden, **kwargs)


@contextlib.contextmanager
def _deferred_on_ranks(shards: Any, state: Forward) -> Iterator[None]:
    """Within the context, a head whose rows lie on ranks returns `DeferredLogits` of this rank's rows."""
    module, replaced = shards.module, own_attribute(shards.module, "forward")
    project = replaced or shards.project  # that of tensor parallelism gathers logits itself

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
