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
    **dict.fromkeys(("decoder_start_token_id",), 1),
    "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    "state_size": 8, "mamba_d_state": 8, "is_decoder": True, "use_cache": False, "vocab_size_per_layer_input": VOCAB,
    "rotary_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "decoder_hidden_size"), 64),
    "image_token_id": 3, "image_token_index": 3, "video_token_id": 4, "audio_token_id": 5, "audio_token_index": 5,
}  # fmt: skip
# The decoder of models that are put together from two.
DECODER = transformers.BertConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
    is_decoder=True, add_cross_attention=True,
)  # fmt: skip
# What a configuration of this type must have besides, wherever it stands.
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
PARTICULAR = {
    **dict.fromkeys(("chameleon", "emu3"), {"vocabulary_map": {"<image>": 3, **{f"token{i}": i for i in range(8)}}}),
    "cohere_asr": {"num_key_value_heads": 4},
    **dict.fromkeys(("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"), {"decoder": DECODER}),
    "csm": {"num_codebooks": 4, "audio_eos_token_id": 4, "codebook_pad_token_id": 0, "codebook_eos_token_id": 0},
    "csm_depth_decoder_model": {"num_codebooks": 4, "backbone_hidden_size": 64},
    "dia": {"delay_pattern": [0, 1, 2, 3], "pad_token_id": 3},
    "dia_decoder": {"num_channels": 4, "cross_head_dim": 16, "cross_hidden_size": 64},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1]},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], "moe_num_experts": 4, "moe_k": 2, "rope_parameters": {
        **SECTIONS["rope_parameters"], "mrope_section": [3, 3, 2]}},
    "hunyuan_vl_text": SECTIONS,
    "instructblipvideo": {"video_token_index": 4, "num_query_tokens": 4},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(
        ("full_attention", "sliding_attention"), {"rope_type": "default", "rope_theta": 1e4})},
    "florence_vision": {"depths": (1, 1, 1, 1), "embed_dim": (16, 32, 32, 32), "num_heads": (4, 4, 4, 4),
                        "num_groups": (4, 4, 4, 4), "window_size": 4, "projection_dim": 64, "drop_path_rate": 0.0},
    "funaudio_adaptor": {"intermediate_size": 16},
    "git_vision_model": {"image_size": 32, "patch_size": 16},
    "glm4v_text": SECTIONS, "glm46v_text": SECTIONS, "glm_ocr_text": SECTIONS,
    "glm_image_text": {**SECTIONS, "vision_vocab_size": VOCAB},
    "glm4v_moe_text": {"rope_parameters": {**SECTIONS["rope_parameters"], "mrope_section": [2, 1, 1]}},
    "higgs_audio_v2": {"num_codebooks": 2, "codebook_size": 24, "audio_delay_token_id": 6, "audio_bos_token_id": 7,
                       "audio_stream_bos_id": 1, "audio_stream_eos_id": 2},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1), "latent_channels": 32, "projection_dim": 64,
                    "image_token_embed_dim": 64, "num_embeddings": 32},
    "janus_vision_model": {"projection_dim": 64},
    "kyutai_speech_to_text": {"num_codebooks": 2, "codebook_vocab_size": 24, "audio_bos_token_id": 23,
                              "audio_pad_token_id": 22},
    "led": {"attention_window": 4},
    "longt5": {"local_radius": 4, "global_block_size": 4},
    "marian": {"decoder_vocab_size": VOCAB},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "mimi": {"num_filters": 4, "num_quantizers": 4, "codebook_size": 16, "codebook_dim": 64, "upsample_groups": 64,
             "vector_quantization_hidden_dimension": 64, "num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_hidden_size": 64},
    "paddleocr_vl_text": SECTIONS,
    "pp_formulanet_vision": {"image_size": 64, "window_size": 2, "mlp_dim": 64, "output_channels": 16,
                             "post_conv_in_channels": 16, "post_conv_mid_channels": 32, "post_conv_out_channels": 64,
                             "global_attn_indexes": (1,)},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
                   "num_decoder_attention_heads": 4},
    "radio": {"video_temporal_patch_size": 2},
    "pix2struct_text_model": {"is_decoder": True, "num_heads": 4},
    "qwen2_5_omni_text": SECTIONS, "qwen2_5_vl_text": SECTIONS, "qwen2_vl_text": SECTIONS,
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), {
        "t2u_vocab_size": VOCAB, "t2u_encoder_layers": 2, "t2u_decoder_layers": 2, "t2u_encoder_ffn_dim": 64,
        "t2u_decoder_ffn_dim": 64, "t2u_encoder_attention_heads": 4, "t2u_decoder_attention_heads": 4,
        "speech_encoder_layers": 2, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 64,
        "unit_hifi_gan_vocab_size": 32, "unit_embed_dim": 16, "lang_embed_dim": 16, "spkr_embed_dim": 16,
        "upsample_initial_channel": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
        "char_vocab_size": VOCAB, "t2u_max_position_embeddings": 64, "max_source_positions": 64,
    }),
    "speech_to_text": {"conv_channels": 64, "max_target_positions": 64, "input_channels": 1},
    "timm_wrapper": {"architecture": "vit_tiny_patch16_224", "hidden_size": 48, "model_args": {
        "embed_dim": 48, "depth": 1, "num_heads": 3, "img_size": 32}},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4, "depths": [1] * 7},
    "whisper": {"max_source_positions": 32, "max_target_positions": 64},
}  # fmt: skip
TOO_LARGE = 30_000_000  # parameters


def shrunk(config_class, overrides=()):
    """A configuration with what it and its parts have of SMALL, or in words why there is none."""
    known = set(inspect.signature(config_class.__init__).parameters) | set(dir(config_class))
    known |= set(getattr(config_class, "attribute_map", {}))
    options = {name: value for name, value in SMALL.items() if name in known}
    if "kv_lora_rank" in known:  # multi-head latent attention
        options["num_key_value_heads"] = options["num_attention_heads"]
    try:
        options |= _parts(config_class)
    except Exception as e:
        return f"no default configuration: {type(e).__name__} {str(e)[:80]}"
    options |= PARTICULAR.get(config_class.model_type, {})
    if config_class.model_type == "prophetnet":  # whose number of layers can only be read
        options.pop("num_hidden_layers")
    for attempt in (options, {k: v for k, v in options.items() if "head_dim" not in k}):
        try:
            return config_class(**{**attempt, **dict(overrides)})
        except Exception as e:  # each family has its own checks
            reason = f"no such configuration: {type(e).__name__} {str(e)[:80]}"
    return reason


def _parts(config_class):
    """The small configurations of encoders, decoders and towers, as far as they exist by default."""
    if not config_class.sub_configs:
        return {}
    default = config_class()
    parts = {name: getattr(default, name, None) for name in config_class.sub_configs}
    return {name: _small_part(part) for name, part in parts.items() if part is not None}


def _small_part(default):
    part = shrunk(type(default))
    return default if isinstance(part, str) else part


def build_class(class_name, experts="eager", **overrides):
    """A tiny model of any class, in eval mode, or in words why there is none."""
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        return "not in this transformers"
    config = shrunk(model_class.config_class, overrides)
    return config if isinstance(config, str) else _build(model_class, config, experts)


def build(model_type, class_name, experts="eager", **overrides):
    """The family's tiny model in eval mode, or in words why there is none."""
    model_class = getattr(transformers, class_name, None)
    if model_class is None or model_type not in CONFIG_MAPPING:
        return "not in this transformers"
    config = shrunk(CONFIG_MAPPING[model_type], overrides)
    return config if isinstance(config, str) else _build(model_class, config, experts)


def _build(model_class, config, experts):
    for part in (config, getattr(config, "decoder", None)):  # seq2seq models have it by their checkpoint only
        if part is not None and getattr(part, "decoder_start_token_id", None) is None:
            part.decoder_start_token_id = 1
    if config.is_encoder_decoder and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    config._experts_implementation = experts if model_class._can_set_experts_implementation() else "eager"
    for name in config.sub_configs:  # some towers, though not the whole, must have their own loop
        part = getattr(config, name, None)
        if "vision" in name and part is not None:
            part._experts_implementation = "eager"
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if size > TOO_LARGE:
            return f"{size / 1e6:.0f} million parameters"
        torch.manual_seed(0)
        return spread_weights(model_class(config)).eval()
    except Exception as e:
        return f"not built: {type(e).__name__} {str(e)[:80]}"
