"""Models that whole-model benchmarks measure, by shape: random weights, the sizes of real ones."""

from __future__ import annotations

from typing import Any

import torch

UNTIED = {"tie_word_embeddings": False, "max_position_embeddings": 8192}
# name: (model type, sizes)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("qwen3", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
    "Qwen3-1.7B": ("qwen3", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
    "Llama-3.2-1B": ("llama", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    }),
    "Qwen3-8B": ("qwen3", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, **UNTIED,
    }),
    "Llama-3-8B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, **UNTIED,
    }),
    "Llama-3-8B, 16 layers": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, **UNTIED,
    }),
    "Gemma-3-1B": ("gemma3_text", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    }),
    "Llama-3-70B": ("llama", {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, **UNTIED,
    }),
    "Qwen3-30B-A3B, 4 layers": ("qwen3_moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "mlp_only_layers": [],
    }),
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
COMMON = {"max_position_embeddings": 4096, "tie_word_embeddings": True}


def config_of(shape: str, tiny: bool, **options: Any) -> Any:
    """Return the configuration of a shape, or of the same family with TINY sizes."""
    from transformers import AutoConfig

    model_type, sizes = SHAPES[shape]
    return AutoConfig.for_model(model_type, **{**COMMON, **sizes, **(TINY if tiny else {}), **options})


def random_model(shape: str, tiny: bool, device: str, seed: int = 0, **options: Any) -> Any:
    """Make a model in bf16 on `device`, the same one for the same seed."""
    from transformers import AutoModelForCausalLM

    config = config_of(shape, tiny, attn_implementation="sdpa", use_cache=False, **options)
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
