"""Every causal-LM family of transformers, tiny: configurations shrunk by the options that they have."""

import inspect

import torch
import transformers
from tiny import spread_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 96
# Options of a configuration, as far as it has them.
SMALL = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "model_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k", "n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("pad_token_id", "pad_token"), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    "state_size": 8, "mamba_d_state": 8, "is_decoder": True, "use_cache": False, "vocab_size_per_layer_input": VOCAB,
    "rotary_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
}  # fmt: skip
TOO_LARGE = 30_000_000  # parameters


def shrunk(config_class, overrides=()):
    """A configuration with what it has of SMALL, or in words why there is none."""
    known = set(inspect.signature(config_class.__init__).parameters) | set(dir(config_class))
    known |= set(getattr(config_class, "attribute_map", {}))
    options = {name: value for name, value in SMALL.items() if name in known}
    if "kv_lora_rank" in known:  # multi-head latent attention
        options["num_key_value_heads"] = options["num_attention_heads"]
    for attempt in (options, {k: v for k, v in options.items() if "head_dim" not in k}):
        try:
            return config_class(**{**attempt, **dict(overrides)})
        except Exception as e:  # each family has checks of its own
            reason = f"no such configuration: {type(e).__name__} {str(e)[:80]}"
    return reason


def build(model_type, class_name, experts="eager", **overrides):
    """The family's tiny model in eval mode, or in words why there is none."""
    model_class = getattr(transformers, class_name, None)
    if model_class is None or model_type not in CONFIG_MAPPING:
        return "not in this transformers"
    config = shrunk(CONFIG_MAPPING[model_type], overrides)
    if isinstance(config, str):
        return config
    config._experts_implementation = experts if model_class._can_set_experts_implementation() else "eager"
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if size > TOO_LARGE:
            return f"{size / 1e6:.0f} million parameters"
        torch.manual_seed(0)
        return spread_weights(model_class(config)).eval()
    except Exception as e:
        return f"not built: {type(e).__name__} {str(e)[:80]}"
