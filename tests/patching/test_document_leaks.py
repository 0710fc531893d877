"""Models in which a changed document would move the others are refused, and no others are."""

import sys

import pytest
import torch
import transformers
from families import build
from packed import documents, packed
from tiny import tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer.common.replacements import Replacements
from liger_trainer.errors import ConfigError
from liger_trainer.extras.sequence_parallel import why_not_sliced
from liger_trainer.patching.options import PatchReport
from liger_trainer.patching.packing.packed_attention import pack_attention
from liger_trainer.patching.packing.packed_rows import (
    PackedRows,
    patch_packed_attention,
    why_documents_mix,
)

LENGTHS = (5, 9, 2, 12)  # the windows of these families are of 8 tokens
HYBRIDS = {  # what a tiny one of the family needs
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]},
}
GUARD = "can't keep packed sequences apart"


def logits(model, labels=None, **batch):
    with torch.no_grad():
        return model(**batch, use_cache=False).logits[0]


def measured(model):
    """What packing does to a model: "apart", "leaks", or the sentence with which it stops."""
    rows = documents(LENGTHS, 50)
    rows = [row + 4 for row in rows]  # no special tokens
    try:
        got = logits(model, **packed(rows))
        changed = logits(model, **packed([rows[0].flip(0), *rows[1:]]))
        alone = [logits(model, input_ids=row[None], position_ids=torch.arange(len(row))[None]) for row in rows]
    except ValueError as error:
        if GUARD in str(error):
            return str(error)
        raise
    wanted = torch.cat(alone)
    apart = (got - changed)[LENGTHS[0] :].norm() <= 1e-4 * got.norm()
    return "apart" if apart and (got - wanted).norm() <= 1e-4 * wanted.norm() else "leaks"


def with_every_layer(model_type, class_name):
    """The tiny model of a family, with a layer of each kind that its default has; or in words why there is none."""
    overrides = {}
    try:
        kinds = sorted(set(getattr(CONFIG_MAPPING[model_type]().get_text_config(), "layer_types", None) or ()))
        kinds = kinds * 2 if len(kinds) == 1 else kinds
        overrides = {"layer_types": kinds, "num_hidden_layers": len(kinds)} if kinds else {}
    except Exception:  # no default configuration
        pass
    model = build(model_type, class_name, **overrides)
    return build(model_type, class_name) if isinstance(model, str) else model


def tiny(family):
    return build(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], **HYBRIDS.get(family, {}))


def judged(model, by_lengths):
    """ "", or how the measurement and the judgement of a model differ."""
    replacements, report = Replacements(), PatchReport("")
    if by_lengths:
        pack_attention(model, replacements, report)
    by_lengths = bool(report.swapped)
    try:
        reason = why_documents_mix(model, by_lengths)
        result = measured(model)
    except Exception as error:
        return "" if reason else f"{type(error).__name__}: {error}"
    finally:
        replacements.undo()
    return "" if (result == "apart") == (reason is None) else f"{result}, and judged {reason}"


# Refused although they are apart: speech models whose forward has no position_ids by name, two that leak with
# transformers 5.6 and 5.17, and one whose attention goes through no interface.
CAUTION = {"doge", "falcon", "git", "moss_transcribe_diarize", "whisper"}


@pytest.mark.slow
def test_every_family_is_judged_as_measured():
    wrong, counted = {}, 0
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = class_name if isinstance(class_name, str) else class_name[0]
        model = with_every_layer(model_type, name)
        if isinstance(model, str) or model_type in CAUTION:
            continue
        try:
            logits(model, input_ids=torch.arange(6, 12)[None])
        except Exception:
            continue
        counted += 1
        for by_lengths in (False, True):
            if (difference := judged(model, by_lengths)) != "":
                wrong[model_type, by_lengths] = difference
    assert wrong == {} and counted > 120


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("by_lengths", [False, True])
def test_hybrids_are_judged_as_measured(name, by_lengths):
    assert judged(tiny(name), by_lengths) == ""


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral", "granite"])
def test_attention_is_judged_as_measured(family):
    model = tiny_model(family)
    assert why_documents_mix(model, by_lengths=False) is None and judged(model, by_lengths=True) == ""


@pytest.mark.parametrize("family", ["gpt_oss", "opt"])
def test_masks_without_positions_are_read_by_lengths_alone(family):
    """Their own attention would let documents see one another, under PyTorch's implementations without a word."""
    model = tiny(family)
    assert measured(model) == "leaks" and "ignores positions" in why_documents_mix(model, by_lengths=False)
    assert judged(model, by_lengths=True) == "" and why_documents_mix(model, by_lengths=True) is None


def test_the_error_names_the_layers_and_what_to_set():
    model = tiny("lfm2")
    with pytest.raises(ConfigError, match=r"Lfm2ForCausalLM: documents .* type conv .*`packing: false`"):
        patch_packed_attention(model, None, PackedRows())
    patch_packed_attention(model, None, None)
    patch_packed_attention(model, None, PackedRows(certain=False))


def test_layers_whose_kernels_are_in_place_are_let_through(monkeypatch):
    model = tiny("lfm2")
    place = sys.modules[type(model).__module__]
    free = {name: getattr(getattr(f, "__code__", None), "co_freevars", ()) for name, f in vars(place).items()}
    guarded = [name for name, variables in free.items() if "is_new_implementation" in variables]
    if not guarded:
        pytest.skip("this transformers does not refuse packed rows without kernels, so nothing is let through")

    def with_kernel(is_new_implementation):
        return lambda *args, **kwargs: is_new_implementation

    assert "causal_conv1d" in why_documents_mix(model, by_lengths=True)
    for name in guarded:
        monkeypatch.setattr(place, name, with_kernel(True))
    assert why_documents_mix(model, by_lengths=True) is None
    monkeypatch.setattr(place, guarded[0], with_kernel(False))
    assert why_documents_mix(model, by_lengths=True) is not None


def test_an_attention_of_one_s_own_is_trusted_where_the_user_says_so():
    class Attention(torch.nn.Module):
        """Mixes tokens by itself."""

    class Own(transformers.LlamaForCausalLM):
        """Remote code, whose attention does not ask transformers."""

        __module__ = "transformers_modules.own"

    model = Own(tiny_model("llama").config)
    for layer in model.model.layers:
        layer.self_attn = Attention()
    assert "interface" in why_documents_mix(model, by_lengths=False)
    assert why_documents_mix(model, by_lengths=False, trusted=True) is None
    Own.__module__ = "transformers.models.own"
    assert "interface" in why_documents_mix(model, by_lengths=False, trusted=True)


# Slices of rows, on several GPUs. The exchange itself: tests/engines


def windowed(window, *kinds):
    """Flash attention is told the window beside the mask."""
    model = tiny_model("qwen3")
    model.config.layer_types, model.config.sliding_window = list(kinds), window
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


@pytest.mark.parametrize("model, words", [
    (lambda: tiny_model("llama"), None),
    (lambda: tiny_model("llama", attn_implementation="eager"), "is eager"),
    (lambda: tiny_model("gemma3"), "windows of its attention (sliding_attention)"),
    (lambda: tiny("lfm2"), "layers of type conv"),
    (lambda: windowed(8, "sliding_attention", "sliding_attention"), None),
    (lambda: windowed(None, "chunked_attention", "full_attention"), "chunked_attention"),
])  # fmt: skip
def test_models_whose_rows_cannot_be_sliced_say_why(model, words):
    reason = why_not_sliced(model())
    assert reason is None if words is None else words in reason
