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
    "Qwen3-8B, V 262144": ("qwen3", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 262144, **UNTIED,
    }),
    "Llama-3-8B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, **UNTIED,
    }),
    "Gemma-3-1B": ("gemma3_text", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    }),
    "Gemma-4-E2B": ("gemma4_text", {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144, "sliding_window": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    }),
    "gpt-oss-20b": ("gpt_oss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128, "num_local_experts": 32,
        "num_experts_per_tok": 4, **UNTIED,
    }),
    "Qwen3.5-0.8B": ("qwen3_5_text", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    }),
    "Qwen3.5-2B": ("qwen3_5_text", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    }),
    "Qwen3-30B-A3B": ("qwen3_moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "mlp_only_layers": [],
    }),
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
TINY_OF = {  # besides TINY, by model type
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_5_text": {
        "num_hidden_layers": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {
        "global_head_dim": 32, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16,
        "num_hidden_layers": 3, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}  # fmt: skip
COMMON = {"max_position_embeddings": 4096, "tie_word_embeddings": True}


def config_of(shape: str, tiny: bool, **options: Any) -> Any:
    """Return the configuration of a shape, or of the same family with TINY sizes."""
    from transformers import AutoConfig

    model_type, sizes = SHAPES[shape]
    small = {**TINY, **TINY_OF.get(model_type, {})} if tiny else {}
    layers = {**sizes, **small, **options}["num_hidden_layers"]
    if kinds := {**sizes, **small}.get("layer_types"):
        options["layer_types"] = kinds[:layers]
    return AutoConfig.for_model(model_type, **{**COMMON, **sizes, **small, **options})


def random_model(shape: str, tiny: bool, device: str, seed: int = 0, **options: Any) -> Any:
    """Make a model in bf16 on `device`, the same one for the same seed."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if SHAPES[shape][0] == "gpt_oss" else "sdpa"  # which has no sinks
    config = config_of(shape, tiny, attn_implementation=attention, use_cache=False, **options)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if config.model_type == "gemma4_text":  # its scores have no scale of their own: ones saturate the softmax
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.data.fill_(len(weight) ** -0.5)
    return model
