"""Tiny models whose files have a head for multi-token prediction, laid out as those of their families."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from liger_trainer.common.mtp_head import ONE_FILE

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 60,
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
ATTENTION = ["full_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
DEEPSEEK = {  # with a head that is a layer behind the last, whose number the class has in its patterns
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm4_moe": {**_ROUTED},
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
}
_QWEN_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 16}
QWEN = {  # with a head below `mtp.`
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "qwen3_5_moe_text": {**_QWEN_EXPERTS, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "qwen3_next": {**_QWEN_EXPERTS, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "mellum": {
        **EXPERTS, "num_mtp_layers": 1, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "sparse", "sparse"], "sliding_window": 4,
    },
    "exaone_moe": {
        **EXPERTS, "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "layer_types": [*ATTENTION, "full_attention"], "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": 8,
    },
}  # fmt: skip
PARTS = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}


def save_with_head(folder: Path, layer_types=ATTENTION, **more) -> Path:
    """A tiny Qwen3.5 with a head in its file, random and far from small."""
    return save_family(folder, "qwen3_5_text", layer_types=[*layer_types, "full_attention"], **more)


def save_family(folder: Path, family: str, **more) -> Path:
    """A tiny model of such a family with a head in its file, random and far from small.

    It is saved with a layer more, which in the file becomes the head's, with experts as the family's files have them.
    """
    torch.manual_seed(0)
    config: Any = deep_config(family, **more)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # so that tokens differ
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for weight in model.model.layers[-1].parameters():
            weight.copy_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    depth = config.num_hidden_layers - 1
    written = json.loads((folder / "config.json").read_text())
    kinds = {name: written[name][:-1] for name in ("layer_types", "mlp_layer_types") if written.get(name)}
    (folder / "config.json").write_text(json.dumps({**written, **kinds, "num_hidden_layers": depth}))
    behind = f"model.layers.{depth}."
    parts = {f"{n}.weight": 0.3 * torch.randn(32) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    parts["fc.weight"] = 0.3 * torch.randn(32, 64)
    weights = load_file(folder / ONE_FILE)
    if family in DEEPSEEK:
        head = {behind + f"{PARTS[name.removesuffix('.weight')]}.weight": weight for name, weight in parts.items()}
        head[f"{behind}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        head[f"{behind}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    else:
        head = {f"mtp.{name}": weight for name, weight in parts.items()}
        weights = {name.replace(behind, "mtp.layers.0."): weight for name, weight in weights.items()}
    save_file({**weights, **head}, folder / ONE_FILE, metadata={"format": "pt"})
    return folder


def deep_config(family: str, **more) -> Any:
    """The configuration with the head's layer counted among the layers."""
    sizes = {**SIZES, **(DEEPSEEK.get(family) or QWEN[family]), **more}
    return AutoConfig.for_model(family, **{"num_hidden_layers": len(sizes.get("layer_types", "123")), **sizes})


def stored_head(folder: Path, family: str = "qwen3_5_text") -> dict[str, torch.Tensor]:
    """The head's weights in a file, by the names there."""
    weights = load_file(folder / ONE_FILE)
    depth = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    beginning = f"model.layers.{depth}." if family in DEEPSEEK else "mtp."
    return {name: weight for name, weight in weights.items() if name.startswith(beginning)}


def deep_model(folder: Path, family: str = "qwen3_5_text") -> tuple[Any, dict[str, torch.Tensor]]:
    """The model in fp64 with the head's layer behind its own, and the head's other weights by Qwen3.5's names."""
    config = AutoConfig.from_pretrained(folder)
    depth = config.num_hidden_layers
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            heads = getattr(config, f"mtp_{name}", None) or [getattr(deep_config(family), name)[-1]]
            setattr(config, name, [*getattr(config, name), heads[0]])
    config.num_hidden_layers = depth + 1
    behind, parts, weights = f"model.layers.{depth}.", {}, {}
    for name, weight in load_file(folder / ONE_FILE).items():
        below = name.removeprefix("mtp.").removeprefix(behind)
        own = next((o for o, theirs in PARTS.items() if below in (f"{o}.weight", f"{theirs}.weight")), None)
        if own is not None and below != name:
            parts[own] = weight.double()
        elif not below.startswith(("embed_tokens", "shared_head")):
            weights[name.replace("mtp.layers.0.", behind)] = weight
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    cls: Any = type(AutoModelForCausalLM.from_config(config))
    return cls.from_pretrained(None, config=config, state_dict=weights, **how).double(), parts


class Definition:
    """The head of a tiny Qwen3.5's file beside its model, in plain torch and fp64."""

    def __init__(self, folder: Path):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
        self.model = model
        self.head = {name.removeprefix("mtp."): nn.Parameter(w.double()) for name, w in stored_head(folder).items()}
        place = max(i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention")
        self.layer = copy.deepcopy(model.model.layers[place])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        epsilon = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * (1 + self.head[f"{name}.weight"])

    def drafts(self, row: list[int]) -> torch.Tensor:
        """The logits (tokens - 2, V) of the third token of a row and those behind it."""
        model, ids = self.model, torch.tensor([row])
        with torch.no_grad():
            states = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
            next_tokens = model.get_input_embeddings()(ids)[:, 1:]
        both = [self._norm(next_tokens, "pre_fc_norm_embedding"), self._norm(states, "pre_fc_norm_hidden")]
        x, length = torch.cat(both, -1) @ self.head["fc.weight"].T, states.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        positions = model.model.rotary_emb(x, torch.arange(length)[None].expand(3, 1, -1))
        how = {"position_embeddings": tuple(p.double() for p in positions), "attention_mask": mask}
        own = {n.removeprefix("layers.0."): w for n, w in self.head.items() if n.startswith("layers.0.")}
        x = torch.func.functional_call(self.layer, own, (x,), how)
        return model.lm_head(self._norm(x[0] if isinstance(x, tuple) else x, "norm"))[0, :-1]

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.head, torch.autograd.grad(loss, list(self.head.values())), strict=True))


def head_of(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a model's tensors that are the head's, by their names there."""
    return {name.partition("mtp.")[2]: value for name, value in values.items() if "mtp." in name}
