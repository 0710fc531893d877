"""A tiny Qwen3.5 whose file has a head for multi-token prediction."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from liger_trainer.common.mtp_head import ONE_FILE

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 60,
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
ATTENTION = ["full_attention", "full_attention"]


def save_with_head(folder: Path, layer_types=ATTENTION, **more) -> Path:
    """A tiny Qwen3.5 with a head in its file, random and far from small."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text", **SIZES, layer_types=list(layer_types), num_hidden_layers=len(layer_types), **more
    )
    model = AutoModelForCausalLM.from_config(config)
    block = next(b for b, kind in zip(model.model.layers, layer_types, strict=True) if kind == "full_attention")
    head = {f"layers.0.{name}": 0.3 * torch.randn_like(weight) for name, weight in block.state_dict().items()}
    head["fc.weight"] = 0.3 * torch.randn(32, 64)
    head |= {f"{n}.weight": 0.3 * torch.randn(32) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    with torch.no_grad():  # so that tokens differ
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    head = {f"mtp.{name}": weight for name, weight in head.items()}
    save_file({**load_file(folder / ONE_FILE), **head}, folder / ONE_FILE, metadata={"format": "pt"})
    return folder
