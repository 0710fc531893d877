"""Rows that several ranks share, each with a slice: what is refused, since it would be computed otherwise.

`sp_size` is DeepSpeed's Ulysses, which accelerate and Trainer drive (`ParallelismConfig`): its loader cuts the rows of
a training into slices of `input_ids`, `position_ids`, `shift_labels` and whatever else has a value for each token.
Evaluations read whole rows, each rank others.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..compat.deepspeed import sequence_parallel_group, zero3_averages_over_all_ranks
from ..compat.models import attention_implementation
from ..errors import ConfigError
from ..patching.packing.packed_attention import OF_SLICES, attention_configs
from ..patching.packing.packed_rows import other_layers
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


# Attention over rows of which each rank has a slice: Ulysses (Jacobs et al. 2023, arXiv:2309.14509), by DeepSpeed.
#
# Around attention, the ranks exchange slices of all heads for whole rows of some heads. DeepSpeed puts that in the
# place of an attention function of transformers, with the heads and the batch of the one model that it prepares, and in
# train mode only. A teacher may have other heads, and is in eval mode: it would silently read slices. So `SlicedRows`
# lends it a separate exchange while it reads a batch of slices.


def sliced_teacher(model: Any, name: str) -> "SlicedRows":
    """Return what has a frozen teacher read whole rows. Raise ConfigError where it would not."""
    reason = why_not_sliced(model)
    if reason is not None:
        raise ConfigError(f"Sequence parallelism (sp_size > 1), {name}: {reason}.")
    return SlicedRows(model)


def why_not_sliced(model: Any) -> str | None:
    """Say why a model, without PEFT around it, would not see whole rows as it does on one rank; None if it would.

    Ulysses hands causal attention no mask: what only a mask says is lost.
    """
    configs = attention_configs(model)
    if not configs:
        return "its attention does not go through transformers' interface (ALL_ATTENTION_FUNCTIONS)"
    kinds = other_layers(model, model.config.get_text_config(decoder=True))
    if kinds:
        return f"its layers of type {', '.join(kinds)} mix tokens besides attention, and would see slices"
    for config in configs:
        name, windows = attention_implementation(config), _windows(config)
        flash = name.startswith("flash_attention")
        if not flash and name not in ("sdpa", OF_SLICES):
            return f"its attention is {name}: load it with attn_implementation sdpa or flash_attention_2"
        if windows and not (flash and windows == {"sliding_attention"}):
            return f"the windows of its attention ({', '.join(sorted(windows))}) are told by a mask, which is dropped"
    return None


def implementations_of(model: Any) -> set[str]:
    """Return the names under which a model asks transformers for its causal attention."""
    return {attention_implementation(config) for config in attention_configs(model)}


def _windows(config: Any) -> set[str]:
    """Return the types of attention that see less than all tokens before one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        return {"sliding_attention"}
    return {kind for kind in kinds or () if kind not in ("attention", "full_attention")}


class SlicedRows:
    """The attention of a frozen model over rows of which each rank has a slice.

    Args:
        model: a model in which `why_not_sliced` finds none, before DeepSpeed prepares another one.
    """

    def __init__(self, model: Any):
        self._own = {name: ALL_ATTENTION_FUNCTIONS[name] for name in implementations_of(model)}
        self._exchanges: dict[tuple, Any] = {}

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within the context, attention of the model sees whole rows. All ranks of a row enter it together."""
        before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in self._own}
        for name, own in self._own.items():
            ALL_ATTENTION_FUNCTIONS[name] = functools.partial(self._attend, own)
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS.update(before)

    def _attend(
        self, own: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `own` over whole rows, of slices (rows, heads, length, width)."""
        shape = (own, query.shape[0], query.shape[1], key.shape[1], query.shape[3])
        if shape not in self._exchanges:
            self._exchanges[shape] = _exchange(*shape)
        return self._exchanges[shape](module, query, key, value, None, **how)


def _exchange(own: Any, rows: int, heads: int, key_heads: int, width: int) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )

    return UlyssesSPAttentionHF(
        own, batch_size=rows, attn_head_count=heads, attn_head_size=width, kv_head_count=key_heads,
        num_hidden_layers=1, process_group=sequence_parallel_group(), seq_length_is_variable=True,
    )  # fmt: skip
