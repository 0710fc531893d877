"""The published shapes of the models that configurations name: only config.json, so that memory can be estimated
without the hub."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": True}
_GRANITE4 = {
    "vocab_size": 100352, "position_embedding_type": "rope", "num_local_experts": 0, "num_experts_per_tok": 0,
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 40,
}  # fmt: skip
_SMALL_VISION = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}
_VISION = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
_SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 896, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    return {**sizes, "num_hidden_layers": layers, "num_attention_heads": heads, **more}


def _qwen3_5(hidden: int, intermediate: int, layers: int, heads: int, vision: dict[str, int], **more: Any) -> Any:
    """Qwen3.5, with its vision tower. transformers' defaults are the 9B's."""
    text = _sizes(hidden, intermediate, layers, heads, num_key_value_heads=heads // 4, **more)
    text["tie_word_embeddings"] = tied = hidden < 4096
    return "qwen3_5", {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": tied, "text_config": text,
        "vision_config": {**vision, "out_hidden_size": hidden},
    }  # fmt: skip


def _gemma4(hidden: int, intermediate: int, layers: int, windows: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """Gemma 4 with its towers, whose sizes are transformers' defaults; so many windows to a layer that sees all."""
    text = _sizes(
        hidden, intermediate, layers, 8, vocab_size=262144, head_dim=256, sliding_window=512,
        final_logit_softcapping=30.0, **more,
    )  # fmt: skip
    text["layer_types"] = [*["sliding_attention"] * windows, "full_attention"] * (layers // (windows + 1))
    return "gemma4", {
        "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, "audio_config": {},
        "vision_config": {"use_clipped_linears": True},
    }  # fmt: skip


def _lfm2(feed_forward: int, layers: int, attention: tuple[int, ...], adjusts: bool) -> dict[str, Any]:
    sizes = _sizes(2048, feed_forward, layers, 32, num_key_value_heads=8, vocab_size=65536)
    return {**sizes, "full_attn_idxs": list(attention), "block_auto_adjust_ff_dim": adjusts}


def _ministral3(hidden: int, intermediate: int, layers: int, tied: bool) -> tuple[str, dict[str, Any]]:
    """Ministral 3, with Mistral Small's vision tower, transformers' default."""
    text = _sizes(
        hidden, intermediate, layers, 32, num_key_value_heads=8, head_dim=128, vocab_size=131072,
        model_type="ministral3", tie_word_embeddings=tied,
    )  # fmt: skip
    return "mistral3", {
        "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": tied,
    }  # fmt: skip


# model id: (model type, its sizes). SmolLM3's are the defaults of transformers' class.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": ("qwen3", {**_QWEN3, **_sizes(1024, 3072, 28, 16)}),
    "Qwen/Qwen3-1.7B": ("qwen3", {**_QWEN3, **_sizes(2048, 6144, 28, 16)}),
    "Qwen/Qwen3-4B": ("qwen3", {**_QWEN3, **_sizes(2560, 9728, 36, 32)}),
    "Qwen/Qwen3-8B": ("qwen3", {**_QWEN3, **_sizes(4096, 12288, 36, 32), "tie_word_embeddings": False}),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", {**_LLAMA3, **_sizes(2048, 8192, 16, 32, head_dim=64)}),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", {**_LLAMA3, **_sizes(3072, 8192, 28, 24, head_dim=128)}),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "llama",
        {**_LLAMA3, **_sizes(4096, 14336, 32, 32, head_dim=128), "tie_word_embeddings": False},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        "mistral",
        _sizes(4096, 14336, 32, 32, num_key_value_heads=8, head_dim=128, vocab_size=32768, sliding_window=None),
    ),
    "ibm-granite/granite-4.0-1b": (
        "granitemoehybrid",
        {
            **_GRANITE4, **_sizes(2048, 4096, 40, 16, num_key_value_heads=4, shared_intermediate_size=4096),
            "attention_multiplier": 0.0078125, "logits_scaling": 8.0,
        },
    ),
    "ibm-granite/granite-4.0-micro": (
        "granitemoehybrid",
        {
            **_GRANITE4, **_sizes(2560, 8192, 40, 40, num_key_value_heads=8, shared_intermediate_size=8192),
            "attention_multiplier": 0.015625, "logits_scaling": 10.0,
        },
    ),
    "mistralai/Ministral-3-3B-Instruct-2512-BF16": _ministral3(3072, 9216, 26, True),
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": _ministral3(4096, 14336, 34, False),
    "ibm-granite/granite-4.0-h-micro": (
        "granitemoehybrid",
        {
            **_GRANITE4, **_sizes(2048, 8192, 40, 32, num_key_value_heads=8, shared_intermediate_size=8192),
            "attention_multiplier": 0.015625, "logits_scaling": 8.0, "position_embedding_type": "nope",
            "mamba_n_heads": 64, "mamba_d_state": 128,
            "layer_types": ["full_attention" if n in (5, 15, 25, 35) else "linear_attention" for n in range(40)],
        },
    ),
    "LiquidAI/LFM2-1.2B": ("lfm2", _lfm2(12288, 16, (2, 5, 8, 10, 12, 14), True)),
    "LiquidAI/LFM2-2.6B": ("lfm2", _lfm2(10752, 30, (2, 6, 10, 14, 18, 21, 24, 27), False)),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", _sizes(2048, 11008, 36, 16, num_key_value_heads=4, vocab_size=128256)),
    "Qwen/Qwen3.5-0.8B": _qwen3_5(1024, 3584, 24, 8, _SMALL_VISION, linear_num_value_heads=16),
    "Qwen/Qwen3.5-2B": _qwen3_5(2048, 6144, 24, 8, _VISION, linear_num_value_heads=16),
    "Qwen/Qwen3.5-4B": _qwen3_5(2560, 9216, 32, 16, _VISION),
    "Qwen/Qwen3.5-9B": _qwen3_5(4096, 12288, 32, 16, {}),
    "openai/gpt-oss-20b": (
        "gpt_oss",
        _sizes(
            2880, 2880, 24, 64, num_key_value_heads=8, head_dim=64, vocab_size=201088, sliding_window=128,
            num_local_experts=32, num_experts_per_tok=4, quantization_config={"quant_method": "mxfp4"},
        ),
    ),
    "google/gemma-3-1b-it": (
        "gemma3_text",
        _sizes(1152, 6912, 26, 4, num_key_value_heads=1, head_dim=256, vocab_size=262144, sliding_window=512),
    ),
    "google/gemma-3-4b-it": (
        "gemma3",
        {
            "text_config": _sizes(
                2560, 10240, 34, 8, num_key_value_heads=4, head_dim=256, vocab_size=262208, sliding_window=1024
            ),
            "vision_config": _SIGLIP,
        },
    ),
    "google/gemma-4-E2B-it": _gemma4(
        1536, 6144, 35, 4, num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True
    ),
    "google/gemma-4-E4B-it": _gemma4(2560, 10240, 42, 5, num_key_value_heads=2, num_kv_shared_layers=18),
}  # fmt: skip
PARAMETERS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "ibm-granite/granite-4.0-1b": 1_631_750_144,
    "ibm-granite/granite-4.0-h-micro": 3_191_396_096,
    "ibm-granite/granite-4.0-micro": 3_402_836_480,
    "mistralai/Ministral-3-3B-Instruct-2512-BF16": 3_849_090_048,
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": 8_918_026_240,
    "LiquidAI/LFM2-1.2B": 1_170_340_608,
    "LiquidAI/LFM2-2.6B": 2_569_272_320,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    # less the head for multi-token prediction, which transformers does not load
    "Qwen/Qwen3.5-0.8B": 873_438_784 - 20_452_864,
    "Qwen/Qwen3.5-2B": 2_274_069_824 - 60_828_160,
    "Qwen/Qwen3.5-4B": 4_659_865_088 - 120_599_552,
    "Qwen/Qwen3.5-9B": 9_653_104_368 - 243_290_624,
    "openai/gpt-oss-20b": 20_914_757_184,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-4b-it": 4_300_079_472,
    # less keys' and values' weights of the layers that take others' and are not loaded, and what are buffers
    "google/gemma-4-E2B-it": 5_123_178_979 - 18_880_512 - 963,
}
"""As their pages count them: what shows a wrong size above."""


def save_shapes(root: Path) -> dict[str, str]:
    """Write a folder with a config.json for each model below `root`; return the folders by model id."""
    folders = {}
    for name, (model_type, sizes) in SHAPES.items():
        folder = root / name.replace("/", "--")
        AutoConfig.for_model(model_type, **sizes, dtype="bfloat16").save_pretrained(folder)
        folders[name] = str(folder)
    return folders
