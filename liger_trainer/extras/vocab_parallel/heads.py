"""Output heads that stay sharded by rows, that is by vocabulary, over the ranks while a loss is computed.

Two engines shard so: FSDP2, where a head is a separate unit and was marked by `mark_sharded`, and transformers'
tensor parallelism (`tp_plan`), whose heads are colwise. What the loss makes of it is in docs/extras.md.

An FSDP2 unit gathers its weight in a hook before its forward. While logits are deferred, these two hooks are passed
over: the loss reads this rank's rows from the sharded parameter, and autograd adds the gradient, which is complete, to
that parameter's own. FSDP2 then finds nothing to reduce. In every other forward the unit gathers as ever.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...compat.modules import has_backward_hooks
from ...compat.recognitions import tensor_parallel_style
from ...compat.torch_internals import mixed_precision_of, without_gathering
from ...errors import ConfigError
from ...kernels.types import RowSelection, VocabParallel
from ...losses.model_parts import Head, head_rows, output_module
from ...plugins import KEEPS_ROWS


def mark_sharded(model: nn.Module, keep: bool = True) -> None:
    """Mark the head of a model, whose loss will read its rows from the ranks once it is a sharded FSDP2 unit.

    keep: False takes off the mark that an earlier trainer has left.
    """
    head = output_module(model)
    if head is not None:
        setattr(head, KEEPS_ROWS, keep)


def kept_sharded(model: nn.Module) -> bool:
    """Whether the head of a model is marked by `mark_sharded`."""
    return getattr(output_module(model), KEEPS_ROWS, False)


def why_gathered(model: nn.Module) -> str | None:
    """Return why the head of a model must be gathered, None if nothing is in the way."""
    head = output_module(model)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"its output head is a {type(head).__name__}, and no plain linear layer"
    # they would see gradients of a forward that does not run
    if has_backward_hooks(head):
        return "its output head has backward hooks"
    get = getattr(model, "get_input_embeddings", lambda: None)
    if getattr(get(), "weight", None) is head.weight:
        return "its embeddings are tied to the output head, and are gathered in any case"
    return None


def shard_teacher_head(student: nn.Module, teacher: nn.Module, **how: Any) -> None:
    """Give a teacher's head a separate FSDP2 unit, as the student's is kept sharded, so that it need not be gathered.

    Heads of unequal numbers of rows would lie differently on the ranks, so such a teacher's is gathered.

    Args:
        how: the arguments of `fully_shard`.
    """
    if why_gathered(teacher) is None and head_rows(teacher) == head_rows(student):
        head: Any = output_module(teacher)
        mark_sharded(teacher)
        fully_shard(head, **how)


@dataclass(frozen=True)
class ShardedHead:
    """A head whose rows lie on the ranks, in the forward that is running."""

    module: Any
    tokens: str  # see `VocabParallel`

    @classmethod
    def of(cls, module: Any) -> "ShardedHead | None":
        """Return the head if its rows are to stay where they are, else None.

        Raises:
            ConfigError: it is marked by `mark_sharded`, but is not sharded in a way that its loss can use.
        """
        if module is None:
            return None
        if is_tensor_parallel(module):
            return cls(module, "replicated")
        if not getattr(module, KEEPS_ROWS, False):
            return None
        unit = isinstance(module, FSDPModule)
        if unit:
            # a forward of before, without a backward, may have left it gathered
            module.reshard()
        weight = module.get_parameter("weight")
        if not isinstance(weight, DTensor):
            return None  # one process, or DDP
        if not unit or not _by_rows(weight):
            raise ConfigError(
                f"vocab_parallel: the output head ({type(module).__name__}) should be a separate FSDP2 unit that is "
                f"sharded by rows over one dimension of a mesh. It has placements {weight.placements} on "
                f"{weight.device_mesh}. Set vocab_parallel to never."
            )
        return cls(module, "sharded")

    @property
    def parallel(self) -> VocabParallel:
        weight = self.module.weight
        mesh, rows = weight.device_mesh, weight.shape[0]
        first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)  # DTensor's chunks
        averaged = self.tokens == "sharded"  # as FSDP2 reduces every other gradient
        return VocabParallel(mesh.get_group(), first, rows, self.tokens, averaged)

    def start_counting_rows(self, rows: RowSelection | None) -> None:
        """Start telling the ranks how many labelled rows each has, before the backbone runs, if the loss will ask."""
        if rows is not None and self.tokens == "sharded" and rows.device == self.module.weight.device:
            rows.share(self.parallel.group)

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's rows of (weight, bias), differentiable, in the dtype that the engine would gather in."""
        weight, bias = self.module.weight, self.module.bias
        return self._local(weight), None if bias is None else self._local(bias)

    @property
    def _dtypes(self) -> Any:
        """Return the `MixedPrecisionPolicy` of the FSDP2 unit, None in tensor parallelism."""
        return mixed_precision_of(self.module) if self.tokens == "sharded" else None

    def _local(self, parameter: DTensor) -> Tensor:
        local, dtypes = parameter.to_local(), self._dtypes
        if dtypes is None or torch.is_autocast_enabled(local.device.type):
            return local
        # FSDP2's mixed precision casts what it gathers; a shard that is not gathered is cast here
        return local.to(dtypes.param_dtype or local.dtype)

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return hidden states as the module's own forward would get them from the engine's hooks."""
        dtypes = self._dtypes
        if isinstance(hidden, DTensor):  # of sequence parallelism
            return hidden.redistribute(placements=[Replicate()]).to_local()
        if dtypes is None or not dtypes.cast_forward_inputs:
            return hidden
        return hidden.to(dtypes.param_dtype or hidden.dtype)

    def whole(self) -> Head:
        """Return the whole head of tensor parallelism, whose gradient is the same on all ranks.

        Raises:
            ConfigError: it is FSDP2's.
        """
        if self.tokens == "sharded":
            raise ConfigError(
                "This loss reads a whole output head, but the head's rows stay on their ranks. Set vocab_parallel to "
                "never."
            )
        weight, bias = self.module.weight, self.module.bias
        return Head(weight.full_tensor(), None if bias is None else bias.full_tensor())

    def project(self, hidden: Tensor) -> Tensor:
        """Return real logits (..., V) from a head of FSDP2, for whoever reads them: all ranks must.

        Raises:
            ConfigError: they are to have a gradient.
        """
        if torch.is_grad_enabled():
            raise ConfigError(
                f"The logits of {type(self.module).__name__} are computed in training, but its rows stay on their "
                "ranks. Set vocab_parallel to never."
            )
        weight, bias = self.module.weight.full_tensor(), self.module.bias
        bias = None if bias is None else bias.full_tensor().to(hidden.dtype)
        return F.linear(hidden, weight.to(hidden.dtype), bias)

    def without_gathering(self) -> contextlib.AbstractContextManager[None]:
        """Return a context within which calling the module does not gather it."""
        return without_gathering(self.module) if self.tokens == "sharded" else contextlib.nullcontext()


def is_tensor_parallel(module: nn.Module | None) -> bool:
    """Whether transformers' tensor parallelism has sharded a linear head by rows, its hidden states replicated."""
    if not isinstance(module, nn.Linear) or tensor_parallel_style(module) != "ColwiseParallel":
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, DTensor) and _by_rows(weight)


def _by_rows(weight: DTensor) -> bool:
    return weight.device_mesh.ndim == 1 and tuple(weight.placements) == (Shard(0),)
