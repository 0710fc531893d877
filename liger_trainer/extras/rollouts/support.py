"""Which models decode in CUDA graphs (rollouts.py), and their adapters while they do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from ...compat.deepspeed import is_partitioned
from ...compat.models import attention_implementation
from ...compat.modules import is_hooked
from ...compat.recognitions import compares_with
from ...errors import ConfigError
from ...kernels.decode_attention import WIDEST
from ...losses.model_parts import decoder_layers, reads_images
from ...patching.layers.experts import looks_like_experts
from ...patching.packing.packed_attention import NAMES, attention_modules
from ...patching.patcher import base_of
from ...trainers.decoder import NotServed

SERVED = {  # fields of GenerationConfig that are read here, or change nothing
    "do_sample", "use_cache", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "suppress_tokens",
    "pad_token_id", "bos_token_id", "eos_token_id", "disable_compile", "transformers_version",
    "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "max_length",
}  # fmt: skip
NEUTRAL = {"num_return_sequences": 1, "repetition_penalty": 1.0, "num_beams": 1}  # with another value they are not


def why_not(model: Any, settings: GenerationConfig) -> str | None:
    """Say why completions of a model are sampled by `generate`, None where they can be decoded here."""
    base = base_of(model)
    fields = {k: v for k, v in settings.to_diff_dict().items() if k not in SERVED and not k.startswith("_")}
    others = {k for k, v in fields.items() if v not in (None, NEUTRAL.get(k))}
    if others:
        return f"{', '.join(sorted(others))} of GenerationConfig"
    if getattr(base.config, "is_encoder_decoder", False) or reads_images(base):
        return "the model reads more than text"
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        return "prompts are learned"
    try:
        layers = decoder_layers(base)[1]
    except ConfigError as error:
        return str(error)
    attention = list(attention_modules(base))
    if len(attention) != len(layers) or any(not hasattr(module, "layer_idx") for module in attention):
        return "not every layer calls its attention by transformers' interface"
    text = base.config.get_text_config()
    if attention_implementation(text) not in (*NAMES, *NAMES.values()):
        return f"its attention is {attention_implementation(text)}"
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of the kinds {', '.join(sorted(kinds))}"
    if any(compares_with(kind, NAMES) for kind in {type(module) for module in base.modules()}):
        return "its attention computes something else for each implementation"
    if any(getattr(module, "rope_type", "") in ("dynamic", "longrope") for module in base.modules()):
        return "its rope depends on the longest row"
    strange = {type(p).__name__ for p in base.parameters() if type(p) is not nn.Parameter or is_partitioned(p)}
    if strange or any(isinstance(p, DTensor) for p in base.parameters()):
        return f"its weights are {', '.join(sorted(strange)) or 'sharded'}"
    if any(map(looks_like_experts, layers.modules())):
        return "it has experts"
    return next((reason for module in layers.modules() for reason in [_why_not_layer(module)] if reason), None)


def _why_not_layer(module: nn.Module) -> str | None:
    if is_hooked(module):
        return f"a {type(module).__name__} has hooks"
    if getattr(module, "sinks", None) is not None:
        return "its attention has sinks"
    if (getattr(module, "head_dim", None) or 0) > WIDEST:
        return f"its heads are wider than {WIDEST}"
    return None


@contextmanager
def adapters_merged(model: Any) -> Iterator[None]:
    """Within, the weights under adapters hold what the adapters add; after it they have the bits that they had.

    Adapters next to the weights launch four more kernels for each product, and double a step. Weights in 16 bits round
    what is added to them, so that a draw may differ where two tokens are equally likely but for rounding.
    """
    with_adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in with_adapters:
        if layer.merged and layer.disable_adapters:  # PEFT's forward does the same, which does not run here
            layer.unmerge()
    layers = [layer for layer in with_adapters if not (layer.merged or layer.disable_adapters)]
    saved = [{name: x.detach().clone() for name, x in layer.get_base_layer().named_parameters()} for layer in layers]
    merged = []
    try:
        for layer in layers:
            merged.append(layer)
            try:
                layer.merge()  # pyright: ignore[reportCallIssue]
            except Exception as error:  # PEFT refuses some kinds, in several ways
                raise NotServed(f"its adapters cannot be merged ({str(error).splitlines()[0]})") from error
        yield
    finally:
        for layer, weights in zip(merged, saved, strict=False):
            layer.merged_adapters.clear()  # `unmerge` would compute their products once more, to subtract them
            for name, x in layer.get_base_layer().named_parameters():
                x.data.copy_(weights[name])
