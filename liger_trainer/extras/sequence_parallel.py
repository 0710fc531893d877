"""Rows that several ranks share, each with a slice: what is refused, since it would be computed otherwise.

`sp_size` is DeepSpeed's Ulysses, which accelerate and Trainer drive (`ParallelismConfig`): its loader cuts the rows of
a training into slices of `input_ids`, `position_ids`, `shift_labels` and whatever else has a value for each token.
Evaluations read whole rows, each rank others.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..compat.deepspeed import zero3_averages_over_all_ranks
from ..errors import ConfigError
from ..patching.packing.packed_attention import OF_SLICES
from ..patching.packing.packed_rows import implementations_of, why_not_sliced
from ..patching.patcher import base_of
from ..trainers.host import TrainerHost


def check_slices(trainer: TrainerHost) -> None:
    """Raise ConfigError where ranks that share rows would not compute what one process does of whole rows."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.cp_enabled:
        raise ConfigError(
            "Context parallelism (cp_size > 1) is not supported: no test has its loss. For long rows over several GPUs "
            "use sequence parallelism (sp_size) with DeepSpeed."
        )
    if trainer.shards_sequences():
        reason = _why_engine(trainer) or _why_rows(trainer) or why_not_sliced(base_of(trainer.model))
        if reason is not None:
            raise ConfigError(f"Sequence parallelism (sp_size > 1): {reason}.")


def _why_engine(trainer: TrainerHost) -> str | None:
    if not trainer.is_deepspeed_enabled:
        return "only DeepSpeed cuts rows into slices. Set deepspeed, or launch with a file of accelerate for it"
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )

    if "disable_in_eval" not in inspect.signature(UlyssesSPAttentionHF.register_with_transformers).parameters:
        return "this DeepSpeed would mix the rows of evaluations (no disable_in_eval). Install a newer one"
    if not trainer.args.average_tokens_across_devices:
        return "the tokens of a row's slices are counted together. Leave average_tokens_across_devices at true"
    return _why_zero3(trainer) if is_deepspeed_zero3_enabled() else None


def _why_zero3(trainer: TrainerHost) -> str | None:
    zero = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if not zero.get("reduce_scatter", True):
        return (
            "without reduce_scatter, ZeRO-3 averages large gradients over the ranks and adds small ones up. Leave "
            "reduce_scatter at true"
        )
    if not zero3_averages_over_all_ranks():  # which `ranks_summed` counts on
        return "this DeepSpeed's ZeRO-3 sums gradients in a way that no test has seen. Use ZeRO-2, or DeepSpeed 0.19.8"
    return None


def ranks_summed(trainer: TrainerHost) -> int:
    """Return the number of ranks whose gradients DeepSpeed sums; it averages over the rest.

    They are the ranks with slices of a row. ZeRO-3 averages over these too, as `reduce_scatter_coalesced` of DeepSpeed
    0.19 knows no slices.
    """
    return 1 if is_deepspeed_zero3_enabled() else trainer.get_sp_size()


def _why_rows(trainer: TrainerHost) -> str | None:
    ranks = trainer.get_sp_size()
    if type(trainer.data_collator) is not DataCollatorForLanguageModeling:
        return "rows are text, padded on the right by TRL's own collator, since attention gets no mask"
    if trainer.padding_free and trainer.args.per_device_train_batch_size > 1:
        return "documents lie end to end in one row. Set per_device_train_batch_size to 1, and a larger max_length"
    if isinstance(trainer.model, PeftModel) and any(c.is_prompt_learning for c in trainer.model.peft_config.values()):
        return "prompt learning would put its tokens in front of each slice. Train adapters of layers, such as LoRA's"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss of a mixture of experts would be of slices. Set router_aux_loss_coef to 0"
    multiple = trainer.data_collator.pad_to_multiple_of
    if not multiple or multiple % ranks:
        return f"rows are cut into {ranks} slices of one length. Set pad_to_multiple_of to a multiple of {ranks}"
    return None


def slice_documents(trainer: TrainerHost) -> None:
    """Have rows in which several documents stand cut into slices.

    Raises:
        ConfigError: the documents would see one another.
    """
    if not trainer.padding_free:
        return
    handler = trainer.accelerator.parallelism_config.sp_handler
    packed = implementations_of(base_of(trainer.model)) == {OF_SLICES}
    if not packed or handler.sp_attn_implementation not in ("sdpa", OF_SLICES):
        raise ConfigError(
            "Sequence parallelism (sp_size > 1): packed documents would see one another. Set `attention: auto`, and "
            "sdpa as the model's attn_implementation and as sp_attn_implementation; or set `packing: false` and "
            "`padding_free: false`."
        )
    handler.sp_attn_implementation = OF_SLICES  # DeepSpeed compares it with the model's
    trainer.data_collator = DocumentsByPositions(trainer.data_collator)


@dataclass
class DocumentsByPositions:
    """A collator around the one of packed rows. It leaves what has no value for each token to the positions."""

    collator: Any

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(rows)
        shape = batch["input_ids"].shape
        return {name: value for name, value in batch.items() if getattr(value, "shape", None) == shape}
