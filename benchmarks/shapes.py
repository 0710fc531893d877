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
    "SmolLM2-135M": ("llama", {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
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

# Vision-language models with 8 layers in either tower. `tokens`: of an image of `grid` x `grid` patches, between
# the tokens `begins` and `ends`.
VISION: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B, 8 layers": {
        "type": "qwen2_5_vl", "grid": 32, "tokens": 256, "image": 151655, "begins": 151652, "ends": 151653,
        "text": {
            "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2,
            "vocab_size": 151936, "num_hidden_layers": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision": {
            "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "out_hidden_size": 2048,
            "window_size": 112, "fullatt_block_indexes": [7], "depth": 8,
        },
    },
    "Gemma-3-4B, 8 layers": {
        "type": "gemma3", "grid": 64, "tokens": 256, "image": 262144, "begins": 255999, "ends": 256000,
        "text": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024, "num_hidden_layers": 8,
        },
        "vision": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "image_size": 896,
            "patch_size": 14, "vision_use_head": False, "num_hidden_layers": 8,
        },
    },
}  # fmt: skip
_TINY_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "num_hidden_layers": 1,
}  # fmt: skip
TINY_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "grid": 8, "tokens": 16, "image": 3, "begins": 4, "ends": 5,
        "text": {
            **_TINY_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        "vision": {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "depth": 1},
    },
    "gemma3": {
        "grid": 8, "tokens": 16, "image": 3, "begins": 4, "ends": 5, "text": {**_TINY_TEXT, "head_dim": 16},
        "vision": {
            "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 112,
            "num_hidden_layers": 1,
        },
    },
}  # fmt: skip


def vision_sizes(shape: str, tiny: bool) -> dict[str, Any]:
    """Return the sizes of a vision-language model, small ones in their place if `tiny`."""
    sizes = VISION[shape]
    small = TINY_VISION[sizes["type"]] if tiny else {}
    return {**sizes, **small, **{part: {**sizes[part], **small.get(part, {})} for part in ("text", "vision")}}


def config_of(shape: str, tiny: bool, **options: Any) -> Any:
    """Return the configuration of a shape, or of the same family with TINY sizes."""
    from transformers import AutoConfig

    if shape in VISION:
        return _vision_config(vision_sizes(shape, tiny), options)
    model_type, sizes = SHAPES[shape]
    small = {**TINY, **TINY_OF.get(model_type, {})} if tiny else {}
    layers = {**sizes, **small, **options}["num_hidden_layers"]
    if kinds := {**sizes, **small}.get("layer_types"):
        options["layer_types"] = kinds[:layers]
    return AutoConfig.for_model(model_type, **{**COMMON, **sizes, **small, **options})


def _vision_config(sizes: dict[str, Any], options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    marks = {"image_token_id": "image", "vision_start_token_id": "begins", "vision_end_token_id": "ends"}
    if sizes["type"] == "gemma3":
        marks = {
            "image_token_index": "image", "boi_token_index": "begins", "eoi_token_index": "ends",
            "mm_tokens_per_image": "tokens",
        }  # fmt: skip
    attention = {key: options.pop(key) for key in ("attn_implementation",) if key in options}
    text = {**sizes["text"], "max_position_embeddings": COMMON["max_position_embeddings"], **options}
    return AutoConfig.for_model(
        sizes["type"], text_config=text, vision_config=sizes["vision"], tie_word_embeddings=True, **attention,
        **{key: sizes[of] for key, of in marks.items()},
    )  # fmt: skip


def random_model(shape: str, tiny: bool, device: str, seed: int = 0, **options: Any) -> Any:
    """Make a model in bf16 on `device`, the same one for the same seed."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if shape in VISION else AutoModelForCausalLM
    attention = "eager" if SHAPES.get(shape, ("",))[0] == "gpt_oss" else "sdpa"  # which has no sinks
    config = config_of(shape, tiny, attn_implementation=attention, use_cache=False, **options)
    torch.manual_seed(seed)
    with torch.device(device):
        model = kind.from_config(config, dtype=torch.bfloat16).train()
    if config.model_type == "gemma4_text":  # its scores have no scale of their own: ones saturate the softmax
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.data.fill_(len(weight) ** -0.5)
    return model


class ImageCollator:
    """Rows of token ids with an image each, as a processor makes them: the same images in every batch."""

    def __init__(self, shape: str, tiny: bool, rows: int):
        self.sizes, grid = vision_sizes(shape, tiny), vision_sizes(shape, tiny)["grid"]
        patch, generator = self.sizes["vision"]["patch_size"], torch.Generator().manual_seed(3)
        self.is_qwen = self.sizes["type"] == "qwen2_5_vl"
        size = (rows, grid**2, 3 * 2 * patch**2) if self.is_qwen else (rows, 3, grid * patch, grid * patch)
        self.pixels = torch.randn(size, generator=generator)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        is_image = ids == self.sizes["image"]
        batch = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(is_image, -100),
            "pixel_values": self.pixels[: len(ids)],
        }  # fmt: skip
        if not self.is_qwen:
            return {**batch, "token_type_ids": is_image.long()}
        grid = torch.tensor([[1, self.sizes["grid"], self.sizes["grid"]]] * len(ids))
        pixels = batch["pixel_values"].flatten(0, 1)
        return {**batch, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": is_image.long()}
