"""What tokenizers and models are known by in checkpoints."""

import json
from collections.abc import Mapping
from typing import Any

from ..patching.patcher import base_of
from .cache.fingerprints import sampled_fingerprint, template_fingerprint, tokenizer_fingerprint

LABEL = "name"  # for people: a dataset or a model may move
# of a configuration: where and how a model or an adapter was loaded, what trainers set, what it returns
_NOT_THE_MODEL = frozenset(
    "_name_or_path transformers_version architectures dtype torch_dtype quantization_config use_cache return_dict "
    "pad_token_id bos_token_id eos_token_id initializer_range router_aux_loss_coef id2label label2id "
    "base_model_name_or_path revision inference_mode peft_version auto_mapping task_type init_lora_weights".split()
)


def tokenizer_fingerprints(tokenizer: Any, template_of: Any) -> dict[str, Any]:
    return {
        "vocabulary": tokenizer_fingerprint(tokenizer),
        "chat template": template_fingerprint(template_of) or "none",
    }


def model_fingerprints(model: Any) -> dict[str, Any]:
    """Of a model without its weights."""
    base = base_of(model)
    adapters = getattr(model, "peft_config", {})
    return {
        LABEL: base.config._name_or_path or None,
        "class": type(base).__name__,
        "config": _settings(base.config.to_dict()),
        "adapters": ", ".join(sorted(adapters)) or "none",
        **{f"adapter {name}": _settings(config.to_dict()) for name, config in adapters.items()},
    }


def frozen_fingerprints(model: Any) -> dict[str, Any]:
    """Of a model that does not train."""
    return {**model_fingerprints(model), "weights": sampled_fingerprint(model.named_parameters())}


def _settings(config: Mapping[Any, Any]) -> dict[str, Any]:
    """What a model computes, of its configuration: dropout and outputs may change."""
    return {
        str(name): _settings(value) if isinstance(value, Mapping) else _plain(value)
        for name, value in config.items()
        if name not in _NOT_THE_MODEL and "drop" not in str(name) and not str(name).startswith("output_")
    }


def _plain(value: Any) -> str:
    return json.dumps(sorted(value, key=str) if isinstance(value, set | frozenset) else value, default=str)
