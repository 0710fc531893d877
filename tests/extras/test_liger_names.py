"""docs/extras.md names every public name of Liger-Kernel 0.8.5, and says rightly whether it is here; the snippets of
its README run."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from steps import assert_same_step
from tiny import tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_trainer.extras.modules import families
from liger_trainer.patching.patcher import patched_record

PAGE = Path(__file__).parents[2] / "docs" / "extras.md"
APPLY = "apply_liger_kernel_to_"
TRANSFORMERS = """
is_transformers_available LigerCrossEntropyLoss LigerDyT LigerFusedCETVDLoss LigerFusedLinearCrossEntropyLoss
LigerFusedLinearJSD LigerFusedLinearKLDivLoss LigerGEGLUMLP LigerJSD LigerLayerNorm LigerFusedAddRMSNorm
LigerModulatedRMSNorm LigerPolyNorm LigerReLUSquared LigerRMSNorm LigerRMSNormForMuseGlimmer
LigerRMSNormForMuseGlimmerTextCentered liger_rotary_pos_emb liger_llama4_text_rotary_pos_emb
liger_llama4_vision_rotary_pos_emb LigerBlockSparseTop2MLP LigerFalconH1SwiGLUMLP LigerPhi3SwiGLUMLP
LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer LigerTiledGEGLUMLP LigerTiledSwiGLUMLP LigerTVDLoss
LigerKLDIVLoss LigerMHC LigerMultiTokenAttention LigerSoftmax LigerSparsemax LigerMLP LigerFalconH1MLP
AutoLigerKernelForCausalLM _apply_liger_kernel _apply_liger_kernel_to_instance
""".split()  # of __all__, without the families
FAMILIES = """
falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4v glm4v_moe gpt_oss granite internvl llama llava
llama4 ministral mistral mixtral muse_glimmer nemotron mllama olmo2 olmo3 paligemma phi3 pixtral qwen2 qwen2_5_vl
qwen2_vl qwen3 qwen3_moe qwen3_5 qwen3_5_moe qwen3_next qwen3_vl qwen3_vl_moe smollm3 smolvlm hunyuan_v1_dense
hunyuan_v1_moe deepseek_v2 deepseek_v3 deepseek_v4 exaone4
""".split()
MORE = ["LigerExperts", "LigerVocabParallelCrossEntropy", "MODEL_TYPE_TO_APPLY_LIGER_FN"]
FUNCTIONAL = """
CrossEntropyOutput liger_cross_entropy liger_fused_linear_cross_entropy liger_fused_linear_scaled_cross_entropy_tp
liger_fused_linear_jsd liger_fused_linear_kl_div liger_geglu liger_group_norm liger_jsd liger_kl_div liger_sparsemax
liger_multi_token_attention liger_fused_neighborhood_attention liger_tvd liger_layer_norm liger_qwen2vl_mrope
liger_relu_squared liger_rms_norm liger_modulated_rms_norm liger_poly_norm liger_fused_add_rms_norm liger_rope
liger_swiglu liger_softmax liger_dyt liger_mhc_coeffs liger_mhc_pre liger_mhc_post_res liger_mhc_apply liger_attn_res
liger_mhc_forward
""".split()


def tables() -> list[dict[str, str]]:
    """Of each table of names, the verdict on each name."""
    found = []
    for rows in re.findall(r"^\| name \| here \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"), re.M):
        cells = [row.strip("| ").split(" | ") for row in rows.splitlines()]
        names = [(name, verdict) for cell, verdict in cells for name in re.findall(r"`(\w+)`", cell)]
        assert len(dict(names)) == len(names)
        found.append(dict(names))
    return found


def test_every_name_is_in_a_table():
    names, functions = tables()
    assert set(names) == {*TRANSFORMERS, *MORE, *(APPLY + family for family in FAMILIES)}
    assert set(functions) == set(FUNCTIONAL)
    for verdict in (*names.values(), *functions.values()):
        assert verdict == "yes" or re.fullmatch(r"no: .{10,}", verdict)


@pytest.mark.parametrize("table, module", [(0, "liger_trainer"), (1, "liger_trainer.modules.functional")])
def test_a_name_can_be_imported_where_the_table_says_so(table, module):
    for name, verdict in tables()[table].items():
        if name.removeprefix(APPLY) in FAMILIES and name.removeprefix(APPLY) not in CONFIG_MAPPING:
            continue  # an older transformers does not have the model
        assert hasattr(import_module(module), name) == (verdict == "yes"), name


# Liger-Kernel's README

AUTO = """
from liger_kernel.transformers import AutoLigerKernelForCausalLM

# This AutoModel wrapper class automatically monkey-patches the
# model with the optimized Liger kernels if the model is supported.
model = AutoLigerKernelForCausalLM.from_pretrained("path/to/some/model")
"""
APPLY_TO_LLAMA = """
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


@pytest.fixture
def run(tmp_path):
    """Run a snippet with a tiny model on the CPU; return what it defines, and the plain model."""

    def run_snippet(snippet):
        tiny_model("llama").save_pretrained(tmp_path)
        for name, replaced in (
            ("liger_kernel.transformers", "liger_trainer"), ("path/to/some/model", str(tmp_path)),
            ("path/to/llama/model", str(tmp_path)), (".cuda()", ""), ('device="cuda"', 'device="cpu"'),
        ):  # fmt: skip
            snippet = snippet.replace(name, replaced)
        scope = {}
        exec(compile(snippet, "README", "exec"), scope)
        for handle in list(families._wrapped.values()):
            handle.undo()
        return scope, transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    return run_snippet


def test_the_readmes_auto_model(run):
    scope, plain = run(AUTO)
    assert patched_record(scope["model"]).fused is not None and patched_record(plain) is None
    assert_same_step(scope["model"], plain)


def test_the_readmes_patched_llama(run):
    scope, plain = run(APPLY_TO_LLAMA)
    swapped = patched_record(scope["model"]).report.swapped
    assert {"rope", "SwiGLU", "cross-entropy"} <= set(swapped) and not {"RMSNorm", "fused loss"} & set(swapped)
    assert_same_step(scope["model"], plain)


def test_the_readmes_composed_loss(run):
    scope, _ = run(COMPOSE)
    hidden, target, head = scope["input"], scope["target"], scope["model"]
    truth = hidden.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(truth @ head.weight.detach().double().T, target)
    want.backward()
    torch.testing.assert_close(scope["loss"].double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), truth.grad, rtol=1e-5, atol=1e-8)
    assert head.weight.grad.any() and head.bias.grad is None  # the snippet hands over the weight alone
