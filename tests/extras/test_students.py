"""Students made by dropping layers: the kept layers compute what they computed in the teacher."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    SmolLM3Config,
)

from liger_trainer.errors import ConfigError
from liger_trainer.extras.students.drop_layers import drop_layers

LAYERS = 6
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.2,  # so that every layer matters
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SIZES, sliding_window=4, layer_types=[SLIDING, FULL, FULL, SLIDING, SLIDING, FULL]),
    "qwen3": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=3),
    "smollm3": SmolLM3Config(**SIZES),  # every fourth layer without rotary embedding
    "gpt2": GPT2Config(
        vocab_size=61, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, pad_token_id=0, eos_token_id=None
    ),
}
CHOICES = [({"keep_every_nth": 2}, [0, 2, 5]), ({"keep_every_nth": 4}, [0, 5]), ({"keep": (1, 2, 5)}, [1, 2, 5])]


def build(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family]).eval()


def token_ids() -> torch.Tensor:
    return torch.randint(2, 61, (2, 9), generator=torch.Generator().manual_seed(1))


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


class Skipped(nn.Module):
    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


@pytest.fixture(params=CONFIGS)
def teacher(request) -> PreTrainedModel:
    return build(request.param)


@pytest.mark.parametrize(("choice", "kept"), CHOICES)
@torch.no_grad()
def test_equals_the_teacher_without_the_other_layers(teacher, choice, kept):
    student = drop_layers(teacher, **choice)
    assert type(student) is type(teacher)
    assert student.config.num_hidden_layers == len(layers_of(student)) == len(kept)
    assert teacher.config.num_hidden_layers == len(layers_of(teacher)) == LAYERS
    logits = student(token_ids()).logits
    for index in set(range(LAYERS)) - set(kept):
        layers_of(teacher)[index] = Skipped()
    assert torch.equal(logits, teacher(token_ids()).logits)


@pytest.mark.parametrize(
    ("layers", "n", "kept"), [(6, 3, [0, 5]), (6, 6, [0]), (5, 2, [0, 2, 4]), (7, 3, [0, 3, 6]), (8, 3, [0, 3, 7])]
)
def test_every_nth_keeps_the_first_and_the_last(layers, n, kept):
    teacher = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "num_hidden_layers": layers}))
    for index, layer in enumerate(teacher.model.layers):
        layer.input_layernorm.weight.data.fill_(index)
    student = drop_layers(teacher, keep_every_nth=n)
    assert [int(layer.input_layernorm.weight[0]) for layer in student.model.layers] == kept


@torch.no_grad()
def test_generates_alike_with_and_without_cache_and_saved(teacher, tmp_path):
    teacher.generation_config.max_new_tokens = 7
    student = drop_layers(teacher, keep=[1, 2, 5])
    for cached_layers in [m for m in student.modules() if hasattr(m, "layer_idx")]:
        assert cached_layers.layer_idx in range(3)
    settings = {"max_new_tokens": 12, "do_sample": False}  # longer than the sliding window
    with_cache = student.generate(token_ids(), use_cache=True, **settings)
    assert with_cache.shape == (2, 21)
    assert torch.equal(with_cache, student.generate(token_ids(), use_cache=False, **settings))

    student.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.generation_config.max_new_tokens == 7
    assert torch.equal(loaded(token_ids()).logits, student(token_ids()).logits)


def test_per_layer_lists_follow_the_layers():
    gemma = drop_layers(build("gemma2"), keep=[0, 2, 3])
    assert gemma.config.layer_types == [SLIDING, FULL, SLIDING]
    assert drop_layers(build("qwen3"), keep=[1, 4]).config.layer_types == [FULL, SLIDING]
    assert drop_layers(build("smollm3"), keep=[2, 3, 5]).config.no_rope_layers == [1, 0, 1]
    two = LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "eos_token_id": [2, 3]})  # as long by chance
    assert drop_layers(AutoModelForCausalLM.from_config(two), keep=[1]).config.eos_token_id == [2, 3]


def test_shares_nothing_and_trains(teacher):
    student = drop_layers(teacher, keep_every_nth=2)
    assert not {p.data_ptr() for p in student.parameters()} & {p.data_ptr() for p in teacher.parameters()}
    assert not any(t.is_meta for t in [*student.parameters(), *student.buffers()])
    before = {name: parameter.clone() for name, parameter in teacher.named_parameters()}
    tied = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (student, teacher)]
    assert tied[0] == tied[1]
    student.train()
    student(token_ids(), labels=token_ids()).loss.backward()
    assert all(p.requires_grad and p.grad is not None for p in student.parameters())
    torch.optim.SGD(student.parameters(), lr=0.1).step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in teacher.named_parameters())
    student.config.vocab_size = student.generation_config.max_new_tokens = 1
    assert teacher.config.vocab_size == 61 and teacher.generation_config.max_new_tokens != 1


def test_dtype_mode_attention_and_random_state_are_kept():
    teacher = AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="eager").to(torch.bfloat16)
    teacher.model.norm.float()
    state = torch.get_rng_state()
    student = drop_layers(teacher.train(), keep_every_nth=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert student.training and student.config._attn_implementation == "eager"
    assert student.lm_head.weight.dtype == torch.bfloat16 and student.model.norm.weight.dtype == torch.float32
    assert not drop_layers(teacher.eval(), keep_every_nth=3).training


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({}, "one of keep_every_nth and keep"),
        ({"keep_every_nth": 2, "keep": [0]}, "not both"),
        ({"keep_every_nth": 1}, "from 2 to 6.*got 1"),
        ({"keep_every_nth": 7}, "got 7"),
        ({"keep_every_nth": 2.0}, "got 2.0"),
        ({"keep_every_nth": True}, "got True"),
        ({"keep": []}, r"at least one.*got \[\]"),
        ({"keep": [0, 6]}, r"from 0 to 5.*got \[0, 6\]"),
        ({"keep": [-1]}, r"got \[-1\]"),
        ({"keep": [0, 0, 1]}, "each once"),
        ({"keep": [2, 1]}, "ascending"),
        ({"keep": ["1"]}, "index"),
    ],
)
def test_wrong_choice(choice, message):
    with pytest.raises(ConfigError, match=message):
        drop_layers(build("llama"), **choice)


def fewer(model):
    model.model.layers = nn.ModuleList(list(model.model.layers)[:5])


def two_lists(model):
    model.model.others = nn.ModuleList(nn.Linear(1, 1) for _ in range(LAYERS))


def lists_within(model):
    """Not taken for the layers; no Llama has these."""
    for layer in model.model.layers:
        layer.experts = nn.ModuleList(nn.Identity() for _ in range(LAYERS))


def more_weights(model):
    model.model.layers[2].adapter = nn.Linear(2, 2)


def by_position(model):
    """Layer 1 of the student would scale its attention otherwise than the layer it was copied from."""
    model.model.layers[2].self_attn.scaling = 0.5


def quantised(model):
    model.hf_quantizer = object()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fewer, "one list of 6 decoder layers.*LlamaForCausalLM.*found none"),
        (two_lists, "found model.layers, model.others"),
        (lists_within, "'experts'.*in layer 0"),
        (more_weights, "adapter"),
        (by_position, "self_attn has scaling=0.5 in layer 2 .*layer 1 of the student"),
        (lambda model: get_peft_model(model, LoraConfig()), "merge_and_unload"),
        (quantised, "without quantisation"),
    ],
)
def test_models_that_are_refused(change, message):
    teacher = build("llama")
    with pytest.raises(ConfigError, match=message):
        drop_layers(change(teacher) or teacher, keep_every_nth=2)
    if change is more_weights:  # of a layer that goes
        assert drop_layers(teacher, keep=[0, 1]).config.num_hidden_layers == 2
