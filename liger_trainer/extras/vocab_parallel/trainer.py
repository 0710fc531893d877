"""`vocab_parallel`: an output head whose rows stay on their ranks while the loss is computed, under accelerate's FSDP2.

accelerate puts the head into one unit with the final norm, or into the root's, either of which gathers it. So the head
gets its own unit while accelerate prepares the model.
"""

import functools
from typing import Any

from accelerate.utils import fsdp_utils
from torch import nn

from ...common.console import announce
from ...common.replacements import Replacements
from ...errors import ConfigError
from ...losses.model_parts import head_rows, output_module
from ...patching.patcher import base_of
from ...plugins import TrainerPlugin
from ...teachers.model import ModelTeacher
from ...trainers.host import TrainerHost
from ...trainers.options import ALWAYS, AUTO, NEVER
from .heads import is_tensor_parallel, mark_sharded, why_gathered


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
