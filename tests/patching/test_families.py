"""apply_liger_kernel_to_<family>, with a model and without: what is patched, what is refused, what stays untouched."""

import copy
import inspect

import pytest
import torch
import transformers
from tiny import assert_same_gradients, masked_batch, named_gradients, tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import liger_trainer
from liger_trainer import PatchOptions, patch
from liger_trainer.errors import ConfigError
from liger_trainer.kernels.cross_entropy import cross_entropy
from liger_trainer.patching import families
from liger_trainer.patching.families import apply_liger_kernel_to_llama
from liger_trainer.patching.patcher import patched_record

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
    return folder


def plain_and(model):
    plain = tiny_model("llama").eval()
    plain.load_state_dict(model.state_dict())
    return plain


def assert_same_step(model, plain):
    batch = masked_batch()
    got, want = model(**batch), plain(**batch)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    assert_same_gradients(named_gradients(model, got.loss), named_gradients(plain, want.loss))


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
    "auto": lambda folder: AutoModelForCausalLM.from_pretrained(folder),
    "bf16": lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float(),
    "from_config": lambda folder: AutoModelForCausalLM.from_config(tiny_model("llama").config),
    "constructor": lambda folder: LlamaForCausalLM(tiny_model("llama").config),
}


@pytest.mark.parametrize("way", WAYS)
def test_models_constructed_from_then_on_are_patched(way, saved, capsys):
    handle = apply_liger_kernel_to_llama()
    model = WAYS[way](saved).eval()
    record = patched_record(model)
    assert record.fused is not None and record.report.swapped["RMSNorm"] == 5 and record.report.swapped["SwiGLU"] == 2
    assert record.report.swapped["rope"] == 2 and not record.report.left_alone
    assert f"liger-trainer: {record.report}" in capsys.readouterr().out
    handle.undo()
    plain = plain_and(model)
    assert patched_record(plain) is None
    assert_same_step(model, plain)


def test_no_class_of_a_layer_and_no_other_family_is_touched():
    module = transformers.models.llama.modeling_llama
    before = {name: value for name, value in vars(module).items()}
    layers = {name: dict(vars(value)) for name, value in before.items() if inspect.isclass(value)}
    existing = tiny_model("llama")
    with apply_liger_kernel_to_llama():
        tiny_model("llama")
        assert patched_record(tiny_model("qwen3")) is None
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


def test_undo_ends_it_and_keeps_what_is_patched(saved):
    handle = apply_liger_kernel_to_llama()
    model = LlamaForCausalLM.from_pretrained(saved)
    handle.undo()
    handle.undo()
    assert patched_record(model) is not None
    assert patched_record(LlamaForCausalLM.from_pretrained(saved)) is None


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


def test_a_subclass_is_left_to_its_author():
    class Own(LlamaForCausalLM):
        pass

    with apply_liger_kernel_to_llama():
        assert patched_record(Own(tiny_model("llama").config)) is None


def test_the_constructor_keeps_its_signature():
    before = inspect.signature(LlamaForCausalLM.__init__)
    with apply_liger_kernel_to_llama():
        assert inspect.signature(LlamaForCausalLM.__init__) == before


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


def test_a_model_of_another_family_is_refused():
    with pytest.raises(ConfigError, match=r"apply_liger_kernel_to_gemma2 got a LlamaForCausalLM \(llama\)"):
        liger_trainer.apply_liger_kernel_to_gemma2(model=tiny_model("llama"))


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
    with liger_trainer.apply_liger_kernel_to_nemotron(relu_squared=True) as handle:
        assert handle.options == PatchOptions()
    with liger_trainer.apply_liger_kernel_to_nemotron(relu_squared=False) as handle:
        assert handle.options == PatchOptions(relu2=False)
    with pytest.raises(ConfigError, match="has nothing for relu2=True"):
        apply_liger_kernel_to_llama(relu_squared=True)
    with pytest.raises(ConfigError, match="relu_squared is another name of relu2"):
        PatchOptions.of({"relu_squared": True, "relu2": True})


def test_cross_entropy_computes_the_loss_from_stored_logits():
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
    record.undo()
    assert model.loss_function is before and "_loss_function" not in vars(model)


def test_cross_entropy_takes_memory_for_the_logits_once(monkeypatch):
    seen = []

    def watched(logits, *args, **options):
        seen.append(logits.dtype)
        return cross_entropy(logits, *args, **options)

    monkeypatch.setattr("liger_trainer.losses.cross_entropy.cross_entropy", watched)
    model = tiny_model("llama").to(torch.bfloat16)
    liger_trainer.apply_liger_kernel_to_llama(cross_entropy=True, model=model)
    model(**masked_batch())
    assert seen == [torch.bfloat16]  # transformers' own makes a copy in fp32


def test_a_loss_of_another_kind_is_left_alone():
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    for flags in ({}, {"cross_entropy": True}):
        with patch(model, flags) as record:
            assert "loss of its own" in record.report.left_alone["loss"] and record.fused is None


@pytest.mark.parametrize(
    ("family", "flags", "missing"),
    [
        ("llama", {"geglu": True}, "geglu=True"),
        ("llama", {"layer_norm": True, "relu2": True, "swiglu": True}, "layer_norm=True, relu2=True"),
        ("gemma2", {"swiglu": True}, "swiglu=True"),
        ("mistral", {"lora": True}, "lora=True"),
    ],
)
def test_a_flag_for_what_a_family_lacks_is_refused_with_what_it_has(family, flags, missing):
    message = rf"{family} has nothing for {missing}\. It has something for rope, rms_norm, .*fused_linear_cross_entropy"
    with pytest.raises(ConfigError, match=message):
        getattr(liger_trainer, f"apply_liger_kernel_to_{family}")(**flags)
    assert not families._wrapped


def test_a_flag_for_what_a_model_lacks_is_refused_and_the_model_is_as_before():
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="llama has nothing for geglu=True"):
        apply_liger_kernel_to_llama(geglu=True, model=model)
    assert patched_record(model) is None and all("forward" not in vars(layer) for layer in model.modules())


def test_a_configuration_of_ones_own_is_judged_by_itself():
    model = tiny_model("llama", hidden_act="gelu_pytorch_tanh")
    assert apply_liger_kernel_to_llama(geglu=True, model=model).report.swapped["GEGLU"] == 2
    with apply_liger_kernel_to_llama(swiglu=True), pytest.raises(ConfigError, match="nothing for swiglu=True"):
        tiny_model("llama", hidden_act="gelu_pytorch_tanh")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ropes": True}, "Unknown patch options: ropes. There are rope, rms_norm"),
        ({"rope": 1}, "must be true or false, got 1"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": True}, "choose one"),
    ],
)
def test_wrong_flags_are_errors(flags, message):
    with pytest.raises(ConfigError, match=message):
        apply_liger_kernel_to_llama(**flags)
