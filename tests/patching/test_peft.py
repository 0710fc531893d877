"""Models that PEFT has wrapped: loss and every gradient of the patched model are those of the plain one, in fp32."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import FAMILIES, assert_same_gradients, masked_batch, named_gradients, tiny_model

from liger_trainer.patching.patcher import patch

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about tied weights and merged adapters
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**options) -> LoraConfig:
    """Plain LoRA on every linear layer, B not zero."""
    given = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return LoraConfig(**given)


def tiny(family: str) -> Any:
    return tiny_model(family) if family in FAMILIES else build(family, f"{family.title()}ForCausalLM")


def wrapped(model: Any, config: LoraConfig) -> PeftModel:
    """The model with adapters that are the same each time, and in train mode."""
    torch.manual_seed(1)
    peft = get_peft_model(model, config)
    return spread_trainable(peft).train()


def spread_trainable(model: Any) -> Any:
    """Other values for copies of weights (modules_to_save), so that they are not those of the base."""
    for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        generator = torch.Generator().manual_seed(i)
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.05
    return model


def loss_and_gradients(model: Any) -> tuple[float, dict]:
    loss = model(**masked_batch()).loss
    return loss.item(), named_gradients(model, loss) if loss.requires_grad else {}


def assert_same(plain: Any, patched: Any) -> None:
    want_loss, want = loss_and_gradients(plain)
    loss, gradients = loss_and_gradients(patched)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert all(gradient.norm() > 0 for gradient in want.values())
    assert bool(gradients) == bool(want)
    if want:
        assert_same_gradients(gradients, want)


TOKENS = masked_batch()["input_ids"][0, :3].tolist()
CONFIGS: dict[str, tuple[str, dict]] = {
    "lora": ("qwen3", {}),
    "packed gate and up": ("phi3", {}),
    "geglu": ("gemma2", {}),
    "ungated": ("phi", {}),
    "experts": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    "attention": ("llama", {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
    "mlp": ("llama", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "part of the mlp": ("llama", {"target_modules": ["up_proj"]}),
    "one layer": ("llama", {"target_modules": LINEAR, "layers_to_transform": [1]}),
    "ranks and scales of their own": ("llama", {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"k_proj": 9}}),
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"use_dora": True}),
    "lora_bias": ("phi", {"lora_bias": True}),
    "trained biases": ("phi", {"bias": "all"}),
    "lm_head": ("llama", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "lm_head, dora": ("llama", {"target_modules": ["q_proj", "lm_head"], "use_dora": True}),
    "lm_head, tied": ("llama_tied", {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "embeddings, tied": ("llama_tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "embeddings and lm_head, tied": (
        "llama_tied",
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "saved lm_head": ("llama", {"modules_to_save": ["lm_head"]}),
    "saved lm_head, tied": ("llama_tied", {"modules_to_save": ["lm_head"]}),
    "saved embeddings and lm_head": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved embeddings, tied": (
        "llama_tied",
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "saved norms": ("llama", {"target_modules": ["up_proj"], "modules_to_save": ["norm", "post_attention_layernorm"]}),
    "saved projection": ("llama", {"target_modules": ["q_proj", "gate_proj"], "modules_to_save": ["up_proj"]}),
    "trained tokens": ("llama", {"trainable_token_indices": TOKENS}),
    "trained tokens, tied": ("llama_tied", {"trainable_token_indices": TOKENS}),
}  # fmt: skip
ORDERS = ["before", "after"]  # whether the model is patched before PEFT wraps it, or after


@pytest.mark.parametrize("case", CONFIGS)
def test_adapters(case):
    """The orders of patching and wrapping take turns; tests below take both."""
    family, options = CONFIGS[case]
    order = ORDERS[list(CONFIGS).index(case) % 2]
    plain, model = wrapped(tiny(family), lora(**options)), tiny(family)
    if order == "before":
        patch(model)
    model = wrapped(model, lora(**options))
    patch(model)
    assert_same(plain, model)
    if case == "saved norms":  # a copy of a swapped norm is a swapped norm
        assert order == "before"
        assert sum("forward" in vars(m) for n, m in model.named_modules() if "modules_to_save.default" in n) == 5
    if case in ("lora", "dora", "saved norms"):
        got, want = (each.merge_and_unload()(**masked_batch()).loss for each in (model, plain))
        assert torch.allclose(got, want, rtol=1e-5)


def two_adapters(model: Any) -> Any:
    model = wrapped(model, lora())
    torch.manual_seed(2)
    model.add_adapter("other", lora(r=2, lora_alpha=3, target_modules=["q_proj", "gate_proj", "down_proj"]))
    return model


def disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


STATES: dict[str, Callable[[Any], Any]] = {
    "the first of two": lambda model: model.set_adapter("default"),
    "the second of two": lambda model: model.set_adapter("other"),
    "both at once": lambda model: model.base_model.set_adapter(["default", "other"]),
    "disabled": disabled,
    "merged": lambda model: model.base_model.merge_adapter(),
    "merged and disabled": lambda model: (model.base_model.merge_adapter(), disabled(model)),
    "merged and taken apart": lambda model: (model.base_model.merge_adapter(), model.base_model.unmerge_adapter()),
    "deleted": lambda model: (model.set_adapter("other"), model.delete_adapter("default")),
    "rescaled": lambda model: [m.scale_layer(0.3) for m in model.modules() if hasattr(m, "scale_layer")],
}


@pytest.mark.parametrize("state", STATES)
def test_states(state):
    """Switched after patching: what a layer computes is decided when it is called."""
    order = ORDERS[list(STATES).index(state) % 2]
    plain, model = two_adapters(tiny_model()), tiny_model()
    if order == "before":
        patch(model)
    model = two_adapters(model)
    patch(model)
    first, _ = loss_and_gradients(model)
    for each in (plain, model):
        STATES[state](each)
        each.train()
    want_loss, want = loss_and_gradients(plain)
    loss, gradients = loss_and_gradients(model)
    assert loss == pytest.approx(want_loss, rel=2e-6)  # merged weights were added and subtracted
    unchanged = ("the first of two", "merged", "merged and taken apart")
    assert (loss == pytest.approx(first, rel=1e-4)) == (state in unchanged)
    if want and any(gradient.norm() > 0 for gradient in want.values()):
        assert_same_gradients(gradients, want)


@pytest.mark.parametrize(
    ("reentrant", "options", "order"),
    [
        (True, {}, "before"),
        (False, {}, "after"),
        (True, {"use_dora": True}, "after"),
        (False, {"use_dora": True}, "before"),
    ],
)
def test_gradient_checkpointing(reentrant, options, order):
    plain = wrapped(tiny_model("qwen3"), lora(**options))
    model = tiny_model("qwen3")
    if order == "before":
        patch(model)
    model = wrapped(model, lora(**options))
    patch(model)
    for each in (plain, model):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        each.enable_input_require_grads()
    assert_same(plain, model)


def test_dropout():
    """In train mode torch's seed alone decides the masks; in eval mode there are none."""
    plain = wrapped(tiny_model(), lora(lora_dropout=0.3))
    model = wrapped(tiny_model(), lora(lora_dropout=0.3))
    patch(model)
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(loss_and_gradients(model))
    assert results[0][0] == results[1][0] != results[2][0]
    assert_same_gradients(results[1][1], results[0][1])
    assert_same(plain.eval(), model.eval())


def test_batches_of_several_adapters():
    """`adapter_names`, PEFT's mixed batches, goes to PEFT."""
    plain, model = two_adapters(tiny_model()).eval(), two_adapters(tiny_model()).eval()
    patch(model)
    batch = masked_batch() | {"adapter_names": ["default", "other", "__base__"]}
    batch.pop("labels")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


def test_generation():
    plain, model = wrapped(tiny_model(), lora()).eval(), wrapped(tiny_model(), lora()).eval()
    patch(model)
    prompt = {"input_ids": masked_batch()["input_ids"], "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**prompt), plain.generate(**prompt))


def test_saved_adapters_load_into_a_patched_model(tmp_path):
    model = wrapped(tiny_model(), lora())
    want = loss_and_gradients(model)[0]
    patch(model)
    model.save_pretrained(tmp_path)
    base = tiny_model()
    patch(base)
    with warnings.catch_warnings(action="error", category=UserWarning):  # missing or unexpected keys
        loaded = PeftModel.from_pretrained(base, tmp_path)
    assert loss_and_gradients(loaded)[0] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("first", ["patch", "PEFT"])
def test_a_deep_copy_is_a_peft_model_with_adapters_of_its_own(first):
    base = tiny_model("llama")
    if first == "patch":
        patch(base)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    if first == "PEFT":
        patch(model)
    clone = copy.deepcopy(model)
    assert type(clone) is type(model) and clone.get_base_model() is not base
    assert type(copy.deepcopy(base)) is type(base)
    batch = masked_batch()
    torch.testing.assert_close(clone(**batch).loss, model(**batch).loss)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert (clone(**batch).loss - model(**batch).loss).abs() > 1e-4
