"""patch(model): one object and nothing else, before and after everything that wraps models, and the way back."""

import copy
import io
import pickle
import sys
import types

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from families import VOCAB, build
from steps import adapted, assert_same_outcome, only, step
from tiny import masked_batch, tiny_model
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_trainer.errors import ConfigError
from liger_trainer.patching import patcher as patching
from liger_trainer.patching.patcher import NothingToPatch, PatchOptions, patch

# Families of different norms, MLPs and experts: what is swapped in them beside rope and the loss.
DIVERSE = {
    "llama": {"RMSNorm", "SwiGLU"},
    "qwen3": {"RMSNorm", "SwiGLU"},
    "gemma2": {"RMSNorm", "GEGLU"},
    "gemma3_text": {"RMSNorm", "GEGLU"},
    "mixtral": {"RMSNorm", "SwiGLU experts"},
    "qwen3_moe": {"RMSNorm", "SwiGLU experts"},
    "phi3": {"RMSNorm", "SwiGLU"},
    "glm4": {"RMSNorm", "SwiGLU"},
    "olmo2": {"RMSNorm", "SwiGLU"},
    "gpt_oss": {"RMSNorm", "SwiGLU experts"},
    "granite": {"RMSNorm", "SwiGLU"},
    "cohere": {"LayerNorm", "SwiGLU"},
    "phi": {"LayerNorm", "GELU MLP"},
    "nemotron": {"LayerNorm", "ReLU2"},
    "gpt2": {"LayerNorm"},
}


def objects(model):
    """Everything that a model's modules hold, object for object; a bound method by its function and its owner."""
    return {
        (name, key): (value.__func__, id(value.__self__)) if isinstance(value, types.MethodType) else id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }


def classes(model):
    """What the classes and the modules of the code define, object for object."""
    kinds = {type(module) for module in model.modules()}
    members = {(kind, key): id(value) for kind in kinds for base in kind.__mro__ for key, value in vars(base).items()}
    homes = {sys.modules[kind.__module__] for kind in kinds}
    return members | {
        (home.__name__, key): id(value) for home in homes for key, value in vars(home).items() if key[:2] != "__"
    }


OVERRIDES = {"nemotron": {"hidden_act": "relu2"}, "granite": {"logits_scaling": 2.5, "embedding_multiplier": 2.0}}


def diverse(family):
    overrides = OVERRIDES.get(family, {})
    model = build(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], experts="grouped_mm", **overrides)
    assert not isinstance(model, str), model
    return model


@pytest.mark.parametrize("family", DIVERSE)
def test_loss_and_gradients_are_the_plain_models(family):
    plain = diverse(family)
    batch = masked_batch(vocab=VOCAB)
    want = step(plain, batch)
    model = copy.deepcopy(plain)
    with patch(model) as patched:
        kinds = set(patched.report.swapped) - {"rope", "QK norm + rope", "fused loss", "shared input"}
        assert kinds == DIVERSE[family] and patched.fused is not None
        assert_same_outcome(step(model, batch), want, 1e-4, 1e-4)
    assert_same_outcome(step(model, batch), want, 1e-6)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_thirty_two_steps_end_where_the_plain_models_end(family):
    def trained(model) -> tuple[list[float], torch.Tensor]:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for number in range(32):
            loss = model(**masked_batch(seed=number)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, torch.cat([weight.detach().flatten() for weight in model.parameters()])

    plain, patched = tiny_model(family), tiny_model(family)
    patch(patched)
    (want, weights), (got, own_weights) = trained(plain), trained(patched)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
    assert (own_weights - weights).norm() < 1e-5 * weights.norm()


@pytest.mark.parametrize("option", sorted(vars(PatchOptions()).keys() - {"lora", "cross_entropy", "towers", "hybrids"}))
def test_each_option_alone(option):
    """And all but that one."""
    family = {"geglu": "gemma2", "layer_norm": "cohere", "relu2": "nemotron", "gelu": "phi"}.get(option, "llama")
    plain = diverse(family)
    batch = masked_batch(vocab=VOCAB)
    model = copy.deepcopy(plain)
    patched = patch(model, only(option))
    assert not patched.report.left_alone
    kinds = {
        "swiglu": "SwiGLU", "geglu": "GEGLU", "relu2": "ReLU2", "gelu": "GELU MLP", "rms_norm": "RMSNorm",
        "layer_norm": "LayerNorm", "rope": "rope", "fused_linear_cross_entropy": "fused loss", "linear": "shared input",
    }  # fmt: skip
    swapped = {kinds[option]}
    assert set(patched.report.swapped) == swapped
    assert_same_outcome(step(model, batch), step(plain, batch), 1e-5)
    patched.undo()
    every, others = (patch(copy.deepcopy(model), {option: on}).report.swapped for on in (True, False))
    assert not swapped & set(others) and {k: n for k, n in every.items() if k not in swapped} == dict(others)


def test_the_report_is_one_line_on_what_was_asked_for():
    report = patch(tiny_model("llama"), rope=False).report
    assert str(report) == "llama: RMSNorm 5, SwiGLU 2, shared input 4, fused loss. Left alone: none."
    model = tiny_model("mixtral")
    with patch(model, rope=False) as patched:
        said, left = str(patched.report).split(" Left alone: ")
    assert said == "mixtral: RMSNorm 5, shared input 2, fused loss."
    assert left.startswith("MixtralExperts (its implementation (eager)")
    assert not patch(model, only("rms_norm")).report.left_alone


@pytest.mark.parametrize("wrap", [lambda model: model, adapted], ids=["plain", "LoRA"])
def test_another_model_keeps_its_objects_and_undo_gives_back_every_one(wrap):
    student, teacher = wrap(tiny_model("qwen3")), wrap(tiny_model("qwen3", seed=1))
    before, code = [objects(model) for model in (student, teacher)], classes(teacher)
    want = step(teacher)
    patched = patch(student)
    teacher.zero_grad()
    assert objects(student) != before[0] and objects(teacher) == before[1]
    assert classes(teacher).items() >= code.items()
    assert_same_outcome(step(teacher), want, 1e-12)
    for _ in range(2):  # the second time there is nothing left to undo
        patched.undo()
        teacher.zero_grad()
        assert [objects(model) for model in (student, teacher)] == before and classes(teacher).items() >= code.items()


def test_a_failure_gives_back_every_object(monkeypatch):
    """Halfway through the patch, and within it as a context."""
    model = tiny_model()
    before = objects(model)
    with pytest.raises(KeyError), patch(model):
        assert objects(model) != before
        raise KeyError

    def broken(*_):
        raise RuntimeError("a part is broken")

    monkeypatch.setattr(patching, "PARTS", (*patching.PARTS, broken))
    with pytest.raises(RuntimeError, match="a part is broken"):
        patch(model)
    assert objects(model) == before


def test_twice_is_once():
    model = tiny_model()
    patched = patch(model)
    after = objects(model)
    assert patch(model) is patched and patch(adapted(model, target_modules=["q_proj"])) is patched
    assert patch(model, dict(vars(patched.options))) is patched
    with pytest.raises(ConfigError, match="is patched with PatchOptions.*Undo that before"):
        patch(model, rms_norm=False)
    patched.undo()
    assert after != objects(model) and patch(model, rms_norm=False).report.swapped["RMSNorm"] == 0


WRAPPED = "the model itself, not the .* around it.*patch first"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (tiny_model, {"rmsnorm": True}, r"Unknown patch options: rmsnorm\. There are rope, rms_norm"),
        (tiny_model, {"rope": "yes"}, "must be true or false, got 'yes'"),
        (tiny_model, {"options": PatchOptions(), "rope": False}, "options or keywords, not both"),
        (lambda: "some/model", {}, r"a model that is loaded, got 'some/model'\..*AutoLigerKernelForCausalLM"),
        # doctor knows models of transformers alone
        (lambda: nn.Linear(2, 2), {}, r"(?s)^Nothing was found to patch in Linear(?!.*doctor)"),
        (tiny_model, only("geglu"), r"Nothing was found to patch in llama for geglu\..*doctor llama"),
        (lambda: torch.compile(tiny_model(), backend="eager"), {}, WRAPPED),
        (lambda: nn.DataParallel(tiny_model()), {}, WRAPPED),
    ],
    ids=["option", "value", "both ways", "name", "no model", "nothing", "compiled", "parallel"],
)
def test_what_is_refused(model, options, message):
    model = model()
    before = objects(model) if isinstance(model, nn.Module) else None
    with pytest.raises(ConfigError, match=message) as caught:
        patch(model, **options)
    if before is not None:
        assert objects(model) == before
    if "Nothing" in message:
        assert isinstance(caught.value, NothingToPatch) and not caught.value.report.swapped


def test_a_deep_copy_runs_on_its_own_weights_and_has_its_own_record():
    model = tiny_model()
    patched = patch(model)
    clone = copy.deepcopy(model)
    before = objects(model)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.add_(0.05)
    plain = tiny_model()
    plain.load_state_dict(clone.state_dict())
    assert_same_outcome(step(clone), step(plain))
    for module in clone.modules():
        for value in vars(module).values():
            if isinstance(value, types.MethodType):
                assert value.__self__ in set(clone.modules())
    record = patch(clone, patched.options)
    assert record is not patched and record.model is clone
    record.undo()
    assert all("forward" not in vars(m) for m in clone.modules()) and objects(model).keys() == before.keys()
    assert_same_outcome(step(model), step(tiny_model()))


def save_whole(model):
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize(("save", "fused"), [(pickle.dumps, True), (save_whole, False)], ids=["pickle", "torch.save"])
def test_pickling_says_what_to_do(save, fused):
    """Before a weight is written. Without the patch, or as a state dict, it works; so does a deep copy."""
    model = tiny_model()
    patched = patch(model, fused_linear_cross_entropy=fused)
    clone = copy.deepcopy(model)
    for each in (model, clone, patched, nn.ModuleDict({"wrapped": model})):
        with pytest.raises(
            pickle.PicklingError, match=r"A patched LlamaForCausalLM cannot .*save_pretrained.*undo\(\)"
        ):
            save(each)
    torch.save(model.state_dict(), io.BytesIO())
    patch(clone, patched.options).undo()
    patched.undo()
    for each in (model, clone):
        assert not {"__reduce_ex__", "__deepcopy__"} & vars(each).keys()
        save(each)
    unpickled = pickle.loads(pickle.dumps(clone))
    assert_same_outcome(step(unpickled), step(clone))


class Counting(ModelHook):
    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("order", ["hook patch undo unhook", "patch hook undo unhook", "hook patch unhook undo"])
def test_accelerates_hooks(order):
    model, hooks = tiny_model(), {}
    layers = {n: m for n, m in model.named_modules() if n.endswith(("mlp", "norm", "down_proj"))}
    patched, hooked = None, False
    for each in order.split():
        if each == "hook":
            for name, module in layers.items():
                hooks[name] = Counting()
                add_hook_to_module(module, hooks[name])
        elif each == "patch":
            patched = patch(model)
        elif each == "undo":
            patched.undo()
        else:
            remove_hook_from_submodules(model)
        hooked = each == "hook" or (hooked and each != "unhook")
        before = [hook.calls for hook in hooks.values()]
        assert_same_outcome(step(model), step(tiny_model()))
        assert [hook.calls - n for hook, n in zip(hooks.values(), before, strict=True)] == [hooked] * len(hooks)
    assert patched.report.swapped["RMSNorm"] == 5 and patched.report.swapped["SwiGLU"] == 2
    assert all(vars(m).get("forward", m.forward).__func__ is type(m).forward for m in layers.values())
    assert_same_outcome(step(model), step(tiny_model()), 1e-12, 1e-12)


def test_spread_by_a_device_map_with_weights_on_disk(tmp_path):
    """Weights that accelerate brings in for a layer's call are not there outside of it."""
    tiny_model().save_pretrained(tmp_path / "model")
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    patched = patch(model)
    assert patched.report.swapped["RMSNorm"] == 5 and patched.report.swapped["SwiGLU"] == 2
    with torch.no_grad():
        got, want = model(**masked_batch()).loss, tiny_model()(**masked_batch()).loss
    assert torch.allclose(got, want, rtol=1e-5)


def test_on_the_meta_device_then_loaded():
    plain = tiny_model("gemma3")
    with torch.device("meta"):
        model = type(plain)(plain.config)
    patched = patch(model)
    assert {"RMSNorm": 10 - 1, "GEGLU": 2, "QK norm + rope": 2}.items() <= patched.report.swapped.items()
    model.load_state_dict(plain.state_dict(), assign=True)
    model.model.rotary_emb, model.model.embed_tokens.embed_scale = (
        copy.deepcopy(plain.model.rotary_emb), plain.model.embed_tokens.embed_scale.clone(),
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad_()
    model.tie_weights()
    assert_same_outcome(step(model.eval()), step(plain))


def test_weights_and_dtype_may_change_afterwards():
    model = tiny_model()
    patch(model)
    other = tiny_model(seed=5)
    model.load_state_dict(other.state_dict())
    assert_same_outcome(step(model), step(other))
    with torch.no_grad():
        logits = model.to(torch.bfloat16)(**masked_batch()).logits
        want = other.to(torch.bfloat16)(**masked_batch()).logits
    assert logits.dtype == want.dtype and (logits[:] - want).norm() < 2e-2 * want.norm()


def test_saving_is_as_before(tmp_path):
    model, plain = tiny_model("qwen3"), tiny_model("qwen3")
    patch(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.parameters(), strict=True))


def test_any_module_is_patched_as_far_as_it_goes():
    report = patch(nn.Sequential(nn.LayerNorm(8)), only("layer_norm")).report
    assert str(report) == "Sequential: LayerNorm. Left alone: none."
