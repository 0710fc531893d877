"""AutoLigerKernelForCausalLM, and the snippets of Liger-Kernel's README, unchanged but for the import."""

import copy

import pytest
import torch
import transformers
from tiny import assert_same_gradients, masked_batch, named_gradients, tiny_model

from liger_trainer import AutoLigerKernelForCausalLM, patch
from liger_trainer.errors import ConfigError
from liger_trainer.losses.deferred_logits import DeferredLogits
from liger_trainer.patching import families
from liger_trainer.patching.patcher import patched_record


@pytest.fixture(autouse=True)
def every_family_undone():
    yield
    for handle in list(families._wrapped.values()):
        handle.undo()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(folder)
    return str(folder)


def assert_same_step(model, plain, rtol=1e-6):
    batch = masked_batch()
    got, want = model(**batch), plain(**batch)
    torch.testing.assert_close(got.loss, want.loss, rtol=rtol, atol=0)
    assert_same_gradients(named_gradients(model, got.loss), named_gradients(plain, want.loss))


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
    with pytest.raises(TypeError, match="rms_norms"):
        AutoLigerKernelForCausalLM.from_pretrained(saved, rms_norms=False)


def test_ligers_name_of_a_flag_is_taken_out_too(saved):
    record = patched_record(AutoLigerKernelForCausalLM.from_pretrained(saved, relu_squared=False))
    assert record is not None and not record.options.relu2


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
    for handle in list(families._wrapped.values()):
        handle.undo()
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
