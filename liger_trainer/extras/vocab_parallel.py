"""Output heads that stay sharded by rows, that is by vocabulary, over the ranks while a loss is computed.

Two engines shard so: FSDP2, where a head is a separate unit and was marked by `mark_sharded`, and transformers'
tensor parallelism (`tp_plan`), whose heads are colwise. What the loss makes of it is in docs/extras.md.

An FSDP2 unit gathers its weight in a hook before its forward. While logits are deferred, these two hooks are passed
over: the loss reads this rank's rows from the sharded parameter, and autograd adds the gradient, which is complete, to
that parameter's own. FSDP2 then finds nothing to reduce. In every other forward the unit gathers as ever.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import fsdp_utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..common.console import announce
from ..common.replacements import Replacements
from ..compat.modules import has_backward_hooks
from ..compat.recognitions import tensor_parallel_style
from ..compat.torch_internals import mixed_precision_of, without_gathering
from ..errors import ConfigError
from ..kernels.types import RowSelection, VocabParallel
from ..losses.model_parts import Head, head_rows, output_module
from ..patching.patcher import base_of
from ..plugins import KEEPS_ROWS, TrainerPlugin
from ..teachers.model import ModelTeacher
from ..trainers.host import TrainerHost
from ..trainers.options import ALWAYS, AUTO, NEVER


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


# `vocab_parallel` for the trainers, under accelerate's FSDP2, which puts the head into one unit with the final norm, or
# into the root's, either of which gathers it. So the head gets its own unit while accelerate prepares the model.


def shard_head(trainer: TrainerHost, wanted: str) -> None:
    """Have the head of a trainer's model stay sharded, if `wanted` says so and it can.

    Raises:
        ConfigError: wanted is "always", and something is in the way.
    """
    model = base_of(trainer.model)
    # an earlier trainer of this model may have left its mark
    mark_sharded(model, False)
    if wanted == NEVER or is_tensor_parallel(output_module(model)):
        return
    reason = _reason(trainer, model)
    if reason is None and wanted == AUTO:
        reason = _costs_more(trainer, model)
    if reason is None:
        mark_sharded(model)
        _prepare_apart(trainer.accelerator, output_module(model))
        announce(f"output head: its {head_rows(model)} rows stay on {trainer.accelerator.num_processes} ranks.")
    elif wanted == ALWAYS:
        raise ConfigError(f"vocab_parallel: always, but {reason}. Set it to auto or never.")
    elif trainer.is_fsdp_enabled:
        announce(f"output head: gathered, since {reason}.")


def _reason(trainer: TrainerHost, model: nn.Module) -> str | None:
    """Return why the head must be gathered, None if nothing is in the way."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if not trainer.is_fsdp_enabled or plugin is None or plugin.fsdp_version != 2:
        return "this training is not on FSDP2"
    # rows over one dimension only: the loss sums over a single group
    mesh = getattr(trainer.accelerator, "torch_device_mesh", None)
    if mesh is not None and sum(size > 1 for size in mesh.shape) > 1:
        return f"the ranks form a mesh of several dimensions ({mesh})"
    if plugin.cpu_offload not in (None, False) and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        return "its weights are offloaded to the CPU"
    if trainer.args.torch_compile:
        return "torch_compile cannot trace the collectives of its loss"
    return why_whole_head(trainer) or why_gathered(model)


def why_whole_head(trainer: TrainerHost) -> str | None:
    """Return why a trainer's loss needs the output head as a whole, None if its rows may stay on their ranks."""
    teaching = getattr(trainer, "teaching", None)
    if teaching is not None and not isinstance(teaching, ModelTeacher):
        return "only a single teacher model in this process is compared with a head whose rows lie on the ranks"
    if teaching is not None:
        plan = trainer.args.loss_plan()
        if plan.other_tokens or plan.of("hidden"):
            return "uld, alm and the losses on hidden states need whole models"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func reads logits"
    return "sequences are sharded over the ranks" if trainer.shards_sequences() else None


def _costs_more(trainer: TrainerHost, model: nn.Module) -> str | None:
    """Return why gathering the head moves fewer numbers, None where it moves more.

    A head of V rows is all-gathered and its gradient reduce-scattered; without, so are the hidden states of N tokens of
    each of W ranks, and their gradients in fp32: 2 V against 3 W N numbers of the hidden size.
    """
    args, ranks, rows = trainer.args, trainer.accelerator.num_processes, head_rows(model)
    if not args.max_length:
        return "max_length is not set, so the tokens of a batch are not known"
    # at most: rows may be shorter
    tokens = ranks * args.per_device_train_batch_size * args.max_length
    # the smaller of both, by the docstring's count
    if 3 * tokens > 2 * rows:
        return f"a batch of {tokens} tokens on all ranks is more to move than its {rows} rows"
    return None


def _prepare_apart(accelerator: Any, head: nn.Module | None) -> None:
    """Have accelerate give the head its own unit whenever it prepares the model."""
    if not hasattr(fsdp_utils, "fsdp2_prepare_auto_wrap_policy"):
        raise ConfigError(
            "vocab_parallel: this release of accelerate does not say which modules become FSDP2 units. "
            "Set vocab_parallel to never, or take the release that pyproject.toml names."
        )
    # the attribute of this accelerator, not of its class: others stay as they are
    prepare, policy_of = accelerator.prepare, fsdp_utils.fsdp2_prepare_auto_wrap_policy

    def with_head(plugin: Any, model: nn.Module) -> Any:
        policy = policy_of(plugin, model)
        # the head as well as what accelerate's policy says
        return lambda module: module is head or (policy is not None and policy(module))

    @functools.wraps(prepare)
    def prepare_apart(*args, **kwargs):
        replaced = Replacements()
        # accelerate asks for the policy while it prepares, and has no hook for it
        replaced.set(fsdp_utils, "fsdp2_prepare_auto_wrap_policy", with_head)
        try:
            return prepare(*args, **kwargs)
        finally:
            replaced.undo()

    accelerator.prepare = prepare_apart


class VocabParallelPlugin(TrainerPlugin):
    """`vocab_parallel` for the trainers. It also takes off the mark of an earlier trainer that had it."""

    def after_init(self, trainer: TrainerHost) -> None:
        shard_head(trainer, getattr(trainer.args, "vocab_parallel", NEVER))


PLUGIN = VocabParallelPlugin()
