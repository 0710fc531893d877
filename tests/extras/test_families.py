"""Liger-Kernel's names: apply_liger_kernel_to_<family>, AutoLigerKernelForCausalLM."""

import copy
import inspect

import pytest
import torch
import transformers
from recorders import calls_of
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
from liger_trainer.extras.modules import families
from liger_trainer.extras.modules.families import apply_liger_kernel_to_llama
from liger_trainer.losses import answers
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.patching.patcher import patched_record

HAS = "It has something for rope, rms_norm, .*fused_linear_cross_entropy"
TYPES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


@pytest.fixture(autouse=True)
def every_family_undone():
    constructors = {c: vars(c)["__init__"] for c in (LlamaForCausalLM, transformers.Gemma2ForCausalLM)}
    yield
    for handle in list(families._wrapped.values()):
        handle.undo()
    assert all(vars(c)["__init__"] is before for c, before in constructors.items())


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


def test_instances_by_the_function_of_their_family_and_of_any():
    """What they compute: test_patcher.py."""
    gemma, qwen, other = tiny_model("gemma2"), tiny_model("qwen3"), tiny_model("gemma2")
    record = liger_trainer.apply_liger_kernel_to_gemma2(model=gemma)
    assert record is patched_record(gemma) and record.fused is not None and patched_record(other) is None
    record = liger_trainer._apply_liger_kernel_to_instance(model=qwen, rms_norm=False)
    assert patch(qwen, rms_norm=False) is record and "RMSNorm" not in record.report.swapped


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
    seen = calls_of(monkeypatch, answers, "cross_entropy")
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
    assert {logits.dtype for logits, *_ in seen} == {torch.float32}
    model.bfloat16()(**batch)
    assert seen[-1][0].dtype == torch.bfloat16  # transformers' own makes a copy in fp32
    record.undo()
    assert model.loss_function is before and "_loss_function" not in vars(model)


def test_a_loss_of_another_kind_is_left_alone():
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    for flags in ({}, {"cross_entropy": True}):
        with patch(model, flags) as record:
            assert "its own loss" in record.report.left_alone["loss"] and record.fused is None


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


def test_what_from_pretrained_refuses(saved):
    nothing = dict.fromkeys(("rope", "rms_norm", "swiglu", "linear", "fused_linear_cross_entropy"), False)
    with pytest.raises(ConfigError, match="Nothing was found to patch in llama for layer_norm, geglu"):
        AutoLigerKernelForCausalLM.from_pretrained(saved, **nothing)
    with pytest.raises(ConfigError, match="must be true or false, got 'yes'"):  # before anything is loaded
        AutoLigerKernelForCausalLM.from_pretrained("no such model", rope="yes")
