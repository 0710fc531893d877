"""Models that PEFT has wrapped: loss and every gradient of the patched model are those of the plain one, in fp32."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build
from peft import PeftModel
from steps import ADAPTER_STATES, adapted, assert_same_outcome, assert_same_step, lora, step
from tiny import FAMILIES, assert_same_gradients, masked_batch, tiny_model

from liger_trainer.patching.patcher import patch

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about tied weights and merged adapters
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny(family: str) -> Any:
    return tiny_model(family) if family in FAMILIES else build(family, f"{family.title()}ForCausalLM")


def wrapped(model: Any, **options) -> PeftModel:
    """The model with adapters, and copies of weights (modules_to_save) with other values than those of the base."""
    peft = adapted(model, **options)
    for i, parameter in enumerate(p for p in peft.parameters() if p.requires_grad):
        generator = torch.Generator().manual_seed(i)
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.05
    return peft


ORDERS = ["before", "after"]  # whether the model is patched before PEFT wraps it, or after


def plain_and_patched(order: str, make: Callable[[], Any], wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    model = make()
    if order == "before":
        patch(model)
    model = wrap(model)
    patch(model)
    return wrap(make()), model


def assert_same(plain: Any, patched: Any) -> None:
    assert_same_step(patched, plain)
    assert all(gradient.norm() > 0 for gradient in step(plain)[1].values())


TOKENS = masked_batch()["input_ids"][0, :3].tolist()
CONFIGS: dict[str, tuple[str, dict]] = {
    "lora": ("qwen3", {}),
    "packed gate and up": ("phi3", {}),
    "geglu": ("gemma2", {}),
    "ungated": ("phi", {}),
    "experts": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    "attention": ("llama", {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
    "part of the mlp": ("llama", {"target_modules": ["up_proj"]}),
    "one layer": ("llama", {"target_modules": LINEAR, "layers_to_transform": [1]}),
    "ranks and scales of their own": ("llama", {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"k_proj": 9}}),
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"use_dora": True}),
    "lora_bias": ("phi", {"lora_bias": True}),
    "trained biases": ("phi", {"bias": "all"}),
    "lm_head, dora": ("llama", {"target_modules": ["q_proj", "lm_head"], "use_dora": True}),
    "lm_head, tied": ("llama_tied", {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "embeddings, tied": ("llama_tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "saved embeddings and lm_head": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved norms": ("llama", {"target_modules": ["up_proj"], "modules_to_save": ["norm", "post_attention_layernorm"]}),
    "saved projection": ("llama", {"target_modules": ["q_proj", "gate_proj"], "modules_to_save": ["up_proj"]}),
    "a weight of the mlp": ("llama", {"target_modules": ["q_proj"], "target_parameters": ["up_proj.weight"]}),
    "a weight of the attention": ("llama", {"target_modules": ["up_proj"], "target_parameters": ["v_proj.weight"]}),
    "trained tokens, tied": ("llama_tied", {"trainable_token_indices": TOKENS}),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_adapters(case):
    """The orders of patching and wrapping take turns; tests below take both."""
    family, options = CONFIGS[case]
    order = ORDERS[list(CONFIGS).index(case) % 2]
    plain, model = plain_and_patched(order, lambda: tiny(family), lambda model: wrapped(model, **options))
    assert_same(plain, model)
    if case == "saved norms":  # a copy of a swapped norm is a swapped norm
        assert order == "before"
        assert sum("forward" in vars(m) for n, m in model.named_modules() if "modules_to_save.default" in n) == 5
    if case in ("lora", "dora", "saved norms"):
        got, want = (each.merge_and_unload()(**masked_batch()).loss for each in (model, plain))
        assert torch.allclose(got, want, rtol=1e-5)


def two_adapters(model: Any) -> Any:
    model = wrapped(model)
    torch.manual_seed(2)
    model.add_adapter("other", lora(r=2, lora_alpha=3, target_modules=["q_proj", "gate_proj", "down_proj"]))
    return model


STATES = {
    **ADAPTER_STATES,
    "merged and disabled": lambda model: (model.base_model.merge_adapter(), model.base_model.disable_adapter_layers()),
    "deleted": lambda model: (model.set_adapter("other"), model.delete_adapter("default")),
}


@pytest.mark.parametrize("state", STATES)
def test_states(state):
    """Switched after patching: what a layer computes is decided when it is called."""
    plain, model = plain_and_patched(ORDERS[list(STATES).index(state) % 2], tiny_model, two_adapters)
    first, _ = step(model)
    for each in (plain, model):
        STATES[state](each)
        each.train()
    (want, wanted), got = step(plain), step(model)
    if not any(gradient.norm() > 0 for gradient in wanted.values()):
        wanted, got = {}, (got[0], {})
    assert_same_outcome(got, (want, wanted), loss_rtol=2e-6)  # merged weights were added and subtracted
    unchanged = ("the first of two", "merged", "merged and taken apart")
    assert torch.allclose(got[0], first, rtol=1e-4) == (state in unchanged)


@pytest.mark.parametrize(
    ("reentrant", "options", "order"),
    [(True, {}, "before"), (False, {}, "after"), (True, {"use_dora": True}, "after"),
     (False, {"use_dora": True}, "before")],
)  # fmt: skip
def test_gradient_checkpointing(reentrant, options, order):
    models = plain_and_patched(order, lambda: tiny("qwen3"), lambda model: wrapped(model, **options))
    for each in models:
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        each.enable_input_require_grads()
    assert_same(*models)


def test_dropout():
    """In train mode torch's seed alone decides the masks; in eval mode there are none."""
    plain, model = plain_and_patched("after", tiny_model, lambda model: wrapped(model, lora_dropout=0.3))
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(step(model))
    assert results[0][0] == results[1][0] != results[2][0]
    assert_same_gradients(results[1][1], results[0][1])
    assert_same(plain.eval(), model.eval())


def test_batches_of_several_adapters():
    """`adapter_names`, PEFT's mixed batches, goes to PEFT."""
    plain, model = plain_and_patched("after", tiny_model, lambda model: two_adapters(model).eval())
    batch = masked_batch() | {"adapter_names": ["default", "other", "__base__"]}
    batch.pop("labels")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


def test_generation():
    plain, model = plain_and_patched("after", tiny_model, lambda model: wrapped(model).eval())
    prompt = {"input_ids": masked_batch()["input_ids"], "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**prompt), plain.generate(**prompt))


def test_saved_adapters_load_into_a_patched_model(tmp_path):
    plain, model = plain_and_patched("after", tiny_model, wrapped)
    model.save_pretrained(tmp_path)
    base = tiny_model()
    patch(base)
    with warnings.catch_warnings(action="error", category=UserWarning):  # missing or unexpected keys
        loaded = PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(step(loaded)[0], step(plain)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ORDERS)
def test_a_deep_copy_is_a_peft_model_with_adapters_of_its_own(order):
    _, model = plain_and_patched(order, tiny_model, wrapped)
    clone = copy.deepcopy(model)
    assert type(clone) is type(model) and clone.get_base_model() is not model.get_base_model()
    assert type(copy.deepcopy(model.get_base_model())) is type(model.get_base_model())
    want = step(model)[0]
    torch.testing.assert_close(step(clone)[0], want)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    torch.testing.assert_close(step(clone)[0], want)
    assert (step(model)[0] - want).abs() > 1e-4
