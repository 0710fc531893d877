"""What of torch (2.8 to 2.14), besides its modules, has no promise: C functions, operators, optimizers, FSDP2.

Where torch has a public function for the same, a comment says why it does not serve.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import (  # torch's own tests and tools are the only ones that may import these
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .code_objects import name_in_source, without_decorator
from .modules import without_some_hooks

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode", "TorchDispatchMode",
    "tree_leaves", "tree_map",
]  # fmt: skip

_C: Any = torch._C  # its stubs lack what is used here

# Operators that torch calls below its public functions

# What `scaled_dot_product_attention` and `varlen_attn` call; the functions around it cost the host more at each layer.
FLASH_ATTENTION: Any = torch.ops.aten._flash_attention_forward
CAST: Any = torch.ops.aten._to_copy.default  # what `x.to(dtype)` is once torch has dispatched it


def grouped_products() -> list[tuple[Any, str]]:
    """Return (module, name) of each function by which transformers multiplies the matrices of experts."""
    # transformers calls the public one where torch has it, else the other
    places = ((F, "grouped_mm"), (torch, "_grouped_mm"))
    return [(place, name) for place, name in places if hasattr(place, name)]


# Tensors


def version_of(tensor: Tensor) -> int | None:
    """Return a number that changes when a tensor is written into; None where nothing is counted: in inference mode."""
    return None if tensor.is_inference() else tensor._version


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return _C._is_alias_of(a, b)


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return (device, dtype) of the arguments of `Tensor.to`, which has many forms; None for what is not given."""
    device, dtype, _, _ = _C._nn._parse_to(*args, **kwargs)
    return device, dtype


def tensor_without_memory(kind: type, shape: Any, dtype: torch.dtype, device: Any) -> Any:
    """Return a tensor of a subclass with a shape, a dtype and a device, and no memory."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # pyright: ignore


# Within this context a subclass's `__torch_function__` is not called, and results are not made of the subclass. torch's
# notes on extending it use the same.
without_subclasses = _C.DisableTorchFunctionSubclass


# Autograd


def in_backward() -> bool:
    """Whether this thread runs a backward, in which a checkpoint may compute a forward a second time."""
    return _C._current_graph_task_id() != -1  # the engine numbers its tasks from 0


def is_transformed() -> bool:
    """Whether one of torch.func's transforms runs, such as grad or vmap, which no kernel goes through."""
    return not torch.compiler.is_compiling() and _C._are_functorch_transforms_active()


def checkpoint_hook() -> Any:
    """Return the hook by which the innermost checkpoint takes what autograd saves, if it is a non-reentrant one."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks and name_in_source(hooks[0]).startswith("_checkpoint_hook.") else None


# Optimizers. `torch._foreach_*` updates many tensors in one launch: torch's own optimizers are written with them.


def add_to_all(tensors: list[Tensor], number: float) -> None:
    """Add a number to each of many tensors."""
    torch._foreach_add_(tensors, number)


def subtract_from_all(tensors: list[Tensor], number: Tensor) -> None:
    """Subtract a number on the device from each of many tensors."""
    torch._foreach_sub_(tensors, [number] * len(tensors))  # one tensor for all would be read by the host


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each of many tensors by a number on the device."""
    torch._foreach_mul_(tensors, factor)


def adamw_state(optimizer: Any, group: dict[str, Any]) -> tuple[list[Tensor], ...]:
    """Return (parameters, gradients, means, squares, steps) of a group that has gradients.

    torch makes what is not there yet, so that a checkpoint has its names and shapes.
    """
    params, grads, means, squares, steps = [], [], [], [], []
    optimizer._init_group(group, params, grads, means, squares, [], steps)
    return params, grads, means, squares, steps


def has_step_hooks(optimizer: Any) -> bool:
    """Whether hooks run before or after an optimizer's step: its own, or those of all optimizers."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def step_without_hooks(kind: Any) -> Any:
    """Return an optimizer class's step as it was before torch has put the calls of hooks around it."""
    return without_decorator(kind.step) if getattr(kind.step, "hooked", False) else kind.step


def skips_step_on_device(optimizer: Any) -> bool:
    """Whether an optimizer leaves its step out where `found_inf`, a tensor, is not 0, as GradScaler asks it to."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


# Engines

# nn.DataParallel calls it on each module that it copies to another GPU.
REPLICATE = "_replicate_for_data_parallel"


def mixed_precision_of(unit: Any) -> Any:
    """Return the `MixedPrecisionPolicy` of an FSDP2 unit. It was given to `fully_shard`, perhaps by somebody else."""
    return unit._get_fsdp_state()._mp_policy


@contextlib.contextmanager
def without_gathering(unit: Any) -> Iterator[None]:
    """Within the context, calling an FSDP2 unit neither gathers its weights nor frees them.

    There is no public switch: `set_reshard_after_forward` keeps what is gathered, but gathers it.
    """
    state = unit._get_fsdp_state()
    own = {handle.id for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle)}
    with without_some_hooks([unit], lambda key, hook: key in own):
        yield
