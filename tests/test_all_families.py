"""Every causal-LM family of transformers that can be built tiny: fused loss and gradients equal the plain model's."""

import copy
import inspect
import warnings

import pytest
import torch
import transformers
from tiny import named_gradients, spread_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer.deferred import DeferredLogits, MaterializedLogitsWarning
from liger_trainer.errors import ConfigError
from liger_trainer.fused import FusedLoss, _warn_once

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chunked_torch")]

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


def shrunk(config_class):
    """A configuration with what it has of SMALL, or in words why there is none."""
    known = set(inspect.signature(config_class.__init__).parameters) | set(dir(config_class))
    known |= set(getattr(config_class, "attribute_map", {}))
    options = {name: value for name, value in SMALL.items() if name in known}
    if "kv_lora_rank" in known:  # multi-head latent attention
        options["num_key_value_heads"] = options["num_attention_heads"]
    for attempt in (options, {k: v for k, v in options.items() if "head_dim" not in k}):
        try:
            return config_class(**attempt)
        except Exception as e:  # each family has checks of its own
            reason = f"no such configuration: {type(e).__name__} {str(e)[:80]}"
    return reason


def build(model_type, class_name):
    """The family's tiny model, or in words why there is none."""
    model_class = getattr(transformers, class_name, None)
    if model_class is None or model_type not in CONFIG_MAPPING:
        return "not in this transformers"
    config = shrunk(CONFIG_MAPPING[model_type])
    if isinstance(config, str):
        return config
    config._experts_implementation = "eager"
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if size > TOO_LARGE:
            return f"{size / 1e6:.0f} million parameters"
        torch.manual_seed(0)
        return spread_weights(model_class(config)).eval()
    except Exception as e:
        return f"not built: {type(e).__name__} {str(e)[:80]}"


def relative_error(got, want):
    norms = [sum(g.double().square().sum() for g in grads).sqrt().item() for grads in (got, want)]
    difference = sum((a.double() - b.double()).square().sum() for a, b in zip(got, want, strict=True)).sqrt().item()
    assert norms[1] > 0
    return difference / norms[1]


def outcome(model):
    """How the fused loss of a model compares with its own: "equal", "wrong ...", "warns ...", or why it was skipped."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = labels[1, -2:] = -100
    batch = {"input_ids": ids, "labels": labels}
    plain = copy.deepcopy(model)
    try:
        torch.manual_seed(1)
        want = plain(**batch)
        gradients = named_gradients(plain, want.loss)
    except Exception as e:
        return f"skipped: does not train: {type(e).__name__} {str(e)[:80]}"
    try:
        FusedLoss(model)
    except ConfigError as e:
        return f"refused: {e}"
    _warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MaterializedLogitsWarning)
        torch.manual_seed(1)
        got = model(**batch)
        fused = named_gradients(model, got.loss)
        caught = [str(w.message) for w in caught if w.category is MaterializedLogitsWarning]
    errors = [
        abs(got.loss.item() / want.loss.item() - 1),
        relative_error(list(fused.values()), list(gradients.values())),
    ]
    if max(errors) > 1e-4 or not max(errors) == max(errors):
        return f"wrong: loss and gradients differ by {errors}"
    if caught:
        return f"warns: {caught[0]}"
    return "equal" if isinstance(got.logits, DeferredLogits) else f"warns: {type(got.logits).__name__} without a word"


# Families that stay exact but store logits, and say so: decoders that compute the cross-entropy themselves, and one
# that cuts its padding off the logits.
STORE_LOGITS = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "mvp", "pegasus",
    "plbart", "trocr", "whisper", "xlm", "inkling2_text",
}  # fmt: skip


def test_every_family_that_can_be_built():
    outcomes = {}
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        model = build(model_type, class_name)
        try:
            outcomes[model_type] = f"skipped: {model}" if isinstance(model, str) else outcome(model)
        except Exception as e:
            outcomes[model_type] = f"wrong: {type(e).__name__} {str(e)[:200]}"
    kinds = {}
    for model_type, result in outcomes.items():
        kinds.setdefault(result.split(":")[0], []).append(model_type)
        if result != "equal":
            print(f"{model_type}: {result}")
    print({kind: len(families) for kind, families in kinds.items()})
    assert {family: outcomes[family] for family in kinds.get("wrong", [])} == {}
    assert {family: outcomes[family] for family in kinds.get("warns", []) if family not in STORE_LOGITS} == {}
    assert len(kinds["equal"]) >= 100
