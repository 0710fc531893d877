"""What is recognised in other libraries' code: there in the installed releases, and missed aloud where it is not."""

import dataclasses
import inspect
import warnings

import pytest
import torch
import trl.trainer.utils
from commands import call
from quick_cases import slow_but
from tiny import FAMILIES, tiny_model
from transformers import masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llava import modeling_llava
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.siglip import modeling_siglip
from trl.trainer import sft_trainer

from liger_trainer import compat, patch
from liger_trainer.compat import code_objects, recognitions
from liger_trainer.extras import doctor

try:
    from transformers.distributed import tensor_parallel
except ImportError:  # an older release
    from transformers.integrations import tensor_parallel

NAMES = {id(value): name for name, value in vars(recognitions).items() if isinstance(value, recognitions.Recognition)}


def by_name(recognition):
    return NAMES[id(recognition)]


@pytest.fixture
def nothing_missed(monkeypatch):
    monkeypatch.setattr(compat, "_MISSED", {})


def other(*_, **__):
    """Stands in for what a release has changed."""


# recognition: what a release changes, (object, name or key, new value)
CHANGES = {
    "MASKS": (masking_utils, "sliding_window_overlay", lambda window: lambda batch, head, q, kv: kv > q - window),
    "EAGER": (modeling_llama, "eager_attention_forward", lambda module, q, k, v, mask, **_: (q.transpose(1, 2), None)),
    "INTERFACE": (modeling_llama.LlamaAttention, "forward", other),
    "TOWERS": (modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention, "forward", other),
    "PATCHES": (modeling_siglip.SiglipVisionEmbeddings, "forward", other),
    "PLACEHOLDERS": (modeling_llava.LlavaModel, "get_placeholder_mask", other),
    "EXPERTS": (ALL_EXPERTS_FUNCTIONS, "grouped_mm", other),
    "SOURCE": (inspect, "getsource", lambda function: (_ for _ in ()).throw(OSError("no source"))),
    "LOSS": (modeling_llama.LlamaForCausalLM, "forward", other),
    "ROTATION": (modeling_qwen3.Qwen3Attention, "forward", other),
    "TENSOR_PARALLEL": (tensor_parallel.TensorParallelLayer, "install_forward", other),
    "TRL_HEAD": (trl.trainer.utils, "add_fused_lm_head", other),
    "TRL_CONSTRUCTOR": (sft_trainer.SFTTrainer, "__init__", other),
    "CHECKPOINTS": (torch.utils.checkpoint, "checkpoint", lambda function, x, **_: function(x)),
}


def test_every_recognition_has_a_change():
    assert sorted(CHANGES) == sorted(map(by_name, recognitions.RECOGNITIONS)) == sorted(NAMES.values())


@pytest.mark.parametrize("recognition", recognitions.RECOGNITIONS, ids=by_name)
def test_the_installed_release_is_recognised(recognition):
    assert recognition.sample()


@pytest.mark.parametrize("recognition", recognitions.RECOGNITIONS, ids=by_name)
def test_a_release_that_is_not_recognised_is_told_once(recognition, nothing_missed, monkeypatch):
    holder, name, changed = CHANGES[by_name(recognition)]
    for cached in (recognitions.counts_placeholders, code_objects.forward_source):
        cached.cache_clear()
    patch_it = monkeypatch.setitem if holder is ALL_EXPERTS_FUNCTIONS else monkeypatch.setattr
    patch_it(holder, name, changed)
    planted = dataclasses.replace(recognition, what=f"planted: {recognition.what}")  # nobody has checked it before
    with pytest.warns(UserWarning) as told:
        assert not recognitions.check(planted)
    sentences = [str(each.message) for each in told]
    assert f"{planted.what}: {planted.consequence}." in sentences
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not recognitions.check(planted)
    assert compat.all_missed()[planted.what] == planted.consequence
    monkeypatch.undo()
    for cached in (recognitions.counts_placeholders, code_objects.forward_source):
        cached.cache_clear()


def test_an_unknown_mask_of_transformers_is_told_and_one_of_a_model_is_not(nothing_missed):
    def of_a_model(batch, head, q, kv):
        return kv <= q

    assert recognitions.mask_structure(masking_utils.and_masks(masking_utils.causal_mask_function, of_a_model)) is None
    assert recognitions.mask_structure(masking_utils.chunked_causal_mask_function(4, torch.zeros(1))) is None
    assert compat.all_missed() == {}
    of_a_model.__module__, of_a_model.__qualname__ = masking_utils.__name__, "new_overlay.<locals>.inner_mask"
    with pytest.warns(UserWarning, match="makes a mask by new_overlay"):
        assert recognitions.mask_structure(of_a_model) is None


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("attention", [{}, {"attn_implementation": "eager"}], ids=["its own", "eager"])
def test_no_family_gives_a_false_alarm(family, attention, nothing_missed):
    with patch(tiny_model(family, **attention)) as patched:
        patched.pack_attention()
    assert compat.all_missed() == {}


# of the configurations that come along, and of other structure: recurrent, encoder-decoder, experts, images
KINDS = ("gemma3", "mistral", "phi3", "mamba", "t5", "gpt_oss", "qwen3_moe", "qwen2_5_vl", "llava", "bloom")


@pytest.mark.parametrize("model_type", slow_but(KINDS, "gemma3", "mamba", "t5", "gpt_oss", "qwen2_5_vl"))
def test_no_structure_gives_a_false_alarm(model_type, nothing_missed):
    doctor.diagnose(doctor.config_of(model_type))
    assert compat.all_missed() == {}


@pytest.mark.slow
def test_no_class_of_transformers_gives_a_false_alarm(nothing_missed):
    doctor.diagnose_all()
    assert compat.all_missed() == {}


def test_doctor_tells_what_is_not_recognised(nothing_missed, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["doctor", "llama"]
    code, out, _ = call(capsys, *arguments)
    assert code == 0 and "not recognised" not in out
    monkeypatch.setattr(sft_trainer.SFTTrainer, "__init__", other)
    changed = dataclasses.replace(recognitions.TRL_CONSTRUCTOR, what="TRL has changed")
    monkeypatch.setattr(recognitions, "RECOGNITIONS", (changed,))
    code, out, _ = call(capsys, *arguments)
    assert code == 0 and "TRL has changed" in out and "adapters on lm_head are refused" in out
