"""Models that would read slices of rows otherwise than whole rows. The exchange itself: tests/engines."""

import pytest
from tiny import tiny_model
from transformers import Lfm2Config, Lfm2ForCausalLM

from liger_trainer.patching.packing.ulysses import obstacle_to_slices


@pytest.mark.parametrize("model, words", [
    (lambda: tiny_model("llama"), None),
    (lambda: tiny_model("llama", attn_implementation="eager"), "is eager"),
    (lambda: tiny_model("gemma3"), "windows of its attention (sliding_attention)"),
    (lambda: Lfm2ForCausalLM(Lfm2Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
     num_attention_heads=4, num_key_value_heads=2, full_attn_idxs=[1])), "layers of type conv"),
])  # fmt: skip
def test_obstacles(model, words):
    reason = obstacle_to_slices(model())
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize("window, kinds, refused", [
    (8, ["sliding_attention"] * 2, False),  # flash attention is told the window beside the mask
    (None, ["chunked_attention", "full_attention"], True),
])  # fmt: skip
def test_windows_by_flash_attention(window, kinds, refused):
    model = tiny_model("qwen3")
    model.config.layer_types, model.config.sliding_window = kinds, window
    model.config._attn_implementation_internal = "flash_attention_2"
    assert (obstacle_to_slices(model) is not None) is refused
