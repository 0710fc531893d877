"""Liger-Kernel's names: apply_liger_kernel_to_<family>, AutoLigerKernelForCausalLM, the snippets of its README."""

import copy
import inspect

import pytest
import torch
import transformers
from steps import assert_same_step
from tiny import masked_batch, tiny_model
from transformers import LlamaForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import liger_trainer
from liger_trainer import AutoLigerKernelForCausalLM, PatchOptions, patch
from liger_trainer.errors import ConfigError
from liger_trainer.kernels.cross_entropy import cross_entropy
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.patching import families
from liger_trainer.patching.families import apply_liger_kernel_to_llama
from liger_trainer.patching.patcher import patched_record

HAS = "It has something for rope, rms_norm, .*fused_linear_cross_entropy"
TYPES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


@pytest.fixture(autouse=True)
def every_family_undone():
    constructors = {c: vars(c)["__init__"] for c in (LlamaForCausalLM, transformers.Gemma2ForCausalLM)}
    yield
    undo_all()
    assert all(vars(c)["__init__"] is before for c, before in constructors.items())


def undo_all():
    for handle in list(families._wrapped.values()):
        handle.undo()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(folder)
    return str(folder)


# The functions


def test_there_is_a_function_for_every_causal_lm_of_transformers():
    names = [name for name in dir(families) if name.startswith(families.PREFIX)]
    assert len(names) == len(TYPES) > 150
    for name in names:
        function = getattr(liger_trainer, name)
        assert function.__name__ == name and function is getattr(families, name)
        assert list(inspect.signature(function).parameters)[-1] == "model"
    for family in ("llama", "mistral", "mixtral", "gemma", "gemma2"):
        assert f"apply_liger_kernel_to_{family}" in names


def test_the_signature_shows_the_flags_and_their_defaults():
    parameters = inspect.signature(apply_liger_kernel_to_llama).parameters
    flags = {name: p.default for name, p in parameters.items() if name != "model"}
    assert flags == vars(liger_trainer.PatchOptions())
    assert "LlamaForCausalLM" in apply_liger_kernel_to_llama.__doc__


def test_a_family_that_is_unknown_names_those_that_are_known():
    with pytest.raises(AttributeError, match="no causal LM 'lama'. It has .*llama"):
        liger_trainer.apply_liger_kernel_to_lama  # noqa: B018
    with pytest.raises(ImportError):
        from liger_trainer import apply_liger_kernel_to_lama  # noqa: F401  # pyright: ignore


# Without a model


WAYS = {
    "auto": lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder),
    "bf16": lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float(),
    "from_config": lambda folder: transformers.AutoModelForCausalLM.from_config(tiny_model("llama").config),
    "constructor": lambda folder: LlamaForCausalLM(tiny_model("llama").config),
}


@pytest.mark.parametrize("way", WAYS)
def test_models_constructed_from_then_on_are_patched(way, saved, capsys):
    """To undo it twice is harmless, and keeps what is patched."""
    signature = inspect.signature(LlamaForCausalLM.__init__)
    handle = apply_liger_kernel_to_llama()
    assert inspect.signature(LlamaForCausalLM.__init__) == signature
    model = WAYS[way](saved).eval()
    record = patched_record(model)
    assert record.fused is not None and record.report.swapped["RMSNorm"] == 5 and record.report.swapped["SwiGLU"] == 2
    assert record.report.swapped["rope"] == 2 and not record.report.left_alone
    assert f"liger-trainer: {record.report}" in capsys.readouterr().out
    handle.undo()
    handle.undo()
    assert patched_record(model) is record and patched_record(WAYS[way](saved)) is None
    plain = tiny_model("llama")
    plain.load_state_dict(model.state_dict())
    assert_same_step(model, plain)


class Own(LlamaForCausalLM):
    """A subclass, which is left to its author."""


def test_no_class_of_a_layer_and_no_other_family_is_touched():
    module = transformers.models.llama.modeling_llama
    before = dict(vars(module))
    layers = {name: dict(vars(value)) for name, value in before.items() if inspect.isclass(value)}
    existing = tiny_model("llama")
    with apply_liger_kernel_to_llama():
        tiny_model("llama")
        assert patched_record(tiny_model("qwen3")) is None and patched_record(Own(existing.config)) is None
        assert vars(module) == before
        changed = {
            (name, attribute)
            for name, attributes in layers.items()
            for attribute, value in attributes.items()
            if vars(before[name])[attribute] is not value
        }
        assert changed == {("LlamaForCausalLM", "__init__")}
    assert patched_record(existing) is None
    assert all("forward" not in vars(layer) for layer in existing.modules())


def test_the_last_call_counts():
    first = apply_liger_kernel_to_llama()
    second = apply_liger_kernel_to_llama(rms_norm=False)
    first.undo()  # of what is over: nothing
    assert "RMSNorm" not in patched_record(tiny_model("llama")).report.swapped
    families.skeleton_report.cache_clear()  # the skeleton is not one of the models that are patched
    with pytest.raises(ConfigError, match="llama has nothing for geglu=True"):
        apply_liger_kernel_to_llama(geglu=True)
    assert "RMSNorm" not in patched_record(tiny_model("llama")).report.swapped
    second.undo()
    assert patched_record(tiny_model("llama")) is None


# With a model


@pytest.mark.parametrize("family", ["gemma2", "granite", "phi", "mixtral"])  # test_patcher.py has others
def test_an_instance_computes_what_it_did(family):
    model = tiny_model(family)
    plain = copy.deepcopy(model)
    apply = getattr(liger_trainer, f"apply_liger_kernel_to_{model.config.model_type}")
    record = apply(model=model)
    assert record is patched_record(model) and record.fused is not None
    assert_same_step(model, plain)
    assert patched_record(plain) is None


def test_the_function_for_instances_of_any_family():
    model = tiny_model("qwen3")
    record = liger_trainer._apply_liger_kernel_to_instance(model=model, rms_norm=False)
    assert patch(model, rms_norm=False) is record and "RMSNorm" not in record.report.swapped


def test_the_function_for_types_patches_what_is_constructed():
    """By each type's name, those with a hyphen too; the table holds the functions of the families."""
    table = liger_trainer.MODEL_TYPE_TO_APPLY_LIGER_FN
    assert set(table) == TYPES
    assert table["llama"] is apply_liger_kernel_to_llama and table["gpt-sw3"] is families.apply_liger_kernel_to_gpt_sw3
    with liger_trainer._apply_liger_kernel("llama", rms_norm=False):
        record = patched_record(tiny_model("llama"))
    assert record is not None and not record.options.rms_norm and "SwiGLU" in record.report.swapped
    assert patched_record(tiny_model("llama")) is None
    with pytest.raises(ConfigError, match="no causal LM of type 'lama'"):
        liger_trainer._apply_liger_kernel("lama")
    with pytest.raises(ConfigError, match="Unknown patch options: swigloo"):
        liger_trainer._apply_liger_kernel("llama", swigloo=True)


# Flags


def test_relu_squared_is_relu2():
    for flag in (True, False):
        with liger_trainer.apply_liger_kernel_to_nemotron(relu_squared=flag) as handle:
            assert handle.options == PatchOptions(relu2=flag)


def test_cross_entropy_computes_the_loss_from_stored_logits(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "liger_trainer.losses.answers.cross_entropy",
        lambda logits, *args, **options: seen.append(logits.dtype) or cross_entropy(logits, *args, **options),
    )
    model = tiny_model("gemma2")
    plain, batch = copy.deepcopy(model), masked_batch()
    before = model.loss_function
    record = liger_trainer.apply_liger_kernel_to_gemma2(cross_entropy=True, model=model)
    assert record.fused is None and record.report.swapped["cross-entropy"] == 1
    assert isinstance(model(**batch).logits, torch.Tensor) and model.loss_function is not before
    assert_same_step(model, plain)
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    for options in ({"num_items_in_batch": 57}, {"shift_labels": shifted}, {"num_items_in_batch": torch.tensor(9)}):
        torch.testing.assert_close(model(**batch, **options).loss, plain(**batch, **options).loss)
    assert set(seen) == {torch.float32}
    model.bfloat16()(**batch)
    assert seen[-1] == torch.bfloat16  # transformers' own makes a copy in fp32
    record.undo()
    assert model.loss_function is before and "_loss_function" not in vars(model)


def test_a_loss_of_another_kind_is_left_alone():
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    for flags in ({}, {"cross_entropy": True}):
        with patch(model, flags) as record:
            assert "loss of its own" in record.report.left_alone["loss"] and record.fused is None


def test_a_configuration_of_ones_own_is_judged_by_itself():
    model = tiny_model("llama", hidden_act="gelu_pytorch_tanh")
    assert apply_liger_kernel_to_llama(geglu=True, model=model).report.swapped["GEGLU"] == 2
    with apply_liger_kernel_to_llama(swiglu=True), pytest.raises(ConfigError, match="nothing for swiglu=True"):
        tiny_model("llama", hidden_act="gelu_pytorch_tanh")


@pytest.mark.parametrize(
    ("function", "flags", "message"),
    [
        ("llama", {"ropes": True}, "Unknown patch options: ropes. There are rope, rms_norm"),
        ("llama", {"rope": 1}, "must be true or false, got 1"),
        ("llama", {"cross_entropy": True, "fused_linear_cross_entropy": True}, "choose one"),
        ("nemotron", {"relu_squared": True, "relu2": True}, "relu_squared is another name of relu2"),
        ("llama", {"relu_squared": True}, "llama has nothing for relu2=True"),
        ("llama", {"geglu": True}, rf"llama has nothing for geglu=True\. {HAS}"),
        ("llama", {"layer_norm": True, "relu2": True}, rf"llama has nothing for layer_norm=True, relu2=True\. {HAS}"),
        ("gemma2", {"swiglu": True}, rf"gemma2 has nothing for swiglu=True\. {HAS}"),
        ("mistral", {"lora": True}, rf"mistral has nothing for lora=True\. {HAS}"),
        ("gemma2", {"model": "llama"}, r"apply_liger_kernel_to_gemma2 got a LlamaForCausalLM \(llama\)"),
        ("llama", {"geglu": True, "model": "llama"}, "llama has nothing for geglu=True"),
    ],
    ids=str,
)
def test_wrong_flags_are_errors(function, flags, message):
    """And all is as before."""
    model = tiny_model("llama")
    if "model" in flags:
        flags = {**flags, "model": model}
    with pytest.raises(ConfigError, match=message):
        getattr(liger_trainer, f"apply_liger_kernel_to_{function}")(**flags)
    assert not families._wrapped and patched_record(model) is None
    assert all("forward" not in vars(layer) for layer in model.modules())


# AutoLigerKernelForCausalLM


def test_from_pretrained_is_patched_and_computes_what_it_did(saved, capsys):
    model = AutoLigerKernelForCausalLM.from_pretrained(saved)
    assert type(model) is transformers.LlamaForCausalLM and not model.training
    record = patched_record(model)
    assert record is patch(model) and {"RMSNorm", "SwiGLU", "rope", "fused loss"} <= set(record.report.swapped)
    assert str(record.report) in capsys.readouterr().out
    assert isinstance(model(**masked_batch()).logits, DeferredLogits)
    assert_same_step(model, transformers.AutoModelForCausalLM.from_pretrained(saved))
    assert patched_record(transformers.AutoModelForCausalLM.from_pretrained(saved)) is None


def test_from_config_is_patched():
    config = tiny_model("gemma2").config
    model = AutoLigerKernelForCausalLM.from_config(config, geglu=False, attn_implementation="eager").eval()
    assert model.config._attn_implementation == "eager"
    record = patched_record(model)
    assert "GEGLU" not in record.report.swapped and "RMSNorm" in record.report.swapped
    plain = copy.deepcopy(model)
    patched_record(plain).undo()
    assert all("forward" not in vars(layer) for layer in plain.modules())
    assert_same_step(model, plain)


def test_flags_are_taken_out_and_all_else_goes_on(saved):
    model, info = AutoLigerKernelForCausalLM.from_pretrained(
        saved, rms_norm=False, cross_entropy=True, dtype=torch.bfloat16, output_loading_info=True
    )
    assert model.dtype == torch.bfloat16 and not info["missing_keys"]
    record = patched_record(model)
    assert "RMSNorm" not in record.report.swapped and record.fused is None
    assert record.report.swapped["cross-entropy"] == 1
    assert not hasattr(model.config, "rms_norm")
    record = patched_record(AutoLigerKernelForCausalLM.from_pretrained(saved, relu_squared=False))  # Liger's name
    assert record is not None and not record.options.relu2
    with pytest.raises(TypeError, match="rms_norms"):
        AutoLigerKernelForCausalLM.from_pretrained(saved, rms_norms=False)


def test_nothing_to_patch_is_an_error(saved):
    nothing = dict.fromkeys(("rope", "rms_norm", "swiglu", "linear", "fused_linear_cross_entropy"), False)
    with pytest.raises(ConfigError, match="Nothing was found to patch in llama for layer_norm, geglu"):
        AutoLigerKernelForCausalLM.from_pretrained(saved, **nothing)


def test_wrong_flags_are_errors_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="must be true or false, got 'yes'"):
        AutoLigerKernelForCausalLM.from_pretrained("no such model", rope="yes")


# Liger-Kernel's README

AUTO = """
from liger_kernel.transformers import AutoLigerKernelForCausalLM

# This AutoModel wrapper class automatically monkey-patches the
# model with the optimized Liger kernels if the model is supported.
model = AutoLigerKernelForCausalLM.from_pretrained("path/to/some/model")
"""
APPLY = """
import transformers
from liger_kernel.transformers import apply_liger_kernel_to_llama

# 1a. Adding this line automatically monkey-patches the model with the optimized Liger kernels
apply_liger_kernel_to_llama()

# 1b. You could alternatively specify exactly which kernels are applied
apply_liger_kernel_to_llama(
  rope=True,
  swiglu=True,
  cross_entropy=True,
  fused_linear_cross_entropy=False,
  rms_norm=False
)

# 2. Instantiate patched model
model = transformers.AutoModelForCausalLM.from_pretrained("path/to/llama/model")
"""
COMPOSE = """
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
import torch.nn as nn
import torch

model = nn.Linear(128, 256).cuda()

# fuses linear + cross entropy layers together and performs chunk-by-chunk computation to reduce memory
loss_fn = LigerFusedLinearCrossEntropyLoss()

input = torch.randn(4, 128, requires_grad=True, device="cuda")
target = torch.randint(256, (4, ), device="cuda")

loss = loss_fn(model.weight, input, target)
loss.backward()
"""


def run(snippet, saved):
    for name, replaced in (
        ("liger_kernel.transformers", "liger_trainer"), ("path/to/some/model", saved), ("path/to/llama/model", saved),
        (".cuda()", ""), ('device="cuda"', 'device="cpu"'),
    ):  # fmt: skip
        snippet = snippet.replace(name, replaced)
    scope = {}
    exec(compile(snippet, "README", "exec"), scope)
    return scope


def test_the_readmes_auto_model(saved):
    model = run(AUTO, saved)["model"]
    assert patched_record(model).fused is not None
    assert_same_step(model, transformers.AutoModelForCausalLM.from_pretrained(saved))


def test_the_readmes_patched_llama(saved):
    model = run(APPLY, saved)["model"]
    swapped = patched_record(model).report.swapped
    assert {"rope", "SwiGLU", "cross-entropy"} <= set(swapped) and not {"RMSNorm", "fused loss"} & set(swapped)
    undo_all()
    assert_same_step(model, transformers.AutoModelForCausalLM.from_pretrained(saved))


def test_the_readmes_composed_loss(saved):
    scope = run(COMPOSE, saved)
    hidden, target, head = scope["input"], scope["target"], scope["model"]
    truth = hidden.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(truth @ head.weight.detach().double().T, target)
    want.backward()
    torch.testing.assert_close(scope["loss"].double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), truth.grad, rtol=1e-5, atol=1e-8)
    assert head.weight.grad.any() and head.bias.grad is None  # the snippet hands over the weight alone
