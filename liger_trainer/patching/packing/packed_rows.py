"""Models in which the documents of a packed row would see one another, which are refused.

Attention that goes through transformers' interface keeps documents apart. Other layers that mix tokens (state spaces,
linear attention, convolutions) do so only where their kernels are told the documents. Which families do has been
measured: tests/patching/test_document_leaks.py changes one document and looks at the others.
"""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...compat.models import attention_implementation
from ...compat.recognitions import is_guarded_kernel
from ...errors import ConfigError
from .packed_attention import NAMES, attention_configs, why_not_packed
from .token_mixers import missing_for

_ATTENTION = (
    "attention", "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "minimax_m3_sparse",
    "deepseek_sparse_attention", "moe",
)  # fmt: skip
# Families whose own attention, which doesn't go through the interface, starts from 0 where positions do.
_APART = ("codegen", "gpt_neo", "gpt_neox_japanese", "gptj")
# Families that hand the documents to the kernels of their other layers. transformers (5.23, not yet 5.17) refuses to
# run packed rows without these kernels. Not Qwen4-Exp, whose n-grams and dilated convolutions go across documents.
_HAND_OVER = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2",
)  # fmt: skip
# Families whose masks are made without positions: only lengths tell their attention where documents end.
_BLIND = (
    "afmoe", "bert", "bert-generation", "biogpt", "camembert", "data2vec-text", "electra", "ernie", "gpt_oss", "opt",
    "roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip


@dataclass(frozen=True)
class PackedRows:
    """Rows in which several documents stand.

    Attributes:
        by_lengths: attention reads them by lengths, where the model can have it.
        certain: there are such rows; else there may be, as a data collator of the user's own makes the batches.
        sliced: of each row, a rank has a slice.
    """

    by_lengths: bool = True
    certain: bool = True
    sliced: bool = False


def patch_packed_attention(model: Any, record: Any, rows: PackedRows | None) -> None:
    """Prepare a model, without PEFT around it, for packed rows; None: there are none.

    Args:
        record: `Patched`, of a patched model; None: without one, the model's own attention stays.

    Raises:
        ConfigError: documents in one row would see one another, or that is not known. The message says why.
    """
    if rows is None:
        return
    by_lengths = rows.by_lengths and record is not None and why_not_packed(model) is None
    reason = why_documents_mix(model, by_lengths, trusted=not rows.by_lengths) if rows.certain else None
    if reason is not None:
        raise ConfigError(
            f"{type(model).__name__}: documents that are packed into one row would see one another: {reason}. Set "
            "`packing: false` and `padding_free: false`."
        )
    if record is not None:
        record.pack_attention(rows.sliced) if rows.by_lengths else record.unpack_attention()


def why_documents_mix(model: Any, by_lengths: bool, trusted: bool = False) -> str | None:
    """Say why documents in one row would see one another in a model, None where they would not.

    Args:
        by_lengths: its attention is computed by lengths.
        trusted: an attention that is none of transformers', and cannot be checked, counts as sound.
    """
    config = model.config.get_text_config(decoder=True)
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "its forward takes no position_ids, which would start at 0 in each document"
    kinds = other_layers(model, config)
    if kinds:
        return _why_layers_mix(model, config, ", ".join(kinds), by_lengths)
    trusted = trusted and not type(model).__module__.startswith("transformers.")
    if not attention_configs(model) and config.model_type not in _APART and not trusted:
        return "its attention does not go through transformers' interface (ALL_ATTENTION_FUNCTIONS)"
    name = attention_implementation(config)
    if config.model_type in _BLIND and name in NAMES and not by_lengths:
        return f"its {name} attention ignores positions in its mask; `attention: auto` does not"
    return None


def reads_documents(model: Any) -> bool:
    """Whether a patched model, without PEFT around it, reads the documents of packed rows by their lengths, at once.

    Eager attention, as models with softcaps or sinks have it, counts as one that does not: it is tried when it runs.
    """
    names = {attention_implementation(config) for config in attention_configs(model)}
    return names == {NAMES["sdpa"]} and why_documents_mix(model, by_lengths=True) is None


def other_layers(model: Any, config: Any) -> list[str]:
    """Return the types of layers, or of modules, that mix tokens by something else than attention."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = {kind for kind in types if kind not in _ATTENTION}
    return sorted(others or {type(module).__name__ for module in _convolving(model, config.num_hidden_layers)})


def _convolving(model: Any, count: int) -> Iterator[nn.Module]:
    """Yield the modules of the decoder's layers that hold a convolution over tokens."""
    lists = [m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    for module in (module for layers in lists for module in layers.modules()):
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            yield module


def _why_layers_mix(model: Any, config: Any, kinds: str, by_lengths: bool) -> str | None:
    # functions of modelling files for which transformers takes a kernel, or refuses packed rows
    files = [sys.modules[name] for name in {type(m).__module__ for m in model.modules()} if name in sys.modules]
    guarded = [value for file in files for value in vars(file).values() if is_guarded_kernel(value)]
    if config.model_type not in _HAND_OVER or not guarded:
        return f"its layers of type {kinds} take no lengths of documents"
    missing = sorted({lack for f in guarded if (lack := missing_for(model, f, by_lengths)) is not None})
    if missing:
        return (
            f"its layers of type {kinds} keep them apart with kernels that are not installed ({', '.join(missing)}, of "
            "causal_conv1d, fla-core or mamba_ssm; `pip install fla-core einops` is enough for gated delta rules in a "
            "patched model)"
        )
    return None
