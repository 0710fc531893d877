"""Attention over rows of which each rank has a slice: Ulysses (Jacobs et al. 2023, arXiv:2309.14509), by DeepSpeed.

Around attention, the ranks exchange slices of all heads for whole rows of some heads. DeepSpeed puts that in the place
of an attention function of transformers, with the heads and the batch of the one model that it prepares, and in train
mode alone. A teacher may have other heads, and is in eval mode: it would silently read slices. So `SlicedRows` lends it
an exchange of its own while it reads a batch of slices.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .document_leaks import other_layers
from .packed_attention import OF_SLICES, attention_configs


def obstacle_to_slices(model: Any) -> str | None:
    """Say why a model, without PEFT around it, would not see whole rows as it does on one rank; None if it would.

    Ulysses hands causal attention no mask: what only a mask says is lost.
    """
    configs = attention_configs(model)
    if not configs:
        return "its attention does not go through transformers' interface (ALL_ATTENTION_FUNCTIONS)"
    kinds = other_layers(model, model.config.get_text_config(decoder=True))
    if kinds:
        return f"its layers of type {', '.join(kinds)} mix tokens beside attention, and would see slices"
    for config in configs:
        name, windows = config._attn_implementation, _windows(config)
        flash = name.startswith("flash_attention")
        if not flash and name not in ("sdpa", OF_SLICES):
            return f"its attention is {name}: load it with attn_implementation sdpa or flash_attention_2"
        if windows and not (flash and windows == {"sliding_attention"}):
            return f"the windows of its attention ({', '.join(sorted(windows))}) are told by a mask, which is dropped"
    return None


def implementations_of(model: Any) -> set[str]:
    """Return the names under which a model asks transformers for its causal attention."""
    return {config._attn_implementation for config in attention_configs(model)}


def _windows(config: Any) -> set[str]:
    """Return the types of attention that see less than all tokens before one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        return {"sliding_attention"}
    return {kind for kind in kinds or () if kind not in ("attention", "full_attention")}


class SlicedRows:
    """The attention of a frozen model over rows of which each rank has a slice.

    Args:
        model: a model in which `obstacle_to_slices` finds none, before DeepSpeed prepares another one.
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
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    return UlyssesSPAttentionHF(
        own, batch_size=rows, attn_head_count=heads, attn_head_size=width, kv_head_count=key_heads,
        num_hidden_layers=1, process_group=groups._get_sequence_parallel_group(), seq_length_is_variable=True,
    )  # fmt: skip
